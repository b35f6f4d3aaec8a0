"""The second half of a step: what was computed counts, and what it completed is published; and the end of a lease."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.lease.step import Step
from headway.cache.lease.table import BROKEN, FAR, MOST_SAMPLED, RUNNING, STEPPING, LeaseTable, Record, Rows
from headway.cache.policy.placement import Place, Placement
from headway.cache.shape.checks import longs
from headway.cache.shape.checks import tokens as as_tokens
from headway.cache.shape.geometry import CacheGeometry, TableKind
from headway.errors import LeaseError

__all__ = ["Committer"]

Ids = NDArray[np.int32]
Longs = NDArray[np.int64]


class Committer:
    """Commits steps and ends leases."""

    def __init__(
        self, geometry: CacheGeometry, pool: BlockPool, leases: LeaseTable, index: PrefixIndex, placement: Placement
    ) -> None:
        """Commit steps of `leases` and publish to `index`."""
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self._index = index
        self._placement = placement
        self._local = any(t.kind in (TableKind.WINDOW, TableKind.CHUNK) for t in geometry.tables)
        self._state = geometry.state_table

    def commit(
        self, step: Step, counts: ArrayLike | None, sampled: ArrayLike | None, sampled_counts: ArrayLike | None
    ) -> None:
        """See `PrefixCache.commit`."""
        done = step.counts
        if counts is not None:
            done = longs("counts", counts)
            if done.shape != step.counts.shape or ((done < 0) | (done > step.counts)).any():
                raise LeaseError("commit: counts must give 0 to step.counts tokens for each lease of the step")
        tokens, told = _told(len(step.rows), sampled, sampled_counts)
        if len(step.rows) <= self._leases.few:
            self._commit_few(step, done, tokens, told)
        else:
            self._commit_many(step, done, tokens, told)
        for export in step.exports:  # of rows whose tokens were rejected before the place: the state is not of it
            record = self._leases.record(export.row)
            if record.exports:
                self._drop_exports(record)

    def _commit_few(self, step: Step, done: Longs, tokens: Ids | None, told: Longs | None) -> None:
        """Commit a few rows with plain numbers, which is faster for them than arrays."""
        leases = self._leases
        numbers = zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), done.tolist(), strict=True)
        work = []
        for i, (row, start, granted, count) in enumerate(numbers):
            if granted:
                computed, known = start + count, leases.known.item(row)
                more = 0 if tokens is None else int(computed == known) if told is None else told.item(i)
                if computed > known + more:
                    raise LeaseError(_TOO_MANY)
                if more and tokens is not None and min(tokens[i, :more].tolist()) < 0:
                    raise LeaseError(_NEGATIVE)
                work.append((i, row, start, computed, more))
        leases.check_few([row for _, row, _, _, _ in work], (STEPPING,))
        if any(leases.serial.item(row) != step.serial for _, row, _, _, _ in work):
            leases.check_step(step.rows[step.counts > 0], step.serial)
        for i, row, start, computed, more in work:
            if more and tokens is not None:
                size = leases.tail_size.item(row)
                leases.tail[row, size : size + more] = tokens[i, :more]
                leases.tail_size[row] = size + more
                leases.known[row] += more
            leases.computed[row] = computed
            leases.phase[row] = RUNNING
            if computed >= leases.eager.item(row):
                self._commit_one(row, start, computed)
            if self._local and computed - start > 1:
                self._pool.release_repeated(leases.drop_behind(np.array([row]), np.array([computed])))

    def _commit_many(self, step: Step, done: Longs, tokens: Ids | None, told: Longs | None) -> None:
        leases, granted = self._leases, step.counts > 0
        rows, starts = step.rows, step.starts
        if not granted.all():
            rows, starts, done = rows[granted], starts[granted], done[granted]
            tokens = None if tokens is None else tokens[granted]
            told = None if told is None else told[granted]
        leases.check_step(rows, step.serial)
        computed, known = starts + done, leases.known[rows]
        if tokens is not None:
            told = (computed == known).astype(np.int64) if told is None else told
            known = known + told
        if (computed > known).any():
            raise LeaseError(_TOO_MANY)
        if tokens is not None and told is not None:
            if tokens.size and tokens.min() < 0 and (np.arange(tokens.shape[1]) < told[:, None])[tokens < 0].any():
                raise LeaseError(_NEGATIVE)
            self._append(rows, tokens, told)
            leases.known[rows] = known
        leases.computed[rows] = computed
        leases.phase[rows] = RUNNING
        eager = computed >= leases.eager[rows]
        if eager.any():
            for i in eager.nonzero()[0].tolist():
                self._commit_one(rows.item(i), starts.item(i), computed.item(i))
        if self._local and (long := done > 1).any():
            self._pool.release_repeated(leases.drop_behind(rows[long], computed[long]))

    def _append(self, rows: Rows, tokens: Ids, counts: Longs) -> None:
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
        if not leases.restored.item(row):
            if record.sources:
                self.release_sources(row)
            leases.restored[row] = True
        full = leases.tail_size.item(row) >= leases.stretch
        if not record.published:
            if full:
                leases.tail_size[row] = 0
        else:
            self._publish_one(row, start, computed, record, full=full)
        self.set_due(row, computed)

    def _publish_one(self, row: int, start: int, computed: int, record: Record, *, full: bool) -> None:
        """Make known and publish what a step of one lease completed."""
        prefill = start < self._leases.prompt.item(row)
        if full or (record.at.position < computed and self._leases.due.item(row) <= computed):
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
        record = self._leases.record(row)
        if position > record.resident or self._index.residency.frontier(record.at) < position:
            self._index.publish(row, position)
            record.resident = position
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
            full = computed + leases.stretch - leases.tail_size.item(row)
            leases.eager[row] = 0 if computed < leases.prompt.item(row) else min(due, full)

    def fail(self, step: Step) -> None:
        """See `PrefixCache.fail`."""
        rows = step.rows[step.counts > 0]
        self._leases.check_step(rows, step.serial)
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
        if not record.published or not leases.restored.item(row) or computed == 0:
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
        if record.sources:
            self.release_sources(row)
        if record.exports:
            self._drop_exports(record)
        for table in self._geometry.tables:
            first = 0 if table.kind is TableKind.STATE else leases.owned.item(table.index, row)
            last = leases.filled.item(table.index, row)
            if last > first:
                self._pool.release(leases.blocks[table.index][row, first:last])
        node = record.at.node
        if row in node.rows:
            self._index.detach(row, record.at)
            leases.close(row)
            self._index.settle(node)
        else:
            leases.close(row)


_NEGATIVE = "commit: sampled token ids must not be negative"
_TOO_MANY = "commit: more tokens computed than known: give the accepted draft tokens in `sampled`"


def _told(leases: int, sampled: ArrayLike | None, sampled_counts: ArrayLike | None) -> tuple[Ids | None, Longs | None]:
    """Sampled tokens of the leases of a step, int32 [n, m], and how many of each row are real, if that is given."""
    if sampled is None:
        return None, None
    tokens = as_tokens("sampled", sampled)
    if tokens.ndim == 1:
        tokens = tokens[:, None]
    if tokens.ndim != 2 or len(tokens) != leases or tokens.shape[1] > MOST_SAMPLED:
        raise LeaseError(f"commit: sampled must be int32 [n] or [n, m] with n = {leases}, m <= {MOST_SAMPLED}")
    if sampled_counts is None:
        if tokens.shape[1] != 1:
            raise LeaseError("commit: give sampled_counts with more than one sampled token a lease")
        return tokens, None
    counts = longs("sampled_counts", sampled_counts)
    if counts.shape != (len(tokens),) or ((counts < 0) | (counts > tokens.shape[1])).any():
        raise LeaseError("commit: sampled_counts must give 0 to m for each lease of the step")
    return tokens, counts
