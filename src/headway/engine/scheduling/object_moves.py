"""Between the blocks of a cache and the objects of lower tiers: which blocks hold which tokens of which group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import CacheGeometry, HeldBlocks, Step, TableKind
from headway.engine.executor import BlockRange, Executor
from headway.tiers import ObjectGroup, Piece, Span

__all__ = ["ObjectMoves", "object_groups"]

Ids = NDArray[np.int32]
_KINDS = {TableKind.PREFIX: "prefix", TableKind.WINDOW: "window", TableKind.CHUNK: "chunk", TableKind.STATE: "state"}


def object_groups(geometry: CacheGeometry, executor: Executor) -> tuple[ObjectGroup, ...]:
    """The groups of a cache as lower tiers know them, by name."""
    found = []
    for group in sorted(geometry.groups, key=lambda one: one.spec.name):
        table, size = group.table, executor.canonical[group.spec.name].bytes
        found.append(ObjectGroup(group.spec.name, _KINDS[table.kind], size, table.window, table.chunk))  # type: ignore[arg-type]
    return tuple(found)


@dataclass(frozen=True)
class ObjectMoves:
    """Reads objects from blocks, and writes them.

    Attributes:
        geometry: Where tokens live.
        executor: Who has the memory.
    """

    geometry: CacheGeometry
    executor: Executor

    def floor(self, position: int) -> int:
        """The first position of all blocks that a lease which resumes at `position` has for itself."""
        return min((position // table.span * table.span for table in self.geometry.prefix_tables), default=position)

    def read(self, spans: Sequence[Span], held: HeldBlocks, *, host: bool) -> dict[Span, memoryview]:
        """The objects `spans` of a place, from the blocks that it needs, of the device or of host memory."""
        parts = dict(zip(held.tables, held.parts, strict=True))
        ranges = []
        for span in spans:
            table = self.geometry.group(span.group).table
            part = parts[table.index]
            ids = part.ids
            if table.span:
                first = span.first // table.span - part.first
                ids = ids[first : -(-span.stop // table.span) - part.first]
            ranges.append(BlockRange(span.group, span.first, span.stop, ids, host))
        return dict(zip(spans, self.executor.read_objects(ranges), strict=True))

    def write(self, pieces: Sequence[Piece], step: Step, tables: Sequence[Ids], row: int) -> None:
        """Write objects to the blocks of a lease, in its first step, and to the checkpoint that the step leaves.

        Nothing needs to be copied before: all blocks of the step are written from their start.

        Args:
            pieces: The objects, those of prefixes from `floor` of the step's start on or before; blocks of theirs that
                are not the step's are left out.
            step: From `PrefixCache.lease_below`.
            tables: The cache's block tables.
            row: The lease's row.
        """
        start, stop = step.starts.item(), (step.starts + step.counts).item()
        ranges, data = [], []
        for piece in pieces:
            table = self.geometry.group(piece.group).table
            if not table.span:
                states = [tables[table.index][row, : table.state_blocks]]
                states += [export.destination for export in step.exports]
                ranges += [BlockRange(piece.group, stop, stop, ids.copy()) for ids in states]
                data += [piece.data] * len(states)
                continue
            first, last = piece.first // table.span, -(-piece.stop // table.span)
            ids = np.full(last - first, -1, dtype=np.int32)
            low = max(first, (start if table.kind is TableKind.PREFIX else piece.first) // table.span)
            high = min(last, -(-stop // table.span))
            if low < high:
                ids[low - first : high - first] = tables[table.index][row, low:high]
                ranges.append(BlockRange(piece.group, piece.first, piece.stop, ids))
                data.append(piece.data)
        self.executor.write_objects(ranges, data)
