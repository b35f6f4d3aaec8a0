"""Shadow directories: what the cache would keep if another policy decided, in tokens alone.

No policy is best on all traffic (docs/policy.md), so the default lets several of them run side by side and follows the
one that has saved most compute lately. A *shadow* is one of them. It holds no blocks: it lies on the same tree as the
cache, keeps a *mark* where its policy would keep a checkpoint, counts what its marks and the stretches before them
would weigh, and drops the lowest when they weigh more than there is. It hears of each request once, some time after
that has ended: nothing of it lies on the way of a step (`Reclaimer.catch_up`).

What a shadow knows of an edge is its *shade*. An edge is held up to its end if anything behind it is held, else up to
its last mark. In models that can resume anywhere there is one mark for each edge, which lies where the held part ends.

Simplified: requests come one after another, each when it ends, and pins are memory that is not there. A shadow's hit
rate is then within 0.3 points of what the cache reaches under that policy.

Rejected: shadows of a sample of the paths. A sixteenth of the memory holds hardly one of the giant conversations of
agents, and says nothing of how a policy treats them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from headway.cache.index.edge import Edge
from headway.cache.index.shades import FloatShade, Lowest, Mark, Oldest, Shade
from headway.cache.policy.eviction import Adaptive, Candidate, GreedyDual, Lru, Weighing
from headway.cache.policy.placement import Place
from headway.cache.policy.reuse import PATH, ReuseRates
from headway.cache.shape.geometry import CacheGeometry
from headway.cache.shape.spec import ComputeCost

__all__ = ["MARK_BYTES", "SHADE_BYTES", "EndedRequest", "Shadow", "Shadows", "shadow_of"]

SHADE_BYTES, MARK_BYTES = 300, 420
"""What a shade takes with its containers, and a mark with its place in the queue."""
_position = attrgetter("position")
_LOST = 256
"""Marks dropped from an edge that a shadow remembers at most."""


class EndedRequest(NamedTuple):
    """What shadows hear of a request.

    Attributes:
        edges: The edges of its path, deepest first.
        limit: The deepest position at which it could have resumed.
        total: Where it ended: everything before it is computed.
        places: Where checkpoints could be kept, ascending.
        goes_on: It went on from the end of a path, where nothing else does.
    """

    edges: Sequence[Edge]
    limit: int
    total: int
    places: Sequence[Place]
    goes_on: bool


def _unused(density: float, uses: int, rate: float, age: float, shared: int, inner: bool) -> float:
    """The rank where nobody asks for one: least recently used."""
    return 0.0


class Shadow(ABC):
    """One policy's directory.

    Attributes:
        number: Its place among the shades of each edge.
        saved: Compute saved lately; what was saved long ago counts less.
        tokens: Tokens of the stretches that it holds.
        marks: Marks that it keeps.
        losses: Marks that it dropped and remembers.
        dropped: Edges and positions at which the latest request made it drop something.
        shade_bytes: What it takes for an edge, before it keeps anything there.
    """

    shade_bytes: int = SHADE_BYTES

    def __init__(
        self, number: int, policy: Weighing | Lru, geometry: CacheGeometry, cost: ComputeCost, without: frozenset[str]
    ) -> None:
        """An empty one for a cache of that geometry, which keeps no places of the kinds `without`."""
        self.number, self.saved = number, 0.0
        self.tokens = self.marks = self.losses = 0
        self.dropped: list[tuple[Edge, int]] = []
        self._policy, self._cost, self._without = policy, cost, without
        self._density = sum(1 / table.span for table in geometry.prefix_tables)
        self._state, self._span = geometry.checkpoint_blocks, geometry.least_span
        self._tick = 0
        self._reuse = ReuseRates()
        self._learns, self._ages = policy.learns, isinstance(policy, GreedyDual)
        self._queue: Oldest | Lowest = Oldest() if isinstance(policy, Lru) else Lowest(self._rank)
        self._weigh = _unused if isinstance(policy, Lru) else policy.rank

    def __getstate__(self) -> dict[str, Any]:
        """All but the methods that are kept at hand."""
        return {name: value for name, value in vars(self).items() if name != "_weigh"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was written; the queue asks this object again."""
        vars(self).update(state)
        self._weigh = _unused if isinstance(self._policy, Lru) else self._policy.rank
        if isinstance(self._queue, Lowest):
            self._queue.rank = self._rank

    @property
    def used(self) -> float:
        """Blocks that all it keeps would take."""
        return self.tokens * self._density + self.marks * self._state

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside those of its shades, an estimate from above."""
        return MARK_BYTES * (self.marks + self.losses)

    @abstractmethod
    def shade(self, edge: Edge) -> Any:
        """What it knows of a new edge: nothing."""

    @abstractmethod
    def keeps(self, edge: Edge, position: int) -> bool:
        """Whether one could resume at `position` of an edge."""

    @abstractmethod
    def cut(self, shade: Any, keep: int) -> None:
        """An edge at whose end nothing follows is forgotten from position `keep` on."""

    @abstractmethod
    def request(self, request: EndedRequest, blocks: int) -> int:
        """A request has ended, where there are so many blocks. Returns the position at which it would have resumed."""

    def check(self, edges: Sequence[Edge]) -> None:
        """Check its invariants over all edges.

        Raises:
            AssertionError: Names the broken one.
        """
        edges = [edge for edge in edges if edge.shades]
        shades = [edge.shades[self.number] for edge in edges]
        assert all(shade.edge is edge for shade, edge in zip(shades, edges, strict=True)), "a shade of another edge"
        held = {edge: shade.end > edge.start for edge, shade in zip(edges, shades, strict=True)}
        for edge, shade in zip(edges, shades, strict=True):
            assert edge.start <= shade.end <= edge.end, "a shadow holds what is not known"
            assert shade.children == sum(held.get(child, False) for child in edge.children.values()), (
                "a shadow's children differ"
            )
            assert not shade.children or shade.end == edge.end, "a shadow holds a child behind a gap"
        assert self.tokens == sum(s.end - e.start for s, e in zip(shades, edges, strict=True)), (
            "a shadow's tokens differ"
        )

    @abstractmethod
    def _gain(self, mark: Mark) -> tuple[int, float, float, bool] | None:
        """What dropping `mark` would do, or None if it cannot be dropped now.

        Returns:
            The position at which its requests would resume instead, compute that one use saves over that, blocks that
            become free, and whether another mark lies behind it on its edge.
        """

    def _note_victim(self, mark: Mark) -> None:
        """Let a policy with a clock know that `mark` goes."""
        if self._ages and (gain := self._gain(mark)) is not None:
            _, saved, blocks, inner = gain
            self._policy.evicted(
                Candidate(mark.kind, mark.position, mark.uses, 0.0, saved, blocks, mark.used, mark.age, 0, inner)
            )

    def _rank(self, mark: Mark) -> float | None:
        """The priority of `mark`, or None if it cannot be dropped now."""
        gain = self._gain(mark)
        if gain is None:
            return None
        _, saved, blocks, inner = gain
        rate = 0.0
        if self._learns:
            now, used = self._tick, mark.used
            rate = self._reuse.rate(mark.kind, mark.uses, now - mark.born, now - used)
        return self._weigh(saved / blocks, mark.uses, rate, mark.age, mark.shared, inner)


class _PlacedShadow(Shadow):
    """For models that resume at checkpoints."""

    def shade(self, edge: Edge) -> Shade:
        return Shade(edge)

    def keeps(self, edge: Edge, position: int) -> bool:
        marks = edge.shades[self.number].marks
        index = bisect_left(marks, position, key=_position)
        return index < len(marks) and marks[index].position == position

    def cut(self, shade: Shade, keep: int) -> None:
        while shade.marks and shade.marks[-1].position > keep:
            mark = shade.marks[-1]
            self._queue.discard(mark)
            self._remove(mark)
        if shade.lost:
            self.losses -= len(shade.lost)
            shade.lost = {at: lost for at, lost in shade.lost.items() if at <= keep}
            self.losses += len(shade.lost)

    def request(self, request: EndedRequest, blocks: int) -> int:
        edges, limit, total, places, goes_on = request
        at = self._find(edges, limit)
        hit = 0 if at is None else at.position
        if self._learns and hit < limit:
            self._miss(edges, hit, limit)
        if at is not None:
            self._resume(at, goes_on)
        number, held = self.number, 0
        for edge in edges:
            if (end := edge.shades[number].end) > edge.start:
                held = end
                break
        planned = [p for p in places if p.position > hit and p.kind.partition(":")[0] not in self._without]
        states = self._state * (1 + len(planned) - (bool(planned) and planned[-1].position == total))
        need = max(0, total - held) * self._density + states
        if self.used + need > blocks:
            self._make_room(blocks - need)
        for place in planned:
            self._take(edges, *place)
        return hit

    def _find(self, edges: Sequence[Edge], limit: int) -> Mark | None:
        """The deepest mark at or before `limit` on a path."""
        number = self.number
        for edge in edges:
            marks = edge.shades[number].marks
            if marks and marks[0].position <= limit:
                mark: Mark = marks[-1]
                return mark if mark.position <= limit else marks[bisect_right(marks, limit, key=_position) - 1]
        return None

    def _resume(self, mark: Mark, goes_on: bool) -> None:
        self._tick += 1
        if self._learns:
            self._reuse.wanted(mark.kind, self._tick - mark.born if mark.uses == 0 else None)
        mark.uses += 1
        mark.shared += not goes_on
        mark.used, mark.age = self._tick, self._policy.clock
        self._queue.push(mark)

    def _miss(self, edges: Sequence[Edge], low: int, high: int) -> None:
        """A request would have resumed in (low, high], but for marks that went: of each kind the deepest counts."""
        seen = set()
        for edge in edges:
            lost = edge.shades[self.number].lost
            for position in sorted(lost, reverse=True) if lost else ():
                one = lost[position]
                if low < position <= high and one.kind not in seen:
                    seen.add(one.kind)
                    self._reuse.wanted(one.kind, self._tick - one.born if one.uses == 0 else None)
                    one.uses += 1
                    one.shared += 1
            if edge.start <= low:
                return

    def _take(self, edges: Sequence[Edge], position: int, kind: str) -> None:
        edge = next(edge for edge in edges if edge.start < position)
        shade: Shade = edge.shades[self.number]
        marks, before = shade.marks, shade.end
        index = bisect_left(marks, position, key=_position) if marks and marks[-1].position >= position else len(marks)
        if index < len(marks) and marks[index].position == position:
            return
        mark = Mark(position, kind, shade)
        marks.insert(index, mark)
        self.marks += 1
        self.tokens += max(0, position - before)
        if before == edge.start:
            self._hold(edge.parent)
        self._tick += 2
        mark.used = mark.born = self._tick
        mark.age = self._policy.clock
        if self._learns:
            if (lost := shade.lost.pop(position, None)) is not None:
                mark.uses, mark.shared = lost.uses, lost.shared
                self.losses -= 1
            self._reuse.took(kind)
        self._queue.push(mark)

    def _hold(self, edge: Edge | None) -> None:
        """A child of `edge` is held from now on: so is all of it, and what is before it."""
        while edge is not None and edge.parent is not None:
            shade: Shade = edge.shades[self.number]
            before = shade.end
            shade.children += 1
            self.tokens += edge.end - before
            if shade.children > 1 or before > edge.start:
                return
            edge = edge.parent

    def _make_room(self, most: float) -> None:
        while self.used > most and (mark := self._queue.pop()) is not None:
            self._note_victim(mark)
            self.dropped.append((mark.shade.edge, mark.position))
            self._remove(mark)
            if self._learns:
                self._remember(mark.shade, mark)
            if not isinstance(self._queue, Oldest):
                self._push_last(mark.shade)

    def _remember(self, shade: Shade, mark: Mark) -> None:
        shade.lost[mark.position] = mark
        if len(shade.lost) > _LOST:
            del shade.lost[next(iter(shade.lost))]
        else:
            self.losses += 1

    def _push_last(self, shade: Shade) -> None:
        """What is the last mark of its path now frees more: queue it anew."""
        while not shade.children:
            if shade.marks:
                self._queue.push(shade.marks[-1])
                return
            parent = shade.edge.parent
            if parent is None or parent.parent is None:
                return
            shade = parent.shades[self.number]

    def _remove(self, mark: Mark) -> None:
        shade: Shade = mark.shade
        before = shade.end
        del shade.marks[bisect_left(shade.marks, mark.position, key=_position)]
        self.marks -= 1
        edge, end = shade.edge, shade.end
        self.tokens -= before - end
        while end == edge.start < before and edge.parent is not None and edge.parent.parent is not None:
            edge = edge.parent
            shade = edge.shades[self.number]
            before = shade.end
            shade.children -= 1
            end = shade.end
            self.tokens -= before - end

    def _gain(self, mark: Mark) -> tuple[int, float, float, bool]:
        shade: Shade = mark.shade
        marks, edge, position, blocks, inner = shade.marks, shade.edge, mark.position, float(self._state), False
        if marks[-1] is mark:
            above = marks[-2].position if len(marks) > 1 else 0
            if not shade.children:
                blocks += (position - (above or edge.start)) * self._density
        else:
            index, inner = bisect_left(marks, position, key=_position), True
            above = marks[index - 1].position if index else 0
        parent = edge.parent
        while not above and parent is not None and parent.parent is not None:
            marks = parent.shades[self.number].marks
            above = marks[-1].position if marks else 0
            parent = parent.parent
        return above, self._cost.between(above, position), blocks or 1.0, inner


class _FloatShadow(Shadow):
    """For models that can resume anywhere: paths are held from their start, and trimmed from their ends."""

    shade_bytes = SHADE_BYTES + MARK_BYTES

    def shade(self, edge: Edge) -> FloatShade:
        return FloatShade(edge)

    def keeps(self, edge: Edge, position: int) -> bool:
        return not edge.shades or edge.shades[self.number].end >= position

    def cut(self, shade: FloatShade, keep: int) -> None:
        if shade.mark.position > keep:
            self._trim(shade, keep)
        if keep == shade.edge.start:
            self._queue.discard(shade.mark)

    def request(self, request: EndedRequest, blocks: int) -> int:
        edges, limit, total = request.edges, request.limit, request.total
        number, held, hit = self.number, 0, 0
        for edge in edges:
            if (end := edge.shades[number].end) > edge.start:
                held, hit = end, min(end, limit)
                break
        if hit < limit:
            self._miss(edges, hit, limit)
        self._tick += 1
        if hit:
            self._resume(edges, hit)
        need = max(0, total - held) * self._density
        if self.used + need > blocks:
            self._make_room(blocks - need, edges)
        self._tick += 1
        if self._learns:
            self._reuse.took(PATH)
        self._grow(edges, total)
        return hit

    def _miss(self, edges: Sequence[Edge], low: int, high: int) -> None:
        """A request would have resumed further, but for ends that were trimmed: all of them on the way count."""
        gone = []
        for edge in edges:
            mark = edge.shades[self.number].mark
            if mark.born and mark.position < min(high, edge.end):
                gone.append(mark)
            if edge.start <= low:
                break
        if gone and self._learns:
            self._reuse.wanted(PATH, self._tick - gone[0].used if gone[0].uses == 0 else None)
        for mark in gone:
            mark.uses += 1

    def _resume(self, edges: Sequence[Edge], hit: int) -> None:
        on_path = [edge.shades[self.number] for edge in edges if edge.start < hit]
        first = on_path[0].mark
        if self._learns:
            self._reuse.wanted(PATH, self._tick - first.used if first.uses == 0 else None)
        for shade in on_path:
            mark = shade.mark
            mark.uses += 1
            mark.used = mark.born = self._tick
            mark.age = self._policy.clock
            if not shade.children:
                self._queue.push(mark)

    def _grow(self, edges: Sequence[Edge], total: int) -> None:
        """Hold the path up to `total`."""
        grew_from_start, whole_path = False, isinstance(self._queue, Oldest)
        for edge in edges:
            shade: FloatShade = edge.shades[self.number]
            mark, before = shade.mark, shade.mark.position
            shade.children += grew_from_start
            stop = min(edge.end, total)
            if before < stop:
                self.tokens += stop - before
                mark.position, mark.age = stop, self._policy.clock
                mark.used = mark.born = self._tick
                self._queue.push(mark)
            elif whole_path:  # what lies before is never older than what follows it
                self._queue.push(mark)
            elif not grew_from_start:
                return
            grew_from_start = before < stop and before == edge.start

    def _make_room(self, most: float, own: Sequence[Edge]) -> None:
        busy, put_back = {edge.shades[self.number].mark for edge in own}, []
        while self.used > most and (mark := self._queue.pop()) is not None:
            shade: FloatShade = mark.shade
            if mark in busy:
                put_back.append(mark)
                continue
            if shade.children or mark.position == shade.edge.start:  # in an order that an edge's division has upset
                put_back += [mark] * (shade.children > 0)
                continue
            self._note_victim(mark)
            self.dropped.append((shade.edge, mark.position))
            blocks = -(-mark.position // self._span) - int(-(-(self.used - most) // (self._density * self._span)))
            self._trim(shade, max(shade.edge.start, blocks * self._span))
            if mark.position > shade.edge.start:
                put_back.append(mark)
        for mark in reversed(put_back):
            self._queue.push_first(mark)

    def _trim(self, shade: FloatShade, keep: int) -> None:
        mark, edge = shade.mark, shade.edge
        self.tokens -= mark.position - keep
        mark.position = keep
        if keep == edge.start and edge.parent is not None and edge.parent.parent is not None:
            above: FloatShade = edge.parent.shades[self.number]
            above.children -= 1
            if not above.children and not isinstance(self._queue, Oldest):
                self._queue.push(above.mark)

    def _gain(self, mark: Mark) -> tuple[int, float, float, bool] | None:
        shade: FloatShade = mark.shade
        start, position = shade.edge.start, mark.position
        if shade.children or position == start:
            return None
        keep = max(start, (-(-position // self._span) - 1) * self._span)
        return keep, self._cost.between(keep, position), max(1.0, (position - keep) * self._density), False


def shadow_of(
    number: int,
    policy: Weighing | Lru,
    geometry: CacheGeometry,
    cost: ComputeCost,
    without: frozenset[str] = frozenset(),
) -> Shadow:
    """A shadow of `policy` for a cache of that geometry; see `Shadow`."""
    kind = _PlacedShadow if geometry.tail_tables else _FloatShadow
    return kind(number, policy, geometry, cost, without)


class Shadows:
    """The shadows of a cache that follows the best of them.

    Attributes:
        each: The shadows, in the order of the choices of `policy`.
        hit: Position at which the latest request would have resumed under the policy that was followed.
    """

    def __init__(self, policy: Adaptive, geometry: CacheGeometry, cost: ComputeCost, first: int = 0) -> None:
        """Empty shadows for an empty cache; `first`: the number of the first of them on every edge."""
        self._policy, self._cost = policy, cost
        choices = policy.choose_among(floats=not geometry.tail_tables)
        self.each = [shadow_of(i, one.policy, geometry, cost, one.without) for i, one in enumerate(choices, first)]
        self._weight = 1.0
        self.hit = 0

    @property
    def dropped(self) -> Sequence[tuple[Edge, int]]:
        """What the policy that is followed dropped for the latest request."""
        return self.each[self._policy.now].dropped

    def keeps(self, edge: Edge, position: int) -> bool:
        """Whether the policy that is followed keeps `position` of an edge."""
        return self.each[self._policy.now].keeps(edge, position)

    def ended(self, request: EndedRequest, blocks: int) -> bool:
        """A request has ended, where there are so many blocks. Returns whether another policy is followed now."""
        for shadow in self.each:
            shadow.dropped.clear()
        hits = [shadow.request(request, blocks) for shadow in self.each]
        self.hit = hits[self._policy.now]
        for shadow, hit in zip(self.each, hits, strict=True):
            if hit:
                shadow.saved += self._weight * self._cost.between(0, hit)
        self._weight *= _GROWTH
        if self._weight > _MOST_WEIGHT:
            for shadow in self.each:
                shadow.saved /= self._weight
            self._weight = 1.0
        return self._policy.follow([shadow.saved for shadow in self.each])


_GROWTH = 2.0 ** (1 / 1000)
"""By so much more counts what a request saves than what the one before it saved: half as much for 1,000 earlier."""
_MOST_WEIGHT = 1e100
