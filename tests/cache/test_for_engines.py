"""What engines ask for whose workers copy before a forward, grant all or nothing, or give each group its own blocks."""

from __future__ import annotations

import numpy as np
import pytest

from headway.cache import CacheConfig, FullAttention, PrefixCache, Prompt, Recurrent, SlidingWindow
from headway.errors import LeaseError


def _hybrid(blocks: int = 40, **more: int) -> PrefixCache:
    groups = [FullAttention("a", 4), Recurrent("s0", 64), Recurrent("s1", 64)]
    return PrefixCache(CacheConfig(groups, blocks, block_bytes=64, check=True, **more))


def test_groups_with_tables_of_their_own() -> None:
    """Two groups of one kind have ids of their own; otherwise one id serves both."""
    groups = [FullAttention("a", 4, own_table=True), FullAttention("b", 8, own_table=True), FullAttention("c", 4)]
    cache = PrefixCache(CacheConfig(groups, 50, block_bytes=64, check=True))
    assert [table.span for table in cache.geometry.tables] == [16, 8, 16]
    lease = cache.lease(Prompt(range(40)), own_blocks=True)
    cache.commit_one(cache.extend_one(lease.row, 40), 40)
    used = [set(table[lease.row, :3].tolist()) for table in cache.tables]
    assert len(set.union(*used)) == 9
    cache.finish([lease.row])
    assert cache.lookup(Prompt(range(40))).tokens == 39


def test_all_of_a_step_or_nothing() -> None:
    """Neither memory nor a checkpoint that is due makes it less."""
    cache = _hybrid(blocks=5)
    lease = cache.lease(Prompt(range(41)))
    assert lease.next_stop == 40
    assert cache.extend_one(lease.row, 41, whole=True).counts.item() == 0
    assert cache.extend_one(lease.row, 40, whole=True).counts.item() == 40
    cache = _hybrid(blocks=5)
    lease = cache.lease(Prompt(range(40)), own_blocks=True)
    cache.commit_one(cache.extend_one(lease.row, 39, whole=True), 39)
    step = cache.extend_one(lease.row, 60, whole=True)  # 39 + 60 tokens need 7 blocks
    assert step.exhausted.all()
    assert cache.extend_one(lease.row, 60).counts.item() > 0


def test_drafts_have_blocks_and_scratch() -> None:
    """Positions behind a step have blocks, and every lease has its own scratch, which nothing keeps."""
    cache = _hybrid(slots_ahead=4, scratch_blocks=3)
    lease = cache.lease(Prompt(range(31)))
    cache.commit_one(cache.extend_one(lease.row, 30), 30)
    cache.commit_one(cache.extend_one(lease.row, 1), 1, [5])
    assert cache.stats().leased == 3 + 2 + 3  # entries of 35 positions, the state, scratch
    assert len(set(cache.tables[-1][lease.row].tolist())) == 3
    cache.finish([lease.row])
    assert cache.stats().leased == 0
    assert cache.stats().evictable == 2 + 2 + 2  # entries of 31 tokens; states at the ends of prompt and answer


def test_exports_are_held_until_they_are_copied() -> None:
    """Whatever becomes of lease and checkpoint, source and destination are nobody else's before that."""
    cache = _hybrid(blocks=8)
    lease = cache.lease(Prompt(range(17)))
    step = cache.extend_one(lease.row, 16)
    (export,) = step.exports
    cache.hold(export)
    cache.commit_one(step, 16)
    cache.discard([lease.row])
    cache.reset()
    taken = {*export.source.tolist(), *export.destination.tolist()}
    other = cache.lease(Prompt(range(100, 133)))
    cache.extend_one(other.row, 32)
    assert not taken & {*cache.tables[0][other.row, :2].tolist(), *cache.tables[1][other.row].tolist()}
    cache.release(export)
    assert cache.free_blocks == 4
    with pytest.raises(LeaseError, match="not held"):
        cache.release(export)


def test_a_lease_that_is_discarded_adds_nothing() -> None:
    """What was published before stays."""
    cache = _hybrid()
    lease = cache.lease(Prompt(range(33)))
    cache.commit_one(cache.extend_one(lease.row, 32), 32)
    cache.commit_one(cache.extend_one(lease.row, 1), 1, [50])
    cache.commit_one(cache.extend_one(lease.row, 1), 1, [51])
    cache.discard([lease.row])
    assert cache.lookup(Prompt([*range(33), 50, 51, 52])).tokens == 32


def test_demand_says_what_admission_takes() -> None:
    """Shared blocks of a running lease cost nothing more; what is idle costs, as it can no longer be evicted."""
    cache = _hybrid(blocks=60)
    lease = cache.lease(Prompt(range(65)))
    cache.commit_one(cache.extend_one(lease.row, 64), 64)
    prompt = Prompt([*range(65), *range(500, 530)])
    hit = cache.lookup(prompt)
    assert hit.tokens == 64
    assert cache.demand(hit, 95) == 2 + 2 + 2  # two more blocks, its state, and the state that it copies
    cache.discard([lease.row])
    assert cache.demand(cache.lookup(prompt), 95) == 6 + 2 + 2
    windows = PrefixCache(CacheConfig([SlidingWindow("w", 4, 20)], 60, block_bytes=64))
    assert windows.demand(windows.lookup(prompt), 95, step=1) < windows.demand(windows.lookup(prompt), 95, step=64) == 6


def test_commit_one_checks_what_it_is_given() -> None:
    """As commit does, with nothing changed."""
    cache = _hybrid()
    lease = cache.lease(Prompt(range(9)))
    step = cache.extend_one(lease.row, 8)
    for count, sampled in ((9, ()), (-1, ()), (8, [2**31]), (8, [-1]), (8, [1] * 65)):
        with pytest.raises(LeaseError):
            cache.commit_one(step, count, sampled)
    cache.commit_one(step, 5)
    assert (lease.computed, lease.tokens) == (5, 9)
    assert np.array_equal(cache.extend_one(lease.row, 3).starts, [5])
