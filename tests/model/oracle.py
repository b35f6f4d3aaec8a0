"""A slow, obvious model of what the cache may and must answer.

Every exact prefix (namespace and tokens) has a number, its *name*, given out by `Names`. The oracle keeps plain sets of
names: what was computed, what was entered, what is kept. What was taken and what went it learns from the cache's events
alone; whether the cache may have taken it, it judges by itself. A hit is then one line of arithmetic over these sets.

It shares nothing with the implementation: no tree, no blocks, no reference counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Names", "Oracle", "due_positions", "longest"]


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


def longest(path: Sequence[int], known: set[int] | dict[int, str]) -> int:
    """The length of the longest prefix of `path` all of whose prefixes are in `known` (the empty one always is)."""
    length = 0
    while length + 1 < len(path) and path[length + 1] in known:
        length += 1
    return length


@dataclass
class Oracle:
    """What the rules of the contract say.

    Entries before position p depend on the first p + lookahead tokens and on nothing else, so what is computed,
    resident or a checkpoint at p goes by the name of that prefix, its *key*: `path[p + lookahead]`.

    Attributes:
        names: The numbering.
        lookahead: Largest lookahead of any group.
        tails: Whether the model has groups that resume only at checkpoints.
        ghosts_kept: Whether no entered path can have been forgotten (a large enough bound on ghosts).
        computed: Keys of what leases that may publish have committed.
        entered: Prefixes that some lease ever told the index: an upper bound of what can match.
        entered_surely: Prefixes that the index must know: a lower bound, if ghosts are kept.
        checkpoints: Key -> kind, as told by events.
        resident: Keys of what is resident, as told by events.
        evictions: Every removal by eviction: what, and its key.
    """

    names: Names
    lookahead: int
    tails: bool
    ghosts_kept: bool
    computed: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)
    entered_surely: set[int] = field(default_factory=set)
    checkpoints: dict[int, str] = field(default_factory=dict)
    resident: set[int] = field(default_factory=set)
    evictions: list[tuple[str, int]] = field(default_factory=list)

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
        self.checkpoints[path[-1]] = event.kind

    def _on_CheckpointRemoved(self, event: Any, path: list[int]) -> None:  # noqa: N802
        assert self.checkpoints.get(path[-1]) == event.kind, "a removed checkpoint that was not stored"
        del self.checkpoints[path[-1]]
        if event.cause == "evicted":
            self.evictions.append(("checkpoint", path[-1]))

    def _on_ResidentGrown(self, event: Any, path: list[int]) -> None:  # noqa: N802
        for key in path[self.lookahead + 1 :]:
            assert key in self.computed, f"resident to {event.position}, but not all of that was computed"
            self.resident.add(key)

    def _on_ResidentShrunk(self, event: Any, path: list[int]) -> None:  # noqa: N802
        assert 0 <= event.keep < event.position, f"shrunk from {event.position} to {event.keep}"
        first = path[event.keep + 1 + self.lookahead]
        assert first in self.resident, "what shrunk was not resident"
        self.resident -= set(self.names.below(first))
        if event.cause == "evicted":
            self.evictions.append(("resident", first))

    # What the driver tells.

    def enter(self, path: Sequence[int], surely: bool) -> None:
        """A lease told the index of this path; `surely` where the rules say that the index keeps it."""
        self.entered.update(path)
        if surely:
            self.entered_surely.update(path)

    def commit(self, path: Sequence[int], computed: int) -> None:
        """A lease that may publish knows all of `path` and has committed its first `computed` tokens."""
        self.computed.update(path[self.lookahead + 1 : computed + self.lookahead + 1])

    def reset(self) -> None:
        """Everything is forgotten."""
        assert not self.checkpoints, "checkpoints survived a reset"
        assert not self.resident, "resident tokens survived a reset"
        for kept in (self.computed, self.entered, self.entered_surely):
            kept.clear()

    # What is right.

    def judge_hit(self, path: Sequence[int], tokens: int, matched: int, running: Iterable[Sequence[int]]) -> None:
        """The hit of a prompt must be sound and the best by the rules.

        Args:
            path: Names of the prompt's prefixes.
            tokens: Position at which the cache would resume.
            matched: Tokens that the cache says it matched.
            running: Paths that running leases have entered.
        """
        surely = set(self.entered_surely) if self.ghosts_kept else set()
        surely |= {name for entered in running for name in entered}
        low, high = longest(path, surely), longest(path, self.entered)
        if low <= self.lookahead:
            low = 0  # so few tokens prove nothing
        assert low <= matched <= high, f"matched {matched} tokens, right is {low} to {high}"
        best = self.best_hit(path)
        assert tokens == best, f"hit {tokens} of {len(path) - 1} tokens ({matched} matched), right is {best}"

    def best_hit(self, path: Sequence[int]) -> int:
        """The deepest position at which a prompt may resume, 0 for none."""
        length = len(path) - 1
        limit = min(length - 1, length - self.lookahead)
        if not self.tails:
            return max(0, min(limit, self.resident_to(path)))
        return max((p for p in range(1, limit + 1) if path[p + self.lookahead] in self.checkpoints), default=0)

    def resident_to(self, path: Sequence[int]) -> int:
        """Entries of a path that are resident."""
        position = 0
        while position + self.lookahead + 1 < len(path) and path[position + self.lookahead + 1] in self.resident:
            position += 1
        return position


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
