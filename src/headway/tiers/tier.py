"""One tier: a store, what it is known to hold, calls to it with deadlines, and the circuit that switches it off.

The circuit opens when a call is late, or three fail one after another. A read counts as failed much earlier, after some
times of what reads took lately: then its request goes on without it, and three such reads open the circuit. While it is
open nothing is asked of the store and nothing of it is offered: requests compute as if the tier were not there. After a
pause a probe asks the store for a record that does not exist; an answer closes the circuit, and silence doubles the
pause. So no request is ever the probe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headway.errors import ConfigError
from headway.tiers.catalogue import Catalogue, Entry
from headway.tiers.objects import MANIFEST, STRETCH, Manifest, ObjectLayout, checksum, object_names, record_name
from headway.tiers.rates import MoveRate, Recent
from headway.tiers.store import (
    DamagedError,
    LateError,
    MissingError,
    RefusedError,
    Store,
    StoreError,
    StoreFullError,
)
from headway.tiers.workers import Clock, Operation, Pool

__all__ = ["Tier", "TierConfig", "TierStats", "reason_of"]

_log = logging.getLogger("headway.tiers")

_IN_A_ROW = 3
"""Failures one after another that open the circuit."""
_LONGEST_PAUSE = 32
"""Times the first pause."""
_GUESSED = 200e6
"""Bytes per second before loads were measured."""
_SHORTEST, _SLACK = 0.2, 16.0
"""A read is late after this part of the tier's patience, and so many times what it should take."""
_LEARNING = 0.2
"""Weight of the latest answer in what asking a store brings."""
_LEAST = 1 / 32
"""What asking brings at least, as far as is believed."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class TierConfig:
    """How a tier is used.

    Attributes:
        name: What it is called in counters and explanations: `disk`, `store`.
        capacity: Bytes that this server may keep there; None leaves the bound to the store.
        shared: Others write there too, so a lookup asks the store (`ObjectTiers.search`).
        threads: Reads at once, and writes at once.
        patience: Seconds that a call may take before it is late, and
        slowest: the bytes per second that it may take longer for what it moves.
        pause: Seconds for which the circuit stays open at first.
        retry: Seconds for which an object that failed is not tried again; twice as long each time.
        grace: Seconds after which an object that no record names is removed.
        rescan: Seconds between two scans of what is there; 0 for the one at the start alone.
        verify: Bytes per second at which the scan at the start compares all objects with their checksums; 0 to
            compare none.
    """

    name: str
    capacity: int | None = None
    shared: bool = False
    threads: int = 4
    patience: float = 5.0
    slowest: float = 20e6
    pause: float = 5.0
    retry: float = 30.0
    grace: float = 3600.0
    rescan: float = 1800.0
    verify: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot work (ConfigError)."""
        if not self.name or self.threads < 1 or self.patience <= 0 or self.slowest <= 0:
            raise ConfigError(f"tier {self.name!r} needs a name, a thread, patience and a slowest speed above zero")
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError(f"tier {self.name!r}: capacity={self.capacity} leaves no room")


@dataclass(frozen=True)
class TierStats:
    """Counters of one tier since it was opened.

    Attributes:
        name: `TierConfig.name`.
        capacity: Bytes that it may hold; None where the store decides.
        used_bytes: Bytes that are held and count against the capacity.
        checkpoints: Checkpoints that are known to be there.
        loads: Objects that were read and verified.
        loaded_bytes: Their bytes.
        stores: Checkpoints that were written.
        stored_bytes: Bytes that were written.
        failures: Calls, objects and writes that failed, by reason.
        evictions: Checkpoints that were evicted.
        circuit: `closed`, or `open` while the tier is switched off.
        openings: How often it was switched off.
        scanning: Whether a scan is under way.
        bytes_per_second: What loads reached lately.
        answer_seconds: How long the store takes to say what it has of a path; 0 before it was asked.
        unasked: Lookups that did not ask it, because its answers save less than they take.
        shared: Others write there too; then what this server wrote before its start is not counted.
    """

    name: str
    capacity: int | None
    used_bytes: int
    checkpoints: int
    loads: int
    loaded_bytes: int
    stores: int
    stored_bytes: int
    failures: dict[str, int]
    evictions: int
    circuit: str
    openings: int
    scanning: bool
    bytes_per_second: float
    answer_seconds: float = 0.0
    unasked: int = 0
    shared: bool = False


class Tier:
    """See the module. `catalogue` is used with `lock` held; everything else takes care of itself.

    Attributes:
        config: How it is used.
        store: Where the bytes are.
        catalogue: What is known to be there.
        lock: The lock of all that is kept in memory; never held during a call to a store.
        groups: The place of each group in the layout, as names have it.
        counts: `loads`, `loaded_bytes`, `stores`, `stored_bytes`, `openings`, `unasked`.
        failures: By reason.
        scanning: Whether a scan is under way.
    """

    def __init__(
        self, config: TierConfig, store: Store, layout: ObjectLayout, lock: threading.RLock, clock: Clock
    ) -> None:
        """Nothing is asked of the store yet."""
        self.config, self.store, self.lock = config, store, lock
        self.catalogue = Catalogue(layout)
        self.groups = {group.name: place for place, group in enumerate(layout.groups)}
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.scanning = False
        self._clock = clock
        self._reads = Pool(f"{config.name}-read", config.threads, clock)
        self._writes = Pool(f"{config.name}-write", config.threads, clock)
        self._probes = Pool(f"{config.name}-probe", 1, clock)
        self._open = self._closed = False
        self._in_a_row, self._pauses = 0, 0
        self._moves, self._answers, self._brought = MoveRate(), Recent(), 1.0

    # ---- calls

    @property
    def usable(self) -> bool:
        """Whether anything may be asked of the store now."""
        return not self._open and not self._closed

    def deadline(self, size: int) -> float:
        """Seconds that a call may take that moves so many bytes."""
        return self.config.patience + size / self.config.slowest

    def _reading_deadline(self, size: int) -> float:
        """As `deadline`, and no more than some times what it took lately: what stalls is known early."""
        most, should = self.deadline(size), self._moves.seconds(size)
        return most if should is None else min(most, _SHORTEST * self.config.patience + _SLACK * should)

    def call(self, what: Callable[[], _T], size: int = 0) -> _T:
        """Make a call to the store and wait for it, at most for its deadline.

        Raises:
            StoreError: It failed, was late, or was not made because the tier is switched off.
        """
        return self.call_all([what], size)[0]

    def call_all(self, calls: Sequence[Callable[[], _T]], size: int = 0) -> list[_T]:
        """Make calls at once and wait for all, as `call` does; `size` is that of the largest."""
        results: list[Any] = [None] * len(calls)
        errors: list[BaseException] = []
        left = threading.Semaphore(0)

        def finish(place: int, result: Any, error: BaseException | None) -> None:
            results[place] = result
            errors.extend([error] if error is not None else [])
            left.release()

        for place, what in enumerate(calls):
            self._submit(self._writes, what, self.deadline(size), partial(finish, place))
        for _ in calls:
            left.acquire()
        if errors:
            worst = next((error for error in errors if not isinstance(error, RefusedError)), errors[0])
            raise worst if isinstance(worst, StoreError) else StoreError(f"{self.config.name}: {worst}") from worst
        return results

    def fetch(
        self, name: str, buffer: memoryview, check: bytes, done: Callable[[str], None], ended: Callable[[], None]
    ) -> Callable[[], bool]:
        """Read an object that fills a buffer, and verify it.

        `done` is called once, from another thread or this one, with the reason of the failure or "".
        `ended` is called once when the buffer is written to no more, which after a late read is later.

        Returns:
            What withdraws the read if it has not begun: then it returns True, and `ended` is called alone.
        """

        def finish(_: None, error: BaseException | None) -> None:
            if error is None:
                with self.lock:
                    self.counts.update(loads=1, loaded_bytes=len(buffer))
            done(reason_of(error) if error else "")

        seconds = self._reading_deadline(len(buffer))
        firm = seconds >= self.deadline(len(buffer))
        operation = self._submit(self._reads, lambda: self.read(name, buffer, check), seconds, finish, ended, firm)
        return lambda: self._reads.withdraw(operation)

    def read(self, name: str, buffer: memoryview, check: bytes) -> None:
        """Read an object that fills a buffer, and verify it; on the calling thread, without a deadline.

        Raises:
            DamagedError: It is not what was written.
            StoreError: The store failed.
        """
        length = self.store.read(name, buffer)
        if length != len(buffer) or checksum(buffer) != check:
            raise DamagedError(f"{self.config.name}: {name} is not what was written")

    def ask(self, names: Sequence[str], done: Callable[[list[bytes | None] | None], None]) -> None:
        """Read records; `done` is called once with them, or with None if that failed."""
        self._submit(
            self._reads,
            lambda: self.store.read_small(names),
            self.deadline(0),
            lambda result, error: done(None if error else result),
        )

    def _submit(
        self,
        pool: Pool,
        call: Callable[[], Any],
        seconds: float,
        done: Callable[[Any, BaseException | None], None],
        ended: Callable[[], None] = lambda: None,
        firm: bool = True,
    ) -> Operation:
        def judged(result: Any, error: BaseException | None) -> None:
            self._judge(error, firm)
            done(result, error)

        operation = Operation(call, seconds, judged, ended)
        pool.submit(operation)
        return operation

    # ---- the circuit

    def _judge(self, error: BaseException | None, firm: bool) -> None:
        """Count a call that ended, and open the circuit if it must be; `firm`: what is late had all its time."""
        if error is None or isinstance(error, MissingError | StoreFullError | DamagedError):
            self._in_a_row = 0
        elif not isinstance(error, RefusedError):
            self._in_a_row += 1
            if (firm and isinstance(error, LateError)) or self._in_a_row >= _IN_A_ROW:
                self._switch_off(error)
        if error is not None:
            self.count(reason_of(error))

    def _switch_off(self, error: BaseException) -> None:
        with self.lock:
            if self._open or self._closed:
                return
            self._open = True
            self.counts["openings"] += 1
        pause = self.config.pause
        _log.warning("%s is switched off for %.3g s: %s", self.config.name, pause, error)
        self._pauses = 1
        for pool in (self._reads, self._writes):
            pool.refuse(RefusedError(f"{self.config.name} is switched off for a while"))
        self._clock.after(pause, self._probe)

    def _probe(self) -> None:
        if not self._closed:
            ask = lambda: self.store.read_small(["probe/probe"])  # noqa: E731
            self._probes.submit(Operation(ask, self.config.patience, self._probed))

    def _probed(self, _: Any, error: BaseException | None) -> None:
        if error is None:
            for pool in (self._reads, self._writes):
                pool.refuse(RefusedError(f"{self.config.name} is closed") if self._closed else None)
            with self.lock:
                self._open, self._in_a_row = False, 0
            _log.warning("%s answers again and is used", self.config.name)
            return
        pause = self.config.pause * min(2**self._pauses, _LONGEST_PAUSE)
        self._pauses += 1
        _log.warning("%s still does not answer, next try in %.3g s: %s", self.config.name, pause, error)
        self._clock.after(pause, self._probe)

    # ---- what is known

    def count(self, reason: str, number: int = 1) -> None:
        """Count failures of a kind."""
        with self.lock:
            self.failures[reason] += number

    def failed(self, entry: Entry, reason: str) -> list[str]:
        """An object of an entry could not be had; with the lock.

        What is gone or altered is withdrawn, anything else is left alone for a while.

        Returns:
            Names to remove from the store.
        """
        if reason in ("missing", "corrupt"):
            gone = self.catalogue.drop(entry, keep=True)
            entry.withdrawn = bool(entry.holds and gone)  # others may still read what is left of it
            return self.names([each for each in gone if not each.withdrawn])
        if reason != "refused":
            entry.until = time.monotonic() + self.config.retry * min(2**entry.failures, _LONGEST_PAUSE)
            entry.failures += 1
        return []

    def names(self, entries: Sequence[Entry]) -> list[str]:
        """The names of entries in the store: records before objects, so that what is half removed is not found."""
        records = [
            record_name(e.folder, e.record.digest, MANIFEST if isinstance(e.record, Manifest) else STRETCH)
            for e in entries
        ]
        objects = [
            name for e in entries for name in object_names(e.folder, e.record, self.groups) if not name.endswith(".")
        ]
        return records + objects

    # ---- what is learned

    def learn(self, size: int, seconds: float) -> None:
        """A load moved so many bytes in so many seconds."""
        if size and seconds > 0:
            with self.lock:
                self._moves.measured(size, seconds)

    def seconds(self, size: int) -> float:
        """What a load of so many bytes takes, as loads did lately; before some were measured, a guess."""
        known = self._moves.seconds(size)
        return size / _GUESSED if known is None else known

    def answered(self, seconds: float, brought: float) -> None:
        """The store took so long to say what it has of a path: this part of what was asked about."""
        with self.lock:
            self._answers.add(seconds)
            self._brought += _LEARNING * (brought - self._brought)

    def worth_asking(self, computing: float) -> bool:
        """Whether asking the store about a path that takes so many seconds to compute saves more than it takes."""
        with self.lock:
            takes = self._answers.value
            worth = takes is None or takes <= computing * max(self._brought, _LEAST)
            self.counts["unasked"] += not worth
            return worth

    def stats(self) -> TierStats:
        """Counters as they are now."""
        with self.lock:
            counts = self.counts
            return TierStats(
                name=self.config.name,
                capacity=self.config.capacity,
                used_bytes=self.catalogue.used,
                checkpoints=self.catalogue.checkpoints,
                loads=counts["loads"],
                loaded_bytes=counts["loaded_bytes"],
                stores=counts["stores"],
                stored_bytes=counts["stored_bytes"],
                failures=dict(self.failures),
                evictions=self.catalogue.evictions,
                circuit="open" if self._open else "closed",
                openings=counts["openings"],
                scanning=self.scanning,
                bytes_per_second=1 / (self._moves.per_byte.value or 1 / _GUESSED),
                answer_seconds=self._answers.value or 0.0,
                unasked=counts["unasked"],
                shared=self.config.shared,
            )

    def close(self, seconds: float) -> None:
        """Make no more calls. The store is closed unless one is still in it after so many seconds."""
        self._closed = True
        pools = (self._reads, self._writes, self._probes)
        for pool in pools:
            pool.close(RefusedError(f"{self.config.name} is closed"))
        until = time.monotonic() + seconds
        if all(pool.join(max(0.0, until - time.monotonic())) for pool in pools):
            self.store.close()
        else:
            _log.warning("%s does not answer; its calls were left behind", self.config.name)


def reason_of(error: BaseException) -> str:
    """The one word for an error that counters and explanations have."""
    words = {
        LateError: "late",
        MissingError: "missing",
        DamagedError: "corrupt",
        StoreFullError: "full",
        RefusedError: "refused",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), "failed")
