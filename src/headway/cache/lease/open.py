"""The start of a lease: its path enters the index, its checkpoints are planned, and it holds what it resumes from."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np

from headway.cache.index.below import Below, Past
from headway.cache.index.edge import Checkpoint, Match, Section
from headway.cache.index.explain import Explanation
from headway.cache.index.hit import Hit
from headway.cache.lease.commit import Committer
from headway.cache.lease.table import Parts, Record
from headway.cache.lease.wish import Outcome, Wish
from headway.cache.policy.placement import Place
from headway.cache.shape.prompt import Prompt
from headway.cache.shape.spec import ComputeCost
from headway.errors import LeaseError, UnservableError

__all__ = ["Opener"]

_NEAR = 16
"""Tokens that are not worth a checkpoint more where one is planned that far before the place."""


@dataclass(eq=False)
class Opener(Parts):
    """Opens leases.

    Attributes:
        committer: Who grants their wishes.
        cost: What computing tokens costs.
    """

    committer: Committer
    cost: ComputeCost

    def open(
        self, hit: Hit, explanation: Explanation, below: Below, *, own_blocks: bool = False, asked: bool = True
    ) -> int:
        """Start a lease at `hit`, which is true now, to read what is `below` in its first step. Returns its row."""
        if asked and not hit.prompt.no_store:
            reused, last = max(hit.tokens, below.position), len(hit.prompt.tokens) - 1
            self.index.usage.miss(hit.at, reused, min(hit.at.position, last))
        record = self._record(hit, explanation, own_blocks)
        record.asked = asked
        if below.position:
            self._plan_load(record, below)
        row = self.leases.open(record, len(hit.prompt.tokens), hit.tokens)
        if hit.tokens:
            self._take_hit(row, record, hit)
        self.index.reclaim.keep_limits()
        self.committer.set_due(row, hit.tokens, record)
        passed = below.position - 1 if below.position and not self.index.floats else hit.tokens
        self.committer.grant_wishes(record, passed, Outcome.NO_CHECKPOINT)
        return row

    def _plan_load(self, record: Record, below: Below) -> None:
        """Let the first step of a request end at what is read back, and keep nothing before it: nothing is computed."""
        position = below.position
        record.loading, record.floor, record.past = position, below.floor, below.past
        if below.past is not None and record.asked:
            record.past = Past(below.past.uses + 1, below.past.born, self.index.usage.learned.ticks, below.past.base)
        record.passed = [place for place in record.passed if place.position > position]
        if record.published and not self.index.floats:
            record.plan = [place for place in record.plan if place.position > position]
            record.plan.insert(0, Place(position, below.kind))

    def _record(self, hit: Hit, explanation: Explanation, own_blocks: bool) -> Record:
        """Enter the path of a request, and plan its checkpoints."""
        prompt, at, index = hit.prompt, hit.at, self.index
        plan: list[Place] = []
        places: list[Place] = []
        passed: list[Place] = []
        goes_on = hit.at.goes_on(len(prompt.tokens))  # now: what follows is entered below
        if prompt.no_store:
            anchor, rest = index.tree.attach(index.place(prompt.namespace, at, hit.tokens)), b""
        else:
            if not index.floats:
                plan, places, passed = self._plan(hit)
            place, anchor = index.enter(prompt.namespace, at, prompt.data[4 * at.position :])
            rest = prompt.data[4 * place.position :]
        wishes = self._wishes(prompt, plan) if prompt.breakpoints or prompt.pin else ()
        record = Record(prompt, hit, explanation, anchor, rest, not prompt.no_store, plan, wishes)
        record.passed, record.own_blocks, record.places, record.goes_on = passed, own_blocks, places, goes_on
        return record

    def _plan(self, hit: Hit) -> tuple[list[Place], list[Place], list[Place]]:
        """What becomes of the places of a request.

        Returns:
            Where it should leave checkpoints, where it could whatever its hit and the policy, and the message
            boundaries that it passes over; all ascending.
        """
        prompt, at = hit.prompt, hit.at
        parted = 0 < at.position < len(prompt.tokens) - self.geometry.lookahead and (
            at.position < at.edge.end or bool(at.edge.children)
        )
        kept = hit.checkpoint is None or hit.checkpoint.position == hit.tokens
        start = hit.tokens if kept else hit.tokens - 1  # where one from behind serves, one can be kept at once
        ends = self._message_ends(prompt, start) if prompt.boundaries else []
        admitted = self._admitted(ends, start)
        places = self.placement.plan(prompt, 0, at.position if parted else None, admitted)
        without = self.index.reclaim.keep.policy.without
        plan = [p for p in places if p.position > start and p.kind.partition(":")[0] not in without]
        planned = {place.position for place in plan}
        return plan, places, [place for place in ends if place.position not in planned]

    def _message_ends(self, prompt: Prompt, hit: int) -> list[Place]:
        """Where message boundaries behind a hit get a checkpoint, ascending; of those within one block, the first."""
        length, least, ends, last = len(prompt.tokens), self.geometry.least_span, [], hit
        for boundary, kind in sorted(self.placement.telling(prompt.boundaries)):
            position = self.placement.place(length, boundary)
            if hit < position and boundary < length and (kind == "boundary" or position - last >= least):
                ends.append(Place(position, kind))
                last = position
        return ends

    def reach(self, hit: Hit, row: int) -> int:
        """See `PrefixCache.reach`."""
        record, first = self.leases.record(row), self._settled(row)
        if record.anchor is None or not record.published:
            return 0
        last = min(hit.at.common(record.anchor), len(hit.prompt.tokens) - 1)
        if self.index.floats:
            return last if last > first else 0
        planned = max([place.position for place in record.plan if place.position <= last], default=0)
        wanted = self.placement.floor(last) if self.placement.junctions and not hit.prompt.no_store else 0
        return wanted if wanted > first and wanted > planned + _NEAR else planned

    def keep_at(self, row: int, position: int) -> None:
        """See `PrefixCache.keep_at`."""
        record, floats = self.leases.record(row), self.index.floats
        if any(place.position == position for place in record.plan):
            return
        end = record.anchor.position if record.anchor is not None and record.published else 0
        placeable = floats or self.placement.floor(position) == position
        if not (self._settled(row) < position <= end and placeable):
            raise LeaseError(
                f"keep_at: row {row} will not stand at position {position}, or keeps nothing: "
                f"give what `reach` returns, before the next step of that lease"
            )
        if not floats:
            insort(record.plan, Place(position, "junction"))
            self.committer.set_due(row, self.leases.computed.item(row), record)

    def _settled(self, row: int) -> int:
        """The position up to which it is too late to ask a lease for a checkpoint: a step exports what it was told."""
        ends = [self.leases.computed.item(row)]
        if self.geometry.state_table is not None:
            for step in self.leases.under_way.values():
                ends += (step.starts + step.counts)[step.rows == row].tolist()
        return max(ends)

    def _wishes(self, prompt: Prompt, plan: list[Place]) -> tuple[Wish, ...]:
        """The wishes of a prompt."""
        asked = [("breakpoint", position) for position in prompt.breakpoints]
        asked += [("pin", prompt.pin)] if prompt.pin else []
        last = len(prompt.tokens) - max(1, self.geometry.lookahead)
        floor = (lambda position: position) if self.index.floats else self.placement.floor
        wishes = tuple(Wish(kind, position, floor(min(position, last))) for kind, position in asked)
        placed = self.placement.breakpoints or self.index.floats
        for wish in wishes:
            if prompt.no_store:
                self.committer.close_wish(wish, Outcome.NOT_STORED)
            elif wish.kind == "breakpoint" and not placed and all(place.position != wish.position for place in plan):
                self.committer.close_wish(wish, Outcome.NOT_PLACED)
        return wishes

    def _admitted(self, ends: list[Place], hit: int) -> list[Place]:
        """Those message boundaries behind a hit that are expected to be worth their memory: the first, and two others.

        Of the others one counts for what it saves behind the hit, or the first.
        """
        if not ends:
            return []
        blocks = max(1, self.geometry.checkpoint_blocks)
        rate, price = self.index.usage.reuse.rate, self.index.reclaim.keep.policy.price

        def worth(place: Place, base: int) -> float:
            return rate(place.kind) * self.cost.between(base, place.position) / blocks

        first = [place for place in ends if place.kind == "boundary" and worth(place, 0) >= price]
        base = max([hit, *(place.position for place in first)])
        others = [(worth(place, base), place) for place in ends if place.kind != "boundary"]
        return first + [place for value, place in sorted(others, reverse=True)[:2] if value >= price]

    def _take_hit(self, row: int, record: Record, hit: Hit) -> None:
        """Fill the block tables with what the hit gives, and hold what the first step copies from."""
        leases, checkpoint = self.leases, hit.checkpoint
        assert checkpoint is not None
        assert record.anchor is not None
        at = record.place(hit.tokens)
        for i, table in enumerate(self.geometry.prefix_tables):
            full, partial = divmod(hit.tokens, table.span)
            record.anchor.held = max(record.anchor.held, hit.tokens - partial)
            ids = self.index.tree.path_ids(at.edge, i, 0, full + (partial > 0))
            leases.blocks[table.index][row, :full] = ids[:full]
            self.pool.use(ids)
            if partial:
                record.sources.append((table, ids[full:]))
                self.pool.share_one(ids.item(full))
        tables = () if record.loading else self.geometry.tail_tables  # what is read back has them
        parts = [section.part(table, hit.tokens) for section, table in zip(checkpoint.sections, tables, strict=False)]
        for used, table in zip(parts, tables, strict=True):
            self.pool.hold(used.ids, whole=used.whole)
            full = 0 if used.whole else hit.tokens // table.span - used.first
            if full:
                leases.blocks[table.index][row, used.first : used.first + full] = used.ids[:full]
                leases.filled[table.index, row] += full
            if len(used.ids) > full:
                record.sources.append((table, used.ids[full:]))
        record.floor = record.floor if record.loading else checkpoint.floor
        if record.plan and record.plan[0].position == hit.tokens:
            checkpoint = self._keep_here(at, record.plan.pop(0).kind, parts, record.floor)
        if record.asked:
            self.resume(hit, at, checkpoint, goes_on=record.goes_on)

    def resume(self, hit: Hit, at: Match, checkpoint: Checkpoint, *, goes_on: bool) -> None:
        """A request resumes at `hit`, which is the place `at`, by `checkpoint`; `goes_on` as in `Record`."""
        gone = next(hit.at.lost(hit.tokens, min(hit.at.position, len(hit.prompt.tokens) - 1)), None)
        self.index.resume(at, checkpoint, deepest=gone is None, goes_on=goes_on)

    def _keep_here(self, at: Match, kind: str, parts: list[Section], floor: int) -> Checkpoint:
        """Keep a checkpoint at `at`, which one behind it serves, by `parts` of its blocks. Returns it."""
        for part in parts:
            self.pool.share(part.ids)
        kept = tuple(Section(part.first, part.ids.copy()) for part in parts)
        return self.index.take_checkpoint(at, kind, kept, floor=floor)

    def demand(self, hit: Hit, tokens: int, step: int) -> int:
        """See `PrefixCache.demand`."""
        start, length, blocks = hit.tokens, tokens + self.leases.ahead, 0
        for table in self.geometry.tables:
            under_way = -(-step // table.span) if table.span else 0
            blocks += table.blocks_copied(start) + min(table.blocks_for(length), table.most_blocks(length) + under_way)
        for table in self.geometry.prefix_tables if start else ():
            shared = hit.blocks(table.index)[: start // table.span]
            blocks -= int(np.count_nonzero(self.pool.users[shared]))
        return blocks

    def admit(self, hit: Hit) -> bool:
        """Whether the pool can hold the prompt of `hit` together with what its first step copies from.

        Raises:
            UnservableError: It could not hold the prompt even without the hit: says what it needs and what there is.
        """
        self.index.reclaim.expire_pins()
        length, pinned = len(hit.prompt.tokens) + self.leases.ahead, self.pool.pinned
        if self.geometry.fits_anyway(self.pool.blocks - pinned, length) or (hit.tokens and self._fits(hit, hit.tokens)):
            return True
        if self._fits(hit, 0):
            return not hit.tokens
        need = self.geometry.peak_blocks(length)
        pins = f" ({pinned} are pinned)" if pinned else ""
        raise UnservableError(
            f"a prompt of {length} tokens needs {need} blocks at once and the pool has {self.pool.blocks}{pins}: "
            f"shorten the prompt or give the cache more memory",
            need,
            self.pool.blocks,
        )

    def _fits(self, hit: Hit, start: int) -> bool:
        """Whether the prompt of `hit`, alone but for pins, can be computed from `start` (the hit or 0) on."""
        geometry, available, first = self.geometry, self.pool.blocks, self.geometry.resume_blocks(start)
        if self.pool.pinned:
            available -= self.pool.pinned
            if start:
                available += self.index.reclaim.pins.held_within(hit.at.edge.edge_at(start), start)
            if start and hit.checkpoint and hit.checkpoint.pinned:  # what is copied of the checkpoint stays anyway
                first -= sum(table.blocks_copied(start) for table in geometry.tail_tables)
        length = len(hit.prompt.tokens) + self.leases.ahead
        return first <= available and geometry.fits(available - geometry.blocks_kept_twice(start), length, start)
