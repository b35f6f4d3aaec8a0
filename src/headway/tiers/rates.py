"""How long computing and moving take, as measured: whether a load is worth its time.

A load is taken where bytes x seconds per byte + latency is less than the compute that it saves x seconds per unit of
compute. Compute is a mean of what was measured lately, a move the median of the last few: one that met an idle disk or
memory that was never touched says little. What was not measured often enough is tried. Compute is counted as everywhere
(`ComputeCost`), so the quadratic part of attention is in it. How wrong the predictions were is measured too.

What does not seem to pay is done all the same now and then, because what is never done is never measured: soon after a
tier has become slow, and ever more rarely while it stays so.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

__all__ = ["MoveRate", "Rates", "Recent"]

_WEIGHT = 0.2
"""Weight of the newest measurement."""
_SMALL = 64 * 1024
"""Bytes up to which a move is all latency."""
_KEPT = 5
"""Measurements of which the median counts."""
_BELIEVED = 3
"""Moves that were measured before anything is predicted."""
_FIRST_TRY, _LAST_TRY = 2, 32
"""Of so many moves that do not seem to pay one is made: at first, then half as often after each, down to that."""


@dataclass
class Recent:
    """The median of the latest measurements.

    Attributes:
        count: How many there were.
    """

    count: int = 0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, value: float) -> None:
        """Another one."""
        self.count += 1
        self._last.append(value)

    @property
    def value(self) -> float | None:
        """The median; None before there is one."""
        return statistics.median_low(self._last) if self._last else None


@dataclass
class MoveRate:
    """How long moves of one tier take.

    Attributes:
        latency: Seconds of a move of next to nothing.
        per_byte: Seconds per byte of larger ones.
        moves: Moves that were measured.
        error: Mean of |measured - predicted| / measured over the moves that were predicted.
    """

    latency: Recent = field(default_factory=Recent)
    per_byte: Recent = field(default_factory=Recent)
    moves: int = 0
    error: float = 0.0

    def seconds(self, size: int) -> float | None:
        """Predicted seconds of a move of `size` bytes, or None if too little is known."""
        if self.moves < _BELIEVED:
            return None
        return (self.latency.value or 0.0) + size * (self.per_byte.value or 0.0)

    def measured(self, size: int, seconds: float) -> None:
        """A move of `size` bytes took `seconds`."""
        predicted = self.seconds(size)
        if predicted is not None and seconds > 0:
            self.error += _WEIGHT * (abs(seconds - predicted) / seconds - self.error)
        self.moves += 1
        if size <= _SMALL:
            self.latency.add(seconds)
        else:
            self.per_byte.add(max(0.0, seconds - (self.latency.value or 0.0)) / size)


@dataclass
class Rates:
    """How long computing takes, and moves by tier.

    Attributes:
        per_compute: Seconds per unit of compute of prompts; None before a step was measured.
        moves: Moves by the tier's name.
        declined: Moves in a row that did not seem to pay and were not made, by the tier's name.
    """

    per_compute: float | None = None
    moves: dict[str, MoveRate] = field(default_factory=dict)
    declined: Counter[str] = field(default_factory=Counter)
    _waits: dict[str, int] = field(default_factory=dict)

    def computed(self, cost: float, seconds: float) -> None:
        """A step of prompts took `seconds` for so much compute."""
        if cost > 0:
            self.per_compute = _mean(self.per_compute, seconds / cost)

    def moved(self, tier: str, size: int, seconds: float) -> None:
        """A move from `tier` took `seconds`."""
        self.moves.setdefault(tier, MoveRate()).measured(size, seconds)

    def gain(self, tier: str, size: int, cost: float) -> float:
        """Seconds that a load of `size` bytes is expected to save which saves so much compute.

        Infinitely many where a side was not measured enough: then it is tried.
        """
        moving = self.moves.get(tier, MoveRate()).seconds(size)
        return math.inf if moving is None or self.per_compute is None else cost * self.per_compute - moving

    def makes(self, tier: str, gain: float) -> bool:
        """Decide about a move that is expected to save so many seconds. Returns whether it is made."""
        if gain > 0:
            self.declined.pop(tier, None)
            self._waits.pop(tier, None)
            return True
        self.declined[tier] += 1
        waits = self._waits.get(tier, _FIRST_TRY)
        if self.declined[tier] < waits:
            return False
        self.declined[tier], self._waits[tier] = 0, min(2 * waits, _LAST_TRY)
        return True


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
