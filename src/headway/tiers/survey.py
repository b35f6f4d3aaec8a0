"""What a store holds, seen from outside and without the key: for `headway tiers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from headway.tiers.objects import (
    ABOUT,
    INDEX,
    MANIFEST,
    STRETCH,
    About,
    Manifest,
    ObjectName,
    Reference,
    Stretch,
    checksum,
    object_name,
    open_manifest,
    open_stretch,
    parse_name,
)
from headway.tiers.store import DamagedError, Listed, MissingError, Store

__all__ = ["Fault", "Holding", "Survey", "survey", "verify"]

_READ_AT_ONCE = 256


@dataclass
class Holding:
    """What there is of one layout.

    Attributes:
        layout: Its digest, as names begin with it.
        label: What its servers call it; "" if they did not say.
        namespaces: How many there are.
        checkpoints: How many.
        stretches: How many.
        objects: How many.
        bytes: Of all objects and records.
        modified: When the latest was written (seconds since 1970); None if the store does not say.
    """

    layout: str
    label: str = ""
    namespaces: int = 0
    checkpoints: int = 0
    stretches: int = 0
    objects: int = 0
    bytes: int = 0
    modified: float | None = None


@dataclass
class Survey:
    """Everything that a store lists.

    Attributes:
        listed: By name.
        names: The names of ours, taken apart.
        abouts: What servers said of each layout.
    """

    listed: dict[str, Listed]
    names: dict[str, ObjectName]
    abouts: dict[str, About] = field(default_factory=dict)

    def holdings(self) -> list[Holding]:
        """By layout, the largest first."""
        found: dict[str, Holding] = {}
        folders: dict[str, set[str]] = {}
        for name, parsed in self.names.items():
            layout = parsed.folder.partition("/")[0]
            holding, item = found.setdefault(layout, Holding(layout)), self.listed[name]
            folders.setdefault(layout, set()).add(parsed.folder)
            holding.checkpoints += parsed.what == MANIFEST
            holding.stretches += parsed.what == STRETCH
            holding.objects += parsed.what == ""
            holding.bytes += item.length
            if item.modified is not None:
                holding.modified = max(holding.modified or 0.0, item.modified)
        for layout, holding in found.items():
            holding.namespaces = len(folders[layout])
            holding.label = self.abouts[layout].label if layout in self.abouts else ""
        return sorted(found.values(), key=lambda holding: -holding.bytes)


def survey(store: Store) -> Survey:
    """List a store.

    Raises:
        StoreError: It failed.
    """
    listed = {item.name: item for item in store.names("")}
    parsed = {name: found for name in listed if (found := parse_name(name))}
    seen = Survey(listed, parsed)
    places = [name for name in listed if name.endswith(f"/{ABOUT}") and name.count("/") == 1]
    for name, data in zip(places, store.read_small(places), strict=True):
        try:
            seen.abouts[name.partition("/")[0]] = msgspec.json.decode(data or b"", type=About)
        except msgspec.MsgspecError:
            continue
    return seen


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be.

    Attributes:
        name: The object's or record's name.
        what: `damaged`, `missing`, `incomplete` (a record without all whole stretches before it), or `loose` (an object
            that no record names).
        seconds: How long ago it was written, None if the store does not say.
    """

    name: str
    what: str
    seconds: float | None

    @property
    def bad(self) -> bool:
        """Whether anything is wrong. Loose objects may belong to a write that is under way."""
        return self.what != "loose"


def verify(store: Store, seen: Survey, tell: Callable[[int], None]) -> list[Fault]:
    """Read everything and compare it with its checksums.

    Args:
        store: The store.
        seen: What it lists.
        tell: Called with the bytes that were read so far.

    Raises:
        StoreError: The store failed.
    """
    now = time.time()

    def fault(name: str, what: str) -> Fault:
        modified = seen.listed[name].modified if name in seen.listed else None
        return Fault(name, what, None if modified is None else now - modified)

    faults: list[Fault] = []
    records: list[tuple[str, ObjectName, Stretch | Manifest]] = []
    for name, parsed, record in _records(store, seen):
        if record is None:
            faults.append(fault(name, "damaged"))
        else:
            records.append((name, parsed, record))
    whole = {(parsed.folder, parsed.digest): record for _, parsed, record in records}
    named: set[str] = set()
    done = 0
    for _, parsed, record in records:
        for object_, reference in _objects(seen, parsed, record):
            named.add(object_)
            if what := _compare(store, object_, reference):
                faults.append(fault(object_, what))
                whole.pop((parsed.folder, parsed.digest), None)
            done += reference.length
            tell(done)
    for name, parsed, record in records:
        if (parsed.folder, parsed.digest) in whole and not _reaches_the_start(whole, parsed.folder, record):
            faults.append(fault(name, "incomplete"))
    faults += [fault(n, "loose") for n, parsed in seen.names.items() if not parsed.what and n not in named]
    return faults


def _records(store: Store, seen: Survey) -> Iterable[tuple[str, ObjectName, Stretch | Manifest | None]]:
    names = [name for name, parsed in seen.names.items() if parsed.what not in ("", INDEX)]
    for start in range(0, len(names), _READ_AT_ONCE):
        some = names[start : start + _READ_AT_ONCE]
        for name, data in zip(some, store.read_small(some), strict=True):
            parsed = seen.names[name]
            if data is None:
                continue  # removed meanwhile
            try:
                opened = open_manifest if parsed.what == MANIFEST else open_stretch
                yield name, parsed, opened(data, parsed.digest, None)
            except DamagedError:
                yield name, parsed, None


def _objects(seen: Survey, parsed: ObjectName, record: Stretch | Manifest) -> Iterable[tuple[str, Reference]]:
    """Names of a record's objects. The place of a group is in the names alone, so it is found by the checksum."""
    about = seen.abouts.get(parsed.folder.partition("/")[0])
    for reference in record.objects:
        places = [about.groups.index(reference.group)] if about and reference.group in about.groups else range(64)
        names = [object_name(parsed.folder, record.digest, place, reference.check) for place in places]
        yield next((name for name in names if name in seen.listed), names[0]), reference


def _reaches_the_start(
    whole: dict[tuple[str, bytes], Stretch | Manifest], folder: str, record: Stretch | Manifest
) -> bool:
    while True:
        if isinstance(record, Stretch) and record.number == 0:
            return True
        before = whole.get((folder, record.before))
        if before is None:
            return isinstance(record, Manifest) and not _behind_stretches(record)
        record = before


def _behind_stretches(record: Manifest) -> bool:
    """Whether a checkpoint needs whole stretches before it: unless its record has all its tokens."""
    return len(record.tokens) // 4 < record.position


def _compare(store: Store, name: str, reference: Reference) -> str:
    buffer = memoryview(bytearray(reference.length))
    try:
        length = store.read(name, buffer)
    except MissingError:
        return "missing"
    return "" if length == reference.length and checksum(buffer) == reference.check else "damaged"
