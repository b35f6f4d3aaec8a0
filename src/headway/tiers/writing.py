"""Everything that changes a store: checkpoints written, entries removed, paths forgotten; one thread a tier, in order.

The order is what makes it right. A write puts its objects first, then the stretch records, then the manifest, and
looks before the manifest whether it was forgotten meanwhile; whatever is to be forgotten is removed behind the writes
that were asked for before it. So what is forgotten does not come back, and a write that dies anywhere leaves objects
that nothing names, which a scan collects.

What is written is in the catalogue from the moment it is asked for, not yet whole: the same checkpoint is not written
twice, and nothing that a write builds on is evicted before it ends (a first-seen prefix used to be lost that way).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headway.tiers.catalogue import Catalogue, Entry
from headway.tiers.objects import (
    ABOUT,
    INDEX,
    MANIFEST,
    STRETCH,
    Manifest,
    ObjectLayout,
    PathDigests,
    Reference,
    Span,
    Stretch,
    checksum,
    object_name,
    open_manifest,
    open_positions,
    open_stretch,
    parse_name,
    record_name,
    seal,
)
from headway.tiers.store import Buffer, DamagedError, StoreError, StoreFullError
from headway.tiers.tier import Tier, reason_of

__all__ = ["Backlog", "Write", "Writer", "adopt", "read_records"]

_log = logging.getLogger("headway.tiers")

_READ_AT_ONCE = 256
"""Records in one call."""


class _ForgottenError(StoreError):
    """What was being written was forgotten meanwhile."""


class Backlog:
    """Bytes that wait to be written, bounded."""

    def __init__(self, capacity: int, lock: threading.RLock) -> None:
        self.capacity, self.used, self._lock = capacity, 0, lock

    def take(self, size: int) -> bool:
        """Count some in; False if they are too many."""
        with self._lock:
            fits = self.used + size <= self.capacity
            self.used += size * fits
            return fits

    def give(self, size: int) -> None:
        """Count some out."""
        with self._lock:
            self.used -= size


@dataclass(eq=False)
class Write:
    """A checkpoint to be written, for all tiers that lack something of it.

    Attributes:
        folder: The namespace, as in names.
        digests: Of its path.
        position: Its position.
        kind: The kind of placement that took it.
        worth: Expected seconds that keeping it saves.
        pieces: Bytes of the objects that a tier lacks.
        free: Called when the last tier is done with it.
        tiers: How many are not.
    """

    folder: str
    digests: PathDigests
    position: int
    kind: str
    worth: float
    pieces: Mapping[Span, Buffer]
    free: Callable[[], None]
    tiers: int = 0
    _checks: dict[Span, bytes] = field(default_factory=dict)

    def check(self, span: Span) -> bytes:
        """The checksum of a piece, computed once."""
        if span not in self._checks:
            self._checks[span] = checksum(self.pieces[span])
        return self._checks[span]


class Writer:
    """The writing thread of one tier. Public methods may be called by any thread."""

    def __init__(self, tier: Tier, layout: ObjectLayout, key: bytes) -> None:
        """The thread starts with the first job."""
        self._tier, self._layout, self._key = tier, layout, key
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._until: float | None = None

    # ---- with the lock, before a write

    def lacking(self, folder: str, digests: PathDigests, position: int) -> tuple[list[int], bool]:
        """Stretches before a position that the tier lacks, and whether it lacks the checkpoint there; with the lock."""
        catalogue, whole = self._tier.catalogue, position // self._layout.stretch
        stretches = [n for n in range(whole) if catalogue.stretch(folder, digests.boundary(n + 1)) is None]
        at = catalogue.checkpoint(folder, digests.boundary(whole), position, digests.rest(position))
        return stretches, at is None

    def begin(self, write: Write) -> None:
        """Take a write: enter what the tier lacks into the catalogue, and have it written; with the lock."""
        digests, folder, catalogue = write.digests, write.folder, self._tier.catalogue
        stretches, checkpoint = self.lacking(folder, digests, write.position)
        fresh = [self._stretch(write, number) for number in stretches]
        fresh += [self._manifest(write)] if checkpoint else []
        if any(Span(r.group, r.first, r.stop) not in write.pieces for e in fresh for r in e.record.objects):
            self._tier.count("incomplete")
            return
        fresh = [catalogue.add(entry) for entry in fresh]
        before = [
            catalogue.stretch(folder, digests.boundary(n + 1)) for n in range(write.position // self._layout.stretch)
        ]
        path = [entry for entry in before if entry is not None]
        for entry in {id(e): e for e in [*path, *fresh]}.values():
            entry.holds += 1
        write.tiers += 1
        self.post(lambda: self._write(write, fresh, path))

    def _stretch(self, write: Write, number: int) -> Entry:
        d, size = write.digests, self._layout.stretch
        objects = self._references(self._layout.stretch_spans(number))
        record = Stretch(
            digest=d.boundary(number + 1),
            before=d.boundary(number),
            tokens=d.part(number * size, (number + 1) * size),
            objects=objects,
            number=number,
        )
        return Entry(write.folder, record, whole=False, worth=write.worth * size / write.position)

    def _manifest(self, write: Write) -> Entry:
        d, at = write.digests, write.position
        record = Manifest(
            digest=d.manifest(at),
            before=d.boundary(at // self._layout.stretch),
            tokens=d.rest(at),
            objects=self._references(self._layout.manifest_spans(at)),
            position=at,
            kind=write.kind,
            worth=write.worth,
        )
        return Entry(write.folder, record, whole=False, worth=write.worth)

    def _references(self, spans: Sequence[Span]) -> tuple[Reference, ...]:
        return tuple(Reference(*span, self._layout.length(span), b"") for span in spans)

    # ---- jobs

    def remove(self, names: Sequence[str]) -> None:
        """Have names removed from the store; a failure is counted, and what stays is found by the next scan."""
        self.post(lambda: self._remove(names))

    def shrink(self) -> None:
        """Have what is over the budget evicted: it may have been less before a restart, or others wrote too."""

        def job() -> None:
            with contextlib.suppress(StoreError):
                self._make_room(0)

        self.post(job)

    def forget(self, folder: str, data: bytes | None, digests: PathDigests | None, gone: Sequence[str]) -> Future[None]:
        """Have a namespace, or a path in it, removed from the store.

        Args:
            folder: The namespace; or the layout, for everything of it.
            data: The path's tokens, None for all.
            digests: Of the path.
            gone: Names that went from the catalogue already.

        Returns:
            Done when the store has nothing of it any more, with a StoreError if that cannot be said.
        """
        future: Future[None] = Future()

        def job() -> None:
            try:
                self._forget(folder, data, digests, gone)
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)

        self.post(job)
        return future

    def close(self, grace: float) -> None:
        """Finish what was asked for within some seconds, and refuse the rest."""
        self._until = time.monotonic() + grace
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(grace + 1.0)

    def post(self, job: Callable[[], None]) -> None:
        """Have something done behind all that was asked for before."""
        with self._tier.lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"headway-tiers-{self._tier.config.name}", daemon=True
                )
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("%s: a write failed", self._tier.config.name)

    # ---- on the thread

    def _write(self, write: Write, fresh: list[Entry], path: list[Entry]) -> None:
        written: list[str] = []
        held = list({id(e): e for e in [*path, *fresh]}.values())
        reason = ""
        try:
            reason = self._refusal(fresh, path, write.position)
            if not reason:
                self._make_room(0)
                if self._tier.config.shared:
                    self._adopt(fresh)
                self._put(write, [entry for entry in fresh if not entry.whole], written)
        except _ForgottenError:
            reason = "forgotten"
        except StoreError as error:
            reason = reason_of(error)
            _log.warning("%s: a checkpoint was not written: %s", self._tier.config.name, error)
        finally:
            with self._tier.lock:
                gone = [g for entry in fresh if not entry.whole for g in self._tier.catalogue.drop(entry)]
                gone += [g for entry in held for g in self._tier.catalogue.release(entry, written=True)]
                useless = {*(written if reason else ()), *self._tier.names([entry for entry in gone if entry.whole])}
                write.tiers -= 1
                last = write.tiers == 0
            if reason:
                self._tier.count(f"write {reason}")
            if last:
                write.free()
        if useless:
            self._remove(sorted(useless))

    def _refusal(self, fresh: list[Entry], path: list[Entry], position: int) -> str:
        """Why a write is not even begun."""
        if self._until is not None and time.monotonic() > self._until:
            return "cancelled"
        if not self._tier.usable:
            return "refused"
        with self._tier.lock:
            if not all(entry.present for entry in fresh):
                return "forgotten"
            if (
                not all(e.present and (e.whole or e in fresh) for e in path)
                or len(path) < position // self._layout.stretch
            ):
                return "incomplete"
        return ""

    def _make_room(self, extra: int) -> None:
        """Evict until the catalogue is within its budget, and `extra` bytes more are free in the store.

        Raises:
            StoreFullError: What is left cannot go.
        """
        tier, capacity = self._tier, self._tier.config.capacity
        with tier.lock:
            bound = tier.catalogue.used if extra or capacity is None else capacity
            gone = tier.catalogue.evict(extra, bound)
            names, used = tier.names(gone), tier.catalogue.used
        if names:
            tier.call(lambda: tier.store.remove(names))
        if used + extra > bound or (capacity is not None and used > capacity):
            raise StoreFullError(f"{tier.config.name} has no room for a checkpoint: give it more bytes")

    def _adopt(self, fresh: list[Entry]) -> None:
        """Others may have written some of it meanwhile: then that is taken as it is."""
        names = [self._record_name(entry) for entry in fresh]
        found = self._tier.call(lambda: self._tier.store.read_small(names))
        with self._tier.lock:
            for entry, data in zip(fresh, found, strict=True):
                if data is not None and entry.present:
                    try:
                        adopt(entry, data, self._key)
                        self._tier.catalogue.disown(entry)
                    except DamagedError:
                        self._tier.count("corrupt")

    def _put(self, write: Write, fresh: list[Entry], written: list[str]) -> None:
        tier = self._tier
        fresh.sort(key=lambda entry: isinstance(entry.record, Manifest))
        objects: list[tuple[str, Buffer]] = []
        for entry in fresh:
            record = entry.record
            checked = tuple(
                Reference(r.group, r.first, r.stop, r.length, write.check(Span(r.group, r.first, r.stop)))
                for r in record.objects
            )
            entry.record = msgspec.structs.replace(record, objects=checked)
            for r in checked:
                name = object_name(entry.folder, record.digest, tier.groups[r.group], r.check)
                objects.append((name, write.pieces[Span(r.group, r.first, r.stop)]))
        self._store(objects, written)
        for entry in fresh:
            with tier.lock:
                if not entry.present:
                    raise _ForgottenError("it was forgotten meanwhile")
            self._store([(self._record_name(entry), seal(entry.record))], written)
            with tier.lock:
                entry.whole = True
        if tier.config.shared:
            self._list(fresh)
        with tier.lock:
            tier.counts["stores"] += any(isinstance(entry.record, Manifest) for entry in fresh)

    def _store(self, objects: Sequence[tuple[str, Buffer]], written: list[str]) -> None:
        """Write objects at once. Where there is no room, evict and try once more."""
        tier = self._tier
        written += [name for name, _ in objects]
        size = sum(len(data) for _, data in objects)

        def calls() -> None:
            each = [partial(tier.store.write, name, data) for name, data in objects]
            tier.call_all(each, size)

        try:
            calls()
        except StoreFullError:
            self._make_room(max(size, tier.catalogue.used // 64))
            calls()
        with tier.lock:
            tier.counts["stored_bytes"] += size

    def _list(self, fresh: list[Entry]) -> None:
        """Enter positions into the indexes that lookups of other servers read.

        Two servers that do so at the same moment can lose one of the two positions, and with it hits, nothing more.
        """
        tier = self._tier
        for entry in fresh:
            if isinstance(entry.record, Manifest):
                name = record_name(entry.folder, entry.record.before, INDEX)
                [data] = tier.call(partial(tier.store.read_small, [name]))
                try:
                    known = open_positions(data) if data else []
                except DamagedError:
                    known = []
                if entry.record.position not in known:
                    body = seal(sorted({*known, entry.record.position}))
                    tier.call(partial(tier.store.write, name, body))

    def _remove(self, names: Sequence[str]) -> None:
        """Remove names, but for those that a new entry of the same content has by now."""
        with self._tier.lock:
            names = [name for name in names if not self._used(name)]
        try:
            self._tier.call(lambda: self._tier.store.remove(names))
        except StoreError as error:
            _log.warning("%s: %d objects were not removed: %s", self._tier.config.name, len(names), error)

    def _forget(self, folder: str, data: bytes | None, digests: PathDigests | None, gone: Sequence[str]) -> None:
        """Look at all that the store has there, whoever wrote it, and remove what is to be forgotten."""
        tier = self._tier
        listed = tier.call(lambda: list(tier.store.names(f"{folder}/")), size=1 << 32)
        names = [item.name for item in listed if not item.name.endswith(f"/{ABOUT}")]
        if data is not None and digests is not None:
            there = Catalogue(self._layout)
            for entry in read_records(tier, names, self._key):
                there.add(entry)
            doomed = {entry.record.digest for entry in there.forget(folder, data, digests)}
            found = [(name, parse_name(name)) for name in names]
            names = [name for name, parsed in found if parsed and parsed.digest in doomed and parsed.what != INDEX]
        names = sorted(
            {*names, *gone, *self._dropped(names)}, key=lambda name: not name.endswith((f".{MANIFEST}", f".{STRETCH}"))
        )
        for start in range(0, len(names), _READ_AT_ONCE):
            some = names[start : start + _READ_AT_ONCE]
            tier.call(partial(tier.store.remove, some))

    def _dropped(self, names: Sequence[str]) -> list[str]:
        """Take entries out that are about to be removed, and became known, or were kept for others, until now."""
        tier, dropped = self._tier, list[str]()
        with tier.lock:
            for parsed in (parse_name(name) for name in names):
                entry = tier.catalogue.entry(parsed.folder, parsed.digest) if parsed and parsed.what != INDEX else None
                if entry is not None and entry.whole:
                    dropped += tier.names(tier.catalogue.drop(entry))
        return dropped

    def _used(self, name: str) -> bool:
        parsed = parse_name(name)
        entry = self._tier.catalogue.entry(parsed.folder, parsed.digest) if parsed else None
        return entry is not None and (not entry.whole or name in self._tier.names([entry]))

    def _record_name(self, entry: Entry) -> str:
        return self._tier.names([entry])[0]


def adopt(entry: Entry, data: bytes, key: bytes) -> None:
    """Take what another server wrote in the place of what was to be written; with the lock.

    Raises:
        DamagedError: It is not what belongs there.
    """
    opened = open_manifest if isinstance(entry.record, Manifest) else open_stretch
    record = opened(data, entry.record.digest, key)
    if record.tokens != entry.record.tokens or record.size != entry.record.size:
        raise DamagedError("the record is about other tokens or other sizes")
    entry.record, entry.whole = record, True


def read_records(tier: Tier, names: Sequence[str], key: bytes | None, whole: bool = True) -> list[Entry]:
    """Read the records among some names; damaged ones are left out, counted and removed.

    Raises:
        StoreError: The store failed.
    """
    entries: list[Entry] = []
    parsed = [(name, found) for name in names if (found := parse_name(name)) and found.what in (STRETCH, MANIFEST)]
    for start in range(0, len(parsed), _READ_AT_ONCE):
        some = parsed[start : start + _READ_AT_ONCE]
        read = tier.call(partial(tier.store.read_small, [name for name, _ in some]))
        for (name, found), data in zip(some, read, strict=True):
            if data is None:
                continue
            try:
                opened = open_manifest if found.what == MANIFEST else open_stretch
                entries.append(Entry(found.folder, opened(data, found.digest, key), whole=whole))
            except DamagedError:
                tier.count("corrupt")
                tier.call(partial(tier.store.remove, [name]))
    return entries
