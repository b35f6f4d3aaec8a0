"""What rank 0 proposes and judges, told to the other ranks.

Both travel as int64 arrays of a shape that every rank knows beforehand, in one collective each. Other ranks get the
token ids and the counts: distributions, confidences and log probabilities are needed where they are judged and reported
only, which is on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway.runtime.context_parallel import Communicator
from headway.runtime.drafting.drafter import Proposal
from headway.runtime.drafting.verification import Verdict

__all__ = ["Agreement"]

Int64s = NDArray[np.int64]


class Agreement:
    """Makes all ranks go on with what rank 0 found.

    Args:
        ranks: The ranks; None for one.
        most: Most tokens of a draft.
        device: Device of this rank.
    """

    def __init__(self, ranks: Communicator | None, most: int, device: torch.device) -> None:
        self._ranks = ranks
        self._most = most
        self._device = device

    def on_proposals(self, count: int, propose: Callable[[], Sequence[Proposal]]) -> Sequence[Proposal]:
        """The proposals of rank 0, for `count` requests; `propose` is called there only."""
        if self._ranks is None:
            return propose()
        mine = propose() if self._ranks.rank == 0 else None
        told = self._tell(count, None if mine is None else [p.tokens.tolist() for p in mine])
        return mine or [Proposal(np.array(tokens, dtype=np.int32)) for tokens in told]

    def on_verdicts(self, count: int, judge: Callable[[], list[Verdict]]) -> list[Verdict]:
        """The verdicts of rank 0 on `count` rows; `judge` is called there only."""
        if self._ranks is None:
            return judge()
        mine = judge() if self._ranks.rank == 0 else None
        told = self._tell(count, None if mine is None else [[v.accepted, *v.tokens] for v in mine])
        return mine or [Verdict(tuple(tokens), accepted=accepted) for accepted, *tokens in told]

    def _tell(self, count: int, lists: Sequence[Sequence[int]] | None) -> list[list[int]]:
        """Lists of whole numbers from rank 0 to all; elsewhere `lists` is None."""
        assert self._ranks is not None
        packed: Int64s = np.zeros((count, self._most + 3), dtype=np.int64)
        for row, numbers in zip(packed, lists or (), strict=False):
            row[0] = len(numbers)
            row[1 : 1 + len(numbers)] = numbers
        gathered = self._ranks.all_gather(torch.from_numpy(packed).to(self._device))[0]
        return [row[1 : 1 + row[0]] for row in gathered.tolist()]
