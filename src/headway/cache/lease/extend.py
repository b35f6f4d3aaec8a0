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
from headway.cache.lease.table import FAR, RUNNING, STEPPING, LeaseTable, Record, Rows, new_serial, ragged
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

    def step(self, rows: Rows, starts: Longs, counts: Longs, serial: int) -> Step:
        """The step."""
        sides = [np.concatenate(side) for side in zip(*self.copies, strict=True)]
        copies, fresh = np.array(sides).T if sides else _NO_COPIES, np.array(self.fresh, dtype=np.int64)
        return Step(rows, starts, counts, copies, fresh, tuple(self.exports), serial)


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
        self._last_phase = RUNNING if leases.steps == 1 else STEPPING
        self._token_tables = [t for t in geometry.tables if t.kind is not TableKind.STATE]
        self._local = any(t.kind in (TableKind.WINDOW, TableKind.CHUNK) for t in geometry.tables)
        self._state = geometry.state_table
        self._state_blocks = self._state.state_blocks if self._state else 0

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """See `PrefixCache.extend`."""
        leases = self._leases
        rows = longs("rows", rows).flatten()  # a copy: the step outlives the call
        leases.check_rows(rows, RUNNING, self._last_phase)
        counts = longs("counts", counts)
        if len(rows) == 0 or (counts.ndim and counts.shape != rows.shape):
            raise LeaseError("extend: give at least one lease, and one count for all or one for each")
        few = len(rows) <= leases.few
        asked = counts.tolist() if few and counts.ndim else [counts.min().item() if counts.ndim else counts.item()]
        if min(asked) < 1:
            raise LeaseError("extend: every lease must be given at least one token to compute")
        work, serial = _Work(), new_serial()
        if few:
            each = asked if counts.ndim else asked * len(rows)
            starts, granted = self._extend_few(rows.tolist(), each, work, serial)
        else:
            starts = leases.planned[rows]
            ends = self._extend_many(rows, starts, starts + counts, work)
            granted = ends - starts
            some = granted > 0
            leases.begin(rows[some], ends[some], serial)
        step = work.step(rows, starts, granted, serial)
        if leases.steps > 1:
            leases.ahead[serial] = step
        return step

    def extend_one(self, row: int, count: int) -> Step:
        """See `PrefixCache.extend_one`."""
        leases = self._leases
        if type(row) is not int or type(count) is not int or count < 1:
            return self.extend([row], [count])
        leases.check_few([row], RUNNING, self._last_phase)
        start = leases.planned.item(row)
        if start + count > leases.calm.item(row):
            return self.extend([row], [count])
        serial = new_serial()
        leases.begin_one(row, start + count, serial)
        step = Step(np.array([row]), np.array([start]), np.array([count]), _NO_COPIES, _NO_ROWS, (), serial)
        if leases.steps > 1:
            leases.ahead[serial] = step
        return step

    def _extend_few(self, rows: list[int], counts: list[int], work: _Work, serial: int) -> tuple[Longs, Longs]:
        """Extend a few rows with plain numbers, which is faster for them than arrays. Returns starts and counts."""
        leases, granted = self._leases, []
        starts = [leases.planned.item(row) for row in rows]
        for row, start, count in zip(rows, starts, counts, strict=True):
            end = self._extend_one(row, start, start + count, work)
            granted.append(end - start)
            if end > start:
                leases.begin_one(row, end, serial)
        return np.array(starts), np.array(granted)

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
        leases, tables = self._leases, self._token_tables
        if len(rows) == 0:
            return ends
        self._pool.drop_repeated(leases.drop_behind(rows, leases.computed[rows]))
        filled = [leases.filled[table.index, rows] for table in tables]
        need = [np.maximum(-(-ends // table.span) - had, 0) for table, had in zip(tables, filled, strict=True)]
        totals = [int(counts.sum()) for counts in need]
        if not self._index.make_room(sum(totals)):
            rest = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
            return np.array([self._extend_one(row, start, end, _Work()) for row, start, end in rest])
        quiet = np.full(len(rows), FAR, dtype=np.int64)
        for table, had, counts, total in zip(tables, filled, need, totals, strict=True):
            after = had + counts
            if total:
                leases.widen(table.index, int(after.max()))
                leases.blocks[table.index][np.repeat(rows, counts), ragged(had, counts)] = self._pool.take(total)
                leases.filled[table.index, rows] = after
            np.minimum(quiet, after * table.span, out=quiet)
        leases.quiet[rows] = quiet
        leases.calm[rows] = np.minimum(quiet, leases.due[rows] - 1)
        return ends

    def _extend_one(self, row: int, start: int, end: int, work: _Work) -> int:
        """Extend one lease, for fewer tokens if need be. Returns the end reached, `start` if nothing could be had."""
        leases = self._leases
        if end <= leases.calm.item(row):
            return end
        record = leases.record(row)
        due = [place for place in record.plan if place.position > start] if self._state else []
        if due and not self._inside:
            end = min(end, due[0].position)
        if self._local:  # a step under way may still read what only the steps before it let go
            self._pool.drop_repeated(leases.drop_behind(np.array([row]), leases.computed[[row]]))
        state = self._state_blocks if self._state and not leases.filled.item(self._state.index, row) else 0
        places, need = due[:0], [0]
        while end > start:
            places = [place for place in due if place.position <= end]
            need = [-(-end // t.span) - leases.filled.item(t.index, row) for t in self._token_tables]
            base = sum(n for n in need if n > 0) + state
            if self._index.make_room(base + len(places) * self._state_blocks):
                break
            if places and self._index.make_room(base):
                places = []
                break
            end = start + (end - start) // 2
        else:
            return start
        self._assign_one(row, need, state)
        if not leases.restored.item(row) and leases.phase.item(row) == RUNNING:
            self._restore(row, start, record, work)
        if places:
            self._plan_exports(row, places, record, work)
        return end

    def _assign_one(self, row: int, need: list[int], state: int) -> None:
        leases, quiet = self._leases, FAR
        for table, count in zip(self._token_tables, need, strict=True):
            filled = leases.filled.item(table.index, row)
            if count > 0:
                leases.widen(table.index, filled + count)
                leases.blocks[table.index][row, filled : filled + count] = self._pool.take(count)
                filled += count
                leases.filled[table.index, row] = filled
            quiet = min(quiet, filled * table.span)
        if state and self._state:
            leases.blocks[self._state.index][row] = self._pool.take(state)
            leases.filled[self._state.index, row] = state
        leases.quiet[row] = quiet
        if leases.restored.item(row):
            leases.calm[row] = min(quiet, leases.due.item(row) - 1)

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
        assert self._state is not None
        running = self._leases.blocks[self._state.index][row].copy()
        for place in places:
            export = StateExport(row, place.position, running, self._pool.take(self._state_blocks))
            record.exports[place.position] = export
            work.exports.append(export)
