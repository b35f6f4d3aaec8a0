"""Geometry against a deal of cards: tokens dealt in runs to ranks, one after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache import (
    CacheConfig,
    CacheGeometry,
    ChunkedLocal,
    FullAttention,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
    TableGeometry,
    TableKind,
)
from headway.errors import ConfigError

RANKS = [1, 2, 3, 4, 8]
RUNS = [1, 2, 4, 8, 16]


def table(ranks: int, run: int, block_tokens: int) -> TableGeometry:
    layout = ParallelLayout(tp=ranks, dcp=ranks, interleave=run)
    return CacheGeometry([FullAttention("a", 2)], layout, block_tokens=block_tokens).tables[0]


def deal(n: int, ranks: int, run: int) -> list[list[int]]:
    """Positions that each rank gets when n tokens are dealt in runs."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for position in range(n):
        hands[(position // run) % ranks].append(position)
    return hands


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_owner_local_and_global_index_agree_with_a_deal(ranks: int, run: int, block_tokens: int) -> None:
    geometry = table(ranks, run, block_tokens)
    assert geometry.span == ranks * block_tokens
    n = 3 * geometry.span + 5
    owners, local = geometry.owner(np.arange(n)), geometry.local_index(np.arange(n))
    for rank, hand in enumerate(deal(n, ranks, run)):
        assert np.flatnonzero(owners == rank).tolist() == hand
        assert local[hand].tolist() == list(range(len(hand)))
        assert geometry.global_index(np.arange(len(hand)), rank).tolist() == hand


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("run", RUNS)
def test_local_lengths_count_what_each_rank_was_dealt(ranks: int, run: int) -> None:
    geometry = table(ranks, run, 16)
    lengths = np.arange(200)
    per_rank = [geometry.local_length(lengths, rank) for rank in range(ranks)]
    assert (sum(per_rank) == lengths).all()
    for n in (0, 1, run, run + 1, ranks * run, 199):
        assert [int(counts[n]) for counts in per_rank] == [len(hand) for hand in deal(n, ranks, run)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("run", RUNS)
def test_slots_fill_every_block_once_and_in_order(ranks: int, run: int) -> None:
    geometry = table(ranks, run, 16)
    row = np.array([5, 2, 9], dtype=np.int32)
    positions = np.arange(3 * geometry.span)
    for rank, hand in enumerate(deal(len(positions), ranks, run)):
        slots = geometry.slots(positions, rank, row)
        assert np.flatnonzero(slots >= 0).tolist() == hand
        wanted = [block * 16 + offset for block in (5, 2, 9) for offset in range(16)]
        assert slots[hand].tolist() == wanted


@given(
    st.sampled_from(RANKS),
    st.sampled_from(RUNS),
    st.integers(1, 4),
    st.integers(0, 10**12),
    st.integers(0, 7),
)
def test_formulas_hold_at_any_position(ranks: int, run: int, runs_in_block: int, position: int, rank: int) -> None:
    geometry = table(ranks, run, run * runs_in_block)
    rank %= ranks
    owner, local = int(geometry.owner(position)), int(geometry.local_index(position))
    assert int(geometry.global_index(local, owner)) == position
    assert int(geometry.local_length(position, owner)) == local
    owned = int(geometry.local_length(position + 1, rank)) - int(geometry.local_length(position, rank))
    assert owned == (rank == owner)


def test_prefill_context_parallelism_splits_further() -> None:
    geometry = CacheGeometry([FullAttention("a", 4)], ParallelLayout(tp=4, dcp=2, pcp=3), block_tokens=8)
    assert geometry.tables[0].shards == 6
    assert geometry.tables[0].span == 48


def test_only_a_kind_that_is_sharded_is_split() -> None:
    groups = [
        FullAttention("full", 8),
        FullAttention("copy", 8, sharded=False),
        SlidingWindow("w", 8, 100),
        ChunkedLocal("c", 8, 64),
        Recurrent("s", 1000),
    ]
    geometry = CacheGeometry(groups, ParallelLayout(tp=8, dcp=8), block_tokens=16)
    assert {group.spec.name: group.shards for group in geometry.groups} == {
        "full": 8,
        "copy": 1,
        "w": 1,
        "c": 1,
        "s": 1,
    }
    assert {group.spec.name: group.span for group in geometry.groups} == {
        "full": 128,
        "copy": 16,
        "w": 16,
        "c": 16,
        "s": 0,
    }


def test_groups_with_one_need_share_a_table_and_never_overlap() -> None:
    groups = [
        FullAttention("target", 24),
        SlidingWindow("w1", 8, 100),
        Recurrent("s1", 100),
        FullAttention("draft", 8, lookahead=1),
        SlidingWindow("w2", 4, 100),
        SlidingWindow("w3", 4, 50),
        Recurrent("s2", 900),
    ]
    geometry = CacheGeometry(groups, block_tokens=4)
    assert geometry.block_bytes == 4 * 32
    assert [t.kind for t in geometry.tables] == [TableKind.PREFIX, TableKind.WINDOW, TableKind.WINDOW, TableKind.STATE]
    assert geometry.tables[-1].state_blocks == 8  # 1,000 bytes in blocks of 128
    assert geometry.lookahead == 1
    for shared in geometry.tables:
        members = sorted((g for g in geometry.groups if g.table is shared), key=lambda g: g.offset)
        end = 0
        for member in members:
            assert member.offset == end
            spec = member.spec
            end += spec.state_bytes if isinstance(spec, Recurrent) else spec.bytes_per_token * shared.block_tokens
        assert end <= geometry.block_bytes * max(1, shared.state_blocks)


@pytest.mark.parametrize("block_bytes", range(64, 130, 6))
def test_a_block_holds_whole_stripes(block_bytes: int) -> None:
    """Runs of four tokens of five bytes: a block that is larger than so many stripes leaves the rest unused."""
    layout = ParallelLayout(tp=2, dcp=2, interleave=4)
    geometry = CacheGeometry([FullAttention("a", 5)], layout, block_bytes=block_bytes)
    assert geometry.tables[0].block_tokens == block_bytes // 20 * 4


def test_smaller_entries_make_longer_blocks() -> None:
    geometry = CacheGeometry([FullAttention("a", 96), SlidingWindow("w", 20, 9)], block_tokens=16)
    assert geometry.group("w").block_tokens == 96 * 16 // 20


@given(st.integers(0, 400), st.integers(1, 50), st.integers(1, 50))
def test_first_needed_is_the_first_token_that_anyone_to_come_can_see(position: int, window: int, chunk: int) -> None:
    geometry = CacheGeometry([FullAttention("a", 4), SlidingWindow("w", 4, window), ChunkedLocal("c", 4, chunk)])
    full, sliding, local = geometry.tables
    seen_by_window = [p for p in range(position) if p > position - window]
    seen_by_chunk = [p for p in range(position) if p // chunk == position // chunk]
    assert full.first_needed(position) == 0
    assert sliding.first_needed(position) == min(seen_by_window, default=position)
    assert local.first_needed(position) == min(seen_by_chunk, default=position)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: ParallelLayout(tp=4, dcp=3), "choose dcp among the divisors of tp"),
        (lambda: ParallelLayout(tp=0), "must be at least 1"),
        (lambda: ParallelLayout(interleave=0), "must be at least 1"),
        (lambda: FullAttention("a", 0), "must be at least 1"),
        (lambda: FullAttention("", 4), "needs a name"),
        (lambda: FullAttention("a", 4, lookahead=-1), "must not be negative"),
        (lambda: SlidingWindow("w", 4, 0), "must be at least 1"),
        (lambda: ChunkedLocal("c", 4, 0), "must be at least 1"),
        (lambda: Recurrent("s", 0), "must be at least 1"),
        (lambda: CacheGeometry([]), "give at least one"),
        (lambda: CacheGeometry([object()]), "use FullAttention"),  # type: ignore[list-item]
        (lambda: CacheGeometry([FullAttention("a", 4), Recurrent("a", 4)]), "give each its own"),
        (
            lambda: CacheGeometry([FullAttention("a", 4)], ParallelLayout(2, 2, 1, 3), block_tokens=16),
            "choose an interleave that divides 16",
        ),
        (lambda: CacheGeometry([FullAttention("a", 4)], block_tokens=0), "at least 1"),
        (
            lambda: CacheGeometry([FullAttention("a", 4), SlidingWindow("w", 99, 5)], block_tokens=4),
            "raise block_tokens",
        ),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=0), "at least 1"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, block_tokens=4, block_bytes=64), "not both"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, placement=("often",)), "known are"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, placement=("interval:x",)), "interval:N"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, placement="prompt_end"), "must be a list"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, eviction="random"), "'adaptive', 'value'"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, pin_share=1.5), "between 0 and 1"),
        (lambda: CacheConfig([FullAttention("a", 4)], blocks=9, checkpoint_alignment=0), "at least 1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(make: object, remedy: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=remedy):
        make()
