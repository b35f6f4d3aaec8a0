"""Loads: objects read into staging memory, verified, whole or lowered; one thread decides, the tiers' threads read.

A request that waits for a load holds no blocks. Its objects come into memory of this process, bounded and reused, and
only when all of a place have arrived and are verified is anyone told. A shortfall of any kind lowers the load to the
deepest place that is whole without what failed, in whichever tier: that place is looked for anew, and what has
arrived already counts as there, even if its tier has been switched off since.

All that happens to loads is an event for one thread (`Loader`), so nothing here needs a lock: started, arrived,
cancelled, late, released. Objects never change under their name, so loads that want the same object share one read
and one buffer. The buffer of a read that is late belongs to that read until it returns, and counts as used as long.

What a load is going to read is not evicted from the moment that it is asked for until the load ends, however long it
waits for memory.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.tiers.catalogue import Entry
from headway.tiers.objects import Reference, Span, object_name
from headway.tiers.tier import Tier
from headway.tiers.workers import Alarm, Clock

__all__ = ["Failure", "Load", "Loaded", "Loader", "Moved", "Piece", "Place", "Wanted"]

_log = logging.getLogger("headway.tiers")

_UNSEEN = 2
"""References to an array that only its fetch has, as `sys.getrefcount` counts them."""


Key = tuple[str, str]
"""Names of a tier and of an object in it."""


class Wanted(NamedTuple):
    """An object of a place, and where it is read."""

    tier: Tier
    entry: Entry
    reference: Reference

    @property
    def key(self) -> Key:
        """The tier's name, and the object's name there."""
        entry, r = self.entry, self.reference
        return self.tier.config.name, object_name(entry.folder, entry.record.digest, self.tier.groups[r.group], r.check)


@dataclass(frozen=True, eq=False)
class Place:
    """A position that a load can restore.

    Attributes:
        position: Tokens of the path that need not be computed then.
        kind: The kind of placement that took the checkpoint; `stretch` for the end of a stretch without one.
        tiers: Names of the tiers that its objects come from, the one of the checkpoint first.
        move_bytes: What a load of it moves.
        seconds: What that takes at the speed that loads of these tiers reached lately.
    """

    position: int
    kind: str
    tiers: tuple[str, ...]
    move_bytes: int
    seconds: float
    path: tuple[str, bytes] = field(repr=False)
    """The namespace, as in names, and the tokens."""
    find: Callable[[int, int, frozenset[Key]], list[Place]] = field(repr=False)
    """The places of the same path between two positions, when some objects count as there."""
    chain: Sequence[Wanted] = field(repr=False)
    """Objects of stretches; the first `linked` of them belong to this place."""
    linked: int = field(repr=False)
    own: tuple[Wanted, ...] = field(repr=False)
    """What the checkpoint needs besides."""

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """All objects of the place."""
        return (*self.chain[: self.linked], *self.own)


class Piece(NamedTuple):
    """Verified bytes of one object.

    Attributes:
        group: The group's name.
        first: First token. May lie before the load's floor, for whole stretches are moved.
        stop: One behind the last token. May lie behind the position, where all groups need the whole prefix.
        data: The bytes, until the load is released. Others may have the same memory: it must not be written to.
    """

    group: str
    first: int
    stop: int
    data: memoryview


class Failure(NamedTuple):
    """Why a load was lowered.

    Attributes:
        tier: The tier's name.
        span: The object: group and tokens.
        reason: `missing`, `late`, `corrupt`, `failed` (the store said so), `refused` (the tier was switched off),
            `cancelled`, `forgotten`, or `memory` (the place is larger than the staging memory, or waited too long for
            it).
    """

    tier: str
    span: Span
    reason: str


class Moved(NamedTuple):
    """What a load moved from one tier: bytes, and seconds from its start to the last of them."""

    tier: str
    bytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Loaded:
    """The end of a load.

    Attributes:
        position: What was restored; the floor if nothing was.
        kind: As `Place.kind`; "" if nothing was restored.
        pieces: All objects of the position from the floor on.
        failures: Why it is not the position that was asked for; empty if it is.
        moved: By tier, what was read for the position.
        seconds: From `load` to the end.
    """

    position: int
    kind: str
    pieces: tuple[Piece, ...]
    failures: tuple[Failure, ...]
    moved: tuple[Moved, ...]
    seconds: float
    _release: Callable[[], None] = field(repr=False)

    def release(self) -> None:
        """Give the staging memory back. The pieces' data cannot be used any more. Any thread, any number of times."""
        self._release()


@dataclass(eq=False)
class _Fetch:
    """An object that is read, or has arrived, and who wants it."""

    wanted: Wanted
    array: NDArray[np.uint8]
    users: set[Load] = field(default_factory=set)
    state: str = "reading"  # then `there`, `withdrawn`, or the reason of its failure
    withdraw: Callable[[], bool] | None = None
    ended: bool = False
    freed: bool = False
    at: float = 0.0  # when it arrived


class Load:
    """A load under way.

    Attributes:
        floor: Position from which on the caller lacks the path.
    """

    def __init__(
        self, loader: Loader, place: Place, floor: int, done: Callable[[Loaded], None], seconds: float
    ) -> None:
        """Made by `Loader.start` alone."""
        self.floor = floor
        self._loader, self._place, self._done = loader, place, done
        self._started = time.monotonic()
        self._until = self._started + seconds
        self._target: Place | None = place
        self._fetches: dict[Key, _Fetch] = {}
        self._held: dict[int, Wanted] = {}
        self._pending: set[Key] = set()
        self._failures: list[Failure] = []
        self._pieces: tuple[Piece, ...] = ()
        self._alarm = Alarm(None)
        self._over = self._released = False

    def cancel(self, reason: str = "cancelled") -> None:
        """Give up. `done` is called soon, with nothing restored, unless it was called already. Any thread."""
        self._loader.post(lambda: self._loader.end(self, None, reason))


class _Staging:
    """Buffers, bounded in bytes; those that are given back are kept for the next of the same size."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._idle_bytes = 0

    def fits(self, size: int) -> bool:
        return self.used + size <= self.capacity

    def take(self, size: int) -> NDArray[np.uint8]:
        self.used += size
        if self._idle.get(size):
            self._idle_bytes -= size
            return self._idle[size].pop()
        while self._idle_bytes and self.used + self._idle_bytes > self.capacity:
            length = next(iter(self._idle))
            self._idle_bytes -= length * len(self._idle.pop(length))
        return np.empty(size, np.uint8)

    def give(self, array: NDArray[np.uint8], reuse: bool) -> None:
        self.used -= len(array)
        if reuse:
            self._idle.setdefault(len(array), []).append(array)
            self._idle_bytes += len(array)


class Loader:
    """Decides about loads, on a thread of its own that also calls their `done`."""

    def __init__(self, staging: int, clock: Clock, withdraw: Callable[[Tier, Sequence[str]], None]) -> None:
        """`withdraw` is told the names that are to be removed from a tier, because an object of theirs is gone."""
        self._staging, self._clock, self._withdraw = _Staging(staging), clock, withdraw
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._fetches: dict[Key, _Fetch] = {}
        self._waiting: list[Load] = []
        self._loads: set[Load] = set()
        self._thread = threading.Thread(target=self._run, name="headway-tiers-loads", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """Bytes of staging memory."""
        return self._staging.capacity

    @property
    def used(self) -> int:
        """Bytes of staging memory that are in use, those of late reads included."""
        return self._staging.used

    @property
    def active(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def start(self, place: Place, floor: int, done: Callable[[Loaded], None], seconds: float) -> Load:
        """Begin a load; any thread, with the lock of the tiers: what went since the place was found is not read."""
        load = Load(self, place, floor, done, seconds)
        if gone := [wanted for wanted in place.wanted if not wanted.entry.present]:
            self._note(load, gone[0], "missing")
        places = place.find(floor, place.position, frozenset()) if gone else [place]
        self._hold(load, places[-1:])
        self.post(lambda: self._begin(load, places))
        return load

    def post(self, event: Callable[[], None]) -> None:
        """Have something done by the loader's thread."""
        self._events.put(event)

    def each(self, match: Callable[[Place], bool], reason: str) -> None:
        """Give up all loads under way whose place matches."""

        def give_up() -> None:
            for load in [load for load in self._loads if match(load._place)]:
                self.end(load, None, reason)

        self.post(give_up)

    def close(self) -> None:
        """Give up all loads, tell them, and end the thread."""
        self.each(lambda _: True, "cancelled")
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- on the loader's thread

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except Exception:
                _log.exception("an event of a load failed")

    def _hold(self, load: Load, places: Sequence[Place]) -> None:
        """Keep what places need from being evicted until the load ends."""
        for wanted in [wanted for place in places for wanted in place.wanted]:
            if id(wanted.entry) not in load._held:
                load._held[id(wanted.entry)] = wanted
                with wanted.tier.lock:
                    wanted.entry.holds += 1

    def _let_go(self, wanted: Wanted) -> None:
        """Undo one hold of an entry."""
        with wanted.tier.lock:
            names = wanted.tier.names(wanted.tier.catalogue.release(wanted.entry))
        if names:
            self._withdraw(wanted.tier, names)

    def _begin(self, load: Load, places: Sequence[Place]) -> None:
        self._loads.add(load)
        left = max(0.0, load._until - time.monotonic())
        load._alarm = self._clock.after(left, lambda: self.post(lambda: self._overdue(load)))
        self._aim(load, places)

    def _aim(self, load: Load, places: Sequence[Place]) -> None:
        """Go for the deepest of some places that fits into the staging memory, or end."""
        for place in reversed(places):
            if sum(wanted.reference.length for wanted in place.wanted) <= self._staging.capacity:
                break
            self._note(load, place.wanted[-1], "memory")
        else:
            lower = places[0].find(load.floor, places[0].position - 1, self._there(load)) if places else []
            if lower:
                return self._aim(load, lower)
            return self.end(load, None)
        load._target = place
        self._hold(load, [place])
        keys = {w.key: w for w in place.wanted}
        for key in [key for key in load._fetches if key not in keys]:
            self._leave(load, key)
        missing = {key: wanted for key, wanted in keys.items() if key not in load._fetches}
        need = sum(w.reference.length for key, w in missing.items() if not self._usable(key))
        if not self._staging.fits(need):
            for key in list(load._fetches):  # who waits for memory holds none
                self._leave(load, key)
            if load not in self._waiting:
                self._waiting.append(load)
            return None
        for key, wanted in missing.items():
            self._join(load, key, wanted)
        load._pending = {key for key in keys if load._fetches[key].state != "there"}
        return self._check(load)

    def _usable(self, key: Key) -> bool:
        return key in self._fetches and self._fetches[key].state in ("reading", "there")

    def _join(self, load: Load, key: Key, wanted: Wanted) -> None:
        if not self._usable(key):
            fetch = self._fetches[key] = _Fetch(wanted, self._staging.take(wanted.reference.length))
            fetch.users.add(load)
            load._fetches[key] = fetch
            buffer = fetch.array.data
            with wanted.tier.lock:
                wanted.entry.holds += 1
            fetch.withdraw = wanted.tier.fetch(
                key[1],
                buffer,
                wanted.reference.check,
                lambda reason: self.post(lambda: self._arrived(key, fetch, reason)),
                lambda: self.post(lambda: self._ended(key, fetch)),
            )
        else:
            load._fetches[key] = self._fetches[key]
            load._fetches[key].users.add(load)

    def _arrived(self, key: Key, fetch: _Fetch, reason: str) -> None:
        fetch.state, fetch.at = reason or "there", time.monotonic()
        users = list(fetch.users)
        if reason:
            self._fail(fetch.wanted, reason)
            for load in users:
                self._note(load, fetch.wanted, reason)
                self._leave(load, key)
        for load in users:
            if load._over or load._target is None:
                continue
            if reason:
                self._lower(load)
            else:
                load._pending.discard(key)
                self._check(load)

    def _fail(self, wanted: Wanted, reason: str) -> None:
        with wanted.tier.lock:
            names = wanted.tier.failed(wanted.entry, reason)
        if reason != "refused":
            _log.warning("%s: %s of %s is %s", *wanted.key, wanted.reference.group, reason)
        if names:
            self._withdraw(wanted.tier, names)

    def _lower(self, load: Load) -> None:
        self._aim(load, load._place.find(load.floor, load._place.position, self._there(load)))

    def _there(self, load: Load) -> frozenset[Key]:
        return frozenset(key for key, fetch in load._fetches.items() if fetch.state == "there")

    def _check(self, load: Load) -> None:
        """End a load if all has arrived."""
        if not load._pending:
            self.end(load, load._target)

    def _overdue(self, load: Load) -> None:
        """The load's own time is over: end with what is whole already. It took its tiers so long at least."""
        if load._over:
            return
        there = self._there(load)
        pending = [f.wanted for f in load._fetches.values() if f.state == "reading"]
        for tier in {wanted.tier for wanted in pending}:
            sizes = [f.wanted.reference.length for f in load._fetches.values() if f.wanted.tier is tier]
            tier.learn(sum(sizes), time.monotonic() - load._started)
        waited = load._target.wanted[-1:] if load in self._waiting and load._target else ()
        for wanted in pending or waited:
            self._note(load, wanted, "late" if pending else "memory")
        places = load._place.find(load.floor, load._place.position, there)
        whole = [place for place in places if all(wanted.key in there for wanted in place.wanted)]
        self.end(load, whole[-1] if whole else None)

    def end(self, load: Load, place: Place | None, reason: str = "") -> None:
        """End a load at a place whose objects have all arrived, or with nothing; on the loader's thread."""
        if load._over:
            return
        load._over = True
        load._alarm.cancel()
        self._loads.discard(load)
        if load in self._waiting:
            self._waiting.remove(load)
        for wanted in load._held.values():
            self._let_go(wanted)
        if reason:
            self._note(load, load._place.wanted[-1], reason)
        keys = [w.key for w in place.wanted] if place else []
        for key in [key for key in load._fetches if key not in keys]:
            self._leave(load, key)
        fetches = [load._fetches[key] for key in keys]
        references = [fetch.wanted.reference for fetch in fetches]
        load._pieces = tuple(
            Piece(r.group, r.first, r.stop, memoryview(fetch.array.data))
            for r, fetch in zip(references, fetches, strict=True)
        )
        now = time.monotonic()
        loaded = Loaded(
            position=place.position if place else load.floor,
            kind=place.kind if place else "",
            pieces=load._pieces,
            failures=tuple(load._failures),
            moved=self._moved(load, keys),
            seconds=now - load._started,
            _release=lambda: self.post(lambda: self._release(load)),
        )
        try:
            load._done(loaded)
        finally:
            self._retry()

    def _moved(self, load: Load, keys: Sequence[Key]) -> tuple[Moved, ...]:
        moved = []
        for name in dict.fromkeys(name for name, _ in keys):
            fetches = [load._fetches[key] for key in keys if key[0] == name]
            size = sum(fetch.wanted.reference.length for fetch in fetches)
            seconds = max(0.0, max(fetch.at for fetch in fetches) - load._started)
            tier = fetches[0].wanted.tier
            with tier.lock:
                for entry in {id(f.wanted.entry): f.wanted.entry for f in fetches}.values():
                    if entry.present:
                        tier.catalogue.rank(entry)  # it was wanted
            tier.learn(size, seconds)
            moved.append(Moved(name, size, seconds))
        return tuple(moved)

    def _release(self, load: Load) -> None:
        if not load._over or load._released:
            return
        load._released = True
        for piece in load._pieces:
            piece.data.release()
        for key in list(load._fetches):
            self._leave(load, key)
        self._retry()

    def _leave(self, load: Load, key: Key) -> None:
        fetch = load._fetches.pop(key)
        fetch.users.discard(load)
        if not fetch.users and fetch.state == "reading" and fetch.withdraw is not None and fetch.withdraw():
            fetch.state = "withdrawn"
        self._free(key, fetch)

    def _ended(self, key: Key, fetch: _Fetch) -> None:
        fetch.ended, fetch.withdraw = True, None  # the call has the buffer
        self._let_go(fetch.wanted)
        self._free(key, fetch)
        self._retry()

    def _free(self, key: Key, fetch: _Fetch) -> None:
        """Take a buffer back that nobody wants and nobody writes to."""
        if not fetch.users and fetch.ended and not fetch.freed:
            fetch.freed = True
            # An array or a slice that somebody made of a piece and kept holds the array: then it is not used again.
            unseen = sys.getrefcount(fetch.array) == _UNSEEN
            self._staging.give(fetch.array, reuse=unseen)
            if self._fetches.get(key) is fetch:
                del self._fetches[key]

    def _retry(self) -> None:
        """Memory came back, perhaps: whoever waits for it tries again, in their order."""
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            if self._waiting:
                self._waiting.append(load)  # nobody passes one who waits
            else:
                self._lower(load)

    def _note(self, load: Load, wanted: Wanted, reason: str) -> None:
        r = wanted.reference
        failure = Failure(wanted.tier.config.name, Span(r.group, r.first, r.stop), reason)
        if failure not in load._failures:
            load._failures.append(failure)
