"""Which blocks edges and checkpoints hold: moving the resident end forward and back.

Every table of full attention has its own run of block ids on each edge. When an edge's resident end moves forward, the
blocks of the lease that computed the stretch become the edge's; when it moves back, they are released. A block that is
only partly filled at the resident end is held by the edge and by the lease that goes on writing behind it; whoever
resumes inside it writes to a copy. When the stretch behind it becomes resident from another lease's copy, that copy
takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.cache.index.edge import Checkpoint, Edge, Match
from headway.cache.index.events import (
    CheckpointReduced,
    CheckpointRemoved,
    CheckpointStored,
    Listeners,
    ResidentGrown,
    ResidentShrunk,
)
from headway.cache.index.pool import BlockPool
from headway.cache.index.tree import PrefixTree
from headway.cache.shape.geometry import CacheGeometry, Ids

__all__ = ["Residency"]


class Residency:
    """Holds and releases the blocks of edges and checkpoints, and tells listeners.

    Attributes:
        listeners: Who is told of every change.
    """

    def __init__(self, tree: PrefixTree, pool: BlockPool) -> None:
        """Keep blocks of `pool` on the edges of `tree`."""
        self._tree = tree
        self._pool = pool
        self._spans = [table.span for table in tree.tables]
        self.listeners = Listeners()

    def grow(self, at: Match, rows: Sequence[Ids], *, given: bool) -> list[Edge]:
        """Make the path to `at` resident with the blocks of `rows` (one block-table row per prefix table).

        Only what is not resident yet is taken.

        Args:
            at: The place; everything before it is computed, and the lease of `rows` holds what is not resident.
            rows: The lease's block tables.
            given: Blocks that the path fills to their ends change hands: the lease's reference becomes the edge's.
                The last one, where it is only partly filled, gets one more holder: the lease goes on writing behind
                it, or the next edge names it too. If not given, the lease keeps a reference on each.

        Returns:
            The edges that grew, topmost first.
        """
        missing, up = [], at.edge
        while up.parent is not None and up.resident < min(up.end, at.position):
            missing.append(up)
            up = up.parent
        missing.reverse()
        start = missing[0].resident if missing else at.position
        for edge in missing:
            stop = min(edge.end, at.position)
            for i, (table, run, row) in enumerate(zip(self._tree.tables, edge.runs, rows, strict=True)):
                span = table.span
                begin, end = edge.start // span + len(run), -(-stop // span)
                if edge.resident > edge.start and edge.resident % span:
                    begin -= 1
                    self._rename_last(edge, i, row.item(begin))
                    self._pool.release_one(run.pop())
                ids = row[begin:end]
                run.frombytes(ids.tobytes())
                if not given:
                    self._pool.share(ids)
                elif stop % span:
                    self._pool.share_one(row.item(end - 1))
            edge.move_resident(stop)
            if edge.computed <= stop:
                edge.trim = None
        if missing and self.listeners:
            self.listeners.tell(ResidentGrown(*self._named(at.edge, at.position), start))
        return missing

    def shrink(self, edge: Edge, keep: int, cause: str) -> None:
        """Keep of `edge` only what lies before `keep`, at least its start."""
        if edge.resident <= keep:
            return
        if self.listeners:
            self.listeners.tell(ResidentShrunk(*self._named(edge, edge.resident), keep, cause))
        for run, size in zip(edge.runs, self._sizes(edge, keep), strict=True):
            if size < len(run):
                self._pool.release(np.array(run[size:]))
                del run[size:]
        edge.move_resident(keep)

    def merge_last_blocks(self, edge: Edge) -> None:
        """Let an edge that ends inside a block name a child's copy of it instead of its own, if no child uses its own.

        The child's copy holds the entries of both. Only worth it when memory is short: it binds the edge to the child.
        """
        for i, table in enumerate(self._tree.tables):
            if edge.resident < edge.end or edge.end % table.span == 0:
                continue
            copies = {child.runs[i][0] for child in edge.children.values() if child.resident > child.start}
            if copies and edge.runs[i][-1] not in copies:
                self._rename_last(edge, i, min(copies))

    def _rename_last(self, edge: Edge, table: int, block: int) -> None:
        """Name `block`, which holds the same entries, in place of the last one of `edge`; pins move with it.

        So do the edges before it that end inside that block and name the same: what their pins share stays shared.
        """
        span, old = self._tree.tables[table].span, edge.runs[table][-1]
        first = (edge.start // span + len(edge.runs[table]) - 1) * span
        for one in edge.path() if old != block else ():
            if one.end <= first:
                return
            if one.runs[table][-1] == old:
                for _ in [pin for pin in one.pins if pin.position > first]:
                    self._pool.pin(np.array([block], dtype=np.int32))
                    self._pool.unpin(np.array([old], dtype=np.int32))
                self._pool.share_one(block)
                self._pool.release_one(old)
                one.runs[table][-1] = block

    def would_free(self, edge: Edge, keep: int) -> int:
        """Block ids that `edge` names for positions of [keep, resident) only."""
        named = sum(map(len, edge.runs))
        return named - sum(self._sizes(edge, keep)) if keep > edge.start else named

    def _sizes(self, edge: Edge, keep: int) -> list[int]:
        """How many block ids of each table `edge` names for positions before `keep`."""
        return [-(-keep // span) - edge.start // span if keep > edge.start else 0 for span in self._spans]

    def store(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint, which brings its references, on its edge."""
        edge = checkpoint.edge
        edge.add_checkpoint(checkpoint)
        self._tree.checkpoints += 1
        self._tree.checkpoint_blocks += checkpoint.blocks
        if self.listeners:
            named = self._named(edge, checkpoint.position)
            self.listeners.tell(CheckpointStored(*named, checkpoint.kind, checkpoint.first))

    def reduce(self, checkpoint: Checkpoint, geometry: CacheGeometry) -> None:
        """Let go of what a checkpoint holds for positions before its own alone."""
        tables, position, sections = geometry.tail_tables, checkpoint.position, []
        self._tree.checkpoint_blocks -= checkpoint.blocks
        for section, table in zip(checkpoint.sections, tables, strict=True):
            needed = section.part(table, position)
            if len(needed.ids) < len(section.ids):
                self._pool.release(section.ids[: len(section.ids) - len(needed.ids)])
            sections.append(needed)
        first = geometry.serves_from(position, [section.first for section in sections])
        checkpoint.reduce(tuple(sections), max(first, checkpoint.floor))
        self._tree.checkpoint_blocks += checkpoint.blocks
        if self.listeners:
            self.listeners.tell(CheckpointReduced(*self._named(checkpoint.edge, position), checkpoint.first))

    def remove(self, checkpoint: Checkpoint, cause: str) -> None:
        """Drop a checkpoint that does not float, and its references."""
        edge = checkpoint.edge
        if self.listeners:
            self.listeners.tell(CheckpointRemoved(*self._named(edge, checkpoint.position), checkpoint.kind, cause))
        edge.remove_checkpoint(checkpoint)
        self._tree.checkpoints -= 1
        self._tree.checkpoint_blocks -= checkpoint.blocks
        for section in checkpoint.sections:
            self._pool.release(section.ids, whole=section.whole)

    def _named(self, edge: Edge, position: int) -> tuple[int, int, Ids]:
        """Namespace, position and tokens of a place on `edge`, as events name it."""
        return edge.root().namespace, position, edge.prefix(position, self._tree.lookahead)
