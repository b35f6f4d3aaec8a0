"""The start of a lease: its path enters the index, its checkpoints are planned, and it holds what it resumes from."""

from __future__ import annotations

from headway.cache.index.edge import Match
from headway.cache.index.explain import Explanation
from headway.cache.index.hit import Hit
from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.lease.commit import Committer
from headway.cache.lease.table import LeaseTable, Record
from headway.cache.lease.wish import Outcome, Wish
from headway.cache.policy.placement import Place, Placement
from headway.cache.shape.geometry import CacheGeometry, TableKind
from headway.cache.shape.prompt import Prompt
from headway.cache.shape.spec import ComputeCost
from headway.errors import UnservableError

__all__ = ["Opener"]


class Opener:
    """Opens leases."""

    def __init__(
        self,
        geometry: CacheGeometry,
        pool: BlockPool,
        leases: LeaseTable,
        index: PrefixIndex,
        placement: Placement,
        committer: Committer,
        cost: ComputeCost,
    ) -> None:
        """Open leases in `leases`."""
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self._index = index
        self._placement = placement
        self._committer = committer
        self._cost = cost

    def open(self, hit: Hit, explanation: Explanation, *, own_blocks: bool) -> int:
        """Start a lease at `hit`, which is true now. Returns its row."""
        record = self._record(hit, explanation)
        record.own_blocks = own_blocks
        row = self._leases.open(record, len(hit.prompt.tokens), hit.tokens)
        if hit.tokens:
            self._take_hit(row, record, hit)
        self._committer.set_due(row, hit.tokens)
        self._committer.grant_wishes(record, hit.tokens, Outcome.NO_CHECKPOINT)
        return row

    def _record(self, hit: Hit, explanation: Explanation) -> Record:
        """Enter the path of a request, and plan its checkpoints."""
        prompt, at, index = hit.prompt, hit.at, self._index
        length = len(prompt.tokens)
        if prompt.no_store:
            anchor = index.tree.attach(index.place(prompt.namespace, at, hit.tokens))
            return Record(prompt, hit, explanation, anchor, b"", False, [], self._wishes(prompt, None))
        index.usage.miss(at, hit.tokens, min(at.position, length - 1))
        plan = [] if index.floats else self._plan(hit)
        place, anchor = index.enter(prompt.namespace, at, prompt.data[4 * at.position :])
        rest = prompt.data[4 * place.position :]
        return Record(prompt, hit, explanation, anchor, rest, True, plan, self._wishes(prompt, plan))

    def _plan(self, hit: Hit) -> list[Place]:
        prompt, at, length = hit.prompt, hit.at, len(hit.prompt.tokens)
        parted = 0 < at.position < length - self._geometry.lookahead and (
            at.position < at.edge.end or bool(at.edge.children)
        )
        return self._placement.plan(
            length,
            hit.tokens,
            junction=at.position if parted else None,
            breakpoints=prompt.breakpoints,
            boundaries=self._admitted(prompt, hit.tokens),
            pin=prompt.pin,
        )

    def _wishes(self, prompt: Prompt, plan: list[Place] | None) -> tuple[Wish, ...]:
        """The wishes of a prompt; `plan` is None where nothing of it will be stored."""
        if not prompt.breakpoints and not prompt.pin:
            return ()
        asked = [("breakpoint", position) for position in prompt.breakpoints]
        asked += [("pin", prompt.pin)] if prompt.pin else []
        floor = (lambda position: position) if self._index.floats else self._placement.floor
        last = len(prompt.tokens) - max(1, self._geometry.lookahead)
        wishes = tuple(Wish(kind, position, floor(min(position, last))) for kind, position in asked)
        placed = self._placement.breakpoints or self._index.floats
        for wish in wishes:
            if plan is None:
                self._committer.close_wish(wish, Outcome.NOT_STORED)
            elif wish.kind == "breakpoint" and not placed and all(place.position != wish.position for place in plan):
                self._committer.close_wish(wish, Outcome.NOT_PLACED)
        return wishes

    def _admitted(self, prompt: Prompt, hit: int) -> list[int]:
        """Message boundaries whose checkpoint is expected to be worth its memory."""
        blocks = sum(
            table.state_blocks or table.blocks_for(table.window or table.chunk) for table in self._geometry.tail_tables
        )
        worth = self._index.usage.reuse.rate("boundary") / max(1, blocks)
        price = self._index.policy.price
        inner = [p for p in self._placement.telling(prompt.boundaries) if hit < p < len(prompt.tokens)]
        return [p for p in inner if worth * self._cost.between(0, p) >= price]

    def _take_hit(self, row: int, record: Record, hit: Hit) -> None:
        """Fill the block tables with what the hit gives, and hold what the first step copies from."""
        leases, checkpoint = self._leases, hit.checkpoint
        assert checkpoint is not None
        assert record.anchor is not None
        at = Match(Match(record.anchor.edge, record.anchor.position).edge_at(hit.tokens), hit.tokens)
        for i, table in enumerate(self._geometry.prefix_tables):
            full, partial = divmod(hit.tokens, table.span)
            record.anchor.held = max(record.anchor.held, hit.tokens - partial)
            ids = self._index.tree.path_ids(at.edge, i, 0, full + (partial > 0))
            leases.blocks[table.index][row, :full] = ids[:full]
            self._pool.use(ids)
            if partial:
                record.sources.append((table, ids[full:]))
                self._pool.share_one(ids.item(full))
        for section, table in zip(checkpoint.sections, self._geometry.tail_tables, strict=True):
            if table.kind is TableKind.STATE:
                record.sources.append((table, section.ids))
                self._pool.hold(section.ids, whole=True)
                continue
            full = max(0, hit.tokens // table.span - section.first)
            shared = section.ids[:full]
            self._pool.hold(section.ids)
            leases.blocks[table.index][row, section.first : section.first + len(shared)] = shared
            leases.filled[table.index, row] += len(shared)
            if len(section.ids) > full:
                record.sources.append((table, section.ids[full:]))
        self._index.resume(at, hit.tokens, checkpoint)

    def admit(self, hit: Hit) -> bool:
        """Whether the pool can hold the prompt of `hit` together with what its first step copies from.

        Raises:
            UnservableError: It could not hold the prompt even without the hit: says what it needs and what there is.
        """
        self._index.reclaim.expire_pins()
        length, pinned = len(hit.prompt.tokens), self._pool.pinned
        if self._geometry.fits_anyway(self._pool.blocks - pinned, length) or (
            hit.tokens and self._fits(hit, hit.tokens)
        ):
            return True
        if self._fits(hit, 0):
            return not hit.tokens
        need = self._geometry.peak_blocks(length)
        pins = f" ({pinned} are pinned)" if pinned else ""
        raise UnservableError(
            f"a prompt of {length} tokens needs {need} blocks at once and the pool has {self._pool.blocks}{pins}: "
            f"shorten the prompt or give the cache more memory",
            need,
            self._pool.blocks,
        )

    def _fits(self, hit: Hit, start: int) -> bool:
        """Whether the prompt of `hit`, alone but for pins, can be computed from `start` (the hit or 0) on."""
        geometry, available, first = self._geometry, self._pool.blocks, self._geometry.resume_blocks(start)
        if self._pool.pinned:
            available -= self._pool.pinned
            if start:
                available += self._index.reclaim.pins.held_within(hit.at.edge_at(start), start)
            if start and hit.checkpoint and hit.checkpoint.pinned:  # what is copied of the checkpoint stays anyway
                first -= sum(table.blocks_copied(start) for table in geometry.tail_tables)
        length = len(hit.prompt.tokens)
        return first <= available and geometry.fits(available - geometry.blocks_kept_twice(start), length, start)
