"""A checkpoint: all that one position needs to resume, beyond the entries of the whole prefix.

Windows, chunks and states need only a bounded tail or one state. A checkpoint at position p holds, for every such table
at once, the blocks that let it resume exactly there. It is taken and dropped as one, so a lookup never has to reconcile
what different kinds of layers kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headway.cache.index.tree import Node

__all__ = ["Checkpoint", "Section"]


class Section(NamedTuple):
    """What a checkpoint holds of one tail table.

    Attributes:
        first: Block index of the first id (0 for states).
        ids: int32 block ids, in order of block index.
    """

    first: int
    ids: NDArray[np.int32]


class Checkpoint:
    """Blocks of all tail tables that allow resuming at one position of a path.

    Attributes:
        position: Tokens before the resume point.
        kind: Kind of placement that took it ("prompt_end", "junction", ...).
        sections: One a tail table, in the order of `CacheGeometry.tail_tables`.
        node: The edge that it lies in.
        born: Tick of its birth.
        hits: Leases that resumed from it.
        missed: Leases that would have, had one not been evicted here earlier.
        used: Tick of the last use (or of its birth).
        age: Eviction policy's clock at the last use.
        entry: Number of its valid entry in the eviction queue; -1 when it is not queued.
        pinned_until: Time until which it must stay; 0.0 when not pinned.
        pinned_blocks: Blocks that count against the cap on pins.
        blocks: Block ids that it holds.
    """

    __slots__ = (
        "age",
        "blocks",
        "born",
        "entry",
        "hits",
        "kind",
        "missed",
        "node",
        "pinned_blocks",
        "pinned_until",
        "position",
        "sections",
        "used",
    )

    def __init__(self, position: int, kind: str, sections: tuple[Section, ...], node: Node) -> None:
        """Make a checkpoint that owns one reference on each block of `sections`."""
        self.position = position
        self.kind = kind
        self.sections = sections
        self.node = node
        self.born = 0
        self.hits = 0
        self.missed = 0
        self.used = 0
        self.age = 0.0
        self.entry = -1
        self.pinned_until = 0.0
        self.pinned_blocks = 0
        self.blocks = sum(len(section.ids) for section in sections)

    @property
    def uses(self) -> int:
        """How often it was wanted."""
        return self.hits + self.missed
