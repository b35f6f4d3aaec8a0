"""What rank 0 finds is what all ranks go on with, its faults included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime.parallel.rank_threads import Ranks

from headway.runtime.drafting.agreement import Agreement
from headway.runtime.drafting.drafter import Proposal
from headway.runtime.interface import RowAnswer

CPU = torch.device("cpu")


def refuse() -> list[Proposal]:
    raise AssertionError("only rank 0 is asked")


def test_proposals_of_rank_0_stand_on_all_ranks() -> None:
    ranks = Ranks(3)
    mine = [Proposal(np.array(tokens, dtype=np.int32)) for tokens in ([7, 8, 9], [], [0])]

    def task(rank: int) -> list[list[int]]:
        agreement = Agreement(ranks.merges[rank].ranks, 3, CPU)
        found = agreement.on_proposals(3, (lambda: mine) if rank == 0 else refuse)
        return [proposal.tokens.tolist() for proposal in found]

    assert ranks(task) == [[[7, 8, 9], [], [0]]] * 3


def test_judgements_of_rank_0_stand_on_all_ranks() -> None:
    ranks = Ranks(2)
    mine = [RowAnswer((4, 5, 6, 1), accepted=3), RowAnswer((2,))]

    def task(rank: int) -> list[tuple[tuple[int, ...], int]]:
        agreement = Agreement(ranks.merges[rank].ranks, 3, CPU)
        found = agreement.on_judgements(2, (lambda: mine) if rank == 0 else refuse)
        return [(judgement.tokens, judgement.accepted) for judgement in found]

    assert ranks(task) == [[((4, 5, 6, 1), 3), ((2,), 0)]] * 2


def test_a_fault_of_rank_0_is_told_and_nobody_waits() -> None:
    ranks = Ranks(2)

    def fail() -> list[Proposal]:
        raise MemoryError("no room to judge")

    def task(rank: int) -> str:
        agreement = Agreement(ranks.merges[rank].ranks, 3, CPU)
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            agreement.on_proposals(1, fail if rank == 0 else refuse)
        return str(caught.value)

    assert ranks(task) == ["no room to judge", "rank 0 could not propose or judge: its own fault says why"]
