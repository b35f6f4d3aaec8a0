"""Which blocks the edges of the tree hold: moving the resident end forward and back.

Every table of full attention has its own run of block ids on each edge. When an edge's resident end moves forward, the
blocks of the lease that computed the stretch become the edge's (one reference each); when it moves back, they are
released. A block that is only partly filled at the resident end is held by the edge and by the lease that goes on
writing behind it; whoever resumes inside it writes to a copy. When the stretch behind it becomes resident from another
lease's copy, that copy takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.cache.index.checkpoint import Checkpoint
from headway.cache.index.events import CheckpointRemoved, CheckpointStored, Event, ResidentGrown, ResidentShrunk
from headway.cache.index.pool import BlockPool
from headway.cache.index.tree import Match, Node
from headway.cache.shape.geometry import CacheGeometry

__all__ = ["Residency"]

Ids = NDArray[np.int32]


class Residency:
    """Holds and releases the blocks of edges and checkpoints, and tells listeners.

    Attributes:
        tables: The tables of full attention.
        listeners: Called with every event.
        namespaces: Namespace id of each root.
    """

    def __init__(self, geometry: CacheGeometry, pool: BlockPool, move_rows: Callable[[Node, Node], None]) -> None:
        """Keep blocks of `pool`; `move_rows(upper, lower)` hands over leases when an edge is split."""
        self.tables = geometry.prefix_tables
        self._pool = pool
        self._move_rows = move_rows
        self.listeners: list[Callable[[Event], None]] = []
        self.namespaces: dict[Node, int] = {}

    def frontier(self, at: Match) -> int:
        """The position up to which the path to `at` is resident."""
        for node in at.node.path():
            if node.resident > node.start:
                return min(node.resident, at.position)
        return 0

    def path_ids(self, at: Match, table: int, first: int, out: Ids) -> None:
        """Write the block ids of prefix table `table` on the path to `at` into `out`, from block index `first` on.

        Where two edges meet inside a block, the deeper edge's id stands: it holds the entries of both.
        """
        span = self.tables[table].span
        last = first + len(out)
        nodes = [node for node in at.node.path() if node.resident > node.start]
        for node in reversed(nodes):
            begin = node.start // span
            ids = node.runs[table].view
            low, high = max(first, begin), min(last, begin + len(ids))
            if low < high:
                out[low - first : high - first] = ids[low - begin : high - begin]

    def grow(self, at: Match, rows: Sequence[Ids]) -> list[Node]:
        """Make the path to `at` resident with the blocks of `rows` (one block-table row a prefix table).

        Only what is not resident yet is taken. Blocks that the path fills to their ends change hands: the lease's
        reference becomes the edge's. The last block of an edge, where it is only partly filled, gets one more holder:
        the lease goes on writing behind it, or the next edge names it too.

        Returns:
            The edges that grew.
        """
        missing = [node for node in at.node.path() if node.resident < min(node.end, at.position)]
        for node in reversed(missing):
            stop = min(node.end, at.position)
            for table, run, row in zip(self.tables, node.runs, rows, strict=True):
                span = table.span
                begin = node.start // span + run.size
                if node.resident > node.start and node.resident % span:
                    begin -= 1
                    self._pool.release_one(run.pop())
                end = -(-stop // span)
                run.extend(row[begin:end])
                if stop % span:
                    self._pool.share_one(row.item(end - 1))
            if node.resident == node.start and node.parent is not None:
                node.parent.resident_children += 1
            node.resident = stop
            node.trimmed = None
        if missing and self.listeners:
            self._tell(ResidentGrown(self._namespace(at.node), at.position, at.node.prefix(at.position)))
        return missing

    def shrink(self, node: Node, keep: int, cause: str) -> int:
        """Keep of `node` only what lies before `keep`, at least its start. Returns the blocks that became free."""
        if node.resident <= keep:
            return 0
        if self.listeners:
            self._tell(ResidentShrunk(self._namespace(node), node.resident, node.prefix(node.resident), keep, cause))
        freed = 0
        for table, run in zip(self.tables, node.runs, strict=True):
            size = -(-keep // table.span) - node.start // table.span if keep > node.start else 0
            freed += self._pool.release(run.cut(size))
        node.resident = keep
        if keep == node.start and node.parent is not None:
            node.parent.resident_children -= 1
        return freed

    def merge_last_blocks(self, node: Node) -> None:
        """Let an edge that ends inside a block name a child's copy of it instead of its own, if no child uses its own.

        The child's copy holds the entries of both. Only worth it when memory is short: it binds the edge to the child.
        """
        for i, table in enumerate(self.tables):
            if node.resident < node.end or node.end % table.span == 0:
                continue
            copies = {c.runs[i].view.item(0) for c in node.children.values() if c.resident > c.start}
            run = node.runs[i]
            if copies and run.view.item(run.size - 1) not in copies:
                self._pool.release_one(run.pop())
                other = min(copies)
                self._pool.share_one(other)
                run.extend(np.array([other], dtype=np.int32))

    def would_free(self, node: Node, keep: int) -> int:
        """Block ids that `node` names for positions of [keep, resident) only."""
        count = sum([run.size for run in node.runs])
        if keep > node.start:
            count -= sum([-(-keep // table.span) - node.start // table.span for table in self.tables])
        return count

    def store(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint, which brings its references, into its edge."""
        checkpoint.node.add_checkpoint(checkpoint)
        if self.listeners:
            prefix = checkpoint.node.prefix(checkpoint.position)
            self._tell(CheckpointStored(self._namespace(checkpoint.node), checkpoint.position, prefix, checkpoint.kind))

    def remove(self, checkpoint: Checkpoint, cause: str) -> int:
        """Drop a checkpoint and its references. Returns the blocks that became free."""
        node = checkpoint.node
        if self.listeners:
            prefix = node.prefix(checkpoint.position)
            self._tell(CheckpointRemoved(self._namespace(node), checkpoint.position, prefix, checkpoint.kind, cause))
        node.remove_checkpoint(checkpoint)
        return sum(self._pool.release(section.ids) for section in checkpoint.sections)

    def split(self, upper: Node, lower: Node) -> None:
        """Divide blocks, residency and leases between the halves of a split edge."""
        cut, resident = lower.start, lower.resident
        for table, run, above in zip(self.tables, lower.runs, upper.runs, strict=True):
            ids = run.view.copy()
            first = upper.start // table.span
            if resident <= cut:
                above.extend(ids)
                run.cut(0)
                continue
            above.extend(ids[: -(-cut // table.span) - first])
            below = ids[cut // table.span - first :]
            if cut % table.span:
                self._pool.share(below[:1])
            run.cut(0)
            run.extend(below)
        upper.resident = min(resident, cut)
        lower.resident = max(resident, cut)
        upper.resident_children = int(resident > cut)
        if lower.pinned_until and lower.pinned_to <= cut:
            upper.pinned_to, lower.pinned_to = lower.pinned_to, 0
            upper.pinned_until, lower.pinned_until = lower.pinned_until, 0.0
            upper.pinned_blocks, lower.pinned_blocks = lower.pinned_blocks, 0
        self._move_rows(upper, lower)

    def _namespace(self, node: Node) -> int:
        while node.parent is not None:
            node = node.parent
        return self.namespaces[node]

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)
