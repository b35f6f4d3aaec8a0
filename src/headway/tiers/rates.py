"""How long computing and moving take, as measured: whether a load is worth its time.

A load is taken where bytes x seconds per byte + latency is less than the compute that it saves x seconds per unit of
compute. Both sides are means of what was measured lately. What was not measured yet is tried once. Compute is
counted as everywhere (`ComputeCost`), so the quadratic part of attention is in it. How wrong the predictions were is
measured too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["MoveRate", "Rates"]

_WEIGHT = 0.2
"""Weight of the newest measurement."""
_SMALL = 64 * 1024
"""Bytes up to which a move is all latency."""


@dataclass
class MoveRate:
    """How long moves of one tier take.

    Attributes:
        latency: Seconds of a move of next to nothing; None before one was measured.
        per_byte: Seconds per byte; None before a move was measured.
        moves: Moves that were measured.
        error: Mean of |measured - predicted| / measured over the moves that were predicted.
    """

    latency: float | None = None
    per_byte: float | None = None
    moves: int = 0
    error: float = 0.0

    def seconds(self, size: int) -> float | None:
        """Predicted seconds of a move of `size` bytes, or None if nothing is known."""
        if self.per_byte is None:
            return self.latency
        return (self.latency or 0.0) + size * self.per_byte

    def measured(self, size: int, seconds: float) -> None:
        """A move of `size` bytes took `seconds`."""
        predicted = self.seconds(size)
        if predicted is not None and seconds > 0:
            self.error += _WEIGHT * (abs(seconds - predicted) / seconds - self.error)
        self.moves += 1
        if size <= _SMALL:
            self.latency = _mean(self.latency, seconds)
        else:
            self.per_byte = _mean(self.per_byte, max(0.0, seconds - (self.latency or 0.0)) / size)


@dataclass
class Rates:
    """How long computing takes, and moves by tier.

    Attributes:
        per_compute: Seconds per unit of compute of prompts; None before a step was measured.
        moves: Moves by the tier's name.
    """

    per_compute: float | None = None
    moves: dict[str, MoveRate] = field(default_factory=dict)

    def computed(self, cost: float, seconds: float) -> None:
        """A step of prompts took `seconds` for so much compute."""
        if cost > 0:
            self.per_compute = _mean(self.per_compute, seconds / cost)

    def moved(self, tier: str, size: int, seconds: float) -> None:
        """A move from `tier` took `seconds`."""
        self.moves.setdefault(tier, MoveRate()).measured(size, seconds)

    def gain(self, tier: str, size: int, cost: float) -> float:
        """Seconds that a load of `size` bytes is expected to save which saves so much compute.

        Infinitely many where a side was not measured yet: then it is tried.
        """
        moving = self.moves.get(tier, MoveRate()).seconds(size)
        return math.inf if moving is None or self.per_compute is None else cost * self.per_compute - moving


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
