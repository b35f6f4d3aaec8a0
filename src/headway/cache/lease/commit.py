"""The second half of a step: what was computed counts, and what it completed is published; and the end of a lease."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache.index.edge import Match, Section
from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.index.usage import count
from headway.cache.lease.step import StateExport, Step
from headway.cache.lease.table import AHEAD, BROKEN, FAR, MOST_SAMPLED, STEPPING, LeaseTable, Record, Rows
from headway.cache.lease.wish import Outcome, Wish
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
        self,
        geometry: CacheGeometry,
        pool: BlockPool,
        leases: LeaseTable,
        index: PrefixIndex,
        placement: Placement,
        pin_seconds: float,
    ) -> None:
        """Commit steps of `leases` and publish to `index`; a pin lasts `pin_seconds` if its prompt does not say."""
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self._index = index
        self._placement = placement
        self._pin_seconds = pin_seconds
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
        leases = self._leases
        note = self._note_few if len(step.rows) <= leases.few else self._note_many
        eager = note(step, done, tokens, told)
        if leases.steps > 1 and counts is not None and (short := done < step.counts).any():
            rows = step.rows[short]
            leases.planned[rows] = leases.computed[rows]
            self._undo_second(rows[leases.phase[rows] == STEPPING])
        for row, start, computed in eager:
            self._commit_one(row, start, computed)
        self._drop_exports(step.exports)  # of rows whose tokens were rejected before the place: the state is not of it
        leases.ahead.pop(step.serial, None)

    def _undo_second(self, rows: Rows) -> None:
        """Take leases whose older step was cut short or failed out of the newer one. One step is under way less."""
        for row in rows.tolist():
            self._drop_exports(self._leases.undo_second(row))
        self._leases.phase[rows] -= 1

    def _note_few(self, step: Step, done: Longs, tokens: Ids, told: Longs | None) -> list[tuple[int, int, int]]:
        """Write down what a few rows computed, with plain numbers, which is faster for them than arrays.

        Returns:
            Row, start and computed tokens of the leases that have something to publish.
        """
        leases = self._leases
        numbers = zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), done.tolist(), strict=True)
        work = []
        for i, (row, start, granted, counted) in enumerate(numbers):
            if granted:
                computed, known = start + counted, leases.known.item(row)
                more = int(computed == known) if told is None else told.item(i)
                if computed > known + more:
                    raise LeaseError(_TOO_MANY)
                if more and min(tokens[i, :more].tolist()) < 0:
                    raise LeaseError(_NEGATIVE)
                work.append((i, row, start, computed, more))
        leases.check_few([row for _, row, _, _, _ in work], STEPPING, AHEAD)
        if any(leases.serial.item(row) != step.serial for _, row, _, _, _ in work):
            leases.check_step(step.rows[step.counts > 0], step.serial)
        eager = []
        for i, row, start, computed, more in work:
            if more:
                size = leases.tail_size.item(row)
                leases.tail[row, size : size + more] = tokens[i, :more]
                leases.tail_size[row] = size + more
                leases.known[row] += more
            leases.computed[row] = computed
            leases.end(row)
            if computed >= leases.eager.item(row) or leases.tail_size.item(row) > leases.stretch:
                eager.append((row, start, computed))
        return eager

    def _note_many(self, step: Step, done: Longs, tokens: Ids, told: Longs | None) -> list[tuple[int, int, int]]:
        """As `_note_few`, with arrays."""
        leases, granted = self._leases, step.counts > 0
        rows, starts = step.rows, step.starts
        if not granted.all():
            rows, starts, done, tokens = rows[granted], starts[granted], done[granted], tokens[granted]
            told = None if told is None else told[granted]
        leases.check_step(rows, step.serial)
        computed, known = starts + done, leases.known[rows]
        more = (computed == known).astype(np.int64) if told is None else told
        if (computed > known + more).any():
            raise LeaseError(_TOO_MANY)
        if tokens.size and tokens.min() < 0 and (np.arange(tokens.shape[1]) < more[:, None])[tokens < 0].any():
            raise LeaseError(_NEGATIVE)
        self._append(rows, tokens, more)
        leases.known[rows] = known + more
        leases.computed[rows] = computed
        leases.end(rows)
        eager = ((computed >= leases.eager[rows]) | (leases.tail_size[rows] > leases.stretch)).nonzero()[0].tolist()
        return [(rows.item(i), starts.item(i), computed.item(i)) for i in eager]

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
        if computed > start and not leases.restored.item(row):
            self._release_sources(record)
            leases.restored[row] = True
        full = leases.tail_size.item(row) >= leases.stretch
        if not record.published:
            if full:
                leases.tail_size[row] = 0
        elif computed > start or full:
            self._publish_one(row, start, computed, record, full=full)
        if self._local and computed - start > 1:
            self._pool.drop_repeated(leases.drop_behind(np.array([row]), np.array([computed])))
        self.set_due(row, computed)

    def _publish_one(self, row: int, start: int, computed: int, record: Record, *, full: bool) -> None:
        """Make known and publish what a step of one lease completed."""
        anchor = record.anchor
        assert anchor is not None
        known = start < anchor.position
        if full or (anchor.position < computed and self._leases.due.item(row) <= computed):
            self.flush(row)
        if known:
            self._index.tree.mark_computed(anchor.edge, start, min(computed, anchor.position))
        if self._index.floats:
            if full or known:
                self.publish(row, min(computed, anchor.position))
            return
        while record.plan and record.plan[0].position <= computed:
            self._checkpoint(row, record.plan.pop(0), record)

    def _checkpoint(self, row: int, place: Place, record: Record) -> None:
        """Take a planned checkpoint, if its state could be exported."""
        export = record.exports.pop(place.position, None)
        if self._state is None or export is not None:
            state = export.destination if export else None
            if not self._take_checkpoint(row, place.position, place.kind, state) and state is not None:
                self._pool.drop(state, whole=True)
        self.grant_wishes(record, place.position, Outcome.NO_ROOM)

    def publish(self, row: int, position: int) -> None:
        """Make the path of a lease resident up to `position` (models that can resume anywhere)."""
        record = self._leases.record(row)
        assert record.anchor is not None
        if position > record.resident or self._index.tree.frontier(Match(record.anchor.edge, position)) < position:
            self._publish(row, position)
            record.resident = position
        self.grant_wishes(record, position, Outcome.NO_ROOM)

    def _publish(self, row: int, position: int) -> Match:
        """Make the path of a lease resident up to `position` (all computed). Returns the place.

        What is resident already is taken over by the lease, whose own copies are freed: one copy is left. A lease that
        keeps its own blocks shares them instead of giving them away, and takes none over.
        """
        leases, tree, record = self._leases, self._index.tree, self._leases.record(row)
        anchor = record.anchor
        assert anchor is not None
        at = Match(Match(anchor.edge, anchor.position).edge_at(position), position)
        frontier = tree.frontier(at)
        rows = []
        for i, table in enumerate(self._geometry.prefix_tables):
            blocks = leases.blocks[table.index][row]
            rows.append(blocks)
            if record.own_blocks:
                continue
            owned, full = leases.owned.item(table.index, row), frontier // table.span
            if full > owned:
                mine, theirs = blocks[owned:full].copy(), tree.path_ids(at.edge, i, owned, full)
                self._pool.use(theirs)
                blocks[owned:full] = theirs
                self._pool.drop(mine)
            leases.owned[table.index, row] = full = max(owned, position // table.span)
            anchor.held = max(anchor.held, full * table.span)
        self._index.publish(at, rows, given=not record.own_blocks)
        return at

    def _take_checkpoint(self, row: int, position: int, kind: str, state: Ids | None) -> bool:
        """Publish the path of a lease up to `position` and keep a checkpoint there.

        Args:
            row: The lease, which still holds its windows and chunks at `position`.
            position: Tokens before the checkpoint; all computed.
            kind: Kind of placement.
            state: Blocks of the state after `position` tokens, which the lease holds and hands over (None: no states).

        Returns:
            False if one was there already, or not all tokens on which its entries depend are known yet; then `state`
            stays the lease's.
        """
        anchor = self._leases.record(row).anchor
        if anchor is None or position > anchor.position:
            return False
        at = self._publish(row, position)
        if at.edge.checkpoint_at(position) is not None:
            return False
        sections = []
        for table in self._geometry.tail_tables:
            if table.kind is TableKind.STATE:
                assert state is not None
                self._pool.disuse(state, whole=True)
                sections.append(Section(0, state, whole=True))
                continue
            first = table.first_needed(position)
            low = first // table.span
            high = -(-position // table.span) if first < position else low
            ids = self._leases.blocks[table.index][row, low:high].copy()
            self._pool.share(ids)
            sections.append(Section(low, ids))
        self._index.take_checkpoint(at, kind, tuple(sections))
        return True

    def grant_wishes(self, record: Record, position: int, missing: Outcome) -> None:
        """Say what became of the pending wishes of a lease at or before `position`; `missing` where nothing is kept."""
        for wish in record.wishes:
            if wish.outcome is Outcome.PENDING and wish.position <= position:
                self.close_wish(wish, self._outcome(record, wish, missing))

    def _outcome(self, record: Record, wish: Wish, missing: Outcome) -> Outcome:
        anchor = record.anchor
        if anchor is None or not record.published:
            return Outcome.NOT_STORED
        if not 0 < wish.position <= anchor.position:
            return missing
        edge = Match(anchor.edge, anchor.position).edge_at(wish.position)
        if edge.checkpoint_at(wish.position) is None:
            return missing
        if wish.kind == "breakpoint":
            return Outcome.KEPT
        seconds = self._pin_seconds if record.prompt.pin_seconds is None else record.prompt.pin_seconds
        pinned = self._index.pin(edge, wish.position, seconds, len(record.prompt.tokens))
        return Outcome.KEPT if pinned else Outcome.PIN_SHARE

    def close_wish(self, wish: Wish, outcome: Outcome) -> None:
        """Say what became of a wish, once."""
        wish.outcome = outcome
        if outcome is not Outcome.KEPT:
            count(self._index.usage.counters.refused, f"{wish.kind}:{outcome.value}")

    def flush(self, row: int) -> None:
        """Enter the answer tokens that have gathered in a row in the tree, as far as their entries are computed.

        All of them, where more are told ahead than a row should hold.
        """
        leases, record = self._leases, self._leases.record(row)
        computed = leases.computed.item(row)
        keep = max(0, leases.known.item(row) - computed - self._geometry.lookahead)
        keep = 0 if keep > leases.stretch else keep
        size = leases.tail_size.item(row) - keep
        if size > 0:
            assert record.anchor is not None
            data = record.rest + leases.tail[row, :size].tobytes()
            start = record.anchor.position
            self._index.advance(record.anchor, data, computed)
            record.rest = data[4 * (record.anchor.position - start) :]
            leases.tail[row, :keep] = leases.tail[row, size : size + keep].copy()
            leases.tail_size[row] = keep

    def set_due(self, row: int, computed: int) -> None:
        """Set the position of the next checkpoint of a lease, and from where on it wants attention."""
        leases, record = self._leases, self._leases.record(row)
        interval = self._placement.interval if record.published and not self._index.floats else 0
        while interval and len(record.plan) < leases.steps:
            place = self._placement.next_interval(max([computed, *(one.position for one in record.plan[-1:])]))
            assert place is not None
            record.plan.append(Place(place, f"interval:{interval}"))
        due = record.plan[0].position if record.plan else FAR
        leases.due[row] = due
        if leases.restored[row]:
            leases.calm[row] = min(leases.quiet.item(row), due - 1)
            full = computed + leases.stretch - leases.tail_size.item(row)
            told = max(leases.prompt.item(row), record.anchor.position if record.anchor else 0)
            leases.eager[row] = 0 if computed < told else min(due, full)

    def fail(self, step: Step) -> None:
        """See `PrefixCache.fail`."""
        rows = step.rows[step.counts > 0]
        self._leases.check_step(rows, step.serial)
        self._undo_second(rows[self._leases.phase[rows] == AHEAD])
        self._leases.ahead.pop(step.serial, None)
        self._leases.phase[rows] = BROKEN
        for row in rows.tolist():
            record = self._leases.record(row)
            if record.anchor is not None:
                self._index.retract(record.anchor, self._leases.computed.item(row))

    # ---- the end of a lease

    def _release_sources(self, record: Record) -> None:
        """Let go of the blocks that the first step copied from."""
        for table, source in record.sources:
            self._pool.drop(source, whole=table.kind is TableKind.STATE)
        record.sources.clear()

    def _drop_exports(self, exports: Iterable[StateExport]) -> None:
        """Free the states of exports that became no checkpoints."""
        for export in exports:
            if self._leases.record(export.row).exports.pop(export.position, None) is not None:
                self._pool.drop(export.destination, whole=True)

    def donate(self, row: int, kind: str) -> None:
        """Publish all that a lease has computed; its running state becomes a checkpoint of `kind`."""
        leases, record = self._leases, self._leases.record(row)
        computed = leases.computed.item(row)
        if not record.published or not leases.restored.item(row) or computed == 0:
            return
        self.flush(row)
        if self._index.floats:
            assert record.anchor is not None
            self.publish(row, min(computed, record.anchor.position))
            return
        state = leases.blocks[self._state.index][row].copy() if self._state else None
        if self._take_checkpoint(row, computed, kind, state) and self._state:
            leases.filled[self._state.index, row] = 0

    def detach(self, row: int) -> None:
        """Make a lease the holder of all that it uses; it goes on and publishes nothing more."""
        record = self._leases.record(row)
        for table in self._geometry.prefix_tables:
            owned = int(self._leases.owned[table.index, row])
            self._pool.share(self._leases.blocks[table.index][row, :owned])
            self._leases.owned[table.index, row] = 0
        if record.anchor is not None:
            self._index.tree.detach(record.anchor)
        record.anchor, record.published = None, False
        record.plan.clear()
        self.grant_wishes(record, self._leases.known.item(row), Outcome.NOT_STORED)
        self.set_due(row, 0)

    def close(self, row: int) -> None:
        """Release all that a lease holds and free its row."""
        leases, record = self._leases, self._leases.record(row)
        self._release_sources(record)
        self._drop_exports(list(record.exports.values()))
        for table in self._geometry.tables:
            blocks, last = leases.blocks[table.index][row], leases.filled.item(table.index, row)
            first = 0 if table.kind is TableKind.STATE else leases.owned.item(table.index, row)
            if table.kind is TableKind.PREFIX and first:
                self._pool.disuse(blocks[:first])
            if last > first:
                self._pool.drop(blocks[first:last], whole=table.kind is TableKind.STATE)
        for wish in record.wishes:
            if wish.outcome is Outcome.PENDING:
                self.close_wish(wish, Outcome.ENDED)
        leases.close(row)
        if record.anchor is not None:
            self._index.leave(record.anchor)


_NEGATIVE = "commit: sampled token ids must not be negative"
_TOO_MANY = "commit: more tokens computed than known: give the accepted draft tokens in `sampled`"


def _told(leases: int, sampled: ArrayLike | None, sampled_counts: ArrayLike | None) -> tuple[Ids, Longs | None]:
    """Sampled tokens of the leases of a step, int32 [n, m], and how many of each row are real, if that is given."""
    if sampled is None:
        return np.empty((leases, 0), dtype=np.int32), np.zeros(leases, dtype=np.int64)
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
