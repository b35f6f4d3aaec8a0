"""The start of a lease: its path enters the index, its checkpoints are planned, and it holds what it resumes from."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cache.index.explain import Explanation
from headway.cache.index.hit import Hit
from headway.cache.lease.commit import Committer
from headway.cache.lease.table import Parts, Record
from headway.cache.lease.wish import Outcome, Wish
from headway.cache.policy.placement import Place
from headway.cache.shape.geometry import TableKind
from headway.cache.shape.prompt import Prompt
from headway.cache.shape.spec import ComputeCost
from headway.errors import UnservableError

__all__ = ["Opener"]


@dataclass(eq=False)
class Opener(Parts):
    """Opens leases.

    Attributes:
        committer: Who grants their wishes.
        cost: What computing tokens costs.
    """

    committer: Committer
    cost: ComputeCost

    def open(self, hit: Hit, explanation: Explanation, *, own_blocks: bool) -> int:
        """Start a lease at `hit`, which is true now. Returns its row."""
        record = self._record(hit, explanation, own_blocks)
        row = self.leases.open(record, len(hit.prompt.tokens), hit.tokens)
        if hit.tokens:
            self._take_hit(row, record, hit)
        self.index.reclaim.keep_limits()
        self.committer.set_due(row, hit.tokens, record)
        self.committer.grant_wishes(record, hit.tokens, Outcome.NO_CHECKPOINT)
        return row

    def _record(self, hit: Hit, explanation: Explanation, own_blocks: bool) -> Record:
        """Enter the path of a request, and plan its checkpoints."""
        prompt, at, index = hit.prompt, hit.at, self.index
        if prompt.no_store:
            anchor, rest, plan = index.tree.attach(index.place(prompt.namespace, at, hit.tokens)), b"", []
        else:
            index.usage.miss(at, hit.tokens, min(at.position, len(prompt.tokens) - 1))
            plan = [] if index.floats else self._plan(hit)
            place, anchor = index.enter(prompt.namespace, at, prompt.data[4 * at.position :])
            rest = prompt.data[4 * place.position :]
        wishes = self._wishes(prompt, plan) if prompt.breakpoints or prompt.pin else ()
        return Record(prompt, hit, explanation, anchor, rest, not prompt.no_store, plan, wishes, own_blocks=own_blocks)

    def _plan(self, hit: Hit) -> list[Place]:
        prompt, at = hit.prompt, hit.at
        parted = 0 < at.position < len(prompt.tokens) - self.geometry.lookahead and (
            at.position < at.edge.end or bool(at.edge.children)
        )
        admitted = self._admitted(prompt, hit.tokens) if prompt.boundaries else []
        return self.placement.plan(prompt, hit.tokens, at.position if parted else None, admitted)

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

    def _admitted(self, prompt: Prompt, hit: int) -> list[int]:
        """Message boundaries whose checkpoint is expected to be worth its memory."""
        blocks = sum(table.blocks_for(table.window or table.chunk) for table in self.geometry.tail_tables)
        worth = self.index.usage.reuse.rate("boundary") / max(1, blocks)
        price = self.index.reclaim.keep.policy.price
        inner = [p for p in self.placement.telling(prompt.boundaries) if hit < p < len(prompt.tokens)]
        return [p for p in inner if worth * self.cost.between(0, p) >= price]

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
        for section, table in zip(checkpoint.sections, self.geometry.tail_tables, strict=True):
            if table.kind is TableKind.STATE:
                record.sources.append((table, section.ids))
                self.pool.hold(section.ids, whole=True)
                continue
            full = max(0, hit.tokens // table.span - section.first)
            shared = section.ids[:full]
            self.pool.hold(section.ids)
            leases.blocks[table.index][row, section.first : section.first + len(shared)] = shared
            leases.filled[table.index, row] += len(shared)
            if len(section.ids) > full:
                record.sources.append((table, section.ids[full:]))
        self.index.resume(at, hit.tokens, checkpoint)

    def admit(self, hit: Hit) -> bool:
        """Whether the pool can hold the prompt of `hit` together with what its first step copies from.

        Raises:
            UnservableError: It could not hold the prompt even without the hit: says what it needs and what there is.
        """
        self.index.reclaim.expire_pins()
        length, pinned = len(hit.prompt.tokens), self.pool.pinned
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
        length = len(hit.prompt.tokens)
        return first <= available and geometry.fits(available - geometry.blocks_kept_twice(start), length, start)
