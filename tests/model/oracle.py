"""A slow, obvious model of what the cache may and must answer.

Every exact prefix (namespace and tokens) has a number, its *name*, given out by `Names`. The oracle keeps plain sets of
names: what was computed, what was entered, what is kept. What was taken and what went it learns from the cache's events
alone; whether the cache may have taken it, it judges by itself. A hit is then one line of arithmetic over these sets.

*Reasons* are judged as hits are: every line of an explanation is a sentence about its tokens, and whether it is true
follows from the same sets (`judge_story`).

It shares nothing with the implementation: no tree, no blocks, no reference counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headway.cache import Reason

__all__ = ["Names", "Oracle", "due_positions"]


class Names:
    """Numbers for exact prefixes: equal numbers, equal namespace and tokens."""

    def __init__(self) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.parent: list[int] = [0]
        self.depth: list[int] = [0]
        self._roots: dict[int, int] = {}

    def root(self, namespace: int) -> int:
        """The empty prefix of a namespace."""
        if namespace not in self._roots:
            self._roots[namespace] = self._new(0, 0)
        return self._roots[namespace]

    def child(self, name: int, token: int) -> int:
        """The prefix one token longer."""
        found = self.children[name].get(token)
        if found is None:
            found = self.children[name][token] = self._new(name, self.depth[name] + 1)
        return found

    def path(self, namespace: int, tokens: Sequence[int]) -> list[int]:
        """Names of every prefix of `tokens`: element n names the first n tokens."""
        names = [self.root(namespace)]
        for token in tokens:
            names.append(self.child(names[-1], int(token)))
        return names

    def below(self, name: int) -> Iterable[int]:
        """`name` and every longer prefix that begins with it."""
        todo = [name]
        while todo:
            current = todo.pop()
            yield current
            todo.extend(self.children[current].values())

    def _new(self, parent: int, depth: int) -> int:
        self.children.append({})
        self.parent.append(parent)
        self.depth.append(depth)
        return len(self.depth) - 1


class Gone(NamedTuple):
    """What went by eviction and has not come back: what it was, and when it went."""

    kind: str
    when: float
    computations: int


@dataclass
class Oracle:
    """What the rules of the contract say.

    Entries before position p depend on the first p + lookahead tokens and on nothing else, so what is computed,
    resident or a checkpoint at p goes by the name of that prefix, its *key*: `path[p + lookahead]`.

    Attributes:
        names: The numbering.
        lookahead: Largest lookahead of any group.
        tails: Whether the model has groups that resume only at checkpoints.
        ghosts_kept: Whether nothing computed can have been forgotten (a large enough bound on history).
        first_served: The first position that a checkpoint serves which holds no more than it needs, by its own.
        clock: The time.
        computed: Keys of what leases that may publish have committed, and how often: an upper bound of what is known.
        surely: Keys of what was committed and must be known, if ghosts are kept.
        checkpoints: Key -> kind, as told by events.
        served: Key -> keys of the checkpoints behind it that serve it too, because they hold all that it needs.
        first: Key of a checkpoint -> the first position that it ever served.
        resident: Keys of what is resident, as told by events.
        evicted: Key -> the checkpoint that was evicted there last, where none was taken again.
        trimmed: Keys of what was resident, was evicted, and is not resident again.
        evictions: Every removal by eviction: what, and its key.
        wanted: Requests whose prompt goes beyond each key: an upper bound of the uses of a checkpoint there.
    """

    names: Names
    lookahead: int
    tails: bool
    ghosts_kept: bool
    clock: Callable[[], float] = lambda: 0.0
    first_served: Callable[[int], int] = lambda position: position
    computed: dict[int, int] = field(default_factory=dict)
    surely: set[int] = field(default_factory=set)
    checkpoints: dict[int, str] = field(default_factory=dict)
    served: dict[int, set[int]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    resident: set[int] = field(default_factory=set)
    evicted: dict[int, Gone] = field(default_factory=dict)
    trimmed: dict[int, Gone] = field(default_factory=dict)
    evictions: list[tuple[str, int]] = field(default_factory=list)
    wanted: Counter[int] = field(default_factory=Counter)

    # What the cache tells.

    def on_event(self, event: Any) -> None:
        """Believe an event, after judging whether it may be."""
        path = self.names.path(event.namespace, event.prefix.tolist())
        assert event.position >= 1
        assert len(path) == event.position + self.lookahead + 1, "the prefix of an event has the wrong length"
        getattr(self, "_on_" + type(event).__name__)(event, path)

    def _on_CheckpointStored(self, event: Any, path: list[int]) -> None:  # noqa: N802
        assert path[-1] in self.computed, f"a checkpoint at {event.position} that nobody computed and published"
        assert path[-1] not in self.checkpoints, "a second checkpoint at one position"
        right = self.first_served(event.position)  # it may hold more while memory is free
        assert 1 <= event.first <= right, f"the checkpoint at {event.position} serves {right}, told is {event.first}"
        self.first[path[-1]] = min(event.first, self.first.get(path[-1], right))
        self.checkpoints[path[-1]] = event.kind
        self.evicted.pop(path[-1], None)
        for key in path[event.first + self.lookahead : -1]:
            self.served.setdefault(key, set()).add(path[-1])

    def _on_CheckpointRemoved(self, event: Any, path: list[int]) -> None:  # noqa: N802
        assert self.checkpoints.get(path[-1]) == event.kind, "a removed checkpoint that was not stored"
        del self.checkpoints[path[-1]]
        for key in path:
            if key in self.served:
                self.served[key].discard(path[-1])
        if event.cause == "evicted":
            self.evictions.append(("checkpoint", path[-1]))
            self.evicted[path[-1]] = self._gone(path[-1], event.kind)

    def _on_CheckpointReduced(self, event: Any, path: list[int]) -> None:  # noqa: N802
        assert path[-1] in self.checkpoints, "a checkpoint that is not there gives something up"
        assert event.first == self.first_served(event.position), "a checkpoint gives up more or less than it can"
        for key in path[: event.first + self.lookahead]:
            if key in self.served:
                self.served[key].discard(path[-1])

    def _on_ResidentGrown(self, event: Any, path: list[int]) -> None:  # noqa: N802
        before = [key in self.resident for key in path[self.lookahead + 1 :]]
        assert before == [i < event.start for i in range(event.position)], f"not {event.start} kept before"
        for key in path[self.lookahead + 1 :]:
            assert key in self.computed, f"resident to {event.position}, but not all of that was computed"
            self.resident.add(key)
            self.trimmed.pop(key, None)

    def _on_ResidentShrunk(self, event: Any, path: list[int]) -> None:  # noqa: N802
        assert 0 <= event.keep < event.position, f"shrunk from {event.position} to {event.keep}"
        first = path[event.keep + 1 + self.lookahead]
        assert first in self.resident, "what shrunk was not resident"
        gone = self.resident.intersection(self.names.below(first))
        self.resident -= gone
        if event.cause == "evicted":
            self.evictions.append(("resident", first))
            self.trimmed.update((key, self._gone(key, "path")) for key in gone)

    def _gone(self, key: int, kind: str) -> Gone:
        return Gone(kind, self.clock(), self.computed.get(key, 0))

    # What the driver tells.

    def commit(self, path: Sequence[int], computed: int, start: int = 0) -> None:
        """A lease that may publish knows all of `path` and has committed its tokens [start, computed).

        What came right before may have waited for later tokens to be known.
        """
        for key in path[max(start, self.lookahead) + 1 : computed + self.lookahead + 1]:
            self.computed[key] = self.computed.get(key, 0) + 1

    def must_know(self, path: Sequence[int], tokens: int) -> None:
        """By the rules, what was computed of the first `tokens` tokens of this path is known from now on."""
        self.surely.update(key for key in path[self.lookahead + 1 : tokens + 1] if key in self.computed)

    def want(self, path: Sequence[int]) -> None:
        """A request begins: it could resume anywhere before its last token."""
        self.wanted.update(path if self.lookahead else path[:-1])

    def reset(self) -> None:
        """Everything is forgotten."""
        assert not self.checkpoints, "checkpoints survived a reset"
        assert not self.resident, "resident tokens survived a reset"
        for kept in (self.computed, self.surely, self.evicted, self.trimmed, self.wanted):
            kept.clear()

    def forget(self, gone: set[int]) -> None:
        """These prefixes are forgotten."""
        assert not gone & self.checkpoints.keys(), "a forgotten prefix has a checkpoint"
        assert not gone & self.resident, "a forgotten prefix is resident"
        self.surely -= gone
        for kept in (self.computed, self.evicted, self.trimmed, self.wanted):
            for key in gone & kept.keys():
                del kept[key]

    # What is right.

    def judge_hit(self, path: Sequence[int], tokens: int, matched: int, running: Iterable[Sequence[int]]) -> None:
        """The hit of a prompt must be sound and the best by the rules.

        Args:
            path: Names of the prompt's prefixes.
            tokens: Position at which the cache would resume.
            matched: Tokens that the cache says it matched.
            running: Paths of the prompts of running leases that publish.
        """
        low, high = self.bounds(path, running)
        assert low <= matched <= high, f"matched {matched} tokens, right is {low} to {high}"
        best = self.best_hit(path)
        assert tokens == best, f"hit {tokens} of {len(path) - 1} tokens ({matched} matched), right is {best}"

    def bounds(self, path: Sequence[int], running: Iterable[Sequence[int]]) -> tuple[int, int]:
        """Tokens of a prompt that must be known, and that can be: computed ones, and what running prompts entered."""
        entered = {name for prompt in running for name in prompt}
        surely = entered | self.surely if self.ghosts_kept else entered
        return self._follow(path, surely), self._follow(path, entered | self.computed.keys())

    def _follow(self, path: Sequence[int], known: set[int]) -> int:
        """Tokens that follow what is known; as few as lookahead prove nothing."""
        matched = self.lookahead
        while matched + 1 < len(path) and path[matched + 1] in known:
            matched += 1
        return matched if matched > self.lookahead else 0

    def best_hit(self, path: Sequence[int]) -> int:
        """The deepest position at which a prompt may resume, 0 for none."""
        length = len(path) - 1
        limit = min(length - 1, length - self.lookahead)
        if not self.tails:
            return max(0, min(limit, self.resident_to(path)))
        keys = {p: path[p + self.lookahead] for p in range(1, limit + 1)}
        return max((p for p, key in keys.items() if key in self.checkpoints or self.served.get(key)), default=0)

    def resident_to(self, path: Sequence[int]) -> int:
        """Entries of a path that are resident."""
        position = 0
        while position + self.lookahead + 1 < len(path) and path[position + self.lookahead + 1] in self.resident:
            position += 1
        return position

    def judge_path(self, path: Sequence[int], told: Any, matched: int) -> None:
        """What is told of a known path must be what is known of it."""
        ahead, end = self.lookahead, max(0, matched - self.lookahead)
        assert told.matched == end
        assert [part.start for part in told.parts] == [0, *(part.stop for part in told.parts)][: len(told.parts)]
        assert (told.parts[-1].stop if told.parts else 0) == end
        keys = {p: path[p + ahead] for p in range(1, end + 1)}
        for part in told.parts:
            inside = {p: key for p, key in keys.items() if part.start < p <= part.stop}
            resident = sum(key in self.resident for key in inside.values())
            assert min(part.resident, part.stop) - part.start == resident
            assert all(inside[p] in self.computed for p in inside if p <= part.computed), f"not all is computed: {part}"
            known = {p: self.checkpoints[key] for p, key in inside.items() if key in self.checkpoints}
            kept = [one for one in part.checkpoints if one.position <= part.stop]
            assert {one.position: one.kind for one in kept} == known
            for one in (*kept, *(lost for lost in part.lost if lost.position <= part.stop)):
                first = self.first.get(inside[one.position], one.position)
                most = self.wanted[keys[first]]
                assert one.uses <= most, f"{one}, but {most} requests went on behind {first}"
            for lost in part.lost:
                assert lost.position > part.stop or inside[lost.position] in self.evicted, f"{lost} did not go"

    # Whether what is said is true.

    def judge_story(
        self,
        path: Sequence[int],
        story: Any,
        running: Sequence[Sequence[int]],
        elsewhere: Iterable[Sequence[int]],
    ) -> None:
        """Every line of an explanation must be true of its tokens, and the lines must cover what was not reused.

        Args:
            path: Names of the prompt's prefixes.
            story: The explanation.
            running: Paths of the prompts of running leases that publish.
            elsewhere: Names of the same tokens in every other namespace.
        """
        at, length = story.hit_tokens, len(path) - 1
        assert story.prompt_tokens == length
        judge = _Judge(self, path, story, running, list(elsewhere))
        for loss in story.losses:
            assert loss.start == at < loss.stop <= length, (
                f"losses do not cover [{story.hit_tokens}, {length}): {story}"
            )
            at = loss.stop
            wrong = judge.objection(loss)
            assert not wrong, f"[{loss.start}, {loss.stop}) {loss.reason.value} is not true: {wrong}\n{story}"
        assert at == length, f"losses do not reach the end: {story}"
        reach = max((self.bounds(other, running)[0] for other in elsewhere), default=0)
        told = max((loss.stop for loss in story.losses if loss.reason is Reason.OTHER_NAMESPACE), default=0)
        assert reach <= max(told, story.matched), (
            f"another namespace knows {reach} tokens, and that is not said\n{story}"
        )


@dataclass
class _Judge:
    """Judges the lines of one explanation: each method says what speaks against a line, or nothing."""

    oracle: Oracle
    path: Sequence[int]
    story: Any
    running: Sequence[Sequence[int]]
    elsewhere: list[Sequence[int]]

    def objection(self, loss: Any) -> str:
        """What is wrong with a line; empty if it is true."""
        return str(getattr(self, "_" + loss.reason.value)(loss))

    def _keys(self, loss: Any) -> dict[int, int]:
        """The keys of the entries of a line, by position."""
        ahead = self.oracle.lookahead
        stop = min(loss.stop, len(self.path) - 1 - ahead)
        return {p: self.path[p + 1 + ahead] for p in range(loss.start, stop)}

    def _uncomputed(self, loss: Any) -> str:
        if loss.stop > self.story.matched - self.oracle.lookahead:
            return f"its end is not known, {self.story.matched} tokens are"
        never = [p for p, key in self._keys(loss).items() if key not in self.oracle.computed]
        return f"nobody computed {never[0]}" if never else ""

    def _evicted(self, loss: Any) -> str:
        oracle = self.oracle
        if wrong := self._uncomputed(loss):
            return wrong
        if not oracle.tails:
            whole = [p for p, key in self._keys(loss).items() if key not in oracle.trimmed]
            return f"position {whole[0]} did not go by eviction" if whole else self._detail(loss)
        key = self.path[loss.stop + oracle.lookahead]
        if key in oracle.checkpoints:
            return f"there is a checkpoint at {loss.stop}"
        return self._detail(loss) if key in oracle.evicted else f"no checkpoint was evicted at {loss.stop}"

    def _detail(self, loss: Any) -> str:
        """What is wrong with what is told of an eviction."""
        oracle, told = self.oracle, loss.detail
        gone = oracle.trimmed if not oracle.tails else oracle.evicted
        keys = list(self._keys(loss).values()) if not oracle.tails else [self.path[loss.stop + oracle.lookahead]]
        if told.cause != "evicted" or (oracle.tails and told.position != loss.stop):
            return f"{told} is not about {loss.stop}"
        right = {(gone[key].kind, oracle.clock() - gone[key].when) for key in keys}
        if not oracle.tails:  # an edge knows when something of it went last
            oldest = max(age for _, age in right)
            return "" if told.kind == "path" and 0 <= told.age <= oldest else f"{told}: {right}"
        found = [(kind, age) for kind, age in right if kind == told.kind and age == told.age]
        return "" if found else f"told is {told}, right is one of {right}"

    def _state_never_taken(self, loss: Any) -> str:
        oracle = self.oracle
        if not oracle.tails:
            return "the model has no checkpoints"
        if wrong := self._uncomputed(loss):
            return wrong
        for p in range(loss.start + 1, loss.stop + 1):
            key = self.path[p + oracle.lookahead]
            gone = oracle.evicted.get(key)
            # Where history is bounded, what was computed again since may have been forgotten in between.
            if gone and (oracle.ghosts_kept or oracle.computed[key] == gone.computations):
                return f"the {gone.kind} checkpoint at {p} was evicted"
            if key in oracle.checkpoints:
                return f"there is one at {p}"
        return ""

    def _still_computing(self, loss: Any) -> str:
        oracle = self.oracle
        entered = {name for prompt in self.running for name in prompt}
        for p, key in self._keys(loss).items():
            if key not in entered:
                return f"nobody who runs has {p} in its prompt"
            if key in oracle.resident or (oracle.ghosts_kept and key in oracle.surely):
                return f"{p} has been computed"
        return ""

    def _lookahead(self, loss: Any) -> str:
        matched, ahead = self.story.matched, self.oracle.lookahead
        right = max(self.story.hit_tokens, matched - ahead), min(matched, len(self.path) - 2)
        return "" if (loss.start, loss.stop) == right else f"right is {right}"

    def _last_token(self, loss: Any) -> str:
        length = len(self.path) - 1
        right = (length - 1, length)
        return "" if (loss.start, loss.stop) == right and self.story.matched == length else f"right is {right}"

    def _other_namespace(self, loss: Any) -> str:
        if loss.start != self.story.matched:
            return f"{self.story.matched} tokens are known in its own"
        reach = max((self.oracle.bounds(other, self.running)[1] for other in self.elsewhere), default=0)
        return "" if loss.stop <= reach else f"others know {reach} tokens"

    def _parted(self, loss: Any) -> str:
        return "" if 0 < self.story.matched <= loss.start else f"{self.story.matched} tokens are known"

    def _nothing_matched(self, loss: Any) -> str:
        return f"{self.story.matched} tokens are known" if self.story.matched else ""

    def _no_room(self, loss: Any) -> str:
        best = self.oracle.best_hit(self.path)
        return "" if loss.start == 0 and loss.stop == best > 0 else f"{best} tokens are there"


def due_positions(
    *,
    length: int,
    hit: int,
    parted: int,
    breakpoints: Iterable[int],
    placement: Iterable[str],
    lookahead: int,
    alignment: int,
) -> set[int]:
    """Positions of a prompt at which a checkpoint is due while it is computed (rule 5 of the contract).

    Args:
        length: Tokens of the prompt.
        hit: Where it resumed.
        parted: Where it parts from a path that goes on differently; 0 for nowhere.
        breakpoints: Positions asked for.
        placement: Kinds in force.
        lookahead: Largest lookahead.
        alignment: Grid of exportable positions.
    """
    end = length - max(1, lookahead)
    wanted: set[int] = set()
    for kind in placement:
        if kind == "prompt_end":
            wanted.add(end)
        elif kind == "junction" and parted:
            wanted.add(parted - lookahead)
        elif kind == "breakpoint":
            wanted.update(min(p, end) for p in breakpoints)
        elif kind.startswith("interval:"):
            step = int(kind.partition(":")[2])
            wanted.update(range(step, end + 1, step))
    floored = {p // alignment * alignment for p in wanted}
    return {p for p in floored if p > max(hit, 0)}
