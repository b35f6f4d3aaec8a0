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
from headway.cache.lease import ANSWER_STRETCH, BROKEN, FAR, LeaseTable, Record, Rows, StateExport, Step
from headway.cache.placement import Place, Placement
from headway.cache.pool import BlockPool
from headway.errors import LeaseError

__all__ = ["Stepper"]

Ids = NDArray[np.int32]
_TAILS = (TableKind.WINDOW, TableKind.CHUNK)


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
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)


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

    # ---- before the ranks run

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """See `PrefixCache.extend`."""
        leases = self._leases
        rows = np.asarray(rows, dtype=np.int64).reshape(-1)
        counts = np.broadcast_to(np.asarray(counts, dtype=np.int64), rows.shape)
        leases.check_rows(rows)
        if len(rows) and int(counts.min()) < 1:
            raise LeaseError("extend: every lease must be given at least one token to compute")
        starts = leases.computed[rows]
        ends = starts + counts
        single = ~leases.restored[rows] | (ends >= leases.due[rows])
        work = _Work()
        if single.any():
            if len(np.unique(rows)) != len(rows):
                raise LeaseError("extend: a lease is given twice")
            plain = ~single
            ends[plain] = self._grow(rows[plain], starts[plain], ends[plain])
            for i in np.flatnonzero(single):
                ends[i] = self._extend_one(int(rows[i]), int(starts[i]), int(ends[i]), work)
        else:
            ends = self._grow(rows, starts, ends)
        granted = ends - starts
        leases.in_step[rows[granted > 0]] = True
        return Step(rows, starts, granted, work.pairs(), np.array(work.fresh, dtype=np.int64), tuple(work.exports))

    def _grow(self, rows: Rows, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks for positions up to `ends`; returns the ends reached (`starts` where nothing could be had)."""
        short = ends > self._leases.quiet[rows]
        if not short.any():
            return ends
        if len(np.unique(rows)) != len(rows):
            raise LeaseError("extend: a lease is given twice")
        due = rows[short]
        self._drop_behind(due, starts[short])
        need = self._need(due, ends[short])
        total = int(need.sum())
        if self._index.make_room(total):
            self._assign(due, need, self._pool.take(total))
            return ends
        reached = ends.copy()
        reached[short] = [self._grow_one(int(r), int(s), int(e)) for r, s, e in zip(due, starts[short], ends[short], strict=True)]
        return reached

    def _grow_one(self, row: int, start: int, end: int) -> int:
        """Blocks for one lease, for fewer tokens if need be."""
        rows = np.array([row])
        while end > start:
            need = self._need(rows, np.array([end]))
            total = int(need.sum())
            if self._index.make_room(total):
                self._assign(rows, need, self._pool.take(total))
                return end
            end = start + (end - start) // 2
        return start

    def _need(self, rows: Rows, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """New block ids that each token-indexed table needs to cover positions up to `ends`: [tables, n]."""
        need = np.zeros((len(self._token_tables), len(rows)), dtype=np.int64)
        for i, table in enumerate(self._token_tables):
            need[i] = np.maximum(-(-ends // table.span) - self._leases.filled[table.index, rows], 0)
        return need

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
        """Extend a lease that starts or reaches a checkpoint. Returns the end reached, `start` if nothing could be had."""
        leases, record = self._leases, self._leases.record(row)
        state_blocks = self._state.state_blocks if self._state else 0
        first = not leases.restored[row]
        if state_blocks and not self._inside:
            end = min(end, int(leases.due[row]))
        rows = np.array([row])
        self._drop_behind(rows, np.array([start]))
        while end > start:
            places = [place for place in record.plan if place.position <= end] if state_blocks else []
            base = int(self._need(rows, np.array([end])).sum()) + (state_blocks if first else 0)
            if self._index.make_room(base + len(places) * state_blocks):
                break
            if places and self._index.make_room(base):
                places = []
                break
            end = start + (end - start) // 2
        if end <= start:
            return start
        if first and self._state:
            self._give_state(row)
        need = self._need(rows, np.array([end]))
        self._assign(rows, need, self._pool.take(int(need.sum())))
        if first:
            self._restore(row, start, record, work)
        self._plan_exports(row, places, record, work)
        return end

    def _give_state(self, row: int) -> None:
        assert self._state is not None
        index = self._state.index
        self._leases.blocks[index][row, : self._state.state_blocks] = self._pool.take(self._state.state_blocks)
        self._leases.filled[index, row] = self._state.state_blocks

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
        leases = self._leases
        granted = step.counts > 0
        rows = step.rows[granted]
        leases.check_rows(rows, in_step=True)
        done = step.counts if counts is None else np.asarray(counts, dtype=np.int64)
        if done.shape != step.counts.shape or ((done < 0) | (done > step.counts)).any():
            raise LeaseError("commit: counts must give 0 to step.counts tokens for each lease of the step")
        starts = step.starts[granted]
        computed = starts + done[granted]
        known = leases.known[rows]
        told = _told(step, granted, computed, known, sampled, sampled_counts)
        if (computed > known + (0 if told is None else told[1])).any():
            raise LeaseError("commit: more tokens computed than known: give the accepted draft tokens in `sampled`")
        leases.computed[rows] = computed
        leases.in_step[rows] = False
        if told is not None:
            self._append(rows, *told)
        single = ~leases.restored[rows] | (starts < leases.prompt[rows])
        single |= (computed >= leases.due[rows]) | (leases.tail_size[rows] >= ANSWER_STRETCH)
        for i in np.flatnonzero(single):
            self._commit_one(int(rows[i]), int(starts[i]), int(computed[i]))
        long = computed - starts > 1
        if self._local_tables and long.any():
            self._drop_behind(rows[long], computed[long])

    def _append(self, rows: Rows, tokens: Ids, counts: NDArray[np.int64]) -> None:
        leases = self._leases
        for column in range(tokens.shape[1]):
            more = counts > column
            if not more.any():
                break
            who = rows[more]
            leases.tail[who, leases.tail_size[who]] = tokens[more, column]
            leases.tail_size[who] += 1
        leases.known[rows] += counts

    def _commit_one(self, row: int, start: int, computed: int) -> None:
        leases, record = self._leases, self._leases.record(row)
        if not leases.restored[row]:
            self.release_sources(row)
            leases.restored[row] = True
        if not record.published:
            leases.tail_size[row] = 0 if leases.tail_size[row] >= ANSWER_STRETCH else leases.tail_size[row]
            return
        flush = leases.tail_size[row] >= ANSWER_STRETCH or (leases.due[row] <= computed and record.at.position < computed)
        if flush:
            self.flush(row)
        if start < leases.prompt[row]:
            self._index.saw(record.at, start, computed)
        if not self._index.tail and (flush or start < leases.prompt[row]):
            self.publish(row, min(computed, record.at.position))
        while record.plan and record.plan[0].position <= computed:
            self._checkpoint(row, record.plan.pop(0), record)
        self._drop_exports(record)
        self.set_due(row, computed)

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
            self._index.pin(record.at, record.pin)
            record.pin = 0

    def flush(self, row: int) -> None:
        """Enter the answer tokens that have gathered in a row in the tree."""
        size = int(self._leases.tail_size[row])
        if size:
            self._index.advance(row, self._leases.tail[row, :size].copy())
            self._leases.tail_size[row] = 0

    def set_due(self, row: int, computed: int) -> None:
        """Set the position of the next checkpoint of a lease."""
        record = self._leases.record(row)
        if not record.plan and self._index.tail and record.published:
            place = self._placement.next_interval(computed)
            if place is not None:
                record.plan.append(Place(place, f"interval:{self._placement.interval}"))
        self._leases.due[row] = record.plan[0].position if record.plan else FAR

    def fail(self, step: Step) -> None:
        """See `PrefixCache.fail`."""
        rows = step.rows[step.counts > 0]
        self._leases.check_rows(rows, in_step=True)
        self._leases.status[rows] = BROKEN
        self._leases.in_step[rows] = False

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
        computed = int(leases.computed[row])
        if not record.published or not leases.restored[row] or computed == 0:
            return
        self.flush(row)
        self._index.saw(record.at, 0, computed)
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
            first = 0 if table.kind is TableKind.STATE else int(leases.owned[table.index, row])
            last = int(leases.filled[table.index, row])
            if last > first:
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
) -> tuple[Ids, NDArray[np.int64]] | None:
    """Sampled tokens of the granted leases: int32 [n, m], and how many of each row are real."""
    if sampled is None:
        return None
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
