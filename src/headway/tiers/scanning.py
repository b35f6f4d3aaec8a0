"""Looking through what a store holds: at the start, so that a restarted server finds what it wrote, and now and then.

A scan reads records, not objects: an object counts as there when it is listed with the length that its record names.
What is listed under a record's name and is no record, and objects of another length, were cut short, and are removed
with the record. An object that was altered and kept its length is found when it is loaded, or here, where `verify`
allows for reading everything. Records are taken in as they are read, so lookups find them while the scan goes on.

Objects that no record names belong to a write that is under way or that died: they are removed once they are old, by
the store's clock where it has one, else by how long we have seen them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from headway.tiers.catalogue import Entry
from headway.tiers.objects import (
    ABOUT,
    INDEX,
    MANIFEST,
    STRETCH,
    Manifest,
    ObjectLayout,
    about,
    object_names,
    parse_name,
    record_name,
)
from headway.tiers.store import Listed, StoreError
from headway.tiers.tier import Tier, reason_of
from headway.tiers.writing import Writer, read_records

__all__ = ["Scanner", "faults"]

_log = logging.getLogger("headway.tiers")

_READ_AT_ONCE = 256


class Scanner:
    """The thread that scans one tier."""

    def __init__(self, tier: Tier, layout: ObjectLayout, key: bytes, writer: Writer) -> None:
        """`writer` is the tier's, by which the scan removes things."""
        self._tier, self._layout, self._key = tier, layout, key
        self._remove, self._shrink = writer.remove, writer.shrink
        self._root = layout.digest(key).hex()
        self._seen: dict[str, float] = {}
        self._ended = threading.Event()
        self._scanned = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headway-tiers-{tier.config.name}-scan", daemon=True)
        tier.scanning = not tier.config.shared
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the first scan."""
        return self._scanned.wait(seconds)

    def close(self) -> None:
        """End the scan; it is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        config = self._tier.config
        self._introduce()
        if config.shared and self._ended.wait(config.rescan or None):
            return
        verify = bool(config.verify)
        while not self._ended.is_set():
            self._tier.scanning = True
            try:
                self.scan()
                if verify:
                    self._verify()
                    verify = False
            except StoreError as error:
                _log.warning("%s could not be scanned: %s", config.name, error)
            except Exception:
                _log.exception("%s could not be scanned", config.name)
            finally:
                self._tier.scanning = False
            self._scanned.set()
            if self._ended.wait(config.rescan or None):
                return

    def _introduce(self) -> None:
        """Say of the layout what `headway tiers ls` shows. Whether it can be said matters to nobody else."""
        tier, name = self._tier, f"{self._root}/{ABOUT}"
        with contextlib.suppress(StoreError):
            if tier.call(lambda: tier.store.read_small([name])) == [None]:
                tier.call(lambda: tier.store.write(name, about(self._layout)))

    def scan(self) -> None:
        """Take in what is there, and remove what is of no use.

        Raises:
            StoreError: The store failed.
        """
        tier = self._tier
        listed = {item.name: item for item in tier.store.names(f"{self._root}/")}
        known = set(tier.names(self._entries()))
        fresh = [
            name for name in listed if name not in known and (p := parse_name(name)) and p.what in (STRETCH, MANIFEST)
        ]
        named = set(known)
        for start in range(0, len(fresh), _READ_AT_ONCE):
            if self._ended.is_set():
                return
            named |= self._take(fresh[start : start + _READ_AT_ONCE], listed)
        self._withdraw(known, listed)
        self._collect(listed, named)
        self._shrink()

    def _entries(self) -> list[Entry]:
        with self._tier.lock:
            return self._tier.catalogue.entries()

    def _take(self, names: Sequence[str], listed: dict[str, Listed]) -> set[str]:
        """Read some records, and take in those whose objects are there. Returns all names that are spoken for."""
        tier, named = self._tier, set[str]()
        for entry in read_records(tier, names, self._key):
            lost = faults(entry, tier.groups, listed)
            if lost:
                again = {item.name: item for item in tier.store.names(f"{entry.folder}/{entry.record.digest.hex()}")}
                lost = faults(entry, tier.groups, again)
            if lost:
                tier.count("missing" if all(name not in listed for name in lost) else "corrupt")
                self._remove(tier.names([entry]))
                continue
            named.update(tier.names([entry]))
            entry.own = not tier.config.shared
            with tier.lock:
                tier.catalogue.add(entry)
                tier.catalogue.trim()
        return named

    def _withdraw(self, known: Iterable[str], listed: dict[str, Listed]) -> None:
        """Take out what was known and is not listed any more: others, or the store, removed it."""
        tier = self._tier
        lost = {name for name in known if name not in listed}
        if not lost:
            return
        for entry in [e for e in self._entries() if e.whole and not lost.isdisjoint(tier.names([e]))]:
            there = {item.name for item in tier.store.names(f"{entry.folder}/{entry.record.digest.hex()}")}
            if not there.issuperset(tier.names([entry])):
                with tier.lock:
                    names = tier.failed(entry, "missing")
                tier.count("missing")
                self._remove(names)

    def _collect(self, listed: dict[str, Listed], named: set[str]) -> None:
        """Remove what is old and of no use."""
        tier, now, wall = self._tier, time.monotonic(), time.time()
        entries = self._entries()
        named |= set(tier.names(entries))
        named |= {record_name(e.folder, e.record.before, INDEX) for e in entries if isinstance(e.record, Manifest)}
        with tier.lock:
            useless = [entry for entry in tier.catalogue.idle() if entry.whole and not entry.holds]
        loose = set(tier.names(useless))
        loose.update(name for name in listed if name not in named and parse_name(name))
        self._seen = {name: self._seen.get(name, now) for name in loose}
        old = {
            name
            for name, seen in self._seen.items()
            if max(now - seen, wall - (_modified(listed, name) or wall)) >= tier.config.grace
        }
        for entry in useless:
            names = tier.names([entry])
            with tier.lock:
                if entry.present and not entry.holds and old.issuperset(names):
                    old.update(tier.names(tier.catalogue.drop(entry)))
                else:
                    old.difference_update(names)
        if old:
            _log.info("%s: %d objects without a checkpoint are removed", tier.config.name, len(old))
            self._remove(sorted(old))

    def _verify(self) -> None:
        """Compare all objects with their checksums, no faster than is allowed."""
        tier = self._tier
        for entry in self._entries():
            for reference, name in zip(
                entry.record.objects, object_names(entry.folder, entry.record, tier.groups), strict=True
            ):
                if self._ended.wait(reference.length / tier.config.verify) or not entry.present or not entry.whole:
                    break
                self._compare(entry, name, reference.length, reference.check)

    def _compare(self, entry: Entry, name: str, length: int, check: bytes) -> None:
        tier = self._tier
        try:
            tier.call(lambda: tier.read(name, memoryview(bytearray(length)), check), length)
        except StoreError as error:
            reason = reason_of(error)
            if reason in ("missing", "corrupt"):
                with tier.lock:
                    names = tier.failed(entry, reason)
                self._remove(names)


def _modified(listed: dict[str, Listed], name: str) -> float | None:
    return listed[name].modified if name in listed else None


def faults(entry: Entry, groups: dict[str, int], listed: dict[str, Listed]) -> list[str]:
    """Names of an entry's objects that are not listed, or with another length."""
    pairs = zip(entry.record.objects, object_names(entry.folder, entry.record, groups), strict=True)
    return [name for r, name in pairs if name not in listed or listed[name].length != r.length]
