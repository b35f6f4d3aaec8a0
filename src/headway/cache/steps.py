"""One step of a batch: blocks for the next tokens before it, publishing what was computed after it.

Almost every row of a decoding batch needs nothing: its blocks suffice and no checkpoint is due. So both halves of a step look
at whole arrays first and treat singly only the rows that start, reach a checkpoint, end a prefill chunk or fill a stretch of
their answer. New blocks for all other rows are taken at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache.geometry import CacheGeometry, TableKind
from headway.cache.index import PrefixIndex
from headway.cache.lease import (
    ANSWER_STRETCH,
    BROKEN,
    FAR,
    RUNNING,
    STEPPING,
    LeaseTable,
    Record,
    Rows,
    StateExport,
    Step,
)
from headway.cache.placement import Place, Placement
from headway.cache.pool import BlockPool
from headway.errors import LeaseError

__all__ = ["Stepper"]

Ids = NDArray[np.int32]
_TAILS = (TableKind.WINDOW, TableKind.CHUNK)
_FEW = 4
"""Rows up to which plain numbers are faster than arrays."""


@dataclass
class _Work:
    """What a step asks of the ranks, while it is put together."""

    copies: list[tuple[Ids, Ids]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    exports: list[StateExport] = field(default_factory=list)

    def pairs(self) -> Ids:
        if not self.copies:
            return np.empty((0, 2), dtype=np.int32)
        sources = np.concatenate([source for source, _ in self.copies])
        targets = np.concatenate([target for _, target in self.copies])
        return np.stack([sources, targets], axis=1)


def _ragged(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0], first[0]+1, ... (counts[0] of them), then the same from first[1], and so on."""
    ends = np.cumsum(counts)
    offsets: NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0)
    return offsets + np.repeat(first - (ends - counts), counts)


class Stepper:
    """Runs the two halves of a step on the lease table."""

    def __init__(
        self, geometry: CacheGeometry, pool: BlockPool, leases: LeaseTable, index: PrefixIndex, placement: Placement, inside: bool
    ) -> None:
        """Step leases of `leases`; `inside`: the model can export states inside a chunk."""
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self._index = index
        self._placement = placement
        self._inside = inside
        self._token_tables = [t for t in geometry.tables if t.kind is not TableKind.STATE]
        self._local_tables = [t for t in geometry.tables if t.kind in _TAILS]
        self._state = geometry.state_table
        self._state_blocks = self._state.state_blocks if self._state else 0

    # ---- before the ranks run

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """See `PrefixCache.extend`."""
        leases = self._leases
        rows = np.asarray(rows, dtype=np.int64).reshape(-1)
        counts = np.broadcast_to(np.asarray(counts, dtype=np.int64), rows.shape)
        leases.check_rows(rows, RUNNING)
        if len(rows) and counts.min() < 1:
            raise LeaseError("extend: every lease must be given at least one token to compute")
        starts = leases.computed[rows]
        ends = starts + counts
        work = _Work()
        busy = ends > leases.calm[rows]
        if busy.any():
            if len(rows) > _FEW:
                single = busy & (~leases.restored[rows] | (ends >= leases.due[rows]))
                many = busy & ~single
                ends[many] = self._grow(rows[many], starts[many], ends[many])
                busy = single
            for i in np.flatnonzero(busy).tolist():
                ends[i] = self._extend_one(rows.item(i), starts.item(i), ends.item(i), work)
        granted = ends - starts
        leases.phase[rows[granted > 0]] = STEPPING
        return Step(rows, starts, granted, work.pairs(), np.array(work.fresh, dtype=np.int64), tuple(work.exports))

    def _grow(self, rows: Rows, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks for positions up to `ends`; returns the ends reached (`starts` where nothing could be had)."""
        if len(rows) == 0:
            return ends
        self._drop_behind(rows, starts)
        need = np.zeros((len(self._token_tables), len(rows)), dtype=np.int64)
        for i, table in enumerate(self._token_tables):
            need[i] = np.maximum(-(-ends // table.span) - self._leases.filled[table.index, rows], 0)
        total = int(need.sum())
        if self._index.make_room(total):
            self._assign(rows, need, self._pool.take(total))
            return ends
        rest = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return np.array([self._extend_one(row, start, end, _Work()) for row, start, end in rest])

    def _assign(self, rows: Rows, need: NDArray[np.int64], ids: Ids) -> None:
        leases = self._leases
        taken = 0
        quiet = np.full(len(rows), FAR, dtype=np.int64)
        for counts, table in zip(need, self._token_tables, strict=True):
            filled = leases.filled[table.index, rows]
            total = int(counts.sum())
            after = filled + counts
            if total:
                leases.widen(table.index, int(after.max()))
                leases.blocks[table.index][np.repeat(rows, counts), _ragged(filled, counts)] = ids[taken : taken + total]
                leases.filled[table.index, rows] = after
                taken += total
            np.minimum(quiet, after * table.span, out=quiet)
        leases.quiet[rows] = quiet
        leases.calm[rows] = np.minimum(quiet, leases.due[rows] - 1)

    def _drop_behind(self, rows: Rows, computed: NDArray[np.int64]) -> None:
        """Release blocks of windows and chunks that no token from `computed` on can see."""
        for table in self._local_tables:
            if table.kind is TableKind.WINDOW:
                keep = np.maximum(computed - table.window + 1, 0) // table.span
            else:
                keep = computed // table.chunk * table.chunk // table.span
            owned = self._leases.owned[table.index, rows]
            keep = np.minimum(keep, self._leases.filled[table.index, rows])
            counts = np.maximum(keep - owned, 0)
            if counts.any():
                where = np.repeat(rows, counts), _ragged(owned, counts)
                self._pool.release_repeated(self._leases.blocks[table.index][where])
                self._leases.blocks[table.index][where] = -1
                self._leases.owned[table.index, rows] = owned + counts

    def _extend_one(self, row: int, start: int, end: int, work: _Work) -> int:
        """Extend one lease, for fewer tokens if need be. Returns the end reached, `start` if nothing could be had."""
        leases, record = self._leases, self._leases.record(row)
        first = not leases.restored[row]
        if self._state_blocks and not self._inside:
            end = min(end, leases.due.item(row))
        if self._local_tables:
            self._drop_behind(np.array([row]), np.array([start]))
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

    # ---- after the ranks ran

    def commit(
        self, step: Step, counts: ArrayLike | None, sampled: ArrayLike | None, sampled_counts: ArrayLike | None
    ) -> None:
        """See `PrefixCache.commit`."""
        leases, granted = self._leases, step.counts > 0
        everyone = bool(granted.all())
        rows = step.rows if everyone else step.rows[granted]
        starts = step.starts if everyone else step.starts[granted]
        leases.check_rows(rows, STEPPING)
        done = step.counts if counts is None else np.asarray(counts, dtype=np.int64)
        if counts is not None and (done.shape != step.counts.shape or ((done < 0) | (done > step.counts)).any()):
            raise LeaseError("commit: counts must give 0 to step.counts tokens for each lease of the step")
        computed = starts + (done if everyone else done[granted])
        known = leases.known[rows]
        tokens, told = _told(step, granted, computed, known, sampled, sampled_counts)
        known = known + told
        if (computed > known).any():
            raise LeaseError("commit: more tokens computed than known: give the accepted draft tokens in `sampled`")
        if tokens is not None:
            self._append(rows, tokens, told)
            leases.known[rows] = known
        leases.computed[rows] = computed
        leases.phase[rows] = RUNNING
        eager = computed >= leases.eager[rows]
        if eager.any():
            for i in np.flatnonzero(eager).tolist():
                self._commit_one(rows.item(i), starts.item(i), computed.item(i))
        if self._local_tables and (long := computed - starts > 1).any():
            self._drop_behind(rows[long], computed[long])

    def _append(self, rows: Rows, tokens: Ids, counts: NDArray[np.int64]) -> None:
        leases = self._leases
        for column in range(tokens.shape[1]):
            more = counts > column
            who, token = rows, tokens[:, column]
            if not more.all():
                who, token = rows[more], token[more]
            size = leases.tail_size[who]
            leases.tail[who, size] = token
            leases.tail_size[who] = size + 1

    def _commit_one(self, row: int, start: int, computed: int) -> None:
        leases, record = self._leases, self._leases.record(row)
        if not leases.restored[row]:
            self.release_sources(row)
            leases.restored[row] = True
        full = leases.tail_size[row] >= ANSWER_STRETCH
        if not record.published:
            if full:
                leases.tail_size[row] = 0
        else:
            self._publish_one(row, start, computed, record, full=full)
        self.set_due(row, computed)

    def _publish_one(self, row: int, start: int, computed: int, record: Record, *, full: bool) -> None:
        """Make known and publish what a step of one lease completed."""
        prefill = start < self._leases.prompt[row]
        if full or (record.at.position < computed and self._leases.due[row] <= computed):
            self.flush(row)
        if not self._index.tail:
            if full or prefill:
                self.publish(row, min(computed, record.at.position))
            return
        if prefill:
            self._index.saw(record.at, start, computed)
        while record.plan and record.plan[0].position <= computed:
            self._checkpoint(row, record.plan.pop(0), record)
        if record.exports:
            self._drop_exports(record)

    def _checkpoint(self, row: int, place: Place, record: Record) -> None:
        export = record.exports.pop(place.position, None)
        if self._state and export is None:
            return
        state = export.destination if export else None
        if not self._index.take_checkpoint(row, place.position, place.kind, state) and state is not None:
            self._pool.release(state)
        self.try_pin(row, place.position)

    def publish(self, row: int, position: int) -> None:
        """Make the path of a lease resident up to `position` (models without checkpoints)."""
        if position > 0:
            self._index.publish(row, position)
            self.try_pin(row, position)

    def try_pin(self, row: int, position: int) -> None:
        """Pin what the request asked to pin, once it is there."""
        record = self._leases.record(row)
        if record.pin and position >= record.pin:
            self._index.reclaim.pin(record.at, record.pin)
            record.pin = 0

    def flush(self, row: int, keep: int = 0) -> None:
        """Enter the answer tokens that have gathered in a row in the tree, all but the last `keep`."""
        size = self._leases.tail_size.item(row) - keep
        if size > 0:
            self._index.advance(row, self._leases.tail[row, :size].copy())
            self._leases.tail[row, :keep] = self._leases.tail[row, size : size + keep].copy()
            self._leases.tail_size[row] = keep

    def set_due(self, row: int, computed: int) -> None:
        """Set the position of the next checkpoint of a lease, and from where on it wants attention."""
        leases, record = self._leases, self._leases.record(row)
        if self._placement.interval and not record.plan and self._index.tail and record.published:
            place = self._placement.next_interval(computed)
            if place is not None:
                record.plan.append(Place(place, f"interval:{self._placement.interval}"))
        due = record.plan[0].position if record.plan else FAR
        leases.due[row] = due
        if leases.restored[row]:
            leases.calm[row] = min(leases.quiet.item(row), due - 1)
            full = computed + ANSWER_STRETCH - leases.tail_size.item(row)
            leases.eager[row] = 0 if computed < leases.prompt.item(row) else min(due, full)

    def fail(self, step: Step) -> None:
        """See `PrefixCache.fail`."""
        rows = step.rows[step.counts > 0]
        self._leases.check_rows(rows, STEPPING)
        self._leases.phase[rows] = BROKEN

    # ---- the end of a lease

    def release_sources(self, row: int) -> None:
        """Drop the references on blocks that the first step copied from."""
        record = self._leases.record(row)
        for _, source in record.sources:
            self._pool.release(source)
        record.sources.clear()

    def _drop_exports(self, record: Record) -> None:
        for export in record.exports.values():
            self._pool.release(export.destination)
        record.exports.clear()

    def donate(self, row: int, kind: str) -> None:
        """Publish all that a lease has computed; its running state becomes a checkpoint of `kind`."""
        leases, record = self._leases, self._leases.record(row)
        computed = leases.computed.item(row)
        if not record.published or not leases.restored[row] or computed == 0:
            return
        self.flush(row, keep=max(0, leases.known.item(row) - computed - self._geometry.lookahead))
        if not self._index.tail:
            self.publish(row, min(computed, record.at.position))
            return
        state = None
        if self._state:
            state = leases.blocks[self._state.index][row, : self._state.state_blocks].copy()
        if self._index.take_checkpoint(row, computed, kind, state) and self._state:
            leases.filled[self._state.index, row] = 0
        self.try_pin(row, computed)

    def close(self, row: int) -> None:
        """Release all that a lease holds and free its row."""
        leases, record = self._leases, self._leases.record(row)
        self.release_sources(row)
        self._drop_exports(record)
        for table in self._geometry.tables:
            first = 0 if table.kind is TableKind.STATE else leases.owned.item(table.index, row)
            last = leases.filled.item(table.index, row)
            if last == first + 1:
                self._pool.release_one(leases.blocks[table.index].item(row, first))
            elif last > first:
                self._pool.release(leases.blocks[table.index][row, first:last])
        node = record.at.node
        if row in node.rows:
            self._index.detach(row, record.at)
            leases.close(row)
            self._index.settle(node)
        else:
            leases.close(row)


def _told(
    step: Step,
    granted: NDArray[np.bool_],
    computed: NDArray[np.int64],
    known: NDArray[np.int64],
    sampled: ArrayLike | None,
    sampled_counts: ArrayLike | None,
) -> tuple[Ids | None, NDArray[np.int64]]:
    """Sampled tokens of the granted leases, int32 [n, m], and how many of each row are real."""
    if sampled is None:
        return None, np.zeros(len(known), dtype=np.int64)
    tokens = np.asarray(sampled, dtype=np.int32)
    if tokens.ndim == 1:
        tokens = tokens[:, None]
    if tokens.ndim != 2 or len(tokens) != len(step.rows) or tokens.shape[1] > ANSWER_STRETCH:
        raise LeaseError(f"commit: sampled must be int32 [n] or [n, m] with n = {len(step.rows)}, m <= {ANSWER_STRETCH}")
    if sampled_counts is None:
        if tokens.shape[1] != 1:
            raise LeaseError("commit: give sampled_counts with more than one sampled token a lease")
        return tokens[granted], (computed == known).astype(np.int64)
    counts = np.asarray(sampled_counts, dtype=np.int64)
    if counts.shape != (len(tokens),) or ((counts < 0) | (counts > tokens.shape[1])).any():
        raise LeaseError("commit: sampled_counts must give 0 to m for each lease of the step")
    return tokens[granted], counts[granted]
