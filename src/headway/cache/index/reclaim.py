"""Making room: what is evicted, and what is remembered of it.

There is one thing that can be evicted: a checkpoint. Evicting one inside a path frees its own blocks alone; evicting
the last one of a path frees the entries behind the previous one too, because entries beyond the last checkpoint of a
path can never be hit. A checkpoint that floats moves back by as many blocks as are wanted, and the entries behind it
go.

What could be had is known without looking: the blocks that no lease and no pin uses (`BlockPool.available`). So an
exhausted pool is not searched, and what is promised is found: in the queue of what is idle, or, as a last resort, on
paths of running leases behind what those leases use. Before anything is evicted, checkpoints give up what they hold for
positions before their own alone: entries that would have slid out of a window by then, and that cost nothing to keep
while memory is free.

What went stays known for a while (tokens only): so a miss can be explained, and it is seen where traffic parts. The
oldest of it is forgotten when all that is known takes more than so many tokens or bytes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.cache.index.edge import Checkpoint, Edge, LostCheckpoint, Pin, Trim
from headway.cache.index.held import HeldBlocks, held_blocks
from headway.cache.index.pins import Pins
from headway.cache.index.pool import BlockPool
from headway.cache.index.residency import Residency
from headway.cache.index.shadow import EndedRequest, Shadows
from headway.cache.index.tree import PrefixTree
from headway.cache.index.usage import Usage, count
from headway.cache.policy.eviction import Adaptive, Candidate, EvictionPolicy, EvictionQueue
from headway.cache.policy.placement import Place
from headway.cache.shape.geometry import CacheGeometry, Ids
from headway.cache.shape.spec import ComputeCost

__all__ = ["Reclaimer", "Retention", "Spill", "Untold"]

_MOST_UNTOLD = 8192
"""Ended requests that wait until shadows hear of them. From there on each that ends lets them hear of two."""
_TOLD_AT_ONCE = 8
"""Ended requests of which shadows hear before something is evicted."""


@dataclass(frozen=True)
class Retention:
    """What decides how long something is kept.

    Attributes:
        policy: Ranks what could be evicted.
        cost: What computing tokens costs.
        clock: Seconds.
        pin_share: Largest share of the pool that pins may protect.
        most_tokens: Tokens beyond which the oldest of what went is forgotten.
        most_bytes: Bytes of what is known beyond which the same is forgotten.
        hard_bytes: Bytes beyond which even what is kept goes.
    """

    policy: EvictionPolicy
    cost: ComputeCost
    clock: Callable[[], float]
    pin_share: float
    most_tokens: int
    most_bytes: int
    hard_bytes: int


class Spill(NamedTuple):
    """A checkpoint that is about to be evicted, and all blocks that resuming there needs.

    Attributes:
        namespace: Id of the namespace.
        prefix: int32 tokens [0, position + lookahead).
        blocks: What it holds.
    """

    namespace: int
    prefix: Ids
    blocks: HeldBlocks


class Untold(NamedTuple):
    """A request that has ended and of which shadows have not heard; see `EndedRequest`.

    Attributes:
        edge: Where it ended.
        limit: As in `EndedRequest`.
        total: As there.
        places: As there.
        goes_on: As there.
        blocks: Blocks that could be had when it ended.
    """

    edge: Edge
    limit: int
    total: int
    places: Sequence[Place]
    goes_on: bool
    blocks: int


class Reclaimer:
    """Eviction, pins and history of one index.

    Attributes:
        keep: What decides how long something is kept.
        queue: What can be evicted, by priority.
        pins: What must stay.
        take: Told what is about to be evicted, or None.
        shadows: What the policies that are compared would keep, where there are several.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        tree: PrefixTree,
        pool: BlockPool,
        residency: Residency,
        usage: Usage,
        keep: Retention,
    ) -> None:
        """Make room in `pool` by moving resident ends of `tree` back."""
        self._geometry = geometry
        self._tree = tree
        self._pool = pool
        self._residency = residency
        self._usage = usage
        self.keep = keep
        self._span = geometry.least_span
        self.queue: EvictionQueue[Checkpoint] = EvictionQueue(self._candidate, keep.policy)
        self.pins = Pins(tree, pool, share=keep.pin_share, clock=keep.clock)
        self.shadows: Shadows | None = None
        if isinstance(keep.policy, Adaptive):
            self.shadows = Shadows(keep.policy, geometry, keep.cost)
            tree.lay(self.shadows.each)
        self._history: OrderedDict[Edge, None] = OrderedDict()
        self._spare: dict[Checkpoint, None] = {}
        self._untold: deque[Untold] = deque()
        self.take: Callable[[Spill], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but who is told."""
        return {**vars(self), "take": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was written; the queue asks this object again."""
        vars(self).update(state)
        self.queue.describe = self._candidate

    # ---- eviction

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` are free. Returns whether they are; if not, nothing has changed."""
        self.expire_pins()
        if blocks > self._pool.available:
            return False
        before = self._pool.free
        while self._spare and self._pool.free < blocks:
            self.reduce(next(iter(self._spare)))
        if self._untold and self._pool.free < blocks:
            self.catch_up(_TOLD_AT_ONCE)
        while self._pool.free < blocks:
            victim = self.queue.pop()
            if victim is None:
                self._trim_busy_paths()
                break
            self._evict(*victim, blocks - self._pool.free)
        self._usage.counters.blocks_evicted += self._pool.free - before
        return self._pool.free >= blocks

    def keep_spare(self, checkpoint: Checkpoint) -> None:
        """A new checkpoint holds more than it needs, until memory runs short."""
        checkpoint.spare = True
        self._spare[checkpoint] = None

    def request_ended(self, request: Untold) -> None:
        """A request has ended, of which the shadows hear later.

        Until something has to go, every policy keeps everything, and nobody needs to know what each would have saved.
        So a cache that is not full only writes down what it is to tell them.
        """
        self._untold.append(request)
        if len(self._untold) > _MOST_UNTOLD:
            self.catch_up(2)

    def catch_up(self, most: int) -> bool:
        """Let the shadows hear of so many requests, the oldest first. Returns whether there are more."""
        for _ in range(min(most, len(self._untold))):
            self._tell_shadows(self._untold.popleft())
        return bool(self._untold)

    def _tell_shadows(self, told: Untold) -> None:
        """Let the shadows hear of a request; what the one that is followed drops or takes is queued anew."""
        assert self.shadows is not None
        edges = [edge for edge in told.edge.path() if edge.start < told.total]
        if not edges or edges[0].end < told.total:  # it was forgotten meanwhile
            return
        self._tree.shade(edges)
        request = EndedRequest(edges, told.limit, told.total, told.places, told.goes_on)
        if self.shadows.ended(request, told.blocks):
            self.queue.restart()
        for edge, position in self.shadows.dropped:
            self._review(edge.checkpoint_at(position))
        if not self._tree.floats:
            for place in request.places:
                edge = next(edge for edge in request.edges if edge.start < place.position)
                checkpoint = edge.checkpoint_at(place.position)
                if checkpoint is not None and not checkpoint.told:
                    checkpoint.told = True
                    self._review(checkpoint)

    def _review(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None and checkpoint.entry >= 0:
            self.queue.push(checkpoint)

    def reduce(self, checkpoint: Checkpoint) -> None:
        """Let a checkpoint hold what it needs and no more."""
        if self._spare.pop(checkpoint, True) is None:
            self._residency.reduce(checkpoint, self._geometry)
            self.queue.push(checkpoint)

    def _candidate(self, item: Checkpoint) -> Candidate | None:
        """What evicting `item` would free and cost, or None if it must stay or nothing would become free."""
        if item.pinned:
            return None
        edge, blocks, position, kind = item.edge, item.blocks, item.position, item.kind
        keep = self._fallback(item, 1)
        last = edge.checkpoints[-1] is item
        if last and edge.busy == 0 and edge.resident_children == 0 and position > keep:
            blocks = max(1, blocks + self._residency.would_free(edge, keep))  # even 0: others wait behind it
        if blocks == 0:
            return None
        if item.elsewhere:
            return Candidate(kind, position, 0, 0.0, 0.0, blocks, 0, 0.0, kept=False)
        now, used, uses = self._usage.learned.ticks, item.used, item.uses
        rate = self._usage.reuse.rate(kind, uses, now - (used if item.floats else item.born), now - used)
        saved = self.keep.cost.between(max(keep, item.base), position)
        told = item.told or (item.floats and not self._untold)
        kept = not told or self.shadows is None or self.shadows.keeps(edge, position)
        return Candidate(kind, position, uses, rate, saved, blocks, used, item.age, item.shared, not last, kept)

    def _fallback(self, item: Checkpoint, blocks: int) -> int:
        """Where a request that `item` serves would resume once it is gone, or has moved back by `blocks`."""
        edge = item.edge
        if item.floats:
            return max(edge.floor, (-(-item.position // self._span) - blocks) * self._span)
        return edge.resume_point(item.position - 1)[0]

    def _evict(self, item: Checkpoint, candidate: Candidate, wanted: int) -> None:
        self.keep.policy.evicted(candidate)
        edge = item.edge
        if item.floats:
            self._trim(edge, self._fallback(item, wanted), "evicted")
        else:
            self._drop(item, "evicted")
        if edge.last_checkpoint <= item.position:
            self.tidy(edge, "evicted")

    def _drop(self, item: Checkpoint, cause: str) -> None:
        """Evict a checkpoint that does not float."""
        self._tell(item)
        count(self._usage.counters.evicted, item.kind)
        if item.hits == 0:
            count(self._usage.counters.evicted_unused, item.kind)
        self._spare.pop(item, None)
        self._residency.remove(item, cause)
        lost = LostCheckpoint(item.position, item.kind, self.keep.clock(), cause, item.born, item.uses, item.shared)
        self._tree.remember(item.edge, lost)

    def _trim(self, edge: Edge, keep: int, cause: str) -> None:
        if keep < edge.resident:
            if self._tree.floats:
                self._tell(edge.checkpoints[0])
            self._residency.shrink(edge, keep, cause)
            if self._tree.floats:
                edge.trim = Trim(self.keep.clock(), cause)

    def _tell(self, item: Checkpoint) -> None:
        """Tell what is about to be evicted; of what floats, once for all that it holds, as it goes block by block."""
        if self.take is None or item.spilled >= item.position:
            return
        item.spilled = item.position
        self.take(self._spill(item))

    def kept(self) -> Iterator[Spill]:
        """See `PrefixCache.kept`."""
        found: list[tuple[bool, float, Checkpoint]] = []
        for edge in self._tree.edges():
            for item in edge.checkpoints if edge.resident > edge.start else ():
                candidate = self._candidate(item)
                value = 0.0 if candidate is None else candidate.rate * candidate.saved / candidate.blocks
                if not item.floats or not edge.resident_children:
                    found.append((item.kind == "answer_end", -value, item))
        found.sort(key=lambda one: one[:2])
        for _, _, item in found:
            yield self._spill(item)

    def _spill(self, item: Checkpoint) -> Spill:
        edge, position = item.edge, item.position
        held = held_blocks(self._geometry, self._tree, edge, position, item)
        return Spill(edge.root().namespace, edge.prefix(position, self._tree.lookahead), held)

    def _trim_busy_paths(self) -> None:
        """Last resort: free what lies behind all that leases and pins use, and second copies of blocks.

        What is idle and not pinned has gone by now, so whatever holds a block without a user lies on the way to a
        lease or to a pin.
        """
        held: dict[Edge, int] = {}
        for one in self._tree.edges():
            if one.anchors or one.pins:
                most = max([anchor.held for anchor in one.anchors], default=0)
                held.update((edge, max(held.get(edge, 0), most)) for edge in one.path())
        for edge in sorted(held, key=lambda one: -one.start):
            if edge.resident_children:
                self._residency.merge_last_blocks(edge)
                continue
            keep = max(edge.floor, min(held[edge], edge.resident))
            while not self._tree.floats and edge.last_checkpoint > keep:
                self._drop(edge.checkpoints[-1], "evicted")
            self._trim(edge, keep, "evicted")

    # ---- what is known

    def tidy(self, edge: Edge, cause: str = "unreachable") -> None:
        """Bring `edge` and its ancestors in order after something that held them is gone.

        Entries beyond the last checkpoint go, what can be evicted is queued, what nobody computed and nobody will is
        forgotten.
        """
        while edge.parent is not None:
            parent, idle = edge.parent, edge.idle
            if idle:
                self._trim(edge, edge.last_checkpoint, cause)
                if edge.checkpoints:
                    self.queue.push(edge.checkpoints[-1])
            gone = self._forget_uncomputed(edge)
            if not gone and (not idle or edge.resident > edge.start):
                return
            edge = parent

    def _forget_uncomputed(self, edge: Edge) -> bool:
        """Forget the tokens of a leaf that nobody computed and nobody will. Returns whether nothing is left of it."""
        if edge.children:
            return False
        if edge.computed < edge.end:
            keep = max([edge.computed, *[anchor.position for anchor in edge.anchors]])
            if keep < edge.end and self._cut(edge, keep):
                return True
        if not edge.busy and edge.end > edge.resident:
            self._history[edge] = None
        return False

    def keep_limits(self) -> None:
        """Forget the oldest ghosts while too much is known, and evict if that is not enough."""
        tree, keep, before = self._tree, self.keep, self._pool.free
        if tree.tokens <= keep.most_tokens and tree.nbytes <= keep.most_bytes:
            return
        while self._history and (tree.tokens > keep.most_tokens or tree.nbytes > keep.most_bytes):
            self._forget_oldest()
        while tree.nbytes > keep.hard_bytes:
            if self._history:
                self._forget_oldest()
            elif (victim := self.queue.pop()) is not None:
                self._evict(*victim, 1)
            else:
                break
        self._usage.counters.blocks_evicted += self._pool.free - before

    def _forget_oldest(self) -> None:
        edge, _ = self._history.popitem(last=False)
        parent = edge.parent
        if edge.children or edge.busy or parent is None:
            return
        gone = self._cut(edge, edge.resident)
        if gone and parent.parent is not None and not parent.children and parent.end > parent.resident:
            self._history[parent] = None
            self._history.move_to_end(parent, last=False)

    def _cut(self, edge: Edge, keep: int) -> bool:
        gone = self._tree.cut(edge, keep)
        if gone:
            for checkpoint in edge.checkpoints:
                self.queue.discard(checkpoint)
            self._history.pop(edge, None)
        return gone

    def forget(self, top: Edge, cause: str) -> int:
        """Forget an edge and all behind it; nothing runs there. Returns the checkpoints dropped."""
        below, dropped = [top], 0
        for edge in below:
            below.extend(edge.children.values())
        for edge in reversed(below):
            for pin in list(edge.pins):
                self.pins.lift(pin)
            for checkpoint in [one for one in edge.checkpoints if not one.floats]:
                self.queue.discard(checkpoint)
                self._spare.pop(checkpoint, None)
                self._residency.remove(checkpoint, cause)
                dropped += 1
            self._residency.shrink(edge, edge.start, cause)
            self._cut(edge, edge.start)
        return dropped

    # ---- pins

    @property
    def pinned_blocks(self) -> int:
        """Blocks under pins."""
        return self._pool.pinned

    def unpin(self, pin: Pin) -> None:
        """End a pin; what it held can be evicted again."""
        edge, checkpoint = pin.edge, pin.edge.checkpoint_at(pin.position)
        self.pins.lift(pin)
        if checkpoint is not None:
            self.queue.push(checkpoint)
        self.tidy(edge)

    def expire_pins(self) -> None:
        """End the pins whose time is over."""
        for pin in self.pins.expired():
            self.unpin(pin)
