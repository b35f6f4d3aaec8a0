"""Looking into a cache as a whole: who holds which block, and whether every invariant holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.index.tree import Node
from headway.cache.lease.table import LeaseTable
from headway.cache.shape.geometry import CacheGeometry, TableKind

__all__ = ["check", "leased_blocks", "pinned_blocks"]

Mask = NDArray[np.bool_]


def leased_blocks(leases: LeaseTable, geometry: CacheGeometry, blocks: int) -> Mask:
    """Bool [blocks]: what running leases need, their shared prefixes included."""
    needed = np.zeros(blocks, dtype=np.bool_)
    for row in leases.active_rows():
        for table in geometry.tables:
            first = int(leases.owned[table.index, row]) if table.kind in (TableKind.WINDOW, TableKind.CHUNK) else 0
            needed[leases.blocks[table.index][row, first : int(leases.filled[table.index, row])]] = True
        for _, source in leases.record(row).sources:
            needed[source] = True
        for export in leases.record(row).exports.values():
            needed[export.destination] = True
    return needed


def pinned_blocks(index: PrefixIndex, blocks: int) -> Mask:
    """Bool [blocks]: what pins protect."""
    pinned = np.zeros(blocks, dtype=np.bool_)
    for node in index.nodes() if index.reclaim.pinned_blocks else ():
        below = [c for c in node.checkpoints if c.pinned_until]
        for checkpoint in below:
            for section in checkpoint.sections:
                pinned[section.ids] = True
        reach = max([c.position for c in below] + ([node.pinned_to] if node.pinned_until else []), default=0)
        for ancestor in node.path() if reach else ():
            for table, run in zip(index.residency.tables, ancestor.runs, strict=True):
                last = -(-min(reach, ancestor.resident) // table.span) - ancestor.start // table.span
                pinned[run.view[: max(0, last)]] = True
    return pinned


def check(index: PrefixIndex, leases: LeaseTable, geometry: CacheGeometry, pool: BlockPool) -> None:
    """Check every invariant.

    Raises:
        AssertionError: Names the broken one.
    """
    nodes = index.nodes()
    holders = np.zeros(pool.blocks, dtype=np.int64)
    for node in nodes:
        _check_node(node, geometry, index)
        for run in node.runs:
            np.add.at(holders, run.view, 1)
        for checkpoint in node.checkpoints:
            assert checkpoint.node is node, "a checkpoint names another edge"
            for section in checkpoint.sections:
                np.add.at(holders, section.ids, 1)
    for row in leases.active_rows():
        _count_lease(leases, geometry, row, holders)
    wrong = np.flatnonzero(holders != pool.references)
    assert len(wrong) == 0, f"block {wrong[0]} has {holders[wrong[0]]} holders, counted as {pool.references[wrong[0]]}"
    free = pool.free_ids()
    assert _distinct(free, pool.blocks), "a block is free twice"
    assert (pool.references[free] == 0).all(), "a free block has a holder"
    assert len(free) + int((pool.references > 0).sum()) == pool.blocks, "free and held blocks are not all blocks"
    _check_writers(leases, geometry, nodes, pool.blocks)
    _check_actives(leases, nodes)


def _distinct(ids: NDArray[np.int32], blocks: int) -> bool:
    """Whether no id occurs twice."""
    seen = np.zeros(blocks, dtype=np.bool_)
    seen[ids] = True
    return bool(seen.sum() == len(ids))


def _count_lease(leases: LeaseTable, geometry: CacheGeometry, row: int, holders: NDArray[np.int64]) -> None:
    record = leases.record(row)
    for table in geometry.tables:
        first = 0 if table.kind is TableKind.STATE else int(leases.owned[table.index, row])
        ids = leases.blocks[table.index][row, first : int(leases.filled[table.index, row])]
        assert (ids >= 0).all(), "a lease's block table has a hole"
        np.add.at(holders, ids, 1)
    for _, source in record.sources:
        np.add.at(holders, source, 1)
    for export in record.exports.values():
        np.add.at(holders, export.destination, 1)


def _check_node(node: Node, geometry: CacheGeometry, index: PrefixIndex) -> None:
    assert node.start <= node.resident <= node.end, "resident end outside the edge"
    assert node.text.size > 0, "an edge without tokens"
    children = node.children.items()
    assert all(index.tree.key(child.text.view) == key for key, child in children), "a child under a wrong key"
    assert node.text.size == node.end - node.start + geometry.lookahead, "an edge's text has a wrong length"
    resident = sum(child.resident > child.start for _, child in children)
    assert node.resident_children == resident, "wrong count of resident children"
    assert resident == 0 or node.resident == node.end, "a resident child behind a gap"
    assert all(a < b for a, b in pairwise(node.marks)), "checkpoints out of order"
    assert node.marks == [c.position for c in node.checkpoints], "marks and checkpoints differ"
    assert all(node.start < mark <= node.resident for mark in node.marks), "a checkpoint outside the resident part"
    for table, run in zip(geometry.prefix_tables, node.runs, strict=True):
        size = -(-node.resident // table.span) - node.start // table.span if node.resident > node.start else 0
        assert run.size == size, "an edge holds a wrong number of blocks"
    if index.tail and node.active == 0 and resident == 0:
        assert node.resident == (node.marks[-1] if node.marks else node.start), "unreachable entries are kept"


def _check_writers(leases: LeaseTable, geometry: CacheGeometry, nodes: list[Node], blocks: int) -> None:
    """What a lease may write is in no other lease's table, and in the tree only up to what is computed."""
    for table in geometry.tables:
        written: list[NDArray[np.int32]] = []
        for row in leases.active_rows():
            first = 0 if table.kind is TableKind.STATE else int(leases.computed[row]) // table.span
            written.append(leases.blocks[table.index][row, first : int(leases.filled[table.index, row])])
        ids = np.concatenate(written) if written else np.empty(0, dtype=np.int32)
        assert _distinct(ids, blocks), "two leases may write one block"
        states = [c.sections[-1].ids for n in nodes for c in n.checkpoints] if table.kind is TableKind.STATE else []
        assert not states or not np.isin(ids, np.concatenate(states)).any(), "a running state is a checkpoint"


def _check_actives(leases: LeaseTable, nodes: list[Node]) -> None:
    active: dict[Node, int] = {}
    for row in leases.active_rows():
        at = leases.record(row).at
        if row in at.node.rows:
            for node in at.node.path():
                active[node] = active.get(node, 0) + 1
            assert at.node.parent is None or at.node.start < at.position <= at.node.end, "a lease ends outside its edge"
    for node in nodes:
        assert node.active == active.get(node, 0), "wrong count of active leases"
