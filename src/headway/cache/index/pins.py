"""Pins: prefixes that must stay for a while.

A pin protects the entries of a path up to one position, and the checkpoint that lies there. Its blocks count as used,
so the share of the pool that pins may take is a count of real blocks: what two pins share counts once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from headway.cache.index.edge import Edge, Pin, Section
from headway.cache.index.pool import BlockPool
from headway.cache.index.tree import PrefixTree

__all__ = ["Pins"]

_LIFTED = float("-inf")
"""The end of a pin that has been lifted."""


class Pins:
    """All pins of one cache, and when each ends."""

    def __init__(self, tree: PrefixTree, pool: BlockPool, *, share: float, clock: Callable[[], float]) -> None:
        """Start with none.

        Args:
            tree: Where pins lie.
            pool: Whose blocks they need.
            share: Largest share of the pool that they may protect.
            clock: Seconds.
        """
        self._tree = tree
        self._pool = pool
        self._share = share
        self._clock = clock
        self._ends: list[tuple[float, int, Pin]] = []
        self._numbers = 0

    def pin(self, edge: Edge, position: int, seconds: float, fits: Callable[[int], bool]) -> bool:
        """Pin the path through `edge` up to `position`, which lies on it and can be resumed at; renews one there.

        Args:
            edge: The edge.
            position: The position.
            seconds: How long.
            fits: Whether the request that pins can go on from there with so many blocks that no pin protects.

        Returns:
            False if pins would protect more than their share, or leave that request too little; nothing has changed.
        """
        until = self._clock() + seconds
        pin = edge.pin_at(position)
        if pin is not None:
            pin.until = max(pin.until, until)
            return True
        parts = self.parts_under(edge, position)
        more = sum(int(np.count_nonzero(self._pool.pins[part.ids] == 0)) for part in parts)
        pinned = self._pool.pinned + more
        if pinned > self._share * self._pool.blocks or not fits(self._pool.blocks - pinned):
            return False
        for part in parts:
            self._pool.pin(part.ids, whole=part.whole)
        pin = Pin(edge, position, until)
        edge.pins.append(pin)
        self._tree.pins += 1
        self._mark(pin, pinned=True)
        self._numbers += 1
        heapq.heappush(self._ends, (until, self._numbers, pin))
        return True

    def lift(self, pin: Pin) -> None:
        """End a pin now."""
        for part in self.parts_under(pin.edge, pin.position):
            self._pool.unpin(part.ids, whole=part.whole)
        pin.edge.pins.remove(pin)
        self._tree.pins -= 1
        self._mark(pin, pinned=False)
        pin.until = _LIFTED
        if len(self._ends) > 64:
            live = [end for end in self._ends if end[2].until > _LIFTED]
            if 2 * len(live) < len(self._ends):
                heapq.heapify(live)
                self._ends = live

    def expired(self) -> Iterator[Pin]:
        """The pins whose time is over; whoever asks lifts them."""
        while self._ends and self._ends[0][0] <= self._clock():
            _, number, pin = heapq.heappop(self._ends)
            if pin.until > self._clock():  # it was renewed since
                heapq.heappush(self._ends, (pin.until, number, pin))
            elif pin.until > _LIFTED:
                yield pin

    def held_within(self, edge: Edge, position: int) -> int:
        """Pinned blocks that whoever resumes at `position` of the path through `edge` uses as they are."""
        if not self._pool.pinned or position == 0:
            return 0
        tables = enumerate(self._tree.tables)
        ids = [self._tree.path_ids(edge, i, 0, position // table.span) for i, table in tables]
        return sum(int(np.count_nonzero(self._pool.pins[one])) for one in ids)

    def parts_under(self, edge: Edge, position: int) -> list[Section]:
        """Blocks that a pin at `position` of the path through `edge` protects, all distinct."""
        tables, checkpoint = enumerate(self._tree.tables), edge.checkpoint_at(position)
        assert checkpoint is not None
        ids = [self._tree.path_ids(edge, i, 0, -(-position // table.span)) for i, table in tables]
        return [*(Section(0, one) for one in ids), *checkpoint.sections]

    def _mark(self, pin: Pin, *, pinned: bool) -> None:
        checkpoint = pin.edge.checkpoint_at(pin.position)
        if checkpoint is not None and not checkpoint.floats:
            checkpoint.pinned = pinned
