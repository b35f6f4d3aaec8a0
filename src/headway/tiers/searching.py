"""Asking a shared store what it has of a path: a few round trips, for records alone.

First the records of stretches of the path, as far as they are there, and the indexes behind them, which list where
there are checkpoints; then the manifests at those positions whose digest the path has. What is found goes into the
catalogue, also what comes too late for whoever asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from headway.tiers.catalogue import Entry
from headway.tiers.objects import (
    INDEX,
    MANIFEST,
    STRETCH,
    ObjectLayout,
    PathDigests,
    open_manifest,
    open_positions,
    open_stretch,
    record_name,
)
from headway.tiers.store import DamagedError
from headway.tiers.tier import Tier
from headway.tiers.workers import Clock

__all__ = ["Search"]

_Answered = Callable[[Tier, bool], None]
"""Told that a tier has answered, or has failed to."""
_WIDTH, _WIDER = 16, 4
"""Stretches that are asked for at first, and times as many next: to learn that nothing is there costs little."""


class Search:
    """One question to several tiers."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        layout: ObjectLayout,
        key: bytes,
        lock: threading.RLock,
        folder: str,
        digests: PathDigests,
        floor: int,
        limit: int,
    ) -> None:
        """Nothing is asked yet."""
        self._tiers, self._layout, self._key, self._lock = tiers, layout, key, lock
        self._folder, self._digests = folder, digests
        end = digests.tokens - layout.lookahead
        self._floor, self._limit = floor, end if layout.resumes_anywhere else min(limit, end)
        self._left = len(tiers)
        self._done: Callable[[], None] | None = None

    def start(self, done: Callable[[], None], clock: Clock, seconds: float) -> None:
        """Ask; `done` is called once when all have answered or the time is over."""
        self._done, started = done, time.monotonic()
        alarm = clock.after(seconds, self._finish)

        def answered(tier: Tier, failed: bool) -> None:
            if not failed:
                tier.answered(time.monotonic() - started, self._brought(tier))
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                alarm.cancel()
                self._finish()

        for tier in self._tiers:
            self._ask(tier, answered, self._floor // self._layout.stretch, [], _WIDTH)

    def _finish(self) -> None:
        with self._lock:
            done, self._done = self._done, None
        if done is not None:
            done()

    def _brought(self, tier: Tier) -> float:
        """How much of what was asked about is now known to be there, from 0 to 1."""
        size, deepest = self._layout.stretch, self._floor
        with self._lock:
            path = tier.catalogue.path(self._folder, self._digests, self._floor, self._limit)
        whole = self._floor // size
        while whole < len(path.stretches) and path.stretches[whole] is not None:
            whole += 1
        if self._layout.resumes_anywhere:
            deepest = max(deepest, whole * size)
        deepest = max([deepest, *(position for position in path.checkpoints if position // size <= whole)])
        return max(0, min(deepest, self._limit) - self._floor) / max(1, self._limit - self._floor)

    def _ask(self, tier: Tier, answered: _Answered, first: int, positions: list[int], width: int) -> None:
        """Ask for the ends of stretches from `first` on, `width` of them, and go on behind them while all are there."""
        digests, folder, layout = self._digests, self._folder, self._layout
        with self._lock:
            last = min(self._limit // layout.stretch, digests.stretches)
            ends = list(range(first, min(last, first + width - 1) + 1))
            boundaries = {number: digests.boundary(number) for number in ends}
            inner = [n for n in ends if n * layout.stretch > self._floor]  # whoever asks has what ends before
            unknown = [n for n in inner if tier.catalogue.stretch(folder, boundaries[n]) is None]
        names = [record_name(folder, boundaries[n], STRETCH) for n in unknown]
        names += [record_name(folder, boundaries[n], INDEX) for n in ends]

        def found(records: list[bytes | None] | None) -> None:
            if records is not None:
                stretches, indexes = records[: len(unknown)], records[len(unknown) :]
                self._take(tier, [boundaries[n] for n in unknown], stretches, STRETCH)
                positions.extend(self._positions(tier, ends, indexes))
                if ends and ends[-1] < last and None not in stretches:
                    self._ask(tier, answered, ends[-1] + 1, positions, _WIDER * width)
                    return
            self._ask_manifests(tier, answered, positions, records is None)

        tier.ask(names, found)

    def _ask_manifests(self, tier: Tier, answered: _Answered, positions: Sequence[int], failed: bool) -> None:
        with self._lock:
            digests = [self._digests.manifest(position) for position in positions]

        def found(records: list[bytes | None] | None) -> None:
            self._take(tier, digests, records or [], MANIFEST)
            answered(tier, failed or records is None)

        if digests:
            tier.ask([record_name(self._folder, digest, MANIFEST) for digest in digests], found)
        else:
            answered(tier, failed)

    def _positions(self, tier: Tier, ends: Sequence[int], indexes: Sequence[bytes | None]) -> list[int]:
        """Positions on the path whose checkpoint is not known yet."""
        size, found = self._layout.stretch, list[int]()
        for number, data in zip(ends, indexes, strict=True):
            try:
                positions = open_positions(data) if data else []
            except DamagedError:
                tier.count("corrupt")
                continue
            found += [p for p in positions if p // size == number and self._floor < p <= self._limit]
        with self._lock:
            at = self._digests
            return [
                p
                for p in found
                if tier.catalogue.checkpoint(self._folder, at.boundary(p // size), p, at.rest(p)) is None
            ]

    def _take(self, tier: Tier, digests: Sequence[bytes], records: Sequence[bytes | None], what: str) -> None:
        for digest, data in zip(digests, records, strict=False):
            if data is None:
                continue
            try:
                record = (open_stretch if what == STRETCH else open_manifest)(data, digest, self._key)
            except DamagedError:
                tier.count("corrupt")
                continue
            with self._lock:
                tier.catalogue.add(Entry(self._folder, record, own=False))
                tier.catalogue.trim()
