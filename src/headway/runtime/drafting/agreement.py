"""What rank 0 proposes and judges, told to the other ranks.

Both travel as int64 arrays of a shape that every rank knows beforehand, in one collective each. Other ranks get the
token ids and the counts: distributions, confidences and log probabilities are needed where they are judged and reported
only, which is on rank 0. If rank 0 fails, the others are told that too, instead of waiting for it until they count as
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from headway.runtime.drafting.drafter import Proposal
from headway.runtime.interface import RowAnswer
from headway.runtime.parallel.communicator import Communicator

__all__ = ["Agreement"]

Int64s = NDArray[np.int64]
T = TypeVar("T")


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
        """The proposals of rank 0, for `count` requests; `propose` is called there only.

        Raises:
            RuntimeError: Rank 0 failed; there its own exception is raised.
        """
        if self._ranks is None:
            return propose()
        mine, told = self._share(count, propose, lambda proposal: proposal.tokens.tolist())
        return [Proposal(np.array(tokens, dtype=np.int32)) for tokens in told] if mine is None else mine

    def on_judgements(self, count: int, judge: Callable[[], Sequence[RowAnswer]]) -> Sequence[RowAnswer]:
        """The judgements of rank 0 on `count` rows; `judge` is called there only.

        Raises:
            RuntimeError: Rank 0 failed; there its own exception is raised.
        """
        if self._ranks is None:
            return judge()
        mine, told = self._share(count, judge, lambda judgement: [judgement.accepted, *judgement.tokens])
        return [RowAnswer(tuple(tokens), accepted=accepted) for accepted, *tokens in told] if mine is None else mine

    def _share(
        self, count: int, find: Callable[[], Sequence[T]], numbers: Callable[[T], Sequence[int]]
    ) -> tuple[Sequence[T] | None, list[list[int]]]:
        """What rank 0 finds, there only, and on every rank the numbers that tell it."""
        assert self._ranks is not None
        mine: Sequence[T] | None = None
        fault: Exception | None = None
        if self._ranks.rank == 0:
            try:
                mine = find()
            except Exception as error:  # the others wait for word: they hear of it before it is raised
                fault = error
        told = self._tell(count, None if mine is None else [numbers(each) for each in mine], failed=fault is not None)
        if fault is not None:
            raise fault
        if told is None:
            raise RuntimeError("rank 0 could not propose or judge: its own fault says why")
        return mine, told

    def _tell(self, count: int, lists: Sequence[Sequence[int]] | None, *, failed: bool) -> list[list[int]] | None:
        """Lists of whole numbers from rank 0 to all; elsewhere `lists` is None. None if rank 0 says that it failed."""
        assert self._ranks is not None
        packed: Int64s = np.zeros((count, self._most + 3), dtype=np.int64)
        if failed:
            packed[0, 0] = -1
        elif lists is not None:
            for row, each in zip(packed, lists, strict=True):
                row[0] = len(each)
                row[1 : 1 + len(each)] = each
        rows = self._ranks.all_gather(torch.from_numpy(packed).to(self._device))[0].tolist()
        return None if rows[0][0] < 0 else [row[1 : 1 + row[0]] for row in rows]
