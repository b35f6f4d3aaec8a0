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


def test_repeated_ids_drop_a_holder_and_a_user_each() -> None:
    pool = BlockPool(2)
    ids = pool.take(1)
    pool.hold(ids)
    pool.drop_repeated(np.concatenate([ids, ids]))
    assert (pool.free, pool.available) == (2, 2)


def test_what_is_held_without_a_user_is_available() -> None:
    pool = BlockPool(4)
    ids = pool.take(3)
    assert (pool.free, pool.available) == (1, 1)
    pool.disuse(ids[:2])
    assert (pool.free, pool.available) == (1, 3)
    pool.use(ids[1:2])
    pool.use(ids[1:2])
    pool.disuse(ids[1:2])
    assert (pool.free, pool.available) == (1, 2)


def test_a_pin_is_a_use_and_counts_a_block_once() -> None:
    pool = BlockPool(4)
    ids = pool.take(3)
    pool.pin(ids[:2])
    pool.pin(ids[1:])
    assert pool.pinned == 3
    pool.disuse(ids)
    assert pool.available == 1
    pool.unpin(ids[:2])
    assert (pool.pinned, pool.available) == (2, 2)
    pool.unpin(ids[1:])
    pool.release(ids)
    assert (pool.pinned, pool.available, pool.free) == (0, 4, 4)


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
