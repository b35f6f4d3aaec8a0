"""What the cache tells those who listen: routers, recorders, and the oracle of our tests.

Events speak of token prefixes, not of blocks: a prefix names its content whatever the geometry of the one who reads
it. With draft groups it includes the `lookahead` tokens behind the position, on which the entries before it depend.
While nobody listens they cost nothing.

They gather while a call changes the cache and are delivered when the change is complete, in order. So a listener may
use the cache, may end its subscription or another's, and may fail: what it raises is logged and reaches nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CheckpointReduced",
    "CheckpointRemoved",
    "CheckpointStored",
    "Event",
    "Listeners",
    "ResidentGrown",
    "ResidentShrunk",
]

_LOG = logging.getLogger("headway.cache")


@dataclass(frozen=True)
class _Change:
    """Something about a prefix.

    Attributes:
        namespace: Id of the namespace.
        position: Tokens before the place that it is about.
        prefix: int32 tokens [0, position + lookahead).
    """

    namespace: int
    position: int
    prefix: NDArray[np.int32]


@dataclass(frozen=True)
class CheckpointStored(_Change):
    """A request that begins with `prefix` can now resume at `position`.

    Attributes:
        kind: Kind of placement.
        first: One that shares less of `prefix` can as well, from this position on.
    """

    kind: str
    first: int


@dataclass(frozen=True)
class CheckpointRemoved(_Change):
    """The checkpoint at `position` of `prefix` is gone.

    Attributes:
        kind: Kind of placement that had taken it.
        cause: "evicted", "forgotten" (its prefix or namespace) or "reset".
    """

    kind: str
    cause: str


@dataclass(frozen=True)
class CheckpointReduced(_Change):
    """The checkpoint at `position` of `prefix` serves fewer positions before its own, to make room.

    Attributes:
        first: The first one that it still serves.
    """

    first: int


@dataclass(frozen=True)
class ResidentGrown(_Change):
    """The first `position` entries of `prefix` are now kept.

    Attributes:
        start: Of these, as many were kept before.
    """

    start: int


@dataclass(frozen=True)
class ResidentShrunk(_Change):
    """Of the first `position` entries of `prefix`, which were kept, only the first `keep` are kept now.

    Attributes:
        keep: Entries that still are.
        cause: "evicted", "unreachable" (no checkpoint left behind it), "forgotten" or "reset".
    """

    keep: int
    cause: str


Event = CheckpointStored | CheckpointRemoved | CheckpointReduced | ResidentGrown | ResidentShrunk


class Listeners:
    """Who listens, and what they have not been told yet."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._listeners: list[Callable[[Event], None]] = []
        self._waiting: deque[Event] = deque()
        self._delivering = False

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def __getstate__(self) -> dict[str, object]:
        """Without the listeners: a copy of a cache, or one that is read back, has none."""
        return {"_listeners": [], "_waiting": deque(), "_delivering": False}

    def add(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Tell `listener` of every event from now on. Returns what ends it; to call that again does nothing."""

        def tell(event: Event) -> None:  # so that one listener may be added twice, and each time be ended alone
            listener(event)

        def end() -> None:
            if tell in self._listeners:
                self._listeners.remove(tell)

        self._listeners.append(tell)

        return end

    def tell(self, event: Event) -> None:
        """Keep an event until `deliver`."""
        self._waiting.append(event)

    def deliver(self) -> None:
        """Tell everybody what has gathered. A change that a listener makes is told after what came before it."""
        if self._delivering or not self._waiting:
            return
        self._delivering = True
        try:
            while self._waiting:
                event = self._waiting.popleft()
                for listener in tuple(self._listeners):
                    if listener not in self._listeners:
                        continue
                    try:
                        listener(event)
                    except Exception:
                        _LOG.exception("a listener failed on %s and stays subscribed", type(event).__name__)
        finally:
            self._delivering = False
