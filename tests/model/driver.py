"""Drives the real cache, the oracle and the shadow device side by side, and judges after every operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.model.oracle import Names, Oracle, due_positions, longest
from tests.model.shadow import Lane, Shadow, first_needed
from tests.model.worlds import Plan, World

from headway.cache import Media, PrefixCache, Prompt, ResidentShrunk, TableKind
from headway.errors import UnservableError

__all__ = ["Driver", "Flight", "Live"]

_IMAGES = {"x": 3, "y": 5}
_PLACEHOLDER = 7


@dataclass
class Live:
    """A running request.

    Attributes:
        lease: The cache's lease.
        namespace: Its namespace.
        tokens: All tokens known so far.
        prompt_length: How many of them are the prompt.
        publish: Whether what it computes may be published.
        flavour: Which answer it gives.
        due: Positions at which checkpoints are due while the prompt is computed.
        lane: What the device knows of it.
        doomed: Its step failed: it can only be aborted.
        flying: It is in a step that has not been committed.
        attached: No reset has come over it.
    """

    lease: Any
    namespace: int
    tokens: list[int]
    prompt_length: int
    publish: bool
    flavour: int
    due: set[int]
    lane: Lane
    doomed: bool = False
    flying: bool = False
    attached: bool = True

    @property
    def row(self) -> int:
        """Row in the block tables."""
        return int(self.lease.row)


@dataclass
class Flight:
    """A step on its way through the ranks."""

    step: Any
    lives: list[Live]
    drafts: list[list[int]]


@dataclass
class Driver:
    """One world under test.

    Attributes:
        world: Its configuration.
        cache: The real cache.
        oracle: What is right.
        shadow: What the ranks hold.
        lives: Running requests.
        past: Sequences so far: (namespace, tokens).
        flights: Steps on their way, oldest first; the ranks do them in this order.
    """

    world: World
    now: float = 0.0
    lives: list[Live] = field(default_factory=list)
    past: list[tuple[int, list[int]]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    admitted: int = 0
    image_symbols: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.world.config
        self.cache = PrefixCache(config, clock=lambda: self.now)
        if self.world.arrays:  # take the way of large batches for small ones too
            self.cache._leases.few = 0
        self.geometry = self.cache.geometry
        self.names = Names()
        self.tails = any(t.kind is not TableKind.PREFIX for t in self.geometry.tables)
        self.stateful = self.geometry.state_table is not None
        self.oracle = Oracle(self.names, self.geometry.lookahead, self.tails, self.world.ghosts_kept)
        self.shadow = Shadow(self.geometry, config.blocks, self.names)
        self.cache.subscribe(self.oracle.on_event)
        self.cache.subscribe(self._judge_eviction)
        self.check()

    # Requests come.

    def start(self, plan: Plan) -> Live | None:
        """Look up and lease a prompt. None where it is refused."""
        namespace, tokens = self._prompt_tokens(plan)
        if not tokens:
            return None
        n = len(tokens)
        prompt = Prompt(
            np.array(tokens, dtype=np.int32),
            namespace=namespace,
            boundaries=tuple(sorted({max(1, n * e // 1000) for e in plan.edges})),
            breakpoints=tuple(sorted({max(1, n * m // 1000) for m in plan.marks})),
            pin=n * plan.pin // 1000,
            no_store=plan.no_store,
        )
        return self._admit(prompt, plan.flavour)

    def _admit(self, prompt: Any, flavour: int) -> Live | None:
        tokens = prompt.tokens.tolist()
        path = self.names.path(prompt.namespace, tokens)
        hit = self.look(prompt, path)
        parted = self._parting(path, hit.matched)
        free = self._pool()
        try:
            lease = self.cache.lease(prompt, hit)
        except UnservableError as refusal:
            fits = self._most_blocks(len(tokens)) <= self.world.config.blocks
            assert not fits or "pinned" in str(refusal), "refused, and it would fit"  # noqa: PT017
            assert self._pool() == free, "a refused request changed the pool"
            return None
        assert self._least_blocks(len(tokens)) <= self.world.config.blocks, "admitted, and it can never fit"
        self.admitted += len(tokens)
        self.past.append((prompt.namespace, tokens))
        del self.past[:-12]
        if lease.hit.tokens != hit.tokens:
            # The pool can hold the prompt, but not beside what it would copy from.
            assert lease.hit.tokens == 0
            assert not self.world.roomy
        assert lease.computed == lease.hit.tokens, "a lease does not begin at its hit"
        hit = lease.hit
        assert lease.tokens == len(tokens)
        self.oracle.enter(path, surely=False)
        due = due_positions(
            length=len(tokens),
            hit=hit.tokens,
            parted=parted,
            breakpoints=prompt.breakpoints,
            placement=self.world.config.placement,
            lookahead=self.geometry.lookahead,
            alignment=self.world.config.checkpoint_alignment,
        )
        lane = Lane(int(lease.row), path, hit.tokens, hit.tokens)
        assert lane.row not in {live.row for live in self.lives}, "two leases in one row"
        live = Live(lease, prompt.namespace, list(tokens), len(tokens), not prompt.no_store, flavour, due, lane)
        self.lives.append(live)
        self.check()
        return live

    def look(self, prompt: Any, path: list[int]) -> Any:
        """Look a prompt up: it must change nothing, be sound, be the best, and explain itself."""
        before = self._pool()
        hit = self.cache.lookup(prompt)
        running = [live.lane.path[: live.prompt_length + 1] for live in self.lives if live.publish]
        self.oracle.judge_hit(path, hit.tokens, hit.matched, running)
        self._check_bytes(hit, path)
        story = self.cache.explain(prompt)
        assert (story.hit_tokens, story.matched) == (hit.tokens, hit.matched), "explain and lookup disagree"
        at = hit.tokens
        for loss in story.losses:
            assert loss.start == at < loss.stop, f"losses do not cover [{hit.tokens}, {len(path) - 1}): {story.losses}"
            at = loss.stop
        assert at == len(path) - 1, f"losses do not reach the end: {story.losses}"
        assert self._pool() == before, "a lookup changed the pool"
        return hit

    def _check_bytes(self, hit: Any, path: list[int]) -> None:
        """What a hit names must be on the ranks, whoever looks."""
        if not hit.tokens:
            return
        for table in self.geometry.tables:
            blocks = np.asarray(hit.blocks(table.index))
            what = f"hit of {hit.tokens}"
            if table.kind is TableKind.STATE:
                self.shadow.check_state(blocks, path[hit.tokens], what)
            else:
                first = first_needed(table, hit.tokens) // table.span
                row = np.full(first + len(blocks), -1, dtype=np.int32)
                row[first:] = blocks
                self.shadow.check_read(table, row, path, hit.tokens, what)

    def come_back(self, live: Live) -> None:
        """A preempted request asks again, with what it had answered as part of its prompt."""
        prompt = Prompt(np.array(live.tokens, dtype=np.int32), namespace=live.namespace, no_store=not live.publish)
        self._admit(prompt, live.flavour)

    def probe(self, which: int, cut: int) -> None:
        """Look up a stretch of an earlier sequence."""
        if self.past:
            namespace, tokens = self.past[which % len(self.past)]
            tokens = tokens[: max(1, len(tokens) * cut // 1000)]
            prompt = Prompt(np.array(tokens, dtype=np.int32), namespace=namespace)
            self.look(prompt, self.names.path(namespace, tokens))

    # Steps.

    def begin(self, lives: Sequence[Live], chunks: Sequence[int], drafts: Sequence[int]) -> Flight | None:
        """Ask for blocks and set the step on its way."""
        lives = [live for live in lives if not live.flying and not live.doomed]
        if not lives:
            return None
        asked, guesses = [], []
        for live, chunk, guess in zip(lives, chunks, drafts, strict=False):
            rest = len(live.tokens) - live.lane.computed
            assert rest >= 1
            assert live.lane.computed < live.lease.next_stop <= len(live.tokens), "no way to go on"
            guess = guess if rest == 1 and live.lane.computed >= live.prompt_length else 0
            asked.append(min(rest, chunk) + guess)
            guesses.append([self._answer(live, len(live.tokens) + i) for i in range(guess)])
        rows = np.array([live.row for live in lives], dtype=np.int64)
        stops = [int(live.lease.next_stop) for live in lives]
        step = self.cache.extend(rows, np.array(asked, dtype=np.int64))
        self._judge_grants(step, lives, asked, stops)
        for live, granted, guess in zip(lives, step.counts, guesses, strict=True):
            live.flying = bool(granted)
            del guess[max(0, int(granted) - (len(live.tokens) - live.lane.computed)) :]
        flight = Flight(step, lives, guesses)
        self.flights.append(flight)
        spans = {
            live.row: (live.lane.computed, live.lane.computed + int(c))
            for live, c in zip(lives, step.counts, strict=True)
            if c
        }
        self.shadow.check_writers(list(spans), spans, {live.row: live.lane for live in self.lives}, self.cache.tables)
        self.check()
        return flight

    def _judge_grants(self, step: Any, lives: list[Live], asked: list[int], stops: list[int]) -> None:
        for i, live in enumerate(lives):
            granted, start = int(step.counts[i]), int(step.starts[i])
            assert int(step.rows[i]) == live.row
            assert start == live.lane.computed
            assert bool(step.exhausted[i]) == (granted == 0)
            assert granted <= asked[i]
            if self.world.roomy:
                beyond = start + granted >= len(live.tokens)  # an interval among the drafts
                assert granted == asked[i] or start + granted == stops[i] or beyond, "cut elsewhere than at next_stop"
            assert granted or not self.world.roomy, "exhausted in a pool that has room"
            alone = len(self.lives) == 1 and not self.flights
            if alone and asked[i] == 1 and start < live.prompt_length and live.attached:
                assert granted or self._pinned(), "a lone request that was admitted cannot go on"

    def land_all(self) -> None:
        """Let every step on its way land."""
        while self.flights:
            self.complete(self.flights[0], [0], shorter=False, fails=False)

    def go_on(self, live: Live, chunks: Sequence[int], answer: int) -> None:
        """Compute the rest of a prompt and some tokens of the answer, as far as memory allows, and finish."""
        self.land_all()
        wanted = live.prompt_length + answer
        for i in range(200):
            if live.doomed or len(live.tokens) > wanted:
                break
            flight = self.begin([live], [chunks[i % len(chunks)]], [0])
            assert flight is not None
            granted = bool(flight.step.counts[0])
            self.complete(flight, [0], shorter=False, fails=False)
            if not granted:
                self.end(live, "preempt")
                return
        self.end(live, "abort" if live.doomed else "finish")

    def complete(self, flight: Flight, accepted: Sequence[int], shorter: bool, fails: bool) -> None:
        """The ranks do a step, or fail in it. Steps land in the order in which they were begun."""
        assert self.flights[0] is flight
        self.flights.pop(0)
        step = flight.step
        lanes = {live.row: live.lane for live in flight.lives}
        self.shadow.prepare(step, lanes, self.cache.tables)
        for i, live in enumerate(flight.lives):
            start, stop = int(step.starts[i]), int(step.starts[i] + step.counts[i])
            if stop > start:
                written = self._written(live, flight.drafts[i], fails)
                self.shadow.forward(live.row, start, stop, written, live.lane, self.cache.tables)
                inside = self.world.config.exports_inside
                for export in step.exports:
                    if int(export.row) == live.row:
                        self.shadow.export(export, start, stop, written, self.cache.tables, inside)
        if fails:
            self.cache.fail(step)
            for i, live in enumerate(flight.lives):
                if step.counts[i]:
                    live.flying, live.doomed = False, True
        else:
            self._commit(flight, accepted, shorter)
        self.check()

    def _written(self, live: Live, drafts: list[int], poison: bool) -> list[int]:
        """Names of what the ranks write: the known path and the drafts; nonsense where they fail."""
        if poison:
            return self.names.path(-1, [0] * (len(live.tokens) + len(drafts)))
        path = list(live.lane.path)
        for token in drafts:
            path.append(self.names.child(path[-1], token))
        return path

    def _commit(self, flight: Flight, accepted: Sequence[int], shorter: bool) -> None:
        step = flight.step
        counts = np.array(step.counts, dtype=np.int64)
        width = 1 + max((len(d) for d in flight.drafts), default=0)
        sampled = np.zeros((len(flight.lives), width), dtype=np.int32)
        real = np.zeros(len(flight.lives), dtype=np.int64)
        for i, live in enumerate(flight.lives):
            if not step.counts[i]:
                continue
            drafts = flight.drafts[i]
            right = len(drafts) if self.stateful else min(accepted[i % len(accepted)], len(drafts))
            counts[i] -= len(drafts) - right
            if shorter and not drafts and not self.stateful and counts[i] > 1:
                counts[i] -= 1
            if live.lane.computed + counts[i] >= len(live.tokens):
                new = [*drafts[:right], self._answer(live, len(live.tokens) + right)]
                sampled[i, : len(new)], real[i] = new, len(new)
            self._learn(live, int(counts[i]), sampled[i, : real[i]].tolist())
        if width == 1 and not shorter:
            self.cache.commit(step, counts, sampled[:, 0])
        else:
            self.cache.commit(step, counts, sampled, real)
        for i, live in enumerate(flight.lives):
            if step.counts[i]:
                live.flying = False
                assert live.lease.computed == live.lane.computed
                assert live.lease.tokens == len(live.tokens)
                self._judge_kept(live, int(step.starts[i]))

    def _learn(self, live: Live, count: int, sampled: list[int]) -> None:
        """Tell the oracle before the cache is told, because events come from inside the cache's commit."""
        live.lane.computed += count
        live.tokens += sampled
        for token in sampled:
            live.lane.path.append(self.names.child(live.lane.path[-1], token))
        if live.publish and live.attached:
            self.oracle.enter(live.lane.path, surely=False)
            self.oracle.commit(live.lane.path, live.lane.computed)
            known = min(live.lane.computed, live.prompt_length)
            self.oracle.enter(live.lane.path[: known + 1], surely=True)

    def _judge_kept(self, live: Live, start: int) -> None:
        """What had to be published by this commit was."""
        if not (live.publish and live.attached):
            return
        lane = live.lane
        if not self.tails and start < live.prompt_length:
            known = min(lane.computed, live.prompt_length - self.geometry.lookahead)
            assert self.oracle.resident_to(lane.path) >= known, "committed prompt tokens are not resident"
        elif not self.tails and self.world.roomy:
            behind = self.world.config.answer_stretch + self.geometry.lookahead
            assert self.oracle.resident_to(lane.path) >= lane.computed - behind, "an answer gathers for too long"
        elif self.tails and self.world.roomy:
            for position in live.due:
                if start < position <= lane.computed:
                    key = lane.path[position + self.geometry.lookahead]
                    assert key in self.oracle.checkpoints, f"the checkpoint due at {position} was not taken"

    # Requests go.

    def end(self, live: Live, how: str) -> None:
        """Finish, preempt or abort."""
        if live.flying or (live.doomed and how != "abort"):
            return
        lane = live.lane
        publish = live.publish and live.attached and not live.doomed
        donated = how == "preempt" or (how == "finish" and "answer_end" in self.world.config.placement)
        if publish and how != "abort":
            self.oracle.enter(lane.path, surely=False)
            proved = lane.computed + self.geometry.lookahead <= len(live.tokens)
            if lane.computed > lane.first and ((donated and proved) or not self.tails):
                self.oracle.enter(lane.path[: lane.computed + 1], surely=True)
        getattr(self.cache, how)(np.array([live.row], dtype=np.int64))
        self.lives.remove(live)
        self.past.append((live.namespace, list(live.tokens)))
        if publish and lane.computed > lane.first and self.world.roomy:
            proved = len(live.tokens) - self.geometry.lookahead
            if not self.tails and how != "abort":
                right = min(lane.computed, proved)
                assert self.oracle.resident_to(lane.path) >= right, f"{how} forgot what was computed"
            elif self.tails and donated and lane.computed <= proved:
                key = lane.path[lane.computed + self.geometry.lookahead]
                assert key in self.oracle.checkpoints, f"{how} donated nothing"
        self.check()

    def reset(self) -> None:
        """Forget everything; running requests go on for themselves."""
        report = self.cache.reset()
        assert report.leases_detached == len(self.lives)
        self.oracle.reset()
        for live in self.lives:
            live.attached = live.publish = False
        self.check()
        if not self.lives:
            assert self.cache.free_blocks == self.world.config.blocks

    def _judge_eviction(self, event: Any) -> None:
        """Nothing that a running request resumed from may go, but a last block of which it has a copy of its own."""
        if isinstance(event, ResidentShrunk) and event.cause == "evicted":
            ahead = self.geometry.lookahead
            span = min((table.span for table in self.geometry.prefix_tables), default=1 << 30)
            path = self.names.path(event.namespace, event.prefix.tolist())
            for live in self.lives:
                whole = live.lane.first // span * span
                kept = live.lane.path[: whole + ahead + 1] if live.attached and whole else []
                assert path[event.keep + 1 + ahead] not in kept, "what a running request resumed from was evicted"

    def check(self) -> None:
        """Invariants that can be seen from outside."""
        cache, blocks = self.cache, self.world.config.blocks
        stats = cache.stats()
        assert cache.leases == len(self.lives)
        assert cache.free_blocks == stats.free
        assert min(stats.free, stats.leased, stats.pinned, stats.evictable) >= 0
        assert stats.free + stats.leased + stats.pinned + stats.evictable == blocks, f"blocks are missing: {stats}"
        assert not self.world.roomy or not self.oracle.evictions, "something was evicted from a pool that has room"

    def close(self) -> None:
        """End everything: nothing may leak."""
        self.land_all()
        for live in list(self.lives):
            self.end(live, "abort")
        falls = self.cache.waterfall
        assert falls.prompt_tokens == self.admitted
        assert falls.reused + sum(falls.lost.values()) == self.admitted, "the waterfall's lines do not sum up"
        assert not self.lives, [(v.row, v.flying, v.doomed) for v in self.lives]
        assert self.cache.stats().leased == 0, f"blocks are still leased and nobody runs: {self.cache.stats()}"
        self.cache.check()
        self.reset()

    # Odds and ends.

    def _pool(self) -> tuple[int, int, int]:
        stats = self.cache.stats()
        return stats.free, stats.leased, stats.evictable

    def _pinned(self) -> bool:
        return self.cache.stats().pinned > 0

    def _parting(self, path: list[int], matched: int) -> int:
        """Where a prompt parts from a sequence that surely is known and goes on differently; 0 for nowhere."""
        if not self.world.ghosts_kept or not 0 < matched < len(path) - 1:
            return 0
        known = set(self.oracle.entered_surely)
        for live in self.lives:
            if live.publish:
                known.update(live.lane.path[: live.prompt_length + 1])
        if longest(path, known) != matched:
            return 0
        others = [name for name in self.names.children[path[matched]].values() if name in known]
        return matched if others else 0

    def _least_blocks(self, n: int) -> int:
        """Blocks without which a prompt of n tokens cannot be held at its end."""
        total = 0
        for table in self.geometry.tables:
            if table.kind is TableKind.STATE:
                total += table.state_blocks
            elif table.kind is TableKind.PREFIX:
                total += -(-n // table.span)
        return total

    def _most_blocks(self, n: int) -> int:
        """Blocks with which a prompt of n tokens can be computed, however wasteful the order."""
        total = 1
        for table in self.geometry.tables:
            total += 2 * table.state_blocks if table.kind is TableKind.STATE else -(-n // table.span) + 1
        return total

    def _answer(self, live: Live, position: int) -> int:
        return 900 + 10 * live.flavour + position % 7

    def _prompt_tokens(self, plan: Plan) -> tuple[int, list[int]]:
        namespace = self.cache.namespace(salt=plan.salt)
        tokens: list[int] = []
        if plan.base >= 0 and self.past:
            namespace, base = self.past[plan.base % len(self.past)]
            tokens = base[: len(base) * plan.cut // 1000]
        text = [100 * (plan.stream + 1) + i for i in range(plan.length)]
        media = []
        if plan.image:
            size = _IMAGES[plan.image]
            text = [_PLACEHOLDER] * size + text
            media = [Media(0, size, plan.image)]
        symbols = self.cache.symbols(np.array(text, dtype=np.int32), media=media).tolist()
        for i, symbol in enumerate(symbols):
            if media and i < media[0].length:
                assert symbol < 0, "a placeholder became a token"
                assert self.image_symbols.setdefault(symbol, plan.image) == plan.image, "two pictures, one symbol"
            else:
                assert symbol == text[i]
        room = max(0, 60 - len(symbols))
        return namespace, tokens[:room] + symbols
