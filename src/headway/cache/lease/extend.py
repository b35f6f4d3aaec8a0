"""The first half of a step: blocks for the next tokens, and the copies and exports that the ranks must make.

Almost every row of a decoding batch needs nothing: its blocks suffice and no checkpoint is due. So both halves of a
step look at whole arrays first and treat singly only the rows that start, reach a checkpoint, end a prefill chunk or
fill a stretch of their answer. New blocks for all other rows are taken at once. For one row plain numbers are faster
than arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from headway.cache.lease.step import Rows, StateExport, Step
from headway.cache.lease.table import RUNNING, Bookmark, Parts, Record, ragged
from headway.cache.policy.placement import Place
from headway.cache.shape.checks import longs
from headway.cache.shape.geometry import Ids, Longs, TableKind
from headway.errors import LeaseError

__all__ = ["Extender"]

_NO_COPIES = np.empty((0, 2), dtype=np.int32)
_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Work:
    """What a step asks of the ranks, while it is put together."""

    copies: list[Ids] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    exports: list[StateExport] = field(default_factory=list)

    def step(self, rows: Rows, starts: Longs, counts: Longs) -> Step:
        """The step."""
        copies = np.concatenate(self.copies) if self.copies else _NO_COPIES
        fresh = np.array(self.fresh, dtype=np.int64) if self.fresh else _NO_ROWS
        return Step(rows, starts, counts, copies, fresh, tuple(self.exports))


@dataclass(eq=False)
class Extender(Parts):
    """Gives leases what their next step needs.

    Attributes:
        inside: The model can export states inside a chunk.
    """

    inside: bool

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """See `PrefixCache.extend`."""
        leases = self.leases
        rows = longs("rows", rows).flatten()  # a copy: the step outlives the call
        counts = longs("counts", counts)
        if len(rows) == 0 or (counts.ndim and counts.shape != rows.shape):
            raise LeaseError("extend: give at least one lease, and one count for all or one for each")
        if len(rows) == 1 and leases.plain:
            return self.extend_one(rows.item(), counts.item())
        leases.check_rows(rows, RUNNING, leases.extendable)
        if np.count_nonzero((counts < 1) | (counts > _MOST_ASKED)):  # faster than `any`, `min` and the like, for few
            raise LeaseError(_WRONG_COUNT)
        work, starts = _Work(), leases.planned[rows]
        ends = self._extend_many(rows, starts, starts + counts, work)
        step = work.step(rows, starts, ends - starts)
        some = ends > starts
        if np.count_nonzero(some):
            leases.begin(rows[some], ends[some], step)
        return step

    def extend_one(self, row: int, count: int, *, whole: bool = False) -> Step:
        """See `PrefixCache.extend_one`: as `extend`, with plain numbers."""
        if type(row) is not int or type(count) is not int:
            row, count = longs("row", row).item(), longs("count", count).item()
        leases = self.leases
        leases.check_row(row, RUNNING, leases.extendable)
        if not 1 <= count <= _MOST_ASKED:
            raise LeaseError(_WRONG_COUNT)
        work, start = _Work(), leases.planned.item(row)
        end = self._extend_one(row, start, start + count, work, whole=whole)
        numbers = np.array([row, start, end - start])
        step = work.step(numbers[:1], numbers[1:2], numbers[2:])
        if end > start:
            leases.begin(row, end, step)
        return step

    def _extend_many(self, rows: Rows, starts: Longs, ends: Longs, work: _Work) -> Longs:
        """Extend a batch: rows that only need blocks all at once, the others one by one. Returns the ends reached."""
        leases = self.leases
        calm = leases.calm[rows]
        busy = ends > calm
        if not np.count_nonzero(busy):
            return ends
        single = busy & ((calm == 0) | (ends >= leases.due[rows]))
        many = busy & ~single
        if np.count_nonzero(many):
            ends[many] = self._grow(rows[many], starts[many], ends[many])
        for i in np.flatnonzero(single).tolist():
            ends[i] = self._extend_one(rows.item(i), starts.item(i), ends.item(i), work)
        return ends

    def _grow(self, rows: Rows, starts: Longs, ends: Longs) -> Longs:
        """Blocks for positions up to `ends`; returns the ends reached (`starts` where nothing could be had)."""
        leases, tables = self.leases, self.geometry.token_tables
        self.pool.drop_repeated(leases.drop_behind(rows, leases.computed[rows]))
        filled = [leases.filled[table.index, rows] for table in tables]
        reach = ends + leases.ahead
        need = [np.maximum(-(-reach // table.span) - had, 0) for table, had in zip(tables, filled, strict=True)]
        totals = [int(counts.sum()) for counts in need]
        if not self.index.make_room(sum(totals)):
            rest = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
            return np.array([self._extend_one(row, start, end, _Work()) for row, start, end in rest])
        calm = leases.due[rows] - 1
        for table, had, counts, total in zip(tables, filled, need, totals, strict=True):
            after = had + counts
            if total:
                leases.widen(table.index, int(after.max()))
                leases.blocks[table.index][np.repeat(rows, counts), ragged(had, counts)] = self.pool.take(total)
                leases.filled[table.index, rows] = after
            np.minimum(calm, after * table.span - leases.ahead, out=calm)
        leases.calm[rows] = calm
        return ends

    def _extend_one(self, row: int, start: int, end: int, work: _Work, *, whole: bool = False) -> int:
        """Extend one lease, for fewer tokens if need be. Returns the end reached, `start` if nothing could be had."""
        leases = self.leases
        if end <= leases.calm.item(row):
            return end
        record = leases.record(row)
        due = [place for place in record.plan if place.position > start] if self.geometry.state_blocks else []
        if due and not self.inside and due[0].position < end:
            end = start if whole else due[0].position
        end, need, places = self._afford(row, start, end, due, whole=whole)
        if end == start:
            return start
        self._assign(row, need)
        if record.restored:
            leases.calm[row] = min(leases.room(row), leases.due.item(row) - 1)
        elif leases.phase.item(row) == RUNNING:
            self._restore(row, start, record, work)
        if record.bookmark is not None and record.bookmark.due:
            self._copy_state(row, record.bookmark, work)
        if places:
            self._plan_exports(row, places, record, work)
        return end

    def _afford(
        self, row: int, start: int, end: int, due: list[Place], *, whole: bool
    ) -> tuple[int, list[int], list[Place]]:
        """How far towards `end` a lease can go, how many more blocks of each table that takes, and the exports.

        When memory does not suffice, the bookmark goes first, then the exports, then half of the tokens; all of them
        if it must go the `whole` way.
        """
        leases, state = self.leases, self.geometry.state_blocks
        while end > start:
            if self.geometry.local:  # a step under way may still read what only the steps before it let go
                self.pool.drop_repeated(leases.drop_behind(np.array([row]), leases.computed[[row]]))
            places = [place for place in due if place.position <= end] if due else due
            need = self._need(row, end + leases.ahead)
            if self.index.make_room(sum(need) + len(places) * state):
                return end, need, places
            if self.drop_bookmark(row):
                continue
            if places and self.index.make_room(sum(need)):
                return end, need, []
            end = start if whole else start + (end - start) // 2
        return start, [], []

    def _need(self, row: int, reach: int) -> list[int]:
        """How many more blocks of each table a lease needs for positions up to `reach`."""
        need, filled = [], self.leases.filled
        for table in self.geometry.tables:
            blocks = -(-reach // table.span) if table.span else table.state_blocks
            had = filled.item(table.index, row)
            need.append(blocks - had if blocks > had else 0)
        return need

    def _assign(self, row: int, need: list[int]) -> None:
        """Give a lease so many more blocks of each table."""
        leases = self.leases
        for i, count in enumerate(need):
            if count:
                filled = leases.filled.item(i, row)
                leases.widen(i, filled + count)
                leases.blocks[i][row, filled : filled + count] = self.pool.take(count)
                leases.filled[i, row] = filled + count

    def _restore(self, row: int, start: int, record: Record, work: _Work) -> None:
        """Copies that give the lease its own version of what it resumes inside of."""
        if self.geometry.state_table and start == 0:
            work.fresh.append(row)
        if record.loading:
            work.fresh.clear()  # a state that is read back needs no zeros
        for table, source in record.sources:
            first = 0 if table.kind is TableKind.STATE else start // table.span
            pairs = np.empty((len(source), 2), dtype=np.int32)
            pairs[:, 0], pairs[:, 1] = source, self.leases.blocks[table.index][row, first : first + len(source)]
            work.copies.append(pairs)

    def _copy_state(self, row: int, mark: Bookmark, work: _Work) -> None:
        """Copy the state as it is before the step."""
        assert self.geometry.state_table is not None
        running = self.leases.blocks[self.geometry.state_table.index][row, : len(mark.state)]
        work.copies.append(np.stack([running, mark.state], axis=1))
        mark.due = False

    def _plan_exports(self, row: int, places: list[Place], record: Record, work: _Work) -> None:
        assert self.geometry.state_table is not None
        running = self.leases.blocks[self.geometry.state_table.index][row].copy()
        for place in places:
            export = StateExport(row, place.position, running, self.pool.take(len(running)))
            record.exports[place.position] = export
            work.exports.append(export)


_MOST_ASKED = 2**40
_WRONG_COUNT = "extend: every lease must be given at least one token to compute, and no more than a sequence can have"
