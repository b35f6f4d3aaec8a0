"""A store in this process's memory: for tests, replay, and as the plainest example of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from headway.tiers.store import Buffer, Listed, MissingError, StoreFullError

__all__ = ["MemoryStore"]


class MemoryStore:
    """A dict of bytes. See `Store` for the contract of each method.

    Attributes:
        objects: Name to bytes, for whoever wants to look or to break something.
    """

    def __init__(self, capacity: int | None = None) -> None:
        """A store of at most `capacity` bytes, where it is given."""
        self.objects: dict[str, bytes] = {}
        self._capacity, self._lock = capacity, threading.Lock()

    def read(self, name: str, buffer: memoryview) -> int:
        """See `Store.read`."""
        data = self.objects.get(name)
        if data is None:
            raise MissingError(f"{name} is not there")
        length = min(len(data), len(buffer))
        buffer[:length] = data[:length]
        return len(data)

    def read_small(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.read_small`."""
        return [self.objects.get(name) for name in names]

    def write(self, name: str, data: Buffer) -> None:
        """See `Store.write`."""
        with self._lock:
            used = sum(map(len, self.objects.values())) if self._capacity is not None else 0
            if self._capacity is not None and used + len(data) > self._capacity:
                raise StoreFullError(f"no room for {len(data)} bytes")
            self.objects[name] = bytes(data)

    def remove(self, names: Sequence[str]) -> None:
        """See `Store.remove`."""
        with self._lock:
            for name in names:
                self.objects.pop(name, None)

    def names(self, prefix: str) -> Iterator[Listed]:
        """See `Store.names`."""
        with self._lock:
            found = [Listed(name, len(data)) for name, data in self.objects.items() if name.startswith(prefix)]
        return iter(found)

    def close(self) -> None:
        """Nothing to let go of."""
