"""What a tier asks of the place that holds its bytes: whole objects by name, and next to nothing else.

A store may be a folder, a server or a bucket, so the interface is as small as the weakest of them: no locks, no partial
writes, no promises about what is still there. A reader learns from the read itself whether an object exists; listing
is for scans, and may lie.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from headway.errors import ConfigError, HeadwayError

__all__ = [
    "Buffer",
    "DamagedError",
    "LateError",
    "Listed",
    "MissingError",
    "RefusedError",
    "Store",
    "StoreError",
    "StoreFullError",
    "unanswered",
]

_log = logging.getLogger("headway.tiers")

Buffer = bytes | bytearray | memoryview


class StoreError(HeadwayError):
    """A store that failed or did not answer. The message says which and how."""


class MissingError(StoreError):
    """An object that is not there. The store is well."""


class DamagedError(StoreError):
    """What is not as it was written: cut short, altered, under another's name. The store is well."""


class LateError(StoreError):
    """A call that did not end within its time. It may still be under way."""


class StoreFullError(StoreError):
    """No room for an object. The store is well."""


class RefusedError(StoreError):
    """A call that was not made: the tier is switched off for a while, or closed."""


class Listed(NamedTuple):
    """A name that a store lists.

    Attributes:
        name: The name.
        length: Its bytes.
        modified: When it was written (seconds since 1970), None if the store does not say.
    """

    name: str
    length: int
    modified: float | None = None


class Store(Protocol):
    """Objects by name. Calls come from several threads at once and may block; whoever calls keeps the time."""

    def read(self, name: str, buffer: memoryview) -> int:
        """Read an object into the start of a buffer; returns the object's length, which may be another.

        Raises:
            MissingError: There is no such object.
            StoreError: The store failed.
        """

    def read_small(self, names: Sequence[str]) -> list[bytes | None]:
        """Read many records at once; None for each that is missing. The order is that of the names.

        Raises:
            StoreError: The store failed.
        """

    def write(self, name: str, data: Buffer) -> None:
        """Write an object, whole or not at all; one of that name is replaced.

        Raises:
            StoreFullError: There is no room.
            StoreError: The store failed.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. One that is missing is no error.

        Raises:
            StoreError: The store failed; some may be gone.
        """

    def names(self, prefix: str) -> Iterator[Listed]:
        """All objects whose name begins with `prefix`, in any order; what is written meanwhile may be missing.

        Raises:
            StoreError: The store failed.
        """

    def close(self) -> None:
        """Let go of connections and files. No other call follows."""


def unanswered(why: object, optional: bool) -> None:
    """A store does not answer when it is opened: an error, or a warning where it is `optional`.

    Raises:
        ConfigError: It is not.
    """
    if not optional:
        raise ConfigError(
            f"the store does not answer: {str(why).rstrip('.')}. Start it, or correct its URL; with ?optional=true a "
            f"server starts without it, and uses it once it answers"
        )
    _log.warning("the store does not answer yet: %s", why)
