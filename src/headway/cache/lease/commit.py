"""The second half of a step: what was computed counts, and what it completed is published; and the end of a lease."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from headway.cache.index.edge import FAR, Match, Section
from headway.cache.index.usage import count
from headway.cache.lease.step import Rows, StateExport, Step
from headway.cache.lease.table import AHEAD, BROKEN, MOST_SAMPLED, STEPPING, Bookmark, Parts, Record
from headway.cache.lease.wish import Outcome, Wish
from headway.cache.policy.placement import Place
from headway.cache.shape.checks import longs
from headway.cache.shape.checks import tokens as as_tokens
from headway.cache.shape.geometry import Ids, Longs, TableKind
from headway.errors import LeaseError

__all__ = ["Committer"]


@dataclass(eq=False)
class Committer(Parts):
    """Commits steps and ends leases.

    Attributes:
        pin_seconds: How long a pin lasts if its prompt does not say.
    """

    pin_seconds: float

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
        leases = self.leases
        if len(step.rows) == 1 and leases.plain:
            row, count = step.rows.item(), done.item()
            at_end = step.starts.item() + count == leases.known.item(row)
            more = int(at_end) if told is None else told.item()
            eager = self._note_one(step, count, tokens[0, :more].tolist())
        else:
            eager = self._note(step, done, tokens, told)
        self._complete(step, eager, step.rows[done < step.counts] if counts is not None else step.rows[:0])

    def commit_one(self, step: Step, count: int, sampled: Sequence[int]) -> None:
        """See `PrefixCache.commit_one`."""
        granted = step.counts.item()
        if not 0 <= count <= granted:
            raise LeaseError(f"commit: count must be 0 to step.counts, which is {granted}, not {count}")
        if len(sampled) > MOST_SAMPLED or max(sampled, default=0) > _LARGEST:
            raise LeaseError(f"commit: sampled must be at most {MOST_SAMPLED} tokens that fit into 32 bits")
        self._complete(step, self._note_one(step, count, sampled), step.rows if count < granted else step.rows[:0])

    def _complete(self, step: Step, eager: list[tuple[int, int, int]], short: Rows) -> None:
        """Publish what a step completed; of leases that fall `short` of it, undo the newer step."""
        leases = self.leases
        if leases.steps > 1 and len(short):
            leases.planned[short] = leases.computed[short]
            self._undo_second(short[leases.phase[short] == STEPPING])
        # What makes more known may evict, so all of that comes before the first word about what is kept.
        full = [self._enter_answer(row, computed) for row, _, computed in eager]
        for (row, start, computed), one in zip(eager, full, strict=True):
            self._commit_one(row, start, computed, full=one)
        self._drop_exports(step.exports)  # of rows whose tokens were rejected before the place: the state is not of it
        leases.under_way.pop(step.serial, None)

    def _undo_second(self, rows: Rows) -> None:
        """Take leases whose older step was cut short or failed out of the newer one. One step is under way less."""
        leases = self.leases
        for row in rows.tolist():
            self._leave_step(leases.under_way[leases.newest.item(row)], row)
        leases.phase[rows] -= 1

    def _leave_step(self, step: Step, row: int) -> None:
        """Take a lease out of a step; one that nobody takes part in is not under way."""
        step.counts[step.rows == row] = 0
        self._drop_exports([export for export in step.exports if export.row == row])
        step.exports = tuple(export for export in step.exports if export.row != row)
        if not step.counts.any():
            del self.leases.under_way[step.serial]

    def _note_one(self, step: Step, count: int, sampled: Sequence[int]) -> list[tuple[int, int, int]]:
        """`_note` for one row, with plain numbers, which is faster for it than arrays."""
        if step.counts.item() == 0:
            return []
        leases, row, start = self.leases, step.rows.item(), step.starts.item()
        leases.check_step(step.serial, step.rows, step.starts)
        computed, known, more = start + count, leases.known.item(row), len(sampled)
        if computed > known + more:
            raise LeaseError(_TOO_MANY)
        if more and min(sampled) < 0:
            raise LeaseError(_NEGATIVE)
        size = leases.tail_size.item(row) + more
        if more:
            leases.tail[size - more : size, row] = sampled
            leases.tail_size[row], leases.known[row] = size, known + more
        leases.computed[row] = computed
        leases.end(row)
        return [(row, start, computed)] if computed >= leases.eager.item(row) or size > leases.stretch else []

    def _note(self, step: Step, done: Longs, tokens: Ids, told: Longs | None) -> list[tuple[int, int, int]]:
        """Write down what was computed.

        Returns:
            Row, start and computed tokens of the leases that have something to publish.
        """
        leases, rows, starts = self.leases, step.rows, step.starts
        if np.count_nonzero(step.counts) < len(rows):
            granted = step.counts > 0
            rows, starts, done, tokens = rows[granted], starts[granted], done[granted], tokens[granted]
            told = None if told is None else told[granted]
        if len(rows) == 0:
            return []
        leases.check_step(step.serial, rows, starts)
        computed, known = starts + done, leases.known[rows]
        more = (computed == known).astype(np.int64) if told is None else told
        if np.count_nonzero(computed > known + more):
            raise LeaseError(_TOO_MANY)
        wrong = tokens < 0
        if np.count_nonzero(wrong) and (np.arange(tokens.shape[1]) < more[:, None])[wrong].any():
            raise LeaseError(_NEGATIVE)
        self._append(rows, tokens, more)
        leases.known[rows] = known + more
        leases.computed[rows] = computed
        leases.end(rows)
        eager = ((computed >= leases.eager[rows]) | (leases.tail_size[rows] > leases.stretch)).nonzero()[0].tolist()
        return [(rows.item(i), starts.item(i), computed.item(i)) for i in eager]

    def _append(self, rows: Rows, tokens: Ids, counts: Longs) -> None:
        leases = self.leases
        for column in range(tokens.shape[1]):
            more = counts > column
            who, token = rows, tokens[:, column]
            if np.count_nonzero(more) < len(rows):
                who, token = rows[more], token[more]
            size = leases.tail_size[who]
            leases.tail[size, who] = token
            leases.tail_size[who] = size + 1

    def _enter_answer(self, row: int, computed: int) -> bool:
        """Enter what has gathered of an answer if that fills a stretch, or a checkpoint is due. Returns if it does."""
        leases, record = self.leases, self.leases.record(row)
        full, anchor = leases.tail_size.item(row) >= leases.stretch, record.anchor
        if anchor is not None and record.published:
            if full or (record.plan and anchor.position < computed and record.plan[0].position <= computed):
                self.flush(row, record)
        elif full:
            leases.tail_size[row] = 0
        return full

    def _commit_one(self, row: int, start: int, computed: int, *, full: bool) -> None:
        leases, record = self.leases, self.leases.record(row)
        if computed > start and not record.restored:
            self._release_sources(record)
            record.restored = True
        if record.published and (computed > start or full):
            self._publish_step(row, start, computed, record, full=full)
        if self.geometry.local and computed - start > 1:
            self.pool.drop_repeated(leases.drop_behind(np.array([row]), np.array([computed])))
        self.set_due(row, computed, record)

    def _publish_step(self, row: int, start: int, computed: int, record: Record, *, full: bool) -> None:
        """Make known and publish what a step of one lease completed."""
        anchor, plan = record.anchor, record.plan
        assert anchor is not None
        known = start < max(len(record.prompt.tokens), anchor.position)
        if known:
            self.index.tree.mark_computed(anchor.edge, start, min(computed, anchor.position))
        if self.index.floats and (full or known):
            self._publish_floating(row, min(computed, anchor.position), record)
        while plan and plan[0].position <= computed:
            place = plan.pop(0)
            export = record.exports.pop(place.position, None)
            if export is not None or self.geometry.state_table is None:
                state = export.destination if export else None
                if not self._take_checkpoint(row, place.position, place.kind, state, record) and state is not None:
                    self.pool.drop(state, whole=True)
            self.grant_wishes(record, place.position, Outcome.NO_ROOM)

        passed = record.passed
        while passed and passed[0].position <= min(computed, anchor.position):
            place = passed.pop(0)
            self.index.pass_over(record.place(place.position), place.kind)

    def _publish_floating(self, row: int, position: int, record: Record) -> None:
        """Make the path of a lease resident up to `position` (models that can resume anywhere)."""
        assert record.anchor is not None
        if position > record.resident or self.index.tree.frontier(record.anchor.edge, position) < position:
            self._publish(row, position, record)
            record.resident = position
        self.grant_wishes(record, position, Outcome.NO_ROOM)

    def _publish(self, row: int, position: int, record: Record) -> Match:
        """Make the path of a lease resident up to `position` (all computed). Returns the place.

        What is resident already is taken over by the lease, whose own copies are freed: one copy is left. A lease that
        keeps its own blocks shares them instead of giving them away, and takes none over.
        """
        leases, tree, anchor = self.leases, self.index.tree, record.anchor
        assert anchor is not None
        at = record.place(position)
        frontier = tree.frontier(at.edge, position)
        for i, table in enumerate(() if record.own_blocks else self.geometry.prefix_tables):
            owned, full = leases.owned.item(table.index, row), frontier // table.span
            if full > owned:
                blocks = leases.blocks[table.index][row, owned:full]
                mine, theirs = blocks.copy(), tree.path_ids(at.edge, i, owned, full)
                self.pool.use(theirs)
                blocks[:] = theirs
                self.pool.drop(mine)
            leases.owned[table.index, row] = full = max(owned, position // table.span)
            anchor.held = max(anchor.held, full * table.span)
        rows = [leases.blocks[table.index][row] for table in self.geometry.prefix_tables]
        self.index.publish(at, rows, given=not record.own_blocks, past=record.past_at(position))
        return at

    def _take_checkpoint(self, row: int, position: int, kind: str, state: Ids | None, record: Record) -> bool:
        """Publish the path of a lease up to `position` and keep a checkpoint there.

        Args:
            row: The lease, which still holds its windows and chunks at `position`.
            position: Tokens before the checkpoint; all computed.
            kind: Kind of placement.
            state: Blocks of the state after `position` tokens, which the lease holds and hands over (None: no states).
            record: The lease's record.

        Returns:
            False if one was there already, or not all tokens on which its entries depend are known yet; then `state`
            stays the lease's.
        """
        if record.anchor is None or position > record.anchor.position:
            return False
        at = self._publish(row, position, record)
        if at.edge.checkpoint_at(position) is not None:
            return False
        sections, spare = [], False
        for table in self.geometry.tail_tables:
            if table.kind is TableKind.STATE:
                assert state is not None
                self.pool.disuse(state, whole=True)
                sections.append(Section(0, state, whole=True))
                continue
            blocks, owned = self.leases.blocks[table.index][row], self.leases.owned.item(table.index, row)
            held = Section(0, blocks).part(table, position)
            if table.kind is TableKind.WINDOW and owned < held.first and len(held.ids):
                held, spare = Section(owned, blocks[owned : -(-position // table.span)]), True
            self.pool.share(held.ids)
            sections.append(Section(held.first, held.ids.copy()))
        past = record.past_at(position)
        self.index.take_checkpoint(at, kind, tuple(sections), spare=spare, floor=record.floor, past=past)
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
        edge = record.place(wish.position).edge if 0 < wish.position <= anchor.position else None
        if edge is None or edge.checkpoint_at(wish.position) is None:
            return missing
        if wish.kind == "breakpoint":
            return Outcome.KEPT
        seconds = self.pin_seconds if record.prompt.pin_seconds is None else record.prompt.pin_seconds
        shares = not record.own_blocks
        pinned = self.index.pin(edge, wish.position, seconds, len(record.prompt.tokens), shares=shares)
        return Outcome.KEPT if pinned else Outcome.PIN_SHARE

    def close_wish(self, wish: Wish, outcome: Outcome) -> None:
        """Say what became of a wish, once."""
        wish.outcome = outcome
        if outcome is not Outcome.KEPT:
            count(self.index.usage.counters.refused, f"{wish.kind}:{outcome.value}")

    def flush(self, row: int, record: Record) -> None:
        """Enter the answer tokens that have gathered in a row in the tree, as far as their entries are computed.

        All of them, where more are told ahead than a row should hold.
        """
        leases, anchor = self.leases, record.anchor
        computed, gathered = leases.computed.item(row), leases.tail_size.item(row)
        keep = max(0, leases.known.item(row) - computed - self.geometry.lookahead)
        size = gathered if keep > leases.stretch else gathered - keep
        if size > 0:
            assert anchor is not None
            start, data = anchor.position, record.rest + leases.tail[:size, row].tobytes()
            self.index.advance(anchor, data, computed)
            record.rest = data[4 * (anchor.position - start) :]
            leases.tail[: gathered - size, row] = leases.tail[size:gathered, row].copy()
            leases.tail_size[row] = gathered - size

    def set_due(self, row: int, computed: int, record: Record) -> None:
        """Set the position of the next checkpoint of a lease, and from where on it wants attention."""
        leases, plan = self.leases, record.plan
        interval = self.placement.interval if record.published and not self.index.floats else 0
        while interval and len(plan) < leases.steps:
            place = self.placement.next_interval(max([computed, *(one.position for one in plan[-1:])]))
            assert place is not None
            plan.append(Place(place, f"interval:{interval}"))
        leases.due[row] = due = plan[0].position if plan else FAR
        if record.restored:
            leases.calm[row] = min(leases.room(row), due - 1)
            told = max(len(record.prompt.tokens), record.anchor.position if record.anchor else 0)
            full = computed + leases.stretch - leases.tail_size.item(row)
            leases.eager[row] = 0 if computed < told else min(due, full)

    def fail(self, step: Step, which: ArrayLike | None = None) -> None:
        """See `PrefixCache.fail`."""
        leases, granted = self.leases, step.counts > 0
        if which is not None:
            granted &= np.isin(step.rows, longs("rows", which))
        rows = step.rows[granted]
        if len(rows):
            leases.check_step(step.serial, rows, step.starts[granted])
        self._undo_second(rows[leases.phase[rows] == AHEAD])
        if which is None:
            leases.under_way.pop(step.serial, None)
        else:
            for row in rows.tolist():
                self._leave_step(step, row)
        leases.phase[rows] = BROKEN
        for row in rows.tolist():
            record = leases.record(row)
            if record.anchor is not None:
                self.index.retract(record.anchor, leases.computed.item(row))

    # ---- the end of a lease

    def bookmark(self, row: int) -> None:
        """See `PrefixCache.bookmark`."""
        leases, record = self.leases, self.leases.record(row)
        position, mark = leases.computed.item(row), record.bookmark
        idle = self.index.floats or not record.published or not record.restored
        if idle or (mark is not None and mark.position == position):
            return
        blocks = self.geometry.state_blocks
        if mark is None and not self.index.make_room(blocks):
            return
        state = self.pool.take(blocks) if mark is None else mark.state
        record.bookmark = Bookmark(position, state, due=blocks > 0)
        leases.bookmarked[row], leases.calm[row] = position, 0

    def unmark(self, row: int) -> None:
        """See `PrefixCache.unmark`."""
        if self.drop_bookmark(row):
            self.leases.calm[row] = 0

    def _release_sources(self, record: Record) -> None:
        """Let go of the blocks that the first step copied from."""
        for table, source in record.sources:
            self.pool.drop(source, whole=table.kind is TableKind.STATE)
        record.sources.clear()

    def _drop_exports(self, exports: Iterable[StateExport]) -> None:
        """Free the states of exports that became no checkpoints."""
        for export in exports:
            if self.leases.record(export.row).exports.pop(export.position, None) is not None:
                self.pool.drop(export.destination, whole=True)

    def donate(self, row: int, kind: str, reach: int) -> None:
        """Publish what a lease has computed; its running state becomes a checkpoint of `kind`.

        Where it stands behind `reach`, the state at its bookmark does instead, if that does not.
        """
        leases, record = self.leases, self.leases.record(row)
        computed, mark = leases.computed.item(row), record.bookmark
        if not record.published or not record.restored or computed == 0:
            return
        self.flush(row, record)
        if self.index.floats:
            assert record.anchor is not None
            self._publish_floating(row, min(computed, record.anchor.position), record)
            return
        table = self.geometry.state_table
        if reach < computed and mark is not None and mark.position <= reach and not mark.due:
            position, state = (mark.position, mark.state) if table else (reach, None)
            if self._take_checkpoint(row, position, kind, state, record):
                record.bookmark = None
            return
        state = leases.blocks[table.index][row].copy() if table else None
        if self._take_checkpoint(row, computed, kind, state, record) and table:
            leases.filled[table.index, row] = 0

    def detach(self, row: int) -> None:
        """Make a lease the holder of all that it uses; it goes on and publishes nothing more."""
        leases, record = self.leases, self.leases.record(row)
        self.drop_bookmark(row)
        for table in self.geometry.prefix_tables:
            self.pool.share(leases.blocks[table.index][row, : leases.owned.item(table.index, row)])
            leases.owned[table.index, row] = 0
        if record.anchor is not None:
            self.index.tree.detach(record.anchor)
        record.anchor, record.published = None, False
        record.plan.clear()
        self.grant_wishes(record, leases.known.item(row), Outcome.NOT_STORED)
        self.set_due(row, 0, record)

    def kept_twice(self, row: int) -> int:
        """Blocks that the path of a lease keeps for the sake of another table, where the lease has its own copy."""
        record = self.leases.record(row)
        if record.anchor is None or not record.anchor.held:
            return 0
        held, edge = record.anchor.held, record.place(record.anchor.held).edge
        inside = [(i, t, held // t.span) for i, t in enumerate(self.geometry.prefix_tables) if held % t.span]
        ids = [self.index.tree.path_ids(edge, i, block, block + 1).item() for i, _, block in inside]
        rows = [self.leases.blocks[table.index].item(row, block) for _, table, block in inside]
        return sum(one != other for one, other in zip(ids, rows, strict=True))

    def sequence(self, row: int) -> bytes:
        """All tokens of a lease's sequence that are told so far, as bytes of int32."""
        leases, record = self.leases, self.leases.record(row)
        answer = leases.tail[: leases.tail_size.item(row), row].tobytes()
        if record.anchor is None or not record.published:
            return record.prompt.data + answer
        return record.anchor.edge.prefix(record.anchor.position, 0).tobytes() + record.rest + answer

    def close(self, row: int, *, over: bool, answered: bool) -> None:
        """Release all that a lease holds and free its row; `over`: its request is, `answered`: to its end."""
        leases, record = self.leases, self.leases.record(row)
        self._release_sources(record)
        self.drop_bookmark(row)
        if record.exports:
            self._drop_exports(list(record.exports.values()))
        for table in self.geometry.tables:
            blocks, last = leases.blocks[table.index][row], leases.filled.item(table.index, row)
            first = leases.owned.item(table.index, row)
            if table.kind is TableKind.PREFIX and first:
                self.pool.disuse(blocks[:first])
            if last > first:
                self.pool.drop(blocks[first:last], whole=table.kind is TableKind.STATE)
        for wish in record.wishes:
            if wish.outcome is Outcome.PENDING:
                self.close_wish(wish, Outcome.ENDED)
        computed = leases.computed.item(row)
        leases.close(row)
        if record.anchor is None:
            return
        if over and record.published and record.asked:
            self._tell_ended(record, computed, answered=answered)
        self.index.leave(record.anchor)

    def _tell_ended(self, record: Record, computed: int, *, answered: bool) -> None:
        """Let the index know where a request that is over could have resumed, and could leave checkpoints."""
        anchor, known = record.anchor, record.hit.at.position
        assert anchor is not None
        total = min(computed, anchor.position)
        places = [place for place in record.places if place.position <= total]
        if answered and self.placement.answer_end and (not places or places[-1].position < total):
            places.append(Place(total, "answer_end"))
        limit = min(known, len(record.prompt.tokens) - 1, total)
        self.index.ended(anchor, limit, total, places, goes_on=record.goes_on)


_LARGEST = np.iinfo(np.int32).max
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
