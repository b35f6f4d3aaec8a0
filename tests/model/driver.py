"""Drives the real cache, the oracle and the shadow device side by side, and judges after every operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.model.keeping import Keeping
from tests.model.lives import Flight, Live
from tests.model.worlds import PIN_SECONDS

__all__ = ["Driver"]


@dataclass
class Driver(Keeping):
    """One world under test: requests come (`Keeping`), compute in steps, and go."""

    # Steps.

    def begin(self, lives: Sequence[Live], chunks: Sequence[int], drafts: Sequence[int]) -> Flight | None:
        """Ask for blocks and set the step on its way."""
        most = self.world.config.steps_in_flight
        lives = [live for live in lives if len(live.flying) < most and not live.doomed]
        if not lives:
            return None
        asked, guesses = [], []
        for live, chunk, guess in zip(lives, chunks, drafts, strict=False):
            rest = len(live.tokens) - live.planned
            assert live.planned == live.lease.planned
            assert live.flying or live.planned < live.lease.next_stop <= len(live.tokens), "no way to go on"
            guess = guess if rest == 1 and live.planned >= live.prompt_length else 0
            # Behind a step that reaches the last known token goes one that computes the token which that one samples.
            asked.append(max(1, min(rest, chunk)) + guess)
            guesses.append([self._answer(live, len(live.tokens) + i) for i in range(guess)])
        stops = [int(live.lease.next_stop) for live in lives]
        if len(lives) == 1 and chunks[0] % 2:
            step = self.cache.extend_one(lives[0].row, asked[0])
        else:
            rows = np.array([live.row for live in lives], dtype=np.int64)
            step = self.cache.extend(rows, np.array(asked, dtype=np.int64))
        self._judge_grants(step, lives, asked, stops)
        flight = Flight(step, lives, guesses, step.counts.tolist(), tuple(step.exports), self._rows(lives))
        spans = {}
        for live, granted, guess in zip(lives, flight.counts, guesses, strict=True):
            if granted:
                spans[live.row] = live.planned, live.planned + granted
                del guess[max(0, granted - (len(live.tokens) - live.planned)) :]
                live.flying.append(granted)
                live.lane.given = max(live.lane.given, live.planned)
        self.flights.append(flight)
        self.shadow.check_writers(list(spans), spans, {live.row: live.lane for live in self.lives}, self.cache.tables)
        self.check()
        return flight

    def _rows(self, lives: Sequence[Live]) -> list[dict[int, Any]]:
        """Block tables as the ranks get them: by table and row, as they are now."""
        return [{live.row: table[live.row].copy() for live in lives} for table in self.cache.tables]

    def _judge_grants(self, step: Any, lives: list[Live], asked: list[int], stops: list[int]) -> None:
        for i, live in enumerate(lives):
            granted, start = int(step.counts[i]), int(step.starts[i])
            assert int(step.rows[i]) == live.row
            assert start == live.planned
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
            self.complete(self.flights[0], [0], shorter=0, fails=False)

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
            self.complete(flight, [0], shorter=0, fails=False)
            if not granted:
                self.end(live, "preempt")
                return
        self.end(live, "abort" if live.doomed else "finish")

    def complete(self, flight: Flight, accepted: Sequence[int], shorter: int, fails: bool) -> None:
        """The ranks do a step, or fail in it. Steps land in the order in which they were begun.

        Args:
            flight: The oldest step under way.
            accepted: How many drafts are right, in turn.
            shorter: 1: not all tokens count; 2: none counts, where the engine can do the step again.
            fails: The ranks fail.
        """
        assert self.flights[0] is flight
        self.flights.pop(0)
        step = flight.step
        lanes = {live.row: live.lane for live in flight.lives}
        self.shadow.prepare(step, lanes, flight.rows)
        for i, live in enumerate(flight.lives):
            start, stop = int(step.starts[i]), int(step.starts[i]) + flight.counts[i]
            if stop > start and not step.counts[i]:
                self._waste(flight, live.row, start, stop)
            elif stop > start:
                written = self._written(live, flight.drafts[i], fails)
                self.shadow.forward(live.row, start, stop, written, live.lane, flight.rows)
                inside = self.world.config.exports_inside
                for export in step.exports:
                    if int(export.row) == live.row:
                        self.shadow.export(export, start, stop, written, flight.rows, inside)
        if fails:
            self.cache.fail(step)
            for i, live in enumerate(flight.lives):
                if step.counts[i]:
                    live.doomed = True
                    self._judge_undone(live, undone=True)
        elif step.counts.any() or not sum(flight.counts):
            self._commit(flight, accepted, shorter)
        self.check()

    def _waste(self, flight: Flight, row: int, start: int, stop: int) -> None:
        """The ranks compute what the step before has undone: nonsense, which nobody may read."""
        path = self.names.path(-1, [0] * (stop + self.geometry.lookahead + 1))
        exports = [export for export in flight.exports if int(export.row) == row]
        self.shadow.waste(row, start, stop, path, flight.rows, exports)

    def _written(self, live: Live, drafts: list[int], poison: bool) -> list[int]:
        """Names of what the ranks write: the known path and the drafts; nonsense where they fail."""
        if poison:
            return self.names.path(-1, [0] * (len(live.tokens) + len(drafts)))
        path = list(live.lane.path)
        for token in drafts:
            path.append(self.names.child(path[-1], token))
        return path

    def _commit(self, flight: Flight, accepted: Sequence[int], shorter: int) -> None:
        step, granted = flight.step, flight.step.counts.tolist()
        counts = np.array(granted, dtype=np.int64)
        width = 1 + max((len(d) for d in flight.drafts), default=0)
        sampled = np.zeros((len(flight.lives), width), dtype=np.int32)
        real = np.zeros(len(flight.lives), dtype=np.int64)
        for i, live in enumerate(flight.lives):
            if not granted[i]:
                continue
            drafts = flight.drafts[i]
            right = len(drafts) if self.stateful else min(accepted[i % len(accepted)], len(drafts))
            counts[i] -= len(drafts) - right
            if shorter == 1 and not drafts and not self.stateful and counts[i] > 1:
                counts[i] -= 1
            if shorter == 2 and not drafts and (not self.stateful or live.lane.computed == live.lane.first):
                counts[i] = 0  # the engine can do all of it again: it has the state from which it began
            if live.lane.computed + counts[i] >= len(live.tokens):
                new = [*drafts[:right], self._answer(live, len(live.tokens) + right)]
                sampled[i, : len(new)], real[i] = new, len(new)
            self._learn(live, int(counts[i]), sampled[i, : real[i]].tolist())
        if width == 1 and not shorter:
            self.cache.commit(step, counts, sampled[:, 0])
        else:
            self.cache.commit(step, counts, sampled, real)
        for i, live in enumerate(flight.lives):
            if granted[i]:
                self._judge_undone(live, undone=int(counts[i]) < granted[i])
                assert live.lease.computed == live.lane.computed
                assert live.lease.tokens == len(live.tokens)
                if counts[i]:
                    self._judge_kept(live, int(step.starts[i]))

    def _judge_undone(self, live: Live, *, undone: bool) -> None:
        """A step that was cut short or failed undoes the one behind it, for this lease alone."""
        live.flying = []
        for flight in self.flights:
            for i, other in enumerate(flight.lives):
                if other is live and flight.counts[i]:
                    left = int(flight.step.counts[i])
                    assert left == (0 if undone else flight.counts[i]), f"{left} of {flight.counts[i]} tokens are left"
                    exports = [export for export in flight.step.exports if int(export.row) == live.row]
                    assert not exports or left, "an export of a step that was undone"
                    if left:
                        live.flying.append(left)

    def _learn(self, live: Live, count: int, sampled: list[int]) -> None:
        """Tell the oracle before the cache is told, because events come from inside the cache's commit."""
        start = live.lane.computed
        live.lane.computed += count
        live.tokens += sampled
        for token in sampled:
            live.lane.path.append(self.names.child(live.lane.path[-1], token))
        if live.publish and live.attached:
            self.oracle.commit(live.lane.path, live.lane.computed, start)
            self.oracle.must_know(live.lane.path, min(live.lane.computed, live.prompt_length))

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

    def bookmark(self, live: Live, lift: bool) -> None:
        """Let a request remember where it stands, or no longer where it stood."""
        if live.flying or live.doomed:
            return
        if lift:
            self.cache.unmark([live.row])
            live.bookmark = None
            self.check()
        else:
            self.cache.bookmark([live.row])
            if self.tails and live.publish and live.attached and live.lane.computed > live.lane.first:
                live.bookmark = live.lane.computed
            self.check()

    def end(self, live: Live, how: str, back: int = 0) -> None:
        """Finish, preempt or abort, where others can come up to `back` tokens before what it has computed."""
        if live.flying or (live.doomed and how != "abort"):
            return
        lane, mark = live.lane, live.bookmark
        publish = live.publish and live.attached and not live.doomed
        donated = how != "finish" or "answer_end" in self.world.config.placement
        kept = lane.computed
        if back and how != "preempt" and self.tails and mark is not None and mark <= lane.computed - back:
            kept = mark if self.stateful else lane.computed - back
        if publish and (how != "abort" or self.tails):
            proved = kept + self.geometry.lookahead <= len(live.tokens)
            if lane.computed > lane.first and ((donated and proved and self.world.roomy) or not self.tails):
                self.oracle.must_know(lane.path, kept)
        reach = [] if how == "preempt" else [[lane.computed - back]]
        self.lives.remove(live)  # what it resumed from may be evicted in this very call
        getattr(self.cache, how)(np.array([live.row], dtype=np.int64), *reach)
        if self.objections:
            raise self.objections[0]
        self.judge_wishes(live, ended=True)
        del self.outcomes[live.row]
        self.past.append((live.namespace, list(live.tokens)))
        if publish and lane.computed > lane.first and self.world.roomy:
            proved = len(live.tokens) - self.geometry.lookahead
            if not self.tails:
                right = min(lane.computed, proved)
                assert self.oracle.resident_to(lane.path) >= right, f"{how} forgot what was computed"
            elif donated and kept <= proved:
                key = lane.path[kept + self.geometry.lookahead]
                assert key in self.oracle.checkpoints, f"{how} donated nothing at {kept}"
        self.check()

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
        self.now += 4 * PIN_SECONDS
        assert self.cache.stats().pinned == 0, "a pin does not end"
        self.cache.check()
        self.reset()
