"""A store that fails on purpose, for tests: it drops, delays, stalls, truncates, corrupts, lies, refuses and is full.

A fault is chosen by what is asked and by how often it was asked before, not by the order in which threads come: with
rules, or at random by a seed, the same questions meet the same faults in every run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headway.tiers.objects import checksum
from headway.tiers.store import Buffer, Listed, MissingError, Store, StoreError, StoreFullError

__all__ = ["KINDS", "Fault", "FaultyStore", "Kind", "Operation"]

Operation = Literal["read", "read_small", "write", "remove", "names"]
Kind = Literal["drop", "delay", "stall", "truncate", "corrupt", "fail", "full", "lie"]

KINDS: Mapping[Operation, tuple[Kind, ...]] = {
    "read": ("drop", "delay", "stall", "truncate", "corrupt", "fail"),
    "read_small": ("drop", "delay", "stall", "truncate", "corrupt", "fail"),
    "write": ("drop", "delay", "stall", "truncate", "corrupt", "fail", "full"),
    "remove": ("drop", "delay", "stall", "fail"),
    "names": ("drop", "delay", "stall", "fail", "lie"),
}
"""What can happen to each call. A dropped write says that it wrote; a dropped read finds nothing; dropped names are
left out. A lie is a name that was removed and is still listed."""


@dataclass
class Fault:
    """One rule.

    Attributes:
        kind: What happens.
        operation: To which calls.
        match: Only where the name has this in it.
        skip: Only after so many such calls.
        times: So often; None for ever.
        seconds: How long a delay is.
    """

    kind: Kind
    operation: Operation
    match: str = ""
    skip: int = 0
    times: int | None = None
    seconds: float = 0.0
    _seen: int = field(default=0, repr=False)

    def strikes(self, operation: str, name: str) -> bool:
        """Whether it is this call's turn; counts it."""
        if operation != self.operation or self.match not in name:
            return False
        self._seen += 1
        return self._seen > self.skip and (self.times is None or self._seen <= self.skip + self.times)


class FaultyStore:
    """A store around another. See `Store` for the contract that it breaks.

    Attributes:
        rules: May be changed at any time.
        struck: How often each kind of fault happened.
        released: Set it, and calls that stall go on; clear it, and new ones stall again.
        stalled: How many calls stall now.
    """

    def __init__(
        self, store: Store, rules: Sequence[Fault] = (), seed: int = 0, rates: Mapping[Kind, float] | None = None
    ) -> None:
        """Break `store` by rules, and at random: `rates` has the probability of each kind for each name and call."""
        self.rules = list(rules)
        self.struck: Counter[str] = Counter()
        self.released = threading.Event()
        self.stalled = 0
        self._store, self._seed, self._rates = store, seed, dict(rates or {})
        self._asked: Counter[tuple[str, str]] = Counter()
        self._removed: dict[str, Listed] = {}
        self._lock = threading.Lock()

    def read(self, name: str, buffer: memoryview) -> int:
        """See `Store.read`."""
        kind = self._meet("read", name)
        if kind == "drop":
            raise MissingError(f"{name} is not there, on purpose")
        length = self._store.read(name, buffer)
        if kind == "corrupt" and length:
            buffer[length // 2] ^= 0x10
        return length // 2 if kind == "truncate" else length

    def read_small(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.read_small`."""
        kinds = [self._meet("read_small", name) for name in names]
        return [_broken(kind, data) for kind, data in zip(kinds, self._store.read_small(names), strict=True)]

    def write(self, name: str, data: Buffer) -> None:
        """See `Store.write`."""
        kind = self._meet("write", name)
        if kind == "full":
            raise StoreFullError("no room, on purpose")
        if kind != "drop":
            self._store.write(name, _broken(kind, bytes(data)) or b"" if kind in ("truncate", "corrupt") else data)

    def remove(self, names: Sequence[str]) -> None:
        """See `Store.remove`."""
        kept = [name for name in names if self._meet("remove", name) != "drop"]
        with self._lock:
            self._removed.update((name, Listed(name, 1)) for name in kept)
        self._store.remove(kept)

    def names(self, prefix: str) -> Iterator[Listed]:
        """See `Store.names`."""
        kind = self._meet("names", prefix)
        for item in self._store.names(prefix):
            if kind != "drop" or self._chance("dropped name", item.name, 0) < 0.5:
                yield item
        if kind == "lie":
            with self._lock:
                lies = [item for name, item in self._removed.items() if name.startswith(prefix)]
            yield from lies

    def close(self) -> None:
        """See `Store.close`."""
        self.released.set()
        self._store.close()

    def _meet(self, operation: Operation, name: str) -> Kind | None:
        """What happens to a call; delays and stalls happen here, and failures."""
        with self._lock:
            rule = next((rule for rule in self.rules if rule.strikes(operation, name)), None)
            self._asked[operation, name] += 1
            kind = rule.kind if rule else self._drawn(operation, name)
            self.struck[kind or "none"] += 1
        if kind == "delay":
            threading.Event().wait(rule.seconds if rule else 0.01)
        elif kind == "stall":
            self._stall()
        elif kind == "fail":
            raise StoreError(f"{operation} failed, on purpose")
        return kind

    def _stall(self) -> None:
        with self._lock:
            self.stalled += 1
        self.released.wait()
        with self._lock:
            self.stalled -= 1

    def _drawn(self, operation: Operation, name: str) -> Kind | None:
        drawn = self._chance(operation, name, self._asked[operation, name])
        for kind in KINDS[operation]:
            drawn -= self._rates.get(kind, 0.0)
            if drawn < 0:
                return kind
        return None

    def _chance(self, what: str, name: str, count: int) -> float:
        """A number in [0, 1) that depends on the seed and the question alone."""
        drawn = checksum(f"{self._seed} {what} {name} {count}".encode())
        return int.from_bytes(drawn[:6], "little") / 2**48


def _broken(kind: Kind | None, data: bytes | None) -> bytes | None:
    if kind == "drop" or data is None:
        return None
    if kind == "truncate":
        return data[: len(data) // 2]
    if kind == "corrupt" and data:
        changed = np.frombuffer(data, np.uint8).copy()
        changed[len(data) // 2] ^= 0x10
        return changed.tobytes()
    return data
