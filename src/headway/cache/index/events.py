"""What the cache tells those who listen: routers, recorders, and the oracle of our tests.

Events speak of token prefixes, not of blocks: a prefix names its content whatever the geometry of the one who reads
it. With draft groups it includes the `lookahead` tokens behind the position, on which the entries before it depend.
A listener costs nothing while there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CheckpointRemoved", "CheckpointStored", "Event", "ResidentGrown", "ResidentShrunk"]


@dataclass(frozen=True)
class CheckpointStored:
    """A request that begins with `prefix` can now resume behind it.

    Attributes:
        namespace: Id of the namespace.
        position: The resume point: tokens before it.
        prefix: int32 tokens [0, position + lookahead).
        kind: Kind of placement.
    """

    namespace: int
    position: int
    prefix: NDArray[np.int32]
    kind: str


@dataclass(frozen=True)
class CheckpointRemoved:
    """The checkpoint behind `prefix` is gone.

    Attributes:
        namespace: Id of the namespace.
        position: The resume point: tokens before it.
        prefix: int32 tokens [0, position + lookahead).
        kind: Kind of placement that had taken it.
        cause: "evicted" or "reset".
    """

    namespace: int
    position: int
    prefix: NDArray[np.int32]
    kind: str
    cause: str


@dataclass(frozen=True)
class ResidentGrown:
    """The entries of the whole of `prefix` are now kept.

    Attributes:
        namespace: Id of the namespace.
        position: Entries kept.
        prefix: int32 tokens [0, position + lookahead).
    """

    namespace: int
    position: int
    prefix: NDArray[np.int32]


@dataclass(frozen=True)
class ResidentShrunk:
    """Of the entries of `prefix` only the first `keep` tokens are kept now.

    Attributes:
        namespace: Id of the namespace.
        position: Entries that were kept.
        prefix: int32 tokens [0, position + lookahead).
        keep: Entries of them that still are.
        cause: "evicted", "unreachable" (no checkpoint left behind it) or "reset".
    """

    namespace: int
    position: int
    prefix: NDArray[np.int32]
    keep: int
    cause: str


Event = CheckpointStored | CheckpointRemoved | ResidentGrown | ResidentShrunk
