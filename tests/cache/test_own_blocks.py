"""Leases that keep their own blocks until they end."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CacheConfig, FullAttention, Lease, PrefixCache, Prompt, SlidingWindow


def own(engine: Engine, text: np.ndarray) -> Lease:
    return engine.cache.lease(Prompt(text), own_blocks=True)


def test_what_another_published_first_is_not_taken_over() -> None:
    engine = Engine.of(ATTENTION)
    first, second = own(engine, tokens((1, 40))), own(engine, tokens((1, 40)))
    engine.step(first, second, count=20)
    held = engine.cache.tables[0][second.row][:5].tolist()
    engine.step(first, second)
    assert engine.cache.tables[0][second.row][:5].tolist() == held
    assert engine.cache.free_blocks == 80
    engine.cache.finish([second.row])
    assert engine.cache.free_blocks == 90
    engine.cache.finish([first.row])
    assert (engine.cache.free_blocks, engine.cache.stats().leased) == (90, 0)
    assert engine.hit(tokens((1, 40))) == 39


@pytest.mark.parametrize("end", ["finish", "preempt", "abort"])
def test_what_it_published_stays_when_it_ends_and_nothing_else(end: str) -> None:
    engine = Engine.of(ATTENTION)
    lease = own(engine, tokens((1, 30)))
    engine.step(lease, count=10)
    assert engine.hit(tokens((1, 30))) == 10
    engine.step(lease, count=9)
    getattr(engine.cache, end)([lease.row])
    assert (engine.hit(tokens((1, 30))), engine.cache.free_blocks, engine.cache.stats().leased) == (19, 95, 0)
    engine.cache.reset()
    assert engine.cache.free_blocks == 100


def test_an_entry_of_its_row_never_changes() -> None:
    engine = Engine.of(ATTENTION, answer_stretch=8)
    text = tokens((1, 20), (2, 20), (3, 20))
    engine.run(text[:30])
    lease, rival = own(engine, text), engine.start(text)
    seen: list[int] = []
    while lease.computed < 60:
        engine.step(rival, count=7 if rival.computed < 53 else 1)
        engine.step(lease, count=3)
        row = engine.cache.tables[0][lease.row]
        assert row[: len(seen)].tolist() == seen
        seen = row[: -(-lease.computed // 4)].tolist()
        assert len(set(seen)) == len(seen)
    for answer in range(30):
        engine.step(rival, lease, sampled=answer)
    assert engine.cache.tables[0][lease.row][: len(seen)].tolist() == seen
    engine.cache.finish([rival.row, lease.row])
    assert engine.cache.stats().leased == 0


def test_checkpoints_share_its_blocks() -> None:
    engine = Engine.of(ATTENTION, STATE, SlidingWindow("w", 64, 6))
    lease = own(engine, tokens((1, 30)))
    twin = own(engine, tokens((1, 30)))
    engine.compute(lease)
    engine.compute(twin)
    assert engine.hit(tokens((1, 30))) == 29
    engine.cache.abort([lease.row])
    assert engine.hit(tokens((1, 30))) == 29
    engine.cache.finish([twin.row])
    engine.cache.reset()
    assert engine.cache.free_blocks == 100


def test_its_own_copies_are_its_to_evict_nothing_from() -> None:
    """What a running lease holds stays when the tree has to give its share of it up, and is free when it ends."""
    engine = Engine.of(ATTENTION, blocks=20)
    lease = own(engine, tokens((1, 40)))
    engine.compute(lease)
    other = engine.start(tokens((2, 40)))
    assert engine.cache.available == 10
    engine.compute(other)
    engine.cache.finish([lease.row])
    assert engine.cache.available == 10
    engine.cache.finish([other.row])
    assert engine.cache.available == 20


def test_a_reset_leaves_it_all_that_it_uses() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 21)))
    lease = own(engine, tokens((1, 40)))
    engine.step(lease, count=10)
    held = engine.cache.tables[0][lease.row][:7].tolist()
    engine.cache.reset()
    engine.compute(lease)
    assert engine.cache.tables[0][lease.row][:7].tolist() == held
    engine.cache.finish([lease.row])
    assert engine.cache.free_blocks == 100


def test_the_last_step_of_a_prompt_makes_it_resident_again() -> None:
    """With a lookahead the last prompt token adds no entry. What pressure took from the path meanwhile comes back."""
    draft = FullAttention("draft", 64, lookahead=1)
    cache = PrefixCache(CacheConfig([draft], 24, block_tokens=1, check=True))
    first = cache.lease(Prompt(list(range(10))), own_blocks=True)
    cache.commit(cache.extend([first.row], [9]))
    assert cache.lookup(Prompt([*range(9), 50])).tokens == 8
    cache._index.reclaim._trim_busy_paths()
    cache.commit(cache.extend([first.row], [1]), sampled=[7])
    assert cache.lookup(Prompt([*range(10), 50])).tokens == 9
