"""Whether every invariant of a cache holds: who holds and who needs which block, and how its edges lie."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np

from headway.cache.index.edge import Edge
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.lease.table import LeaseTable
from headway.cache.shape.geometry import CacheGeometry, Ids, Longs, TableKind

__all__ = ["check"]

_NOTHING = np.empty(0, dtype=np.int32)


def check(index: PrefixIndex, leases: LeaseTable) -> None:
    """Check every invariant. O(everything).

    Raises:
        AssertionError: Names the broken one.
    """
    edges = list(index.tree.edges())
    for edge in edges:
        _check_edge(edge, index)
        _check_records(edge, index)
    rows = leases.active_rows()
    _check_counts(index, leases, edges, rows)
    _check_writers(index, leases, edges, rows)
    _check_anchors(index, leases, edges, rows)
    tree = index.tree
    assert tree.tokens == sum(edge.end - edge.start for edge in edges), "wrong count of known tokens"
    assert tree.edge_count == len(edges), "wrong count of edges"
    assert tree.losses == sum(len(edge.lost) for edge in edges), "wrong count of lost checkpoints"
    assert tree.pins == sum(len(edge.pins) for edge in edges), "wrong count of pins"
    kept = sum(not one.floats for edge in edges for one in edge.checkpoints)
    assert tree.checkpoints == kept, "wrong count of checkpoints"
    for shadow in index.reclaim.shadows.each if index.reclaim.shadows else ():
        shadow.check(edges)
    sizes = sum(one.blocks for edge in edges for one in edge.checkpoints)
    assert tree.checkpoint_blocks == sizes, "wrong count of block ids in checkpoints"


def _check_edge(edge: Edge, index: PrefixIndex) -> None:
    tree = index.tree
    assert edge.start <= edge.resident <= edge.computed <= edge.end, "resident, computed and known ends out of order"
    assert edge.start < edge.end, "an edge without tokens"
    assert len(edge.text) == edge.end - edge.start + tree.lookahead, "an edge's text has a wrong length"
    children = edge.children.items()
    assert all(tree.key(child.text) == key for key, child in children), "a child under a wrong key"
    assert all(child.parent is edge for _, child in children), "a child names another parent"
    resident = sum(child.resident > child.start for _, child in children)
    assert edge.resident_children == resident, "wrong count of resident children"
    assert resident == 0 or edge.resident == edge.end, "a resident child behind a gap"
    assert edge.computed == edge.end or all(child.computed == child.start for _, child in children), (
        "a computed child behind a gap"
    )
    for table, run in zip(tree.tables, edge.runs, strict=True):
        size = -(-edge.resident // table.span) - edge.start // table.span if edge.resident > edge.start else 0
        assert len(run) == size, "an edge holds a wrong number of blocks"
    if not children:
        last = max([edge.computed, *(anchor.position for anchor in edge.anchors)])
        assert edge.end == last, "tokens are known that nobody computed and nobody will"


def _check_records(edge: Edge, index: PrefixIndex) -> None:
    """What lies on an edge lies inside it and names it."""
    marks = [one.position for one in edge.checkpoints]
    assert all(one.edge is edge for one in edge.checkpoints), "a checkpoint names another edge"
    if index.floats:
        assert marks == [edge.resident], "a checkpoint that floats is not at the resident end"
    else:
        assert all(a < b for a, b in pairwise(marks)), "checkpoints out of order"
        assert all(edge.start < mark <= edge.resident for mark in marks), "a checkpoint outside the resident part"
        assert edge.trim is None
        if edge.idle:
            assert edge.resident == edge.last_checkpoint, "unreachable entries are kept"
        serves = index.geometry.serves_from
        first = [max(serves(c.position, [s.first for s in c.sections]), c.floor) for c in edge.checkpoints]
        assert first == [c.first for c in edge.checkpoints], "a checkpoint serves from elsewhere than its blocks say"
        early = [c.first for c in edge.checkpoints if c.first < c.position]
        lowest = min([*early, *(child.reach for child in edge.children.values())], default=edge.reach)
        assert edge.reach <= lowest, "a checkpoint serves more than its edge says"
    assert all(position == one.position for position, one in edge.lost.items()), "a lost checkpoint at a wrong place"
    assert all(edge.start < position <= edge.computed for position in edge.lost), "a loss where nothing was computed"
    assert index.floats or edge.lost.keys().isdisjoint(marks), "a checkpoint is both kept and lost"
    assert all(pin.edge is edge and edge.start < pin.position <= edge.resident for pin in edge.pins), "a stray pin"
    pins = {pin.position for pin in edge.pins}
    assert len(pins) == len(edge.pins), "two pins at one position"
    if not index.floats:
        assert {one.position for one in edge.checkpoints if one.pinned} == pins, "pins and pinned checkpoints differ"
    assert edge.trim is None or edge.computed > edge.resident, "a trim where nothing is missing"


class _Counts:
    """Who holds and who needs which block, counted anew."""

    def __init__(self, blocks: int) -> None:
        """Nobody yet."""
        self._blocks = blocks
        self.holders, self.users, self.pins = list[Ids](), list[Ids](), list[Ids]()
        self._states: list[Ids] = []

    def add(self, ids: Ids, whole: bool, *counts: list[Ids]) -> None:
        """Count `ids` in each of `counts`; the first block of a state for all of it."""
        if whole:
            self._states.append(ids)
        for one in counts:
            one.append(ids[:1] if whole else ids)

    def settle(self) -> tuple[int, Longs, Longs, Longs]:
        """Count the other blocks of every state as the pool does: blocks with a user, and holders, users and pins."""
        holders, users, pins = (
            np.bincount(np.concatenate([_NOTHING, *each]), minlength=self._blocks)
            for each in (self.holders, self.users, self.pins)
        )
        needed = users > 0
        if self._states:
            ids = np.concatenate(self._states)
            firsts = np.repeat([state[0] for state in self._states], [len(state) for state in self._states])
            needed[ids] = needed[firsts]
            others = ids[ids != firsts]
            holders[others] = users[others] = 1
        return int(needed.sum()), holders, users, pins


def _check_counts(index: PrefixIndex, leases: LeaseTable, edges: list[Edge], rows: list[int]) -> None:
    pool = index.pool
    counts = _Counts(pool.blocks)
    runs = array("i")
    for edge in edges:
        for run in edge.runs:
            runs.extend(run)
        for checkpoint in edge.checkpoints:
            for section in checkpoint.sections:
                counts.add(section.ids, section.whole, counts.holders)
        for pin in edge.pins:
            for part in index.reclaim.pins.parts_under(edge, pin.position):
                counts.add(part.ids, False, counts.pins)
                counts.add(part.ids, part.whole, counts.users)
    counts.holders.append(np.array(runs, dtype=np.int32))
    for row in rows:
        _count_lease(leases, index.geometry, row, counts)
    for held in leases.lent:
        for part in held.parts:
            counts.add(part.ids, part.whole, counts.holders, counts.users)
    for state in [state for export in leases.held for state in (export.source, export.destination)]:
        counts.add(state, True, counts.holders, counts.users)
    used, holders, users, pins = counts.settle()
    assert pool.used == used, "wrong count of used blocks"
    for name, counted, kept in (
        ("holders", holders, pool.references),
        ("users", users, pool.users),
        ("pins", pins, pool.pins),
    ):
        if not np.array_equal(counted, kept):
            wrong = np.flatnonzero(counted != kept)[0]
            raise AssertionError(f"block {wrong} has {counted[wrong]} {name}, counted as {kept[wrong]}")
    assert pool.pinned == np.count_nonzero(pins), "wrong count of pinned blocks"
    free = pool.free_ids()
    assert _distinct(free, pool.blocks), "a block is free twice"
    assert not pool.references[free].any(), "a free block has a holder"
    assert len(free) + np.count_nonzero(pool.references > 0) == pool.blocks, "free and held blocks are not all blocks"


def _count_lease(leases: LeaseTable, geometry: CacheGeometry, row: int, counts: _Counts) -> None:
    record, held = leases.record(row), (counts.holders, counts.users)
    for table in geometry.tables:
        state = table.kind is TableKind.STATE
        first = 0 if state else leases.owned.item(table.index, row)
        ids = leases.blocks[table.index][row, : leases.filled.item(table.index, row)]
        used = ids if table.kind is TableKind.PREFIX else ids[first:]
        assert used.min(initial=0) >= 0, "a lease's block table has a hole"
        counts.add(ids[first:], state and len(ids) > 0, counts.holders)
        counts.add(used, state and len(ids) > 0, counts.users)
    for table, source in record.sources:
        counts.add(source, table.kind is TableKind.STATE, *held)
    for export in record.exports.values():
        counts.add(export.destination, True, *held)
    if record.bookmark is not None and len(record.bookmark.state):
        counts.add(record.bookmark.state, True, *held)


def _distinct(ids: Ids | Longs, blocks: int) -> bool:
    """Whether no id occurs twice."""
    return bool(np.bincount(ids, minlength=blocks).max(initial=0) <= 1)


def _check_writers(index: PrefixIndex, leases: LeaseTable, edges: list[Edge], rows: list[int]) -> None:
    """What a lease may write is in no other lease's table, and in the tree only up to what is computed."""
    for table in index.geometry.tables if rows else ():
        written: list[Ids] = []
        for row in rows:
            first = leases.computed.item(row) // table.span if table.span else 0
            if table.kind in (TableKind.WINDOW, TableKind.CHUNK):  # where a lease reads back, it begins further on
                first = max(first, leases.owned.item(table.index, row))
            written.append(leases.blocks[table.index][row, first : leases.filled.item(table.index, row)])
        ids = np.concatenate(written)
        assert _distinct(ids, index.pool.blocks), "two leases may write one block"
        if table.kind is TableKind.STATE:
            kept = np.zeros(index.pool.blocks, dtype=np.bool_)
            kept[np.concatenate([_NOTHING, *(c.sections[-1].ids for e in edges for c in e.checkpoints)])] = True
            assert not kept[ids].any(), "a running state is a checkpoint"


def _check_anchors(index: PrefixIndex, leases: LeaseTable, edges: list[Edge], rows: list[int]) -> None:
    records = [leases.record(row) for row in rows]
    anchors = [record.anchor for record in records if record.anchor is not None]
    assert all(root.children or root.anchors for root in index.tree.roots.values()), "an empty namespace"
    for edge in (*edges, *index.tree.roots.values()):
        here = [anchor for anchor in anchors if anchor.edge is edge]
        assert {id(anchor) for anchor in here} == {id(anchor) for anchor in edge.anchors}, "wrong leases on an edge"
        assert edge.busy == len(here) + sum(child.busy > 0 for child in edge.children.values()), "wrong count of leases"
        if edge.parent is not None:
            assert all(edge.start < anchor.position <= edge.end for anchor in here), "a lease ends outside its edge"
