"""How often and how soon requests come back to what is kept: learned for each kind of placement, without a trace.

A checkpoint is taken to be used at some rate that nobody knows. Its kind says what to expect: the rates of a kind are
spread as an exponential distribution with mean u / w, where u is how often its checkpoints are wanted and w how long
that takes. Of one that was used n times in a time t is then to be expected (the mean of a gamma distribution, as for
every Poisson process with such a prior)

    rate = (n + 1) / (w / u + t)      uses a tick

so what is new is judged by its kind, and what is old by itself. Time is counted in *ticks*: uses and changes of the
cache.

A use counts whether or not the checkpoint was still there. Else, in a small memory, nothing would look worth keeping
for longer than it is kept. So what went stays known for a while (`headway.cache.tree.LostCheckpoint`): a request that
would have resumed from it counts, and a checkpoint that is taken there again goes on with its uses.

Requests do not come as evenly as that model has it. Two corrections for it were chosen on traces (docs/policy.md): t is
the mean of the time since a checkpoint was taken and the time since it was used last, and w is 0.3 of the geometric
mean of the times until a first use (0.05 for paths).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["PATH", "ReuseRates"]

PATH = "path"
"""What stretches of a path count as, for models that need no checkpoints."""
_CERTAIN = frozenset({"preempt"})
"""Kinds whose requests are sure to come back."""
_WAIT_SHARE, _PATH_WAIT_SHARE = 0.3, 0.05
"""Share of the usual time until a first use within which a checkpoint, or a path, has to show what it is worth. A path
goes block by block from its end, so what is lost by a wrong guess is less."""
_FIRST_WAIT, _FIRST_WEIGHT = 200.0, 5.0
"""Ticks until a first use that are assumed before any was seen, and how many uses that assumption counts for."""


@dataclass(slots=True)
class _Kind:
    taken: float = 0.0
    wanted: float = 0.0
    first: float = 0.0
    """First uses."""
    log_wait: float = 0.0
    """Sum of the logarithms of the ticks until them."""

    def fade(self) -> None:
        self.taken, self.wanted, self.first, self.log_wait = (
            x / 2 for x in (self.taken, self.wanted, self.first, self.log_wait)
        )


@dataclass
class ReuseRates:
    """What was learned of each kind.

    Old evidence fades: counts are halved when a kind has been seen `memory` times.
    """

    memory: int = 2000
    _kinds: dict[str, _Kind] = field(default_factory=dict)

    def took(self, kind: str) -> None:
        """Something of `kind` was kept."""
        seen = self._kinds.setdefault(kind, _Kind())
        seen.taken += 1.0
        if seen.taken > self.memory:
            seen.fade()

    def wanted(self, kind: str, wait: int | None = None) -> None:
        """A request resumed from something of `kind`, or would have if that had not gone.

        Args:
            kind: Its kind.
            wait: If it was wanted for the first time: ticks since it was taken.
        """
        seen = self._kinds.setdefault(kind, _Kind())
        seen.wanted += 1.0
        if wait is not None:
            seen.first += 1.0
            seen.log_wait += math.log(max(1, wait))

    def rate(self, kind: str, uses: int = 0, lived: int = 0, idle: int = 0) -> float:
        """Expected uses a tick.

        Args:
            kind: Its kind.
            uses: How often it was wanted.
            lived: Ticks since it was taken.
            idle: Ticks since it was used, or taken.
        """
        seen = self._kinds.get(kind) or _Kind()
        log_wait = seen.log_wait + _FIRST_WEIGHT * math.log(_FIRST_WAIT)
        share = _PATH_WAIT_SHARE if kind == PATH else _WAIT_SHARE
        wait = share * math.exp(log_wait / (seen.first + _FIRST_WEIGHT))
        often = 1.0 if kind in _CERTAIN else (seen.wanted + 1.0) / (seen.taken + 2.0)
        return (uses + 1.0) / (wait / often + 0.5 * (lived + idle))
