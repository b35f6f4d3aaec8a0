"""The prefix index: the tree of known sequences together with the memory that keeps them reusable.

It finds where a prompt can resume, publishes what leases computed, and makes room. Evicting a checkpoint inside a path frees
its own blocks alone; evicting the last one of a path frees the entries behind the previous one too, because entries
beyond the last checkpoint of a path can never be hit. A model without windows, chunks and states needs no checkpoints: every
resident position is one, and paths are trimmed from their ends.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache.checkpoint import Checkpoint, Section
from headway.cache.config import CacheConfig
from headway.cache.eviction import Candidate, EvictionQueue, eviction_policy
from headway.cache.geometry import CacheGeometry, TableKind
from headway.cache.lease import LeaseTable
from headway.cache.placement import PayRates
from headway.cache.pool import BlockPool
from headway.cache.residency import Residency
from headway.cache.tree import LostCheckpoint, Match, Node, PrefixTree

__all__ = ["Counters", "PrefixIndex"]

Ids = NDArray[np.int32]
Evictable = Checkpoint | Node

_UNUSED_PATH = 0.5
"""Expected reuse of a path that nobody has come back to (models without checkpoints)."""
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


def _count(table: dict[str, int], kind: str) -> None:
    table[kind] = table.get(kind, 0) + 1


class PrefixIndex:
    """Tree, residency, eviction, pins and history.

    Attributes:
        tail: The model resumes at checkpoints only.
        residency: Moves resident ends.
        queue: What can be evicted, by priority.
        pay: How often each kind of checkpoint paid.
        counters: What happened so far.
        version: Changes with every change of the index.
        pinned_blocks: Blocks under pins.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        pool: BlockPool,
        leases: LeaseTable,
        clock: Callable[[], float],
    ) -> None:
        """Make an empty index."""
        self._config = config
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self._clock = clock
        self._cost = config.cost
        self.policy = eviction_policy(config.eviction)
        self.tail = bool(geometry.tail_tables)
        self.residency = Residency(geometry, pool, self._move_rows)
        self.tree = PrefixTree(geometry.lookahead, len(geometry.prefix_tables), self.residency)
        self._nowhere = Match(self.tree.root(), 0)
        self.queue: EvictionQueue[Evictable] = EvictionQueue(self._candidate, self.policy)
        self.pay = PayRates()
        self.counters = Counters()
        self.version = 0
        self.pinned_blocks = 0
        self._ticks = 0
        self._pins: list[tuple[float, int, Evictable]] = []
        self.roots: dict[int, Node] = {}
        self._history: OrderedDict[Node, None] = OrderedDict()
        self._known_tokens = 0
        self._history_tokens = self._history_limit()

    def _history_limit(self) -> int:
        if self._config.history_tokens is not None:
            return self._config.history_tokens
        span = max((table.span for table in self._geometry.prefix_tables), default=1024)
        return 4 * self._pool.blocks * span + 65536

    # ---- finding

    def root(self, namespace: int) -> Node:
        """Root of a namespace."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self.tree.root()
            self.residency.namespaces[root] = namespace
        return root

    def find(self, namespace: int, tokens: Ids) -> tuple[Match, int, Checkpoint | None]:
        """How far a prompt follows a known path, where it can resume, and the checkpoint that serves it. Pure."""
        root = self.roots.get(namespace)
        if root is None:
            return self._nowhere, 0, None
        at = self.tree.follow(Match(root, 0), tokens)
        limit = min(at.position, len(tokens) - 1)
        if limit <= 0:
            return at, 0, None
        if not self.tail:
            return at, min(self.residency.frontier(at), limit), None
        checkpoint = at.node.checkpoint_at_or_before(limit)
        return at, checkpoint.position if checkpoint else 0, checkpoint

    def place(self, namespace: int, at: Match, position: int) -> Match:
        """The place at `position` of the path to `at`."""
        if position == 0:
            return Match(self.root(namespace), 0)
        node = next(node for node in at.node.path() if node.start < position)
        return Match(node, position)

    def hit_blocks(self, at: Match, position: int, checkpoint: Checkpoint | None, table: int) -> Ids:
        """Block ids of one table under a hit at `position` of the path to `at`."""
        geometry = self._geometry.tables[table]
        if geometry.kind is TableKind.PREFIX:
            ids = np.empty(geometry.blocks_for(position), dtype=np.int32)
            self.residency.path_ids(at, self._geometry.prefix_tables.index(geometry), 0, ids)
            return ids
        assert checkpoint is not None
        return checkpoint.sections[self._geometry.tail_tables.index(geometry)].ids.copy()

    def touch(self, at: Match, position: int, checkpoint: Checkpoint | None) -> None:
        """A lease resumes at `position` of the path to `at`."""
        self._ticks += 1
        if checkpoint is not None:
            if checkpoint.hits == 0:
                self.pay.reused(checkpoint.kind)
                _count(self.counters.reused, checkpoint.kind)
            _count(self.counters.resumed, checkpoint.kind)
            checkpoint.hits += 1
            checkpoint.used, checkpoint.age = self._ticks, self.policy.clock
            self.queue.push(checkpoint)
            return
        for node in at.node.path():
            if node.start < position:
                node.hits += 1
                node.used, node.age = self._ticks, self.policy.clock

    # ---- leases in the tree

    def enter(self, at: Match, tokens: Ids) -> Match:
        """Make `tokens` known from `at` on, where nothing known continues with them."""
        place = self.tree.enter(at, tokens)
        if place.position > at.position:
            self.version += 1
            self._known_tokens += place.position - at.position
            if self._known_tokens > self._history_tokens:
                self._forget_history(keep=place.node)
        return place

    def attach(self, row: int, at: Match) -> None:
        """The path of lease `row` now ends at `at`: nothing on it is evicted before the lease ends."""
        at.node.rows.add(row)
        for node in at.node.path():
            node.active += 1

    def detach(self, row: int, at: Match) -> None:
        """Undo `attach`; call `settle` when no new place follows."""
        at.node.rows.discard(row)
        for node in at.node.path():
            node.active -= 1

    def advance(self, row: int, tokens: Ids) -> None:
        """The sequence of lease `row` goes on with `tokens`: move its place in the tree behind them."""
        record = self._leases.record(row)
        if len(record.rest):
            tokens = np.concatenate([record.rest, tokens])
        start = record.at.position
        self.detach(row, record.at)
        at = self.tree.follow(record.at, tokens)
        record.at = self.enter(at, tokens[at.position - start :])
        record.rest = tokens[record.at.position - start :]
        self.attach(row, record.at)

    def saw(self, at: Match, start: int, stop: int) -> None:
        """Positions [start, stop) of the path to `at` have been computed."""
        for node in at.node.path():
            node.seen = max(node.seen, min(stop, node.end))
            if node.start <= start:
                return

    def _move_rows(self, upper: Node, lower: Node) -> None:
        if lower.rows:
            for row in list(lower.rows):
                record = self._leases.record(row)
                if record.at.position <= lower.start:
                    lower.rows.remove(row)
                    upper.rows.add(row)
                    lower.active -= 1
                    record.at = Match(upper, record.at.position)

    # ---- publishing

    def publish(self, row: int, position: int) -> Match:
        """Make the path of lease `row` resident up to `position` (all computed). Returns the place.

        What is resident already is taken over by the lease, whose own copies are freed: one copy is left.
        """
        self.version += 1
        leases, node = self._leases, self._leases.record(row).at.node
        while node.start >= position and node.parent is not None:
            node = node.parent
        at = Match(node, position)
        frontier = self.residency.frontier(at)
        self.saw(at, frontier, position)
        rows = []
        for i, table in enumerate(self._geometry.prefix_tables):
            blocks = leases.blocks[table.index][row]
            owned, full = leases.owned.item(table.index, row), frontier // table.span
            if full > owned:
                mine = blocks[owned:full].copy()
                self.residency.path_ids(at, i, owned, blocks[owned:full])
                self._pool.release(mine)
            leases.owned[table.index, row] = max(owned, position // table.span)
            rows.append(blocks)
        self.residency.grow(at, rows)
        return at

    def take_checkpoint(self, row: int, position: int, kind: str, state: Ids | None) -> bool:
        """Publish the path of lease `row` up to `position` and keep a checkpoint there.

        Args:
            row: The lease, which still holds its windows and chunks at `position`.
            position: Tokens before the checkpoint; all computed and known to the tree.
            kind: Kind of placement.
            state: Blocks of the state after `position` tokens, whose reference goes to the checkpoint (None: no states).

        Returns:
            False if one was there already, or not all tokens on which its entries depend are known yet; then the
            reference on `state` is the caller's to release.
        """
        if position > self._leases.record(row).at.position:
            return False
        at = self.publish(row, position)
        index = bisect_left(at.node.marks, position)
        if index < len(at.node.marks) and at.node.marks[index] == position:
            return False
        sections = []
        for table in self._geometry.tail_tables:
            if table.kind is TableKind.STATE:
                assert state is not None
                sections.append(Section(0, state))
                continue
            first = table.first_needed(position)
            low, high = first // table.span, -(-position // table.span) if first < position else first // table.span
            ids = self._leases.blocks[table.index][row, low:high].copy()
            self._pool.share(ids)
            sections.append(Section(low, ids))
        checkpoint = Checkpoint(position, kind, tuple(sections), at.node)
        self._ticks += 1
        checkpoint.used, checkpoint.age = self._ticks, self.policy.clock
        self.residency.store(checkpoint)
        self.pay.took(kind)
        _count(self.counters.taken, kind)
        self.queue.push(checkpoint)
        return True

    # ---- making room

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` are free. Returns whether they are; what cannot go stays."""
        if self._pool.free >= blocks:
            return True
        if blocks > self._pool.blocks:
            return False
        self.version += 1
        self._expire_pins()
        before = self._pool.free
        while self._pool.free < blocks:
            victim = self.queue.pop()
            if victim is None:
                self._trim_leased_paths()
                break
            self._evict(*victim, blocks - self._pool.free)
        self.counters.blocks_evicted += self._pool.free - before
        return self._pool.free >= blocks

    def _candidate(self, item: Evictable) -> Candidate | None:
        if item.pinned_until:
            return self._pinned_candidate(item)
        if isinstance(item, Checkpoint):
            node = item.node
            previous = node.checkpoint_at_or_before(item.position - 1)
            start = previous.position if previous else 0
            blocks = item.blocks
            if node.marks[-1] == item.position and self._trimmable(node):
                blocks += self.residency.would_free(node, max(start, node.start))
            saved = self._cost.between(start, item.position)
            reuse = item.hits + self.pay.rate(item.kind)
            return Candidate(item.kind, item.position, reuse, saved, max(1, blocks), item.used, item.age)
        return self._path_candidate(item, item.start)

    def _pinned_candidate(self, item: Evictable) -> Candidate | None:
        if isinstance(item, Checkpoint):
            return None
        return self._path_candidate(item, max(item.start, item.pinned_to))

    def _path_candidate(self, node: Node, floor: int) -> Candidate | None:
        """The end of a path of a model without checkpoints."""
        if self.tail or node.resident <= floor or not self._trimmable(node):
            return None
        keep = max(floor, node.resident - self._span)
        saved = self._cost.between(keep, node.resident)
        blocks = max(1, self.residency.would_free(node, keep))
        return Candidate("path", node.resident, node.hits + _UNUSED_PATH, saved, blocks, node.used, node.age)

    @property
    def _span(self) -> int:
        return min(table.span for table in self._geometry.prefix_tables)

    @staticmethod
    def _trimmable(node: Node) -> bool:
        return node.active == 0 and node.resident_children == 0

    def _evict(self, item: Evictable, candidate: Candidate, wanted: int) -> None:
        self.policy.evicted(candidate)
        if isinstance(item, Checkpoint):
            self._drop(item, "evicted")
            return
        floor = max(item.start, item.pinned_to if item.pinned_until else 0)
        last = -(-item.resident // self._span)
        self._trim(item, max(floor, (last - wanted) * self._span), "evicted")
        self._retreat(item)

    def _drop(self, checkpoint: Checkpoint, cause: str) -> None:
        node = checkpoint.node
        _count(self.counters.evicted, checkpoint.kind)
        if checkpoint.hits == 0:
            _count(self.counters.evicted_unused, checkpoint.kind)
        self.residency.remove(checkpoint, cause)
        self._lose(node, checkpoint, cause)
        self._retreat(node, cause)

    def _lose(self, node: Node, checkpoint: Checkpoint, cause: str) -> None:
        node.lost.append(LostCheckpoint(checkpoint.position, checkpoint.kind, self._clock(), cause))
        del node.lost[:-_LOST_KEPT]

    def _trim(self, node: Node, keep: int, cause: str) -> None:
        if keep < node.resident:
            self.residency.shrink(node, keep, cause)
            node.trimmed = (self._clock(), cause)

    def _retreat(self, node: Node, cause: str = "unreachable") -> None:
        """Bring `node` and its ancestors in order after something that held them is gone.

        Entries beyond the last checkpoint go, what can be evicted is queued, what is empty and unknown is deleted.
        """
        while node.parent is not None and self._trimmable(node):
            parent = node.parent
            if self.tail:
                self._trim(node, node.marks[-1] if node.marks else node.start, cause)
                if node.checkpoints:
                    self.queue.push(node.checkpoints[-1])
            else:
                self.queue.push(node)
            self._tidy(node)
            if node.resident > node.start:
                return
            node = parent

    def settle(self, node: Node) -> None:
        """A lease that ended at `node` is gone."""
        self.version += 1
        self._retreat(node)

    def _trim_leased_paths(self) -> None:
        """Last resort: on paths of running leases, free what lies behind what those leases use."""
        floors: dict[Node, int] = {}
        for row in self._leases.active_rows():
            record = self._leases.record(row)
            base = max((int(self._leases.owned[t.index, row]) * t.span for t in self._geometry.prefix_tables), default=0)
            for node in record.at.node.path():
                floors[node] = max(floors.get(node, 0), base)
        for node in sorted(floors, key=lambda n: -n.start):
            if node.resident_children:
                continue
            pinned = node.pinned_to if node.pinned_until else 0
            keep = max(floors[node], node.start, pinned, node.marks[-1] if node.marks else 0)
            self._trim(node, keep, "evicted")

    # ---- history

    def _tidy(self, node: Node) -> None:
        """Forget the tokens of an idle leaf that were never computed, and delete it if nothing is left."""
        if node.children or node.active:
            return
        self._cut(node, max(node.resident, node.seen))
        if node.end > node.resident and node.parent is not None:
            self._history[node] = None

    def _cut(self, node: Node, keep: int) -> None:
        if keep < node.end:
            self._known_tokens -= node.end - keep
            if self.tree.cut(node, keep):
                self.queue.discard(node)
                self._history.pop(node, None)

    def _forget_history(self, keep: Node) -> None:
        """Forget the oldest paths that are neither resident nor leased until the history is within its bound."""
        while self._known_tokens > self._history_tokens and self._history:
            node, _ = self._history.popitem(last=False)
            if node.children or node.active or node is keep or node.parent is None:
                continue
            parent = node.parent
            self._cut(node, max(node.resident, node.start))
            if parent.parent is not None and not parent.children and parent.end > parent.resident and not parent.active:
                self._history[parent] = None
                self._history.move_to_end(parent, last=False)

    # ---- pins

    def pin(self, at: Match, position: int) -> bool:
        """Protect the path to `at` up to `position`, or its deepest checkpoint there. Returns False beyond the cap."""
        item: Evictable | None
        if self.tail:
            item = at.node.checkpoint_at_or_before(position)
        else:
            item = next((node for node in at.node.path() if node.start < position <= node.resident), None)
        if item is None:
            return False
        reach = item.position if isinstance(item, Checkpoint) else position
        blocks = sum(table.blocks_for(reach) for table in self._geometry.prefix_tables)
        blocks += item.blocks if isinstance(item, Checkpoint) else 0
        blocks = max(blocks, item.pinned_blocks)
        if self.pinned_blocks + blocks - item.pinned_blocks > self._config.pin_share * self._pool.blocks:
            self.counters.pins_refused += 1
            return False
        self.pinned_blocks += blocks - item.pinned_blocks
        item.pinned_blocks = blocks
        item.pinned_until = self._clock() + self._config.pin_seconds
        if isinstance(item, Node):
            item.pinned_to = max(item.pinned_to, position)
        self._ticks += 1
        heapq.heappush(self._pins, (item.pinned_until, self._ticks, item))
        self.queue.push(item)
        return True

    def _expire_pins(self) -> None:
        now = self._clock()
        while self._pins and self._pins[0][0] <= now:
            _, _, item = heapq.heappop(self._pins)
            if item.pinned_until and item.pinned_until <= now:
                self.unpin(item)
                self.queue.push(item)

    def unpin(self, item: Evictable) -> None:
        """Lift the pin on an edge or a checkpoint."""
        self.pinned_blocks -= item.pinned_blocks
        item.pinned_until, item.pinned_blocks = 0.0, 0
        if isinstance(item, Node):
            item.pinned_to = 0

    # ---- everything

    def nodes(self) -> list[Node]:
        """All edges, parents before children."""
        found: list[Node] = []
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def clear(self) -> int:
        """Forget everything that no lease holds by itself. Returns the checkpoints dropped."""
        self.version += 1
        dropped = 0
        for node in reversed(self.nodes()):
            for checkpoint in list(node.checkpoints):
                self.residency.remove(checkpoint, "reset")
                dropped += 1
            self.residency.shrink(node, node.start, "reset")
        self.queue.clear()
        self._pins.clear()
        self._history.clear()
        self.pinned_blocks = self._known_tokens = 0
        self.roots.clear()
        self.residency.namespaces.clear()
        return dropped
