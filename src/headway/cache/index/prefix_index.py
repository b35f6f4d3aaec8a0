"""The prefix index: the tree of known sequences together with the memory that keeps them reusable.

It finds where a prompt can resume, keeps the places of running leases, and publishes what they computed. Of leases it
knows the places where they end and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cache.index.below import Past
from headway.cache.index.edge import Anchor, Checkpoint, Edge, Match, Section
from headway.cache.index.pool import BlockPool
from headway.cache.index.reclaim import Reclaimer, Retention, Untold
from headway.cache.index.residency import Residency
from headway.cache.index.tree import PrefixTree
from headway.cache.index.usage import Learned, Usage
from headway.cache.policy.placement import Place
from headway.cache.shape.geometry import CacheGeometry, Ids

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """The tree of known sequences, what of it is resident, and who is computing where.

    Attributes:
        geometry: Where every token lives.
        floats: The model can resume anywhere: it has no windows, chunks or states.
        pool: The blocks.
        tree: The edges.
        residency: Moves resident ends.
        usage: What was used, and what was learned of it.
        reclaim: Makes room.
        version: Changes with every change of the index.
    """

    def __init__(
        self, geometry: CacheGeometry, pool: BlockPool, keep: Retention, learned: Learned | None = None
    ) -> None:
        """Make an empty index, which learns together with others that have the same `learned`."""
        self.geometry = geometry
        self.floats = not geometry.tail_tables
        self.pool = pool
        self.tree = PrefixTree(geometry.lookahead, geometry.prefix_tables, pool, floats=self.floats)
        self.residency = Residency(self.tree, pool)
        self.usage = Usage(keep.policy, self.tree, learned or Learned())
        self.reclaim = Reclaimer(geometry, self.tree, pool, self.residency, self.usage, keep)
        self.version = 0

    # ---- finding

    def find(self, namespace: int, data: bytes) -> tuple[Match, int, Checkpoint | None]:
        """How far a prompt follows a known path, where it can resume, and the checkpoint that serves it. Pure."""
        at = self.tree.find(namespace, data)
        limit = min(at.position, len(data) // 4 - 1)
        position, checkpoint = at.edge.resume_point(limit) if limit > 0 else (0, None)
        if self.geometry.ranges and position < limit:
            position, checkpoint = self._behind(at.edge.edge_at(limit), limit, position) or (position, checkpoint)
        return at, position, checkpoint

    def _behind(self, edge: Edge, limit: int, floor: int) -> tuple[int, Checkpoint] | None:
        """The deepest position above `floor` and up to `limit` on `edge` that a checkpoint behind it serves, and which.

        It is `limit`, or a place where paths part before it.
        """
        position = limit
        while position > floor:
            if (found := edge.serving(position)) is not None:
                return position, found
            assert edge.parent is not None
            edge = edge.parent
            position = edge.end
        return None

    def known_elsewhere(self, namespace: int, data: bytes, latest: int) -> int:
        """Positions of `data` that the one of the `latest` other namespaces knows that knows most."""
        if len(self.tree.roots) == 1 and namespace in self.tree.roots:  # the usual case
            return 0
        others = [name for name in list(self.tree.roots)[-latest - 1 :] if name != namespace][-latest:]
        return max((self.tree.find(name, data).position for name in others), default=0)

    # ---- places of leases

    def place(self, namespace: int, at: Match, position: int) -> Match:
        """The place at `position` of the path to `at`."""
        return Match(at.edge.edge_at(position), position) if position else Match(self.tree.root(namespace), 0)

    def enter(self, namespace: int, at: Match, data: bytes) -> tuple[Match, Anchor]:
        """Make `data` known from `at` on, where nothing known continues with it, and let a lease end behind it.

        Whoever does so holds what it resumes from before anything else is evicted, and keeps the limits after it.
        """
        if at.position == 0:
            at = Match(self.tree.root(namespace), 0)
        place = self.tree.enter(at, data)
        anchor = self.tree.attach(place)
        self.version += place.position > at.position
        if place.edge is not at.edge:
            self.reclaim.tidy(at.edge)
        return place, anchor

    def advance(self, anchor: Anchor, data: bytes, computed: int) -> None:
        """The sequence of a lease, computed up to `computed`, goes on with `data`: move its place behind it."""
        left = Match(anchor.edge, anchor.position)
        known = self.tree.follow(left, data)
        place = self.tree.enter(known, data[4 * (known.position - left.position) :])
        self.tree.move(anchor, place)
        self.tree.mark_computed(place.edge, left.position, min(place.position, computed))
        for edge in {left.edge, known.edge} - {place.edge}:
            self.reclaim.tidy(edge)
        self.version += place.position > known.position
        self.reclaim.keep_limits()

    def retract(self, anchor: Anchor, position: int) -> None:
        """A lease will compute nothing behind `position`: move its place there if it is further."""
        if position < anchor.position:
            left = anchor.edge
            edge = left.edge_at(position) if position else left.root()
            self.tree.move(anchor, Match(edge, position))
            self.version += 1
            self.reclaim.tidy(left)

    def leave(self, anchor: Anchor) -> None:
        """A lease has ended."""
        self.version += 1
        self.tree.detach(anchor)
        self.reclaim.tidy(anchor.edge)
        self.reclaim.keep_limits()

    # ---- publishing

    def publish(self, at: Match, rows: Sequence[Ids], *, given: bool, past: Past | None = None) -> None:
        """Make the path to `at` resident with the blocks of a lease, see `Residency.grow`.

        All of it is computed, or read back from where it has a `past`.
        """
        self.version += 1
        self.usage.extend(self.residency.grow(at, rows, given=given), past)

    def take_checkpoint(
        self,
        at: Match,
        kind: str,
        sections: tuple[Section, ...],
        *,
        spare: bool = False,
        floor: int = 0,
        past: Past | None = None,
    ) -> Checkpoint:
        """Keep a checkpoint at `at`, which is resident and has none; `sections` bring their references.

        `spare`: they hold more than resuming at `at` needs, which may go when memory runs short. `floor`: they serve no
        position before it.
        """
        self.version += 1
        first = max(self.geometry.serves_from(at.position, [section.first for section in sections]), floor)
        checkpoint = Checkpoint(at.position, kind, sections, at.edge, first, floor=floor)
        self.residency.store(checkpoint)
        self.usage.take(checkpoint, past)
        self.reclaim.queue.push(checkpoint)
        if spare:
            self.reclaim.keep_spare(checkpoint)
        return checkpoint

    def pass_over(self, at: Match, kind: str) -> None:
        """No checkpoint of `kind` is kept at `at`, which is computed: see whether one is wanted there."""
        if at.edge.checkpoint_at(at.position) is None and at.position not in at.edge.lost:
            self.usage.pass_over(at, kind)

    def resume(self, at: Match, checkpoint: Checkpoint, *, deepest: bool, goes_on: bool) -> None:
        """A lease resumes on the path to `at`, by `checkpoint`; see `Usage.resume`."""
        self.usage.resume(at, checkpoint, deepest=deepest, goes_on=goes_on)
        if not checkpoint.floats:
            self.reclaim.queue.push(checkpoint)

    def mark_elsewhere(
        self, at: Match, position: int, checkpoint: Checkpoint, elsewhere: bool, past: Past | None = None
    ) -> None:
        """Whether a faster memory has what `checkpoint` gives at `position` of the path to `at`; its `past` there."""
        found = [checkpoint]
        if checkpoint.floats:
            found = [edge.checkpoints[0] for edge in at.edge.path() if edge.start < position]
        for one in found:
            if past is not None:
                self.usage.recall(one, past)
            if one.elsewhere != elsewhere:
                one.elsewhere = elsewhere
                self.reclaim.queue.push(one)

    def ended(self, anchor: Anchor, limit: int, total: int, places: Sequence[Place], *, goes_on: bool) -> None:
        """The request of a lease has ended, see `EndedRequest`: shadows will hear of it."""
        if self.reclaim.shadows is not None and 0 < total <= anchor.position:
            self.reclaim.request_ended(Untold(anchor.edge, limit, total, places, goes_on, self.pool.available))

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` are free. Returns whether they are."""
        if self.pool.free >= blocks:
            return True
        self.version += 1
        return self.reclaim.make_room(blocks)

    # ---- wishes

    def pin(self, edge: Edge, position: int, seconds: float, length: int, *, shares: bool) -> bool:
        """Pin the path through `edge` up to `position` for a prompt of `length` tokens; see `Pins.pin`.

        `shares`: the lease that asks uses the blocks of the path itself.
        """
        if (checkpoint := edge.checkpoint_at(position)) is not None:
            self.reclaim.reduce(checkpoint)
        own = sum(position // table.span for table in self.tree.tables) if shares else 0
        fits = self.geometry.fits
        return self.reclaim.pins.pin(edge, position, seconds, lambda blocks: fits(blocks + own, length, position))

    def unpin(self, at: Match, first: int = 0) -> int:
        """End all pins on the path to `at` from position `first` on. Returns how many."""
        self.reclaim.expire_pins()
        pins = [pin for edge in at.edge.path() for pin in edge.pins if first <= pin.position <= at.position]
        for pin in pins:
            self.reclaim.unpin(pin)
        self.version += bool(pins)
        return len(pins)

    def beginning_with(self, at: Match, data: bytes) -> list[Edge]:
        """The topmost edges that only sequences use which begin with all of `data`; `at` is where it leads."""
        edge, rest = at.edge, data[4 * at.position :]
        if len(rest) > 4 * self.tree.lookahead:
            return []
        if at.position == edge.end and edge.children:
            tops = [child for key, child in edge.children.items() if key.startswith(rest)]
            if len(tops) < len(edge.children) or edge.parent is None:
                return tops
        while edge.parent is not None and edge.parent.parent is not None and len(edge.parent.children) == 1:
            edge = edge.parent
        return [edge] if edge.parent is not None else []

    def forget(self, tops: Sequence[Edge], cause: str) -> int:
        """Forget edges and all behind them; nothing runs there. Returns the checkpoints dropped."""
        self.version += 1
        dropped = 0
        for top in tops:
            dropped += self.reclaim.forget(top, cause)
            if top.parent is not None:
                self.reclaim.tidy(top.parent)
        return dropped
