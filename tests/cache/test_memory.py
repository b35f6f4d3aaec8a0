"""What goes and what stays: eviction by value and by age, tails first, pins with a cap and an end."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import (
    CacheConfig,
    Candidate,
    CheckpointRemoved,
    ChunkedLocal,
    Event,
    EvictionPolicy,
    FullAttention,
    PrefixCache,
    Prompt,
    Recurrent,
    ResidentShrunk,
)
from headway.errors import UnservableError


def test_the_tail_of_a_path_goes_first_and_no_more_than_is_needed() -> None:
    """Twelve blocks of 4. A keeps 8; B of 24 tokens needs 6 of the 4 free: two go, and A's first 24 tokens stay."""
    engine = Engine.of(ATTENTION, blocks=12)
    engine.run(tokens((1, 32)))
    engine.run(tokens((2, 24)))
    assert engine.hit(tokens((1, 32))) == 24


def test_a_branch_goes_before_its_trunk() -> None:
    engine = Engine.of(ATTENTION, blocks=12)
    engine.run(tokens((1, 16)))
    engine.run(tokens((1, 16), (2, 16)))
    engine.run(tokens((3, 28)))
    assert engine.hit(tokens((1, 16), (2, 16))) >= 16


def test_a_state_inside_a_path_goes_alone() -> None:
    """Ten blocks of attention up to 40, states at 20 and 40 of two blocks each: 14 of 20.

    Six are free and a prompt of 20 tokens needs 5 + 2. LRU takes the older state, the one at 20, and its blocks alone.
    """
    engine = Engine.of(ATTENTION, STATE, blocks=20, placement=("breakpoint",), eviction="lru")
    heard: list[Event] = []
    engine.run(tokens((1, 41)), breakpoints=(20, 40))
    assert engine.cache.free_blocks == 6
    engine.cache.subscribe(heard.append)
    lease = engine.start(tokens((2, 20)))
    engine.compute(lease)
    gone = [event for event in heard if isinstance(event, CheckpointRemoved)]
    assert [(event.position, event.cause) for event in gone] == [(20, "evicted")]
    assert not [event for event in heard if isinstance(event, ResidentShrunk)]
    assert engine.hit(tokens((1, 41))) == 40
    assert engine.hit(tokens((1, 30), (3, 4))) == 0


def test_the_last_state_of_a_path_takes_its_stretch_along() -> None:
    """The state at 20 was used since, so the one at 40 goes, and with it the entries of [20, 40)."""
    engine = Engine.of(ATTENTION, STATE, blocks=20, placement=("breakpoint",), eviction="lru")
    engine.run(tokens((1, 41)), breakpoints=(20, 40))
    assert engine.run(tokens((1, 20), (3, 3))) == 20
    lease = engine.start(tokens((2, 40)))
    engine.compute(lease)
    assert engine.hit(tokens((1, 41))) == 20
    stats = engine.cache.stats()
    assert (stats.leased, stats.evictable) == (12, 5 + 2), "twelve of the newcomer; five of entries and the state at 20"


def test_nothing_beyond_the_last_checkpoint_is_kept() -> None:
    """Of 40 tokens only the first 20 can ever be hit: five blocks and a state of two."""
    engine = Engine.of(ATTENTION, STATE, placement=("breakpoint",))
    engine.run(tokens((1, 40)), breakpoints=(20,))
    assert engine.cache.free_blocks == 100 - 5 - 2
    engine.run(tokens((2, 40)))
    assert engine.cache.free_blocks == 100 - 5 - 2


def test_nothing_unreachable_stays_when_an_answer_leaves_a_known_path() -> None:
    """B runs along A's path while A's checkpoints have to make room, and then answers something else.

    What A left behind B's position can be reached by nobody then, and must not be kept.
    """
    groups = Recurrent("s", 8), ChunkedLocal("c", 4, 3), FullAttention("f", 4)
    engine = Engine.of(*groups, block_tokens=1, blocks=8, answer_stretch=1)
    first = engine.start(tokens((1, 2)), breakpoints=(2,))
    engine.step(first, count=1, sampled=900)
    engine.step(first, count=1, sampled=900)
    second = engine.start(tokens((1, 1)))
    engine.cache.finish([first.row])
    engine.step(second, count=1, sampled=900)
    engine.cache.finish([second.row])
    assert engine.cache.stats().leased == 0


@pytest.mark.parametrize(("policy", "kept"), [("value", 60), ("lru", 0)])
def test_value_keeps_what_many_share_and_lru_what_came_last(policy: str, kept: int) -> None:
    """Ten requests share 60 tokens; then eight prompts of 19 blocks that nobody repeats pass through 40 blocks."""
    engine = Engine.of(ATTENTION, blocks=40, eviction=policy)
    for i in range(10):
        engine.run(tokens((1, 60), (10 + i, 8)))
    for i in range(8):
        engine.run(tokens((50 + i, 75)))
    assert engine.hit(tokens((1, 60), (99, 5))) == kept


def test_what_is_not_used_any_more_ages() -> None:
    """Three hits do not keep a path for ever: after 200 others that came twice each it has made room."""
    engine = Engine.of(ATTENTION, blocks=40)
    for _ in range(4):
        engine.run(tokens((1, 60)))
    for i in range(200):
        engine.run(tokens((50 + i, 75)))
        engine.run(tokens((50 + i, 75)))
    assert engine.hit(tokens((1, 60))) == 0


def test_a_policy_of_ones_own() -> None:
    """A policy is one class: this one sends the youngest away first."""

    class Youngest(EvictionPolicy):
        def priority(self, candidate: Candidate) -> float:
            return -float(candidate.used)

    engine = Engine.of(ATTENTION, STATE, blocks=30, eviction=Youngest(), placement=("prompt_end",))
    engine.run(tokens((1, 33)))  # keeps 8 + 2 blocks
    engine.run(tokens((2, 33)))  # keeps 10 more; 10 are free
    lease = engine.start(tokens((3, 36)))  # needs 9 + 2
    engine.compute(lease)
    assert engine.hit(tokens((1, 33))) == 32
    assert engine.hit(tokens((2, 33))) == 0


def test_what_running_requests_use_stays() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=24, placement=("prompt_end",))
    engine.run(tokens((1, 33)))
    lease = engine.start(tokens((1, 33), (2, 4)))
    assert lease.computed == 32
    held = engine.cache.tables[0][lease.row][:8].tolist()
    other = engine.start(tokens((3, 60)))
    engine.step(other)
    assert engine.cache.tables[0][lease.row][:8].tolist() == held
    engine.cache.abort([other.row])
    engine.compute(lease)
    engine.cache.finish([lease.row])


# Pins.


def flood(engine: Engine, first: int = 50, many: int = 6, size: int = 100) -> None:
    for i in range(many):
        engine.run(tokens((first + i, size)))


def test_a_pin_holds_until_its_time_is_over() -> None:
    engine = Engine.of(ATTENTION, blocks=40, pin_seconds=10.0, eviction="lru")
    engine.run(tokens((1, 40)), pin=40)
    flood(engine)
    assert engine.hit(tokens((1, 40), (2, 5))) >= 39
    assert engine.cache.stats().pinned == 10
    engine.now[0] = 10.5
    flood(engine, first=60)
    assert engine.hit(tokens((1, 40), (2, 5))) == 0
    assert engine.cache.stats().pinned == 0


def test_a_pin_ends_where_traffic_has_parted_behind_it() -> None:
    """Twenty tokens are pinned, and two requests go on behind them each in their own way, once and once again above."""
    engine = Engine.of(ATTENTION, blocks=40, pin_seconds=10.0, eviction="lru")
    engine.run(tokens((1, 20), (2, 20)), pin=16)
    engine.run(tokens((1, 20), (3, 20)))
    engine.run(tokens((1, 18), (4, 20)))
    assert engine.cache.stats().pinned == 4
    engine.now[0] = 10.5
    assert engine.cache.stats().pinned == 0
    flood(engine, first=60)
    assert engine.hit(tokens((1, 20), (2, 20))) == 0


def test_a_pin_protects_the_checkpoint_that_serves_the_pinned_prefix() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=40, eviction="lru")
    engine.run(tokens((1, 40), (2, 5)), breakpoints=(40,), pin=40)
    flood(engine, size=60)
    assert engine.hit(tokens((1, 40), (3, 5))) == 40


def test_pins_never_take_more_than_their_share() -> None:
    """A quarter of 40 blocks may be pinned: the first prefix of 8 blocks may, a second of 8 may not."""
    engine = Engine.of(ATTENTION, blocks=40, pin_share=0.25, eviction="lru")
    engine.run(tokens((1, 32)), pin=32)
    engine.run(tokens((2, 32)), pin=32)
    assert engine.cache.stats().counters.refused == {"pin:pin_share": 1}
    flood(engine)
    assert engine.hit(tokens((1, 32), (9, 1))) >= 31
    assert engine.hit(tokens((2, 32), (9, 1))) == 0


def test_pinning_again_is_not_counted_twice() -> None:
    engine = Engine.of(ATTENTION, blocks=40, pin_share=0.25)
    for _ in range(3):
        engine.run(tokens((1, 32)), pin=32)
    assert engine.cache.stats().counters.refused == {}
    assert engine.cache.stats().pinned == 8


def test_an_expired_pin_does_not_refuse_anybody() -> None:
    engine = Engine.of(ATTENTION, blocks=20, pin_seconds=10.0)
    engine.run(tokens((1, 40)), pin=40)
    with pytest.raises(UnservableError, match="pinned"):
        engine.start(tokens((2, 80)))
    engine.now[0] = 11.0
    assert engine.run(tokens((2, 80))) == 0


def test_reset_takes_pins_too() -> None:
    engine = Engine.of(ATTENTION, blocks=20)
    engine.run(tokens((1, 40)), pin=40)
    engine.cache.reset()
    assert engine.cache.free_blocks == 20
    assert engine.run(tokens((2, 80))) == 0


# Counting.


def test_counters_say_which_kinds_of_checkpoint_paid() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    engine.run(tokens((1, 20)))
    engine.run(tokens((1, 20)))
    counters = engine.cache.stats().counters
    assert counters.taken == {"prompt_end": 1, "answer_end": 1}
    assert counters.reused == {"prompt_end": 1}
    assert counters.resumed == {"prompt_end": 2}


def test_victims_that_nobody_had_resumed_from_are_counted_apart() -> None:
    """Each prompt keeps ten blocks of 24; the first is used once before it has to go, the others never are."""
    engine = Engine.of(ATTENTION, STATE, blocks=24, placement=("prompt_end",), eviction="lru")
    engine.run(tokens((1, 33)))
    assert engine.run(tokens((1, 33))) == 32
    for stream in (2, 3, 4):
        engine.run(tokens((stream, 49)))
    counters = engine.cache.stats().counters
    assert counters.evicted == {"prompt_end": 3}
    assert counters.evicted_unused == {"prompt_end": 2}


def test_stats_add_up_to_the_pool() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=60)
    rng = np.random.default_rng(5)
    for i in range(30):
        engine.run(tokens((int(rng.integers(1, 4)), int(rng.integers(1, 30))), (10 + i, 6)))
        stats = engine.cache.stats()
        assert stats.free + stats.leased + stats.pinned + stats.evictable == stats.blocks == 60


def test_a_lookup_of_what_is_gone_does_not_bring_it_back() -> None:
    engine = Engine.of(ATTENTION, blocks=10)
    engine.run(tokens((1, 40)))
    engine.run(tokens((2, 40)))
    before = engine.cache.stats()
    for _ in range(3):
        engine.cache.lookup(Prompt(tokens((1, 40))))
    assert engine.cache.stats() == before


def test_many_short_prompts_fill_the_pool_before_anything_goes() -> None:
    """By default what is kept does not go for the sake of this process's memory: a branch and a state per block fit."""
    cache = PrefixCache(CacheConfig([FullAttention("full", 64), Recurrent("state", 1024)], 8000, block_tokens=16))
    for i in range(2000):
        lease = cache.lease(Prompt([*range(100 * i, 100 * i + 16)]))
        while lease.computed < 16:
            cache.commit(cache.extend([lease.row], [lease.next_stop - lease.computed]), sampled=[1])
        cache.finish([lease.row])
    assert cache.counters.evicted == {}
    assert cache.lookup(Prompt([*range(16)])).tokens == 15
