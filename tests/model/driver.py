"""Drives the real cache, the oracle and the shadow device side by side, and judges after every operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.model.arrivals import Arrivals
from tests.model.lives import Flight, Live
from tests.model.worlds import PIN_SECONDS

__all__ = ["Driver"]


@dataclass
class Driver(Arrivals):
    """One world under test: requests come (`Arrivals`), compute in steps, and go."""

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

    def end(self, live: Live, how: str) -> None:
        """Finish, preempt or abort."""
        if live.flying or (live.doomed and how != "abort"):
            return
        lane = live.lane
        publish = live.publish and live.attached and not live.doomed
        donated = how == "preempt" or (how == "finish" and "answer_end" in self.world.config.placement)
        if publish and how != "abort":
            proved = lane.computed + self.geometry.lookahead <= len(live.tokens)
            if lane.computed > lane.first and ((donated and proved) or not self.tails):
                self.oracle.must_know(lane.path, lane.computed)
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
        self.namespaces.clear()
        for live in self.lives:
            live.attached = live.publish = False
        self.check()
        if not self.lives:
            assert self.cache.free_blocks == self.world.config.blocks

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
        self.now += 2 * PIN_SECONDS
        assert self.cache.stats().pinned == 0, "a pin does not end"
        self.cache.check()
        self.reset()
