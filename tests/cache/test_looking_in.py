"""What a cache says of itself: what is available, what it takes, and all of it as bytes."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CacheConfig, EvictionPolicy, FullAttention, PrefixCache, Prompt, Recurrent
from headway.errors import ConfigError, LeaseError


def test_available_is_what_is_free_or_can_be_evicted() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=60)
    assert engine.cache.available == 60
    engine.run(tokens((1, 40)), pin=40)  # ten blocks, and the state at 39
    assert engine.cache.available == 60 - 12
    lease = engine.start(tokens((2, 40)))
    assert engine.cache.available == 60 - 12
    engine.step(lease, count=20)
    assert engine.cache.available == 60 - 12 - 7
    engine.cache.finish([lease.row])
    assert engine.cache.available == 60 - 12
    engine.now[0] = 10_000.0
    assert engine.cache.available == 60, "a pin whose time is over protects nothing"


def test_what_is_available_can_be_had() -> None:
    """A path of eight blocks that somebody runs on, of which five are behind the place where it resumed."""
    engine = Engine.of(ATTENTION, blocks=20)
    engine.run(tokens((1, 32)))
    engine.start(tokens((1, 12), (2, 8)))
    available = engine.cache.available
    assert available == 17
    other = engine.start(tokens((3, 4 * available)))
    assert engine.step(other) == [4 * available]


def test_holdings_are_every_block_once() -> None:
    """Two prompts share ten tokens, two and a half blocks, and each has its own copy of the third block."""
    engine = Engine.of(ATTENTION, STATE, blocks=60)
    assert engine.cache.holdings() == ({"running": 0, "attention": 0, "windows": 0, "states": 0, "free": 60}, {}, 0)
    engine.run(tokens((1, 10), (2, 10)))
    engine.run(tokens((1, 10), (3, 10)))
    lease = engine.start(tokens((4, 40)))
    engine.step(lease, count=20)
    blocks, checkpoints, prefixes = engine.cache.holdings()
    stats = engine.cache.stats()
    assert sum(blocks.values()) == 60
    assert blocks["free"] == stats.free
    assert checkpoints == {kind: count for kind, count in stats.counters.taken.items() if count}
    assert blocks["states"] == stats.checkpoints * engine.cache.geometry.state_blocks
    assert blocks["attention"] == 5 + 5 - 2
    assert blocks["running"] == 5 + engine.cache.geometry.state_blocks
    assert prefixes == 3


def test_a_batch_of_lookups_is_as_many_lookups() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    prompts = [Prompt(tokens((1, 20))), Prompt(tokens((1, 12), (2, 8))), Prompt(tokens((3, 5)))]
    hits = engine.cache.lookup_batch(prompts)
    assert [(hit.tokens, hit.matched) for hit in hits] == [(19, 20), (0, 12), (0, 0)]
    assert engine.cache.lease(prompts[0], hits[0]).computed == 19


# Bytes.


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_a_cache_goes_on_from_its_bytes(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups, blocks=60)
    salted = engine.cache.namespace(salt="a")
    engine.run(tokens((1, 30)), pin=30, pin_seconds=50.0)
    engine.run(tokens((2, 30)), namespace=salted)
    engine.now[0] = 40.0
    time = [1000.0]
    other = Engine(PrefixCache.load(engine.cache.save(), clock=lambda: time[0]), time)
    assert other.cache.stats() == engine.cache.stats()
    assert other.cache.namespace(salt="a") == salted
    assert other.cache.namespace(salt="b") == engine.cache.namespace(salt="b")
    for prompt, namespace in ((tokens((1, 30)), 0), (tokens((2, 30)), salted)):
        here, there = (one.cache.lookup(Prompt(prompt, namespace=namespace)) for one in (engine, other))
        assert here.tokens == there.tokens == 29
        for table in range(len(engine.cache.geometry.tables)):
            assert here.blocks(table).tolist() == there.blocks(table).tolist()
    time[0] += 5.0
    assert other.cache.stats().pinned > 0
    time[0] += 6.0
    assert other.cache.stats().pinned == 0, "its time has gone on from where it stood"
    other.run(tokens((3, 200)))
    other.cache.check()


def test_a_cache_with_running_leases_is_not_written() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 10)))
    with pytest.raises(LeaseError, match="1 leases run"):
        engine.cache.save()
    engine.cache.abort([lease.row])
    engine.cache.save()


class Foreign(EvictionPolicy):
    """A policy of the caller's own."""

    def priority(self, candidate: Any) -> float:
        return 0.0


def test_a_cache_with_objects_of_others_is_not_written() -> None:
    cache = PrefixCache(CacheConfig((ATTENTION,), blocks=10, eviction=Foreign()))
    with pytest.raises(ConfigError, match="Foreign"):
        cache.save()


class Trap:
    """Runs code of its own when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not run",)


def test_bytes_of_a_stranger_run_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    mark = Engine.of(ATTENTION).cache.save().partition(b"\n")[0] + b"\n"
    with pytest.raises(ConfigError, match="cannot be part of a saved cache"):
        PrefixCache.load(mark + hashlib.sha256(pickle.dumps(Trap())).digest() + pickle.dumps(Trap()))
    with pytest.raises(ConfigError, match="not saved by this release"):
        PrefixCache.load(pickle.dumps(Trap()))
    assert capsys.readouterr().out == ""


# Bookkeeping.


def test_bookkeeping_stays_within_its_bound() -> None:
    """The pool could hold ten prompts; the index has room for the tokens, edges and checkpoints of about two."""
    engine = Engine.of(ATTENTION, STATE, blocks=400, index_bytes=12_000)
    empty, taken = engine.cache.stats(), []
    for stream in range(1, 60):
        engine.run(tokens((10 * stream, 120)))
        stats = engine.cache.stats()
        taken.append(stats.bookkeeping_bytes - empty.bookkeeping_bytes)
        assert stats.bookkeeping_bytes <= stats.bookkeeping_limit
    assert max(taken) < 2 * 12_000
    assert taken[10:] == taken[10:11] * 49
    assert engine.hit(tokens((10 * 59, 120))) == 119


@pytest.mark.parametrize("states", [True, False])
def test_the_bound_in_bytes_holds_and_what_a_lease_resumes_from_stays(states: bool) -> None:
    """So small a bound that every request evicts: never what it resumes from, before it holds that."""
    for seed in range(12):
        rng = random.Random(seed)
        groups = [FullAttention("full", 64), *([Recurrent("state", 512)] if states else [])]
        bound = rng.choice([25_000, 35_000, 50_000])
        cache = PrefixCache(CacheConfig(groups, 400, block_tokens=4, index_bytes=bound, check=True))
        hits = 0
        for _ in range(60):
            own = range(1000 * rng.randrange(1, 30), 10**6)[: rng.randrange(1, 20)]
            prompt = Prompt([*range(rng.randrange(1, 60)), *own])
            lease = cache.lease(prompt)
            hits += lease.hit.tokens > 0
            while lease.computed < len(prompt.tokens):
                cache.commit(cache.extend([lease.row], [lease.next_stop - lease.computed]), sampled=[1])
            cache.finish([lease.row])
            limit = cache.stats().bookkeeping_limit
            assert cache.stats().bookkeeping_bytes <= limit, f"seed {seed}"
            assert cache._index.tree.nbytes <= bound, f"seed {seed}"
        assert hits > 10, f"seed {seed}: the bound leaves nothing to resume from"
