"""What a shadow lays on edges, and the orders in which it drops that.

A mark is a place that a shadow keeps, or kept: what a checkpoint is to the cache, without blocks. All marks of one edge
are its shade. They move with the edge when it is divided.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any

from headway.cache.index.edge import Edge
from headway.cache.policy.reuse import PATH

__all__ = ["FloatShade", "Lowest", "Mark", "Oldest", "Shade"]

_position = attrgetter("position")
_TRIES = 8
"""Marks whose rank has risen that are put back before the lowest one goes all the same."""


class Mark:
    """A place that a shadow keeps, or kept."""

    __slots__ = ("age", "born", "entry", "kind", "position", "shade", "shared", "used", "uses")

    def __init__(self, position: int, kind: str, shade: Any) -> None:
        self.position, self.kind, self.shade = position, kind, shade
        self.used = self.born = self.uses = self.shared = 0
        self.age = 0.0
        self.entry = -1


class Shade:
    """What a shadow holds of an edge: marks, marks dropped (those that teach), and children that are held."""

    __slots__ = ("children", "edge", "lost", "marks")

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.marks: list[Mark] = []
        self.lost: dict[int, Mark] = {}
        self.children = 0

    @property
    def end(self) -> int:
        """Up to where the edge is held."""
        if self.children:
            return self.edge.end
        return self.marks[-1].position if self.marks else self.edge.start

    def split(self, upper: Edge, position: int) -> Shade:
        """Divide it with its edge, which became the lower half. Returns the upper one's."""
        shade, cut = Shade(upper), bisect_right(self.marks, position, key=_position)
        shade.marks, self.marks = self.marks[:cut], self.marks[cut:]
        shade.lost = {at: self.lost.pop(at) for at in list(self.lost) if at <= position}
        for mark in (*shade.marks, *shade.lost.values()):
            mark.shade = shade
        shade.children = int(bool(self.marks or self.children))
        return shade


class FloatShade:
    """The same where models can resume anywhere: its mark lies where the held part ends."""

    __slots__ = ("children", "edge", "mark")

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.mark = Mark(edge.start, PATH, self)
        self.children = 0

    @property
    def end(self) -> int:
        """Up to where the edge is held."""
        return self.mark.position

    def split(self, upper: Edge, position: int) -> FloatShade:
        """Divide it with its edge, which became the lower half. Returns the upper one's."""
        shade, under = FloatShade(upper), self.mark
        over = shade.mark
        over.uses, over.shared, over.used, over.age = under.uses, under.shared, under.used, under.age
        over.born = under.born
        over.position, under.position = min(under.position, position), max(under.position, position)
        shade.children = int(under.position > position)
        return shade


class Oldest:
    """A queue for least recently used first: nothing changes its place while it waits."""

    def __init__(self) -> None:
        """Nothing is queued."""
        self._order: OrderedDict[Mark, None] = OrderedDict()

    def push(self, mark: Mark) -> None:
        """Make it the youngest."""
        self._order[mark] = None
        self._order.move_to_end(mark)

    def push_first(self, mark: Mark) -> None:
        """Put back what was the oldest."""
        self._order[mark] = None
        self._order.move_to_end(mark, last=False)

    def discard(self, mark: Mark) -> None:
        """Take it out, if it is in."""
        self._order.pop(mark, None)

    def pop(self) -> Mark | None:
        """Take out the oldest, or None if there is none."""
        return self._order.popitem(last=False)[0] if self._order else None


class Lowest:
    """A queue for the lowest rank first: like `EvictionQueue`, with less of everything."""

    def __init__(self, rank: Callable[[Mark], float | None]) -> None:
        """Nothing is queued; `rank` gives the rank of a mark, or None if it cannot be dropped now."""
        self.rank = rank
        self._heap: list[tuple[float, int, Mark]] = []
        self._asked: deque[tuple[float, int, Mark]] = deque()
        self._entries = self._live = 0

    def __getstate__(self) -> dict[str, Any]:
        """All but whom it asks: who reads the queue sets `rank` again."""
        return {name: value for name, value in vars(self).items() if name != "rank"}

    def push(self, mark: Mark) -> None:
        """Queue it at its present rank."""
        rank = self.rank(mark)
        if rank is None:
            self.discard(mark)
            return
        self._live += mark.entry < 0
        self._entries = mark.entry = number = self._entries + 1
        entry = (rank, number, mark)
        heappush(self._heap, entry)
        self._asked.append(entry)
        if len(self._asked) > 2 * self._live + 64 or len(self._heap) > 2 * self._live + 64:
            self._asked = deque([entry for entry in self._asked if entry[2].entry == entry[1]])
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapify(self._heap)

    push_first = push

    def discard(self, mark: Mark) -> None:
        """Take it out, if it is in."""
        self._live -= mark.entry >= 0
        mark.entry = -1

    def pop(self) -> Mark | None:
        """Take out the one of lowest rank, or None if nothing can be dropped."""
        heap, asked = self._heap, self._asked
        while asked:
            _, number, mark = asked.popleft()
            if mark.entry == number:
                self.push(mark)
                break
        heap, tries = self._heap, 0
        while heap:
            before, number, mark = heap[0]
            if mark.entry == number:
                rank = self.rank(mark)
                if rank is not None and rank > before and tries < _TRIES:
                    tries += 1
                    self._entries = mark.entry = number = self._entries + 1
                    entry = (rank, number, mark)
                    heapreplace(heap, entry)
                    self._asked.append(entry)
                    continue
                self.discard(mark)
                if rank is not None:
                    heappop(heap)
                    return mark
            heappop(heap)
        return None
