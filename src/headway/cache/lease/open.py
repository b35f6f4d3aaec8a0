"""The start of a lease: its path enters the index, its checkpoints are planned, and it holds what it resumes from."""

from __future__ import annotations

from dataclasses import replace

from headway.cache.index.explain import Explanation
from headway.cache.index.hit import Hit
from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.index.tree import Match
from headway.cache.lease.commit import Committer
from headway.cache.lease.table import LeaseTable, Record
from headway.cache.policy.placement import Placement
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

    def open(self, hit: Hit, explanation: Explanation) -> int:
        """Start a lease at `hit`, which is true now. Returns its row."""
        record = self._record(hit, explanation)
        row = self._leases.open(record, len(hit.prompt.tokens), hit.tokens)
        self._index.attach(row, record.at)
        if hit.at.node is not record.at.node:
            self._index.settle(hit.at.node)
        if hit.tokens:
            self._take_hit(row, record, hit)
        self._committer.set_due(row, hit.tokens)
        self._committer.try_pin(row, hit.tokens)
        return row

    def _record(self, hit: Hit, explanation: Explanation) -> Record:
        prompt, at = hit.prompt, hit.at
        length = len(prompt.tokens)
        published = not prompt.no_store
        if not published:
            place = self._index.place(prompt.namespace, at, hit.tokens)
            return Record(prompt, hit, explanation, place, prompt.tokens[:0], False, [])
        parted = 0 < at.position < length - self._geometry.lookahead and (
            at.position < at.node.end or bool(at.node.children)
        )
        pin = min(prompt.pin, length - max(1, self._geometry.lookahead)) if prompt.pin else 0
        plan = []
        self._index.reclaim.missed(at, hit.tokens, min(at.position, length - 1))
        if self._index.tail:
            plan = self._placement.plan(
                length,
                hit.tokens,
                junction=at.position if parted else None,
                breakpoints=prompt.breakpoints,
                boundaries=self._admitted(prompt, hit.tokens),
                pin=pin,
            )
        if hit.matched == 0:
            at = Match(self._index.root(prompt.namespace), 0)
        at = self._index.enter(at, prompt.tokens[at.position :])
        rest = prompt.tokens[at.position :]
        return Record(
            prompt, hit, explanation, at, rest, True, plan, pin=self._placement.floor(pin) if self._index.tail else pin
        )

    def _admitted(self, prompt: Prompt, hit: int) -> list[int]:
        """Message boundaries whose checkpoint is expected to be worth its memory."""
        blocks = sum(
            table.state_blocks or table.blocks_for(table.window or table.chunk) for table in self._geometry.tail_tables
        )
        worth = self._index.reclaim.reuse.rate("boundary") / max(1, blocks)
        price = self._index.reclaim.policy.price
        inner = [p for p in self._placement.telling(prompt.boundaries) if hit < p < len(prompt.tokens)]
        return [p for p in inner if worth * self._cost.between(0, p) >= price]

    def _take_hit(self, row: int, record: Record, hit: Hit) -> None:
        """Fill the block tables with what the hit gives, and hold what the first step copies from."""
        leases, checkpoint = self._leases, hit.checkpoint
        for i, table in enumerate(self._geometry.prefix_tables):
            full, blocks = hit.tokens // table.span, leases.blocks[table.index][row]
            partial = hit.tokens % table.span != 0
            self._index.residency.path_ids(record.at, i, 0, blocks[: full + partial])
            if partial:
                record.sources.append((table, blocks[full : full + 1].copy()))
                blocks[full] = -1
        for section, table in zip(checkpoint.sections if checkpoint else (), self._geometry.tail_tables, strict=True):
            if table.kind is TableKind.STATE:
                record.sources.append((table, section.ids))
                continue
            full = max(0, hit.tokens // table.span - section.first)
            shared = section.ids[:full]
            self._pool.share(shared)
            leases.blocks[table.index][row, section.first : section.first + len(shared)] = shared
            leases.filled[table.index, row] += len(shared)
            if len(section.ids) > full:
                record.sources.append((table, section.ids[full:]))
        for _, source in record.sources:
            self._pool.share(source)
        self._index.reclaim.used(record.at, hit.tokens, checkpoint)

    def _available(self, hit: Hit) -> int:
        """Blocks that the prompt of `hit` may fill: all but those under pins that it does not share."""
        reclaim = self._index.reclaim
        reclaim.expire_pins()
        if not reclaim.pinned_blocks:
            return self._pool.blocks
        shared = reclaim.pinned_position(hit.at, hit.tokens) if hit.tokens else 0
        return self._pool.blocks - reclaim.pinned_blocks + sum(shared // t.span for t in self._geometry.prefix_tables)

    def _blocks_needed(self, length: int) -> int:
        """Fewest blocks with which a prompt of `length` tokens can be computed to its end."""
        need = 0
        for table in self._geometry.tables:
            if table.kind in (TableKind.WINDOW, TableKind.CHUNK):
                need += table.blocks_for(length) - table.first_needed(length - 1) // table.span
            else:
                need += table.blocks_for(length)
        return need

    def affordable(self, hit: Hit) -> Hit:
        """`hit`, or no hit where the pool cannot hold the prompt together with what its first step copies from."""
        held = sum(table.state_blocks or (1 if hit.tokens % table.span else 0) for table in self._geometry.tables)
        if hit.tokens and self._blocks_needed(len(hit.prompt.tokens)) + held > self._available(hit):
            return replace(hit, tokens=0, kind="", checkpoint=None)
        return hit

    def refuse_unservable(self, hit: Hit) -> None:
        """Refuse a prompt that the pool could never hold.

        Raises:
            UnservableError: Says what it needs and what there is.
        """
        length = len(hit.prompt.tokens)
        need = self._blocks_needed(length)
        if need > self._available(hit):
            pins = f" ({self._index.reclaim.pinned_blocks} are pinned)" if self._index.reclaim.pinned_blocks else ""
            raise UnservableError(
                f"a prompt of {length} tokens needs {need} blocks and the pool has {self._pool.blocks}{pins}: "
                f"shorten the prompt or give the cache more memory",
                need,
                self._pool.blocks,
            )
