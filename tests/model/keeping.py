"""What is forgotten on purpose, and copies of a cache in the middle of its work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.model.arrivals import Arrivals
from tests.model.worlds import Probe

from headway.cache import PrefixCache, Prompt
from headway.errors import LeaseError

__all__ = ["Keeping"]


@dataclass
class Keeping(Arrivals):
    """What an operator does with a cache beside serving."""

    def unpin(self, probe: Probe) -> None:
        """Lift the pins on a path."""
        prompt = self.probed(probe)
        if prompt is None:
            return
        keys = self.pins_on(self.names.path(prompt.namespace, prompt.tokens.tolist()))
        assert self.cache.unpin(prompt) == len(keys), "wrong number of pins lifted"
        for key in keys:
            del self.pins[key]
        self.check()

    # Forgetting.

    def forget(self, probe: Probe) -> None:
        """Forget what begins with some prompt."""
        prompt = self.probed(probe)
        if prompt is None:
            return
        path = self.names.path(prompt.namespace, prompt.tokens.tolist())
        short = len(path) - 1 <= self.geometry.lookahead  # so few tokens are never matched
        whole = short or self.cache.lookup(prompt).matched == len(path) - 1
        shared = [self._shared_to(path, surely=surely) for surely in (True, False)] if whole else []
        free, checkpoints = self.cache.free_blocks, len(self.oracle.checkpoints)
        report = self.cache.forget(prompt)
        if not whole:  # of a running lease, tokens that are not entered yet can begin so
            assert (report.checkpoints, len(self.oracle.checkpoints)) == (0, checkpoints)
            self._judge_forgotten(set(self.names.below(path[-1])), report, free, checkpoints, least=10**9)
            return
        left = self.cache.lookup(prompt).matched
        assert shared[0] <= max(left, self.geometry.lookahead) <= max(shared[1], self.geometry.lookahead), (
            f"{left} tokens are left of {len(path) - 1}, others share {shared[0]} to {shared[1]}"
        )
        gone = set(self.names.below(path[-1])) | set(path[left + 1 :])
        self._judge_forgotten(gone, report, free, checkpoints, least=self.geometry.lookahead)

    def forget_namespace(self, which: int) -> None:
        """Forget a namespace."""
        namespace = sorted(self.namespaces)[which % len(self.namespaces)] if self.namespaces else 0
        free, checkpoints = self.cache.free_blocks, len(self.oracle.checkpoints)
        report = self.cache.forget_namespace(namespace)
        self._judge_forgotten(set(self.names.below(self.names.root(namespace))), report, free, checkpoints, least=0)

    def _shared_to(self, path: list[int], *, surely: bool) -> int:
        """How many tokens of a path other known sequences share: at least, or at most."""
        known = {name for prompt in self._running() for name in prompt}
        if not surely:
            known |= self.oracle.computed.keys()
        else:  # of what is not kept, history may have forgotten any part
            known |= self.oracle.surely if self.world.ghosts_kept else self.oracle.resident
        inside = set(self.names.below(path[-1])) | set(path)
        for tokens in range(len(path) - 2, self.geometry.lookahead, -1):
            if any(name in known and name not in inside for name in self.names.below(path[tokens])):
                return tokens
        return 0

    def _judge_forgotten(self, gone: set[int], report: Any, free: int, checkpoints: int, *, least: int) -> None:
        if self.objections:
            raise self.objections[0]
        detached = []
        for live in self.lives:
            record = self.cache._leases.record(live.row)
            if live.publish and live.attached and not record.published:
                detached.append(live)
                live.attached = live.publish = False
            elif live.attached and record.anchor is None:  # one that keeps nothing, and whose hit was forgotten
                detached.append(live)
                live.attached = False
            # A prompt of no more tokens than lookahead is in the tree only with its answer.
            if live.publish and live.attached and not live.doomed and live.prompt_length > least:
                assert live.lane.path[live.prompt_length] not in gone, "what a running lease publishes was forgotten"
        for live in detached:
            assert gone.intersection(live.lane.path), "a lease was detached that runs elsewhere"
        assert report.leases_detached >= len(detached)
        assert report.blocks_freed == self.cache.free_blocks - free
        assert report.checkpoints == checkpoints - len(self.oracle.checkpoints)
        self.oracle.forget(gone)
        for key in [key for key in self.pins if key in gone]:
            del self.pins[key]
        self.check()

    def reset(self) -> None:
        """Forget everything; running requests go on for themselves."""
        attached = sum(self.cache._leases.record(live.row).anchor is not None for live in self.lives)
        report = self.cache.reset()
        assert report.leases_detached == attached
        self.oracle.reset()
        self.namespaces.clear()
        self.pins.clear()
        for live in self.lives:
            live.attached = live.publish = False
        self.check()
        if not self.lives:
            assert self.cache.free_blocks == self.world.config.blocks

    # Copies.

    def go_on_with_a_copy(self, how: str) -> None:
        """Replace the cache, its leases and steps by a copy of them, and go on with that."""
        mine = (self.cache, [v.lease for v in self.lives], [f.step for f in self.flights])
        stats, tables = self.cache.stats(), [table.copy() for table in self.cache.tables]
        if how == "deepcopy":
            self.cache, leases, steps = copy.deepcopy(mine)
        elif how == "pickle":
            with time_of(self.clock):
                self.cache, leases, steps = pickle.loads(pickle.dumps(mine))
                self.cache._clock.restart(self.clock)
        elif self.lives:
            with pytest.raises(LeaseError, match="leases run"):
                self.cache.save()
            return
        else:
            assert not any(f.step.counts.any() for f in self.flights), "only steps of nobody are left: undone, or empty"
            with time_of(self.clock):
                self.cache, leases, steps = PrefixCache.load(self.cache.save(), clock=self.clock), [], mine[2]
        for live, lease in zip(self.lives, leases, strict=True):
            live.lease = lease
        for flight, step in zip(self.flights, steps, strict=True):
            flight.step = step
        self.listen()
        assert self.cache.stats() == stats
        assert all((a == b).all() for a, b in zip(self.cache.tables, tables, strict=True))
        self.cache.check()
        self.check()

    def take_all_that_is_available(self) -> None:
        """Exactly as many blocks as are said to be available can be had; tried on a copy."""
        before, available = self.cache.stats(), self.cache.available
        other = copy.deepcopy(self.cache)
        most = before.free + before.evictable
        assert not other._index.make_room(most + 1), "more than was evictable could be had"
        other.check()
        assert other._index.make_room(available), f"{available} blocks are said to be available"
        other.check()
        assert other.available >= other.free_blocks >= available
        assert self.cache.stats() == before, "a copy changed the original"
        self.check()

    def refuse_a_foreign_hit(self, probe: Probe) -> None:
        """A hit of another cache, or of the cache that this one is a copy of, is not leased."""
        prompt = self.probed(probe)
        if prompt is None:
            return
        before, other = self.cache.stats(), PrefixCache(self.world.config)
        if (prompt.tokens < 0).any():
            with pytest.raises(LeaseError, match="symbols of another cache"):
                other.lookup(prompt)
            return
        hit = other.lookup(prompt)
        with pytest.raises(LeaseError, match="another cache"):
            self.cache.lease(prompt, hit)
        assert self.cache.stats() == before
        assert isinstance(prompt, Prompt)
        assert np.array_equal(hit.prompt.tokens, prompt.tokens)


@contextmanager
def time_of(clock: Callable[[], float]) -> Iterator[None]:
    """Let `time.monotonic` say what `clock` does: by it the time of a cache goes on while it is written and read."""

    def monotonic() -> float:
        return clock()

    monotonic.__module__, monotonic.__qualname__ = "time", "monotonic"  # what pickle looks up
    with mock.patch("time.monotonic", monotonic):
        yield
