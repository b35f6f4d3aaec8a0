"""Prompt lookup: what followed the last few tokens the last time they occurred in the same sequence.

Answers that repeat their prompt (summaries, edits of code, quotations) are often right for many tokens. It needs no
weights and no memory: the sequence itself is searched anew for each draft, which is a comparison of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.cache import LayerSpec
from headway.runtime.drafting.drafter import DraftRequest, Observed, Proposal
from headway.runtime.forward.arena import Arena
from headway.runtime.model.layout import Entries
from headway.runtime.parallel.context_parallel import HeadMerge

__all__ = ["PromptLookup"]

Int32s = NDArray[np.int32]

_LONGEST, _SHORTEST = 4, 2
"""Tokens that must agree: the longest run is tried first; a single token occurs again by mere chance."""
_NOTHING = np.empty(0, dtype=np.int32)


class PromptLookup:
    """A drafter (see `headway.runtime.drafting.drafter.Drafter`) that looks in the sequence itself.

    Its drafts are not drawn. It may propose fewer tokens than were asked for, or none.

    Args:
        most: Most tokens of a draft.
    """

    name = "lookup"
    groups: tuple[LayerSpec, ...] = ()
    entries: tuple[Entries, ...] = ()
    feature_layers: tuple[int, ...] = ()

    def __init__(self, most: int) -> None:
        self.most = most

    mixed_features = False

    def attach(self, arena: Arena, merge: HeadMerge | None = None) -> None:
        """Do nothing: it keeps nothing."""

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Do nothing: a rank can propose by itself."""

    def observe(self, observed: Observed) -> None:
        """Do nothing: the sequence comes with each request."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose for each sequence what followed the latest earlier occurrence of its end."""
        return [
            Proposal(_followers(np.concatenate([r.sample.prompt, r.sample.output]), r.count).astype(np.int32))
            for r in requests
        ]


def _followers(tokens: Int32s, count: int) -> Int32s:
    """Up to `count` tokens that followed the longest and latest earlier run equal to the end of `tokens`."""
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        places = len(tokens) - length  # starts of earlier runs
        if places < 1:
            continue
        same = np.ones(places, dtype=np.bool_)
        for i in range(length):
            same &= tokens[i : i + places] == tokens[places + i]
        found = np.flatnonzero(same)
        if len(found):
            begin = int(found[-1]) + length
            return tokens[begin : begin + count]
    return _NOTHING
