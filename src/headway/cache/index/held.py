"""All blocks that resuming at one place needs, by table: what is copied to another memory."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cache.index.below import Past
from headway.cache.index.edge import Checkpoint, Edge, Section
from headway.cache.index.tree import PrefixTree
from headway.cache.shape.geometry import CacheGeometry, TableKind

__all__ = ["HeldBlocks", "held_blocks"]


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """What resuming at a place needs.

    Attributes:
        tokens: Tokens before it.
        kind: Kind of placement of the checkpoint that serves it; "path" where a model can resume anywhere.
        past: The life of that checkpoint so far.
        parts: Blocks of each prefix and tail table, in the order of the tables.
        tables: Numbers of these tables.
        floor: What it has of windows serves no position before this one.
    """

    tokens: int
    kind: str
    past: Past
    parts: tuple[Section, ...]
    tables: tuple[int, ...]
    floor: int


def held_blocks(
    geometry: CacheGeometry, tree: PrefixTree, edge: Edge, position: int, checkpoint: Checkpoint
) -> HeldBlocks:
    """What resuming at `position` needs, which lies on `edge` and which `checkpoint` serves."""
    tails = dict(zip(geometry.tail_tables, checkpoint.sections, strict=False))
    prefixes = {table: i for i, table in enumerate(geometry.prefix_tables)}
    parts, tables = [], []
    for table in geometry.tables:
        if table.kind is TableKind.SCRATCH:
            continue
        if table in tails:
            part = tails[table].part(table, position)
            parts.append(Section(part.first, part.ids.copy(), part.whole))
        else:
            ids = tree.path_ids(edge, prefixes[table], 0, table.blocks_for(position))
            parts.append(Section(0, ids.copy()))
        tables.append(table.index)
    return HeldBlocks(position, checkpoint.kind, checkpoint.past, tuple(parts), tuple(tables), checkpoint.floor)
