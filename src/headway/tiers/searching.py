"""Asking a shared store what it has of a path: two round trips, for records alone.

First the records of all stretches of the path, and the indexes behind them, which list at which positions there are
checkpoints; then the manifests at those positions whose digest the path has. What is found goes into the catalogue.
"""

from __future__ import annotations

import threading
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
        self._floor, self._limit = floor, min(limit, digests.tokens - layout.lookahead)
        self._left = len(tiers)
        self._done: Callable[[], None] | None = None

    def start(self, done: Callable[[], None], clock: Clock, seconds: float) -> None:
        """Ask; `done` is called once when all have answered or the time is over."""
        self._done = done
        alarm = clock.after(seconds, self._finish)

        def answered() -> None:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                alarm.cancel()
                self._finish()

        for tier in self._tiers:
            self._ask(tier, answered)

    def _finish(self) -> None:
        with self._lock:
            done, self._done = self._done, None
        if done is not None:
            done()

    def _ask(self, tier: Tier, answered: Callable[[], None]) -> None:
        size, digests, folder = self._layout.stretch, self._digests, self._folder
        first, last = self._floor // size, max(self._floor, self._limit) // size
        with self._lock:
            if self._layout.resumes_anywhere:
                last = min(last + 1, digests.stretches)
            last = min(last, digests.stretches)
            ends = list(range(first, last + 1))
            boundaries = {number: digests.boundary(number) for number in ends}
            unknown = [n for n in ends[1:] if tier.catalogue.stretch(folder, boundaries[n]) is None]
        names = [record_name(folder, boundaries[n], STRETCH) for n in unknown]
        names += [record_name(folder, boundaries[n], INDEX) for n in ends]

        def found(records: list[bytes | None] | None) -> None:
            if records is None:
                answered()
                return
            self._take(tier, [boundaries[n] for n in unknown], records[: len(unknown)], STRETCH)
            positions = self._positions(tier, ends, records[len(unknown) :])
            with self._lock:
                wanted = {digests.manifest(position): position for position in positions}
            if not wanted:
                answered()
                return
            asked = list(wanted)
            names = [record_name(folder, digest, MANIFEST) for digest in asked]

            def known(records: list[bytes | None] | None) -> None:
                self._take(tier, asked, records or [], MANIFEST)
                answered()

            tier.ask(names, known)

        tier.ask(names, found)

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
