"""The first half of a step: blocks for the next tokens, and the copies and exports that the ranks must make.

Almost every row of a decoding batch needs nothing: its blocks suffice and no checkpoint is due. So both halves of a
step look at whole arrays first and treat singly only the rows that start, reach a checkpoint, end a prefill chunk or
fill a stretch of their answer. New blocks for all other rows are taken at once. Up to a few rows plain numbers are
faster than arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.lease.step import StateExport, Step
from headway.cache.lease.table import FAR, RUNNING, STEPPING, LeaseTable, Record, Rows, ragged
from headway.cache.policy.placement import Place
from headway.cache.shape.checks import longs
from headway.cache.shape.geometry import CacheGeometry, TableKind
from headway.errors import LeaseError

__all__ = ["Extender"]

Ids = NDArray[np.int32]
Longs = NDArray[np.int64]
_NO_COPIES = np.empty((0, 2), dtype=np.int32)
_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass
class _Work:
    """What a step asks of the ranks, while it is put together."""

    copies: list[tuple[Ids, Ids]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    exports: list[StateExport] = field(default_factory=list)

    def pairs(self) -> Ids:
        if not self.copies:
            return _NO_COPIES
        pairs = np.empty((sum(len(source) for source, _ in self.copies), 2), dtype=np.int32)
        done = 0
        for source, target in self.copies:
            pairs[done : done + len(source), 0] = source
            pairs[done : done + len(source), 1] = target
            done += len(source)
        return pairs

    def fresh_rows(self) -> Rows:
        return np.array(self.fresh, dtype=np.int64) if self.fresh else _NO_ROWS


class Extender:
    """Gives leases what their next step needs."""

    def __init__(
        self, geometry: CacheGeometry, pool: BlockPool, leases: LeaseTable, index: PrefixIndex, *, inside: bool
    ) -> None:
        """Extend leases of `leases`; `inside`: the model can export states inside a chunk."""
        self._pool = pool
        self._leases = leases
        self._index = index
        self._inside = inside
        self._token_tables = [t for t in geometry.tables if t.kind is not TableKind.STATE]
        self._local = any(t.kind in (TableKind.WINDOW, TableKind.CHUNK) for t in geometry.tables)
        self._state = geometry.state_table
        self._state_blocks = self._state.state_blocks if self._state else 0

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """See `PrefixCache.extend`."""
        leases, work = self._leases, _Work()
        rows = longs("rows", rows).reshape(-1)
        leases.check_rows(rows, RUNNING)
        counts = longs("counts", counts)
        if len(rows) == 0 or (counts.ndim and counts.shape != rows.shape):
            raise LeaseError("extend: give at least one lease, and one count for all or one for each")
        few = len(rows) <= self._leases.few
        asked = counts.tolist() if counts.ndim and few else [int(counts.min())] * len(rows)
        if min(asked) < 1:
            raise LeaseError("extend: every lease must be given at least one token to compute")
        if few:
            return self._extend_few(rows, asked, work)
        starts = leases.computed[rows]
        granted = self._extend_many(rows, starts, starts + counts, work) - starts
        leases.phase[rows[granted > 0]] = STEPPING
        serial = leases.new_serial()
        leases.serial[rows] = serial
        return Step(rows, starts, granted, work.pairs(), work.fresh_rows(), tuple(work.exports), serial)

    def _extend_few(self, rows: Rows, counts: list[int], work: _Work) -> Step:
        """Extend a few rows with plain numbers, which is faster for them than arrays."""
        which = rows.tolist()
        starts = [self._leases.computed.item(row) for row in which]
        granted, serial = [], self._leases.new_serial()
        for row, start, count in zip(which, starts, counts, strict=True):
            granted.append(self._extend_one(row, start, start + count, work) - start)
            if granted[-1]:
                self._leases.phase[row] = STEPPING
                self._leases.serial[row] = serial
        return Step(
            rows, np.array(starts), np.array(granted), work.pairs(), work.fresh_rows(), tuple(work.exports), serial
        )

    def _extend_many(self, rows: Rows, starts: Longs, ends: Longs, work: _Work) -> Longs:
        """Extend a batch: rows that only need blocks all at once, the others one by one."""
        leases = self._leases
        busy = ends > leases.calm[rows]
        if not busy.any():
            return ends
        single = busy & (~leases.restored[rows] | (ends >= leases.due[rows]))
        many = busy & ~single
        ends[many] = self._grow(rows[many], starts[many], ends[many])
        for i in np.flatnonzero(single).tolist():
            ends[i] = self._extend_one(rows.item(i), starts.item(i), ends.item(i), work)
        return ends

    def _grow(self, rows: Rows, starts: Longs, ends: Longs) -> Longs:
        """Blocks for positions up to `ends`; returns the ends reached (`starts` where nothing could be had)."""
        if len(rows) == 0:
            return ends
        self._pool.drop_repeated(self._leases.drop_behind(rows, starts))
        need = np.zeros((len(self._token_tables), len(rows)), dtype=np.int64)
        for i, table in enumerate(self._token_tables):
            need[i] = np.maximum(-(-ends // table.span) - self._leases.filled[table.index, rows], 0)
        total = int(need.sum())
        if self._index.make_room(total):
            self._assign(rows, need, self._pool.take(total))
            return ends
        rest = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return np.array([self._extend_one(row, start, end, _Work()) for row, start, end in rest])

    def _assign(self, rows: Rows, need: Longs, ids: Ids) -> None:
        leases = self._leases
        taken = 0
        quiet = np.full(len(rows), FAR, dtype=np.int64)
        for counts, table in zip(need, self._token_tables, strict=True):
            filled = leases.filled[table.index, rows]
            total = int(counts.sum())
            after = filled + counts
            if total:
                leases.widen(table.index, int(after.max()))
                leases.blocks[table.index][np.repeat(rows, counts), ragged(filled, counts)] = ids[taken : taken + total]
                leases.filled[table.index, rows] = after
                taken += total
            np.minimum(quiet, after * table.span, out=quiet)
        leases.quiet[rows] = quiet
        leases.calm[rows] = np.minimum(quiet, leases.due[rows] - 1)

    def _extend_one(self, row: int, start: int, end: int, work: _Work) -> int:
        """Extend one lease, for fewer tokens if need be. Returns the end reached, `start` if nothing could be had."""
        leases = self._leases
        if end <= leases.calm.item(row):
            return end
        record, first = leases.record(row), not leases.restored.item(row)
        if self._state_blocks and not self._inside:
            end = min(end, leases.due.item(row))
        if self._local:
            self._pool.drop_repeated(leases.drop_behind(np.array([row]), np.array([start])))
        places: list[Place] = []
        need: list[int] = []
        while end > start:
            places = [p for p in record.plan if p.position <= end] if self._state_blocks and record.plan else []
            need = [-(-end // t.span) - leases.filled.item(t.index, row) for t in self._token_tables]
            base = sum(n for n in need if n > 0) + (self._state_blocks if first else 0)
            if self._index.make_room(base + len(places) * self._state_blocks):
                break
            if places and self._index.make_room(base):
                places = []
                break
            end = start + (end - start) // 2
        else:
            return start
        self._assign_one(row, need)
        if first:
            if self._state:
                self._give_state(row)
            self._restore(row, start, record, work)
        if places:
            self._plan_exports(row, places, record, work)
        return end

    def _assign_one(self, row: int, need: list[int]) -> None:
        leases, quiet = self._leases, FAR
        for table, count in zip(self._token_tables, need, strict=True):
            filled = leases.filled.item(table.index, row)
            if count > 0:
                leases.widen(table.index, filled + count)
                leases.blocks[table.index][row, filled : filled + count] = self._pool.take(count)
                filled += count
                leases.filled[table.index, row] = filled
            quiet = min(quiet, filled * table.span)
        leases.quiet[row] = quiet
        if leases.restored[row]:
            leases.calm[row] = min(quiet, leases.due.item(row) - 1)

    def _give_state(self, row: int) -> None:
        assert self._state is not None
        index = self._state.index
        self._leases.blocks[index][row, : self._state_blocks] = self._pool.take(self._state_blocks)
        self._leases.filled[index, row] = self._state_blocks

    def _restore(self, row: int, start: int, record: Record, work: _Work) -> None:
        """Copies that give the lease its own version of what it resumes inside of."""
        if self._state and start == 0:
            work.fresh.append(row)
        for table, source in record.sources:
            if table.kind is TableKind.STATE:
                target = self._leases.blocks[table.index][row, : len(source)]
            else:
                block = start // table.span
                target = self._leases.blocks[table.index][row, block : block + 1]
            work.copies.append((source, target.copy()))

    def _plan_exports(self, row: int, places: list[Place], record: Record, work: _Work) -> None:
        if not self._state:
            return
        running = self._leases.blocks[self._state.index][row, : self._state.state_blocks].copy()
        for place in places:
            export = StateExport(row, place.position, running, self._pool.take(self._state.state_blocks))
            record.exports[place.position] = export
            work.exports.append(export)
