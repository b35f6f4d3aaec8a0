"""The block pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache.index.pool import BlockPool
from headway.errors import ConfigError


def test_a_block_is_free_when_its_last_holder_goes() -> None:
    pool = BlockPool(4)
    ids = pool.take(3)
    assert len(set(ids.tolist())) == 3
    assert pool.free == 1
    pool.share(ids[:2])
    assert pool.release(ids) == 1
    assert pool.free == 2
    assert pool.release(ids[:2]) == 2
    assert pool.free == 4


def test_repeated_ids_drop_a_holder_each() -> None:
    pool = BlockPool(2)
    ids = pool.take(1)
    pool.share(ids)
    assert pool.release_repeated(np.concatenate([ids, ids])) == 1
    assert pool.free == 2


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        BlockPool(0)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_free_and_held_are_all_blocks(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    holders: list[int] = []
    for move, n in moves:
        if move == "take":
            count = min(n, pool.free)
            taken = pool.take(count).tolist()
            assert not set(taken) & set(holders), "a held block was handed out"
            holders += taken
        elif move == "share" and holders:
            block = holders[n % len(holders)]
            pool.share(np.array([block]))
            holders.append(block)
        elif move == "release" and holders:
            block = holders.pop(n % len(holders))
            pool.release(np.array([block]))
        assert pool.free == 8 - len(set(holders))
