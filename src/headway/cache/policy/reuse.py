"""How often and how soon requests come back to what is kept: learned for each kind of placement, without a trace.

A checkpoint is taken to be used at some rate that nobody knows. Its kind says what to expect: the rates of a kind are
spread as an exponential distribution with mean u / w, where u is how often its checkpoints are wanted and w how long
that takes. Of one that was used n times in a time t is then to be expected (the mean of a gamma distribution, as for
every Poisson process with such a prior)

    rate = (n + 1) / (w / u + t)      uses a tick

so what is new is judged by its kind, and what is old by itself. Time is counted in *ticks*: uses and changes of the
cache.

A use counts whether or not the checkpoint was still there. Else, in a small memory, nothing would look worth keeping
for longer than it is kept. So what went stays known for a while: a request that would have resumed from it counts, and
a checkpoint that is taken there again goes on with its uses.

Requests do not come as evenly as that model has it. Two corrections for it were chosen on traces (docs/policy.md): t is
the mean of the time since a checkpoint was taken and the time since it was used last, and w is 0.3 of the geometric
mean of the times until a first use (0.05 for paths).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from headway.cache.policy.placement import LAST_END

__all__ = ["PATH", "ReuseRates"]

PATH = "path"
"""What stretches of a path count as, for models that need no checkpoints."""
_DOUBT = 0.05
"""Uses of the last ends of messages that are assumed before any was seen, where 1 is of other kinds: the end of the
prompt lies behind them, and is what most requests come back to."""
_CERTAIN = frozenset({"preempt"})
"""Kinds whose requests are sure to come back."""
_WAIT_SHARE, _PATH_WAIT_SHARE = 0.3, 0.05
"""Share of the usual time until a first use within which a checkpoint, or a path, has to show what it is worth. A path
goes block by block from its end, so what is lost by a wrong guess is less."""
_FIRST_WAIT, _FIRST_WEIGHT = 200.0, 5.0
"""Ticks until a first use that are assumed before any was seen, and how many uses that assumption counts for."""
_FIRST_LOG = _FIRST_WEIGHT * math.log(_FIRST_WAIT)


@dataclass(slots=True)
class _Kind:
    """What was seen of a kind.

    Attributes:
        taken: How many were taken.
        wanted: How many requests wanted one.
        first: How many were wanted for the first time.
        log_wait: Sum of the logarithms of the ticks until they were.
        patience: w / u that follows from these; None if it has to be computed again.
    """

    taken: float = 0.0
    wanted: float = 0.0
    first: float = 0.0
    log_wait: float = 0.0
    patience: float | None = None

    def fade(self) -> None:
        """Halve all counts."""
        self.taken, self.wanted = self.taken / 2, self.wanted / 2
        self.first, self.log_wait = self.first / 2, self.log_wait / 2


@dataclass
class ReuseRates:
    """What was learned of each kind.

    Old evidence fades: counts are halved when a kind has been seen `memory` times.
    """

    memory: int = 2000
    _kinds: dict[str, _Kind] = field(default_factory=lambda: defaultdict(_Kind))

    def took(self, kind: str) -> None:
        """Something of `kind` was kept."""
        seen = self._kinds[kind]
        seen.taken += 1.0
        seen.patience = None
        if seen.taken > self.memory:
            seen.fade()

    def wanted(self, kind: str, wait: int | None = None) -> None:
        """A request resumed from something of `kind`, or would have if that had not gone.

        Args:
            kind: Its kind.
            wait: If it was wanted for the first time: ticks since it was taken.
        """
        seen = self._kinds[kind]
        seen.wanted += 1.0
        seen.patience = None
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
        seen = self._kinds[kind]
        if seen.patience is None:
            seen.patience = _patience(kind, seen)
        return (uses + 1.0) / (seen.patience + 0.5 * (lived + idle))


def _patience(kind: str, seen: _Kind) -> float:
    """How long a kind usually takes to be wanted as often as once."""
    share = _PATH_WAIT_SHARE if kind == PATH else _WAIT_SHARE
    log_wait = (seen.log_wait + _FIRST_LOG) / (seen.first + _FIRST_WEIGHT)
    hope = _DOUBT if kind.startswith(LAST_END) else 1.0
    often = 1.0 if kind in _CERTAIN else (seen.wanted + hope) / (seen.taken + 2.0)
    return share * math.exp(log_wait) / often
