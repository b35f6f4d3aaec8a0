"""Making room: what is evicted, what is pinned, what is remembered of what went.

Evicting a checkpoint inside a path frees its own blocks alone; evicting the last one of a path frees the entries behind
the previous one too, because entries beyond the last checkpoint of a path can never be hit. A model without windows,
chunks and states needs no checkpoints: every resident position is one, and paths are trimmed from their ends.

What went stays known for a while (tokens only): so a miss can be explained, and it is seen where traffic parts.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.cache.config import CacheConfig
from headway.cache.index.checkpoint import Checkpoint
from headway.cache.index.pool import BlockPool
from headway.cache.index.residency import Residency
from headway.cache.index.tree import LostCheckpoint, Match, Node, PrefixTree
from headway.cache.lease.table import LeaseTable
from headway.cache.policy.eviction import Candidate, EvictionQueue, eviction_policy
from headway.cache.policy.reuse import PATH, ReuseRates
from headway.cache.shape.geometry import CacheGeometry

__all__ = ["Counters", "Reclaimer"]

Evictable = Checkpoint | Node

_LOST_KEPT = 16
"""Evicted checkpoints that an edge remembers."""


@dataclass
class Counters:
    """What has happened to checkpoints, by kind of placement, and to blocks.

    Attributes:
        taken: Checkpoints taken.
        reused: Checkpoints resumed from at least once.
        resumed: Leases that resumed from one.
        evicted: Checkpoints evicted.
        evicted_unused: Of these, never resumed from.
        blocks_evicted: Blocks freed by eviction.
        pins_refused: Pins refused because of the cap.
    """

    taken: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    resumed: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    evicted_unused: dict[str, int] = field(default_factory=dict)
    blocks_evicted: int = 0
    pins_refused: int = 0

    def copy(self) -> Counters:
        """The same numbers, apart from what happens later."""
        return Counters(
            dict(self.taken),
            dict(self.reused),
            dict(self.resumed),
            dict(self.evicted),
            dict(self.evicted_unused),
            self.blocks_evicted,
            self.pins_refused,
        )


def _count(table: dict[str, int], kind: str) -> None:
    """Add one to the count of `kind`."""
    table[kind] = table.get(kind, 0) + 1


class Reclaimer:
    """Eviction, pins and history of one index.

    Attributes:
        policy: Ranks what could be evicted.
        queue: What can be evicted, by priority.
        reuse: How often and how soon requests come back, by kind.
        counters: What happened so far.
        pinned_blocks: Blocks under pins.
        ticks: Uses and changes of the cache so far: what `born` and `used` are read from.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        pool: BlockPool,
        leases: LeaseTable,
        residency: Residency,
        tree: PrefixTree,
        clock: Callable[[], float],
    ) -> None:
        """Make room in `pool` by moving resident ends of `residency` back."""
        self._config = config
        self._tables = geometry.prefix_tables
        self._span = min((table.span for table in self._tables), default=1)
        self._tail = bool(geometry.tail_tables)
        self._pool = pool
        self._leases = leases
        self._residency = residency
        self._tree = tree
        self._clock = clock
        self._cost = config.cost
        self.policy = eviction_policy(config.eviction)
        self.queue: EvictionQueue[Evictable] = EvictionQueue(self._candidate, self.policy)
        self.reuse = ReuseRates()
        self.counters = Counters()
        self.pinned_blocks = 0
        self.ticks = 0
        self._dry = False
        self._pins: list[tuple[float, int, Evictable]] = []
        self._history: OrderedDict[Node, None] = OrderedDict()
        self._known_tokens = 0
        self._history_tokens = config.history_tokens
        if self._history_tokens is None:
            largest = max((table.span for table in self._tables), default=1024)
            self._history_tokens = 4 * pool.blocks * largest + 65536

    # ---- use

    def born(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was taken."""
        self.ticks += 1
        checkpoint.used, checkpoint.age = self.ticks, self.policy.clock
        checkpoint.born = self.ticks
        checkpoint.missed = _uses_of_lost(checkpoint)
        self.reuse.took(checkpoint.kind)
        _count(self.counters.taken, checkpoint.kind)
        self.queue.push(checkpoint)

    def grew(self, nodes: list[Node]) -> None:
        """More of `nodes` is resident: they are as fresh as if they had been used."""
        self.ticks += 1
        self._dry = False
        if nodes:
            self.reuse.took(PATH)
        for node in nodes:
            node.used, node.age = self.ticks, self.policy.clock

    def used(self, at: Match, position: int, checkpoint: Checkpoint | None) -> None:
        """A lease resumes at `position` of the path to `at`: from a checkpoint, or from the path itself."""
        self.ticks += 1
        if checkpoint is None:
            self.reuse.wanted(PATH, self.ticks - at.node.used if at.node.uses == 0 else None)
            for node in at.node.path():
                if node.start < position:
                    node.uses += 1
                    node.used, node.age = self.ticks, self.policy.clock
            return
        if checkpoint.hits == 0:
            _count(self.counters.reused, checkpoint.kind)
        self.reuse.wanted(checkpoint.kind, self.ticks - checkpoint.born if checkpoint.uses == 0 else None)
        _count(self.counters.resumed, checkpoint.kind)
        checkpoint.hits += 1
        checkpoint.used, checkpoint.age = self.ticks, self.policy.clock
        self.queue.push(checkpoint)

    def missed(self, at: Match, low: int, high: int) -> None:
        """A lease would have resumed further in (low, high] of the path to `at`, but for what was evicted there.

        Of every kind the deepest one counts, as each would have served if it alone had been kept.
        """
        for lost in at.deepest_lost(low, high).values():
            self.reuse.wanted(lost.kind, self.ticks - lost.born if lost.uses == 0 else None)
            lost.uses += 1
        if self._tail:
            return
        trimmed = [node for node in at.node.path() if max(low, node.resident) < min(node.seen, high)]
        if trimmed:
            self.reuse.wanted(PATH, self.ticks - trimmed[0].used if trimmed[0].uses == 0 else None)
        for node in trimmed:
            node.uses += 1

    # ---- eviction

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` are free. Returns whether they are; what cannot go stays.

        Once nothing can go any more, that is remembered until a lease publishes or ends, so that an exhausted pool is
        not searched again for every row of a batch.
        """
        if blocks > self._pool.blocks:
            return False
        self.expire_pins()
        before = self._pool.free
        while self._pool.free < blocks:
            victim = self.queue.pop()
            if victim is None:
                if not self._dry:
                    self._trim_leased_paths()
                    self._dry = True
                break
            self._evict(*victim, blocks - self._pool.free)
        self.counters.blocks_evicted += self._pool.free - before
        return self._pool.free >= blocks

    def _candidate(self, item: Evictable) -> Candidate | None:
        if isinstance(item, Checkpoint):
            return None if item.pinned_until else self._checkpoint_candidate(item)
        floor = max(item.start, item.pinned_to)
        if self._tail or item.resident <= floor or not _trimmable(item):
            return None
        keep = max(floor, item.resident - self._span)
        saved = self._cost.between(keep, item.resident)
        blocks = max(1, self._residency.would_free(item, keep))
        idle = self.ticks - item.used
        rate = self.reuse.rate(PATH, item.uses, idle, idle)
        return Candidate(PATH, item.resident, item.uses, rate, saved, blocks, item.used, item.age)

    def _checkpoint_candidate(self, item: Checkpoint) -> Candidate:
        node, position, uses, now = item.node, item.position, item.uses, self.ticks
        previous = node.checkpoint_at_or_before(position - 1)
        start = 0 if previous is None else previous.position
        blocks = item.blocks
        if node.marks[-1] == position and _trimmable(node):
            blocks += self._residency.would_free(node, start)
        saved = self._cost.between(start, position)
        rate = self.reuse.rate(item.kind, uses, now - item.born, now - item.used)
        return Candidate(item.kind, position, uses, rate, saved, blocks or 1, item.used, item.age)

    def _evict(self, item: Evictable, candidate: Candidate, wanted: int) -> None:
        self.policy.evicted(candidate)
        if isinstance(item, Node):
            last = -(-item.resident // self._span)
            self._trim(item, max(item.start, item.pinned_to, (last - wanted) * self._span), "evicted")
            self.retreat(item)
            return
        node = item.node
        _count(self.counters.evicted, item.kind)
        if item.hits == 0:
            _count(self.counters.evicted_unused, item.kind)
        self._residency.remove(item, "evicted")
        lost = LostCheckpoint(item.position, item.kind, self._clock(), "evicted", item.born, item.uses)
        node.lost.append(lost)
        del node.lost[:-_LOST_KEPT]
        if node.marks and node.marks[-1] > item.position:
            self._dry = False  # the edge ends where it ended, and what lies behind is worth more than before
        else:
            self.retreat(node, "evicted")

    def _trim(self, node: Node, keep: int, cause: str) -> None:
        if keep < node.resident:
            self._residency.shrink(node, keep, cause)
            node.trimmed = (self._clock(), cause)

    def retreat(self, node: Node, cause: str = "unreachable") -> None:
        """Bring `node` and its ancestors in order after something that held them is gone.

        Entries beyond the last checkpoint go, what can be evicted is queued, what is empty and unknown is deleted.
        """
        self._dry = False
        while node.parent is not None and _trimmable(node):
            parent = node.parent
            if self._tail:
                self._trim(node, node.marks[-1] if node.marks else node.start, cause)
                if node.checkpoints:
                    self.queue.push(node.checkpoints[-1])
            else:
                self.queue.push(node)
            self._tidy(node)
            if node.resident > node.start:
                return
            node = parent

    def _trim_leased_paths(self) -> None:
        """Last resort: on paths of running leases, free what lies behind what those leases use, and second copies."""
        floors: dict[Node, int] = {}
        for row in self._leases.active_rows():
            held = [self._leases.owned.item(table.index, row) * table.span for table in self._tables]
            base = max(held, default=0)
            for node in self._leases.record(row).at.node.path():
                floors[node] = max(floors.get(node, 0), base)
        for node in sorted(floors, key=lambda n: -n.start):
            if node.resident_children:
                self._residency.merge_last_blocks(node)
                continue
            last = node.marks[-1] if node.marks else 0
            self._trim(node, max(floors[node], node.start, node.pinned_to, last), "evicted")

    # ---- history

    def entered(self, tokens: int, keep: Node) -> None:
        """`tokens` more tokens are known; forget the oldest history if that is too much, but nothing of `keep`."""
        self._known_tokens += tokens
        assert self._history_tokens is not None
        while self._known_tokens > self._history_tokens and self._history:
            node, _ = self._history.popitem(last=False)
            parent = node.parent
            if node.children or node.active or node is keep or parent is None:
                continue
            self._cut(node, node.resident)
            if parent.parent is not None and not parent.children and parent.end > parent.resident and not parent.active:
                self._history[parent] = None
                self._history.move_to_end(parent, last=False)

    def _tidy(self, node: Node) -> None:
        """Forget the tokens of an idle leaf that were never computed, and delete it if nothing is left."""
        if node.children or node.active:
            return
        self._cut(node, max(node.resident, node.seen))
        if node.end > node.resident:
            self._history[node] = None

    def _cut(self, node: Node, keep: int) -> None:
        if keep < node.end:
            self._known_tokens -= node.end - keep
            if self._tree.cut(node, keep):
                self.queue.discard(node)
                self._history.pop(node, None)

    # ---- pins

    def pin(self, at: Match, position: int) -> bool:
        """Protect the path to `at` up to `position`, or its deepest checkpoint there. Returns False beyond the cap."""
        item: Evictable | None
        if self._tail:
            item = at.node.checkpoint_at_or_before(position)
        else:
            item = next((node for node in at.node.path() if node.start < position <= node.resident), None)
        if item is None:
            return False
        reach = item.position if isinstance(item, Checkpoint) else position
        blocks = sum(table.blocks_for(reach) for table in self._tables)
        blocks += item.blocks if isinstance(item, Checkpoint) else 0
        more = max(0, blocks - item.pinned_blocks)
        if self.pinned_blocks + more > self._config.pin_share * self._pool.blocks:
            self.counters.pins_refused += 1
            return False
        self.pinned_blocks += more
        item.pinned_blocks += more
        item.pinned_until = self._clock() + self._config.pin_seconds
        if isinstance(item, Node):
            item.pinned_to = max(item.pinned_to, position)
        self.ticks += 1
        heapq.heappush(self._pins, (item.pinned_until, self.ticks, item))
        self.queue.push(item)
        return True

    def pinned_position(self, at: Match, position: int) -> int:
        """The deepest position at or before `position` up to which the path to `at` is pinned; 0 if it is not."""
        for node in at.node.path():
            if not self._tail and node.pinned_to:
                return min(node.pinned_to, position)
            pinned = [c.position for c in node.checkpoints if c.pinned_until and c.position <= position]
            if pinned:
                return pinned[-1]
        return 0

    def expire_pins(self) -> None:
        """Lift the pins whose time is over.

        Where the edge of a pin was split since, the pin is on the upper half or on one above that.
        """
        while self._pins and self._pins[0][0] <= self._clock():
            until, _, pinned = heapq.heappop(self._pins)
            for item in pinned.path() if isinstance(pinned, Node) else (pinned,):
                if 0.0 < item.pinned_until <= until:
                    self._unpin(item)

    def _unpin(self, item: Evictable) -> None:
        self.pinned_blocks -= item.pinned_blocks
        item.pinned_until, item.pinned_blocks = 0.0, 0
        self._dry = False
        if isinstance(item, Node):
            item.pinned_to = 0
        self.queue.push(item)

    def clear(self) -> None:
        """Forget all candidates, pins and history."""
        self.queue.clear()
        self._pins.clear()
        self._history.clear()
        self._dry = False
        self.pinned_blocks = self._known_tokens = 0


def _uses_of_lost(checkpoint: Checkpoint) -> int:
    """How often the one was wanted that went from here, which is forgotten: a checkpoint goes on with its uses."""
    node = checkpoint.node
    here = [lost for lost in node.lost if lost.position == checkpoint.position]
    if not here:
        return 0
    node.lost = [lost for lost in node.lost if lost.position != checkpoint.position]
    return here[-1].uses


def _trimmable(node: Node) -> bool:
    return node.active == 0 and node.resident_children == 0
