"""Marconi ("Marconi: Prefix Caching for the Era of Hybrid LLMs", arXiv 2411.19379), as a policy on our cache.

Admission: a state is kept where a prompt parts from a known path (the paper's speculative insertion) and at the end of
a request, after its last decoded token. Nowhere else: not at the end of the prompt.

Eviction: the lowest utility goes,

    utility = recency + alpha x FLOP efficiency                                            (equation 2 of the paper)
    FLOP efficiency = compute that a hit saves over the next shallower state / bytes that dropping it frees

both mapped to [0, 1] over what is kept. A state inside a path is dropped alone, at its end with the entries behind the
next shallower one: the cache does that as it is. Alpha begins at 0 (LRU) in the paper; after the first eviction it is
tuned on a window of requests by a grid search. Here the window is the first `bootstrap` share of the trace, replayed
once for each alpha of the grid; the best one is used for the whole trace. That favours the preset a little.

What the heap cannot do is to rank anew whenever the extremes move. Recency is therefore mapped by the span between the
latest use and the last victim's, and efficiency by the largest one seen; both change slowly.
"""

from __future__ import annotations

from dataclasses import replace

from headway.cache import Candidate, EvictionPolicy
from headway.replay.config import MarconiPreset, ReplayConfig

__all__ = ["ALPHAS", "MarconiUtility", "marconi_config"]

ALPHAS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The grid on which alpha is tuned."""
_PLACEMENT = ("junction", "answer_end")


class MarconiUtility(EvictionPolicy):
    """Recency plus alpha times FLOP efficiency, in units of ticks of use."""

    def __init__(self, alpha: float) -> None:
        """Weigh FLOP efficiency by `alpha`; 0 is least recently used first."""
        self._alpha = alpha
        self._latest = 0
        self._span = 0
        self._largest = 0.0

    def priority(self, candidate: Candidate) -> float:
        """Utility of `candidate`, times the span of recency."""
        efficiency = candidate.saved / candidate.blocks
        self._latest = max(self._latest, candidate.used)
        self._largest = max(self._largest, efficiency)
        share = efficiency / self._largest if self._largest else 0.0
        return candidate.used + self._alpha * self._span * share

    def evicted(self, candidate: Candidate) -> None:
        """The span of recency reaches back to the oldest that was still there."""
        super().evicted(candidate)
        self._span = max(self._span, self._latest - candidate.used)


def marconi_config(config: ReplayConfig, settings: MarconiPreset, alpha: float | None = None) -> ReplayConfig:
    """The cache's own configuration for this preset, with that alpha (the settings' if not given)."""
    utility = MarconiUtility(settings.alpha if alpha is None else alpha)
    return replace(config, preset=None, placement=_PLACEMENT, eviction=utility, alignment=1)
