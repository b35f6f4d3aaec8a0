"""Ranks that share the tokens of a forward: who computes what, and what goes from one to another."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.parallel.rank_threads import Ranks

from headway.runtime.forward.views import _Relay
from headway.runtime.model.attention import Scores, masked_attention
from headway.runtime.parallel.context_parallel import partial_attention
from headway.runtime.parallel.prefill_context import LEAST_SHARE, TokenRanks, share_of


@given(st.integers(1, 600), st.integers(1, 9))
def test_shares_cover_all_tokens_once_or_each_is_all(count: int, size: int) -> None:
    shares = [share_of(count, rank, size) for rank in range(size)]
    if shares[0] == (0, count):
        assert set(shares) == {(0, count)}
        return
    assert [token for first, stop in shares for token in range(first, stop)] == list(range(count))
    assert min(stop - first for first, stop in shares) >= 2
    assert shares[0][1] >= LEAST_SHARE


def test_what_is_long_enough_is_shared() -> None:
    assert [share_of(2 * LEAST_SHARE, rank, 2) for rank in (0, 1)] == [(0, LEAST_SHARE), (LEAST_SHARE, 2 * LEAST_SHARE)]
    assert share_of(2 * LEAST_SHARE - 2, 0, 2) == (0, 2 * LEAST_SHARE - 2)


@pytest.mark.parametrize(("count", "pcp"), [(33, 2), (64, 3), (50, 3)])
def test_tokens_are_gathered_and_dealt_out(count: int, pcp: int) -> None:
    ranks = Ranks(1, dcp=1, pcp=pcp)
    tokens = [merge.tokens for merge in ranks.merges]
    whole = torch.randn(2, 3, count, 4)

    def both(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        shared = tokens[rank]
        assert isinstance(shared, TokenRanks)
        own = slice(*share_of(count, rank, pcp))
        return shared.gather(whole[:, :, own], count, dim=2), shared.exchange(whole + rank, dim=2)

    for rank, (gathered, dealt) in enumerate(ranks(both)):
        assert torch.equal(gathered, whole)
        own = whole[:, :, slice(*share_of(count, rank, pcp))]
        assert torch.equal(dealt, torch.stack([own + other for other in range(pcp)]))


@pytest.mark.parametrize(("dcp", "pcp", "own"), [(1, 2, False), (1, 3, True), (2, 2, True), (2, 2, False)])
@pytest.mark.parametrize("form", ["ag_rs", "a2a"])
def test_parts_of_all_ranks_are_merged_for_all_queries_or_for_each_ranks_own(
    dcp: int, pcp: int, own: bool, form: str
) -> None:
    count, scores = 50, Scores(0.4, sinks=torch.randn(4))
    query, key, value = torch.randn(2, 4, count, 8), torch.randn(2, 2, count, 8), torch.randn(2, 2, count, 5)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    expected = masked_attention(query, key, value, scores, seen[None, None])
    ranks = Ranks(dcp, form, dcp, pcp)
    assert sorted(merge.shard for merge in ranks.merges) == list(range(dcp * pcp))

    def attend(rank: int) -> torch.Tensor:
        merge = ranks.merges[rank]
        mask = seen & (torch.arange(count) % merge.shards == merge.shard)
        part = partial_attention(query, key, value, scores, mask[None, None])
        return merge(part, scores.sinks, own_tokens=own)

    for rank, merged in enumerate(ranks(attend)):
        mine = slice(*share_of(count, rank // dcp, pcp)) if own else slice(None)
        assert (merged - expected[:, :, mine]).abs().max().item() < 1e-5


def test_states_go_from_rank_to_rank_and_the_last_ones_to_all() -> None:
    ranks = Ranks(1, dcp=1, pcp=3)

    def add_up(rank: int) -> tuple[float, float]:
        shared = ranks.merges[rank].tokens
        assert shared is not None
        state = shared.take(torch.zeros(1)) + rank + 1
        shared.hand_on(state)
        return state.item(), shared.from_last(state).item()

    assert ranks(add_up) == [(1.0, 6.0), (3.0, 6.0), (6.0, 6.0)]


def test_a_state_that_changes_after_it_was_handed_on_is_an_error() -> None:
    """The rank of later tokens has gone on from the one before: its numbers would be wrong."""
    layer, tokens = Mock(names={"conv:0", "recurrent:0"}), Mock()
    relay = _Relay(tokens)
    relay.begin(layer)
    relay.left(layer, "conv:0")
    tokens.hand_on.assert_not_called()
    relay.left(layer, "recurrent:0")
    tokens.hand_on.assert_called_once_with(layer.packed())
    with pytest.raises(RuntimeError, match="--pcp is not for this model"):
        relay.left(layer, "conv:0")
