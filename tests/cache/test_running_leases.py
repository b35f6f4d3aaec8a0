"""What happens to running leases, and beside them, when the cache is changed as a whole."""

from __future__ import annotations

import copy
import random
import threading

import pytest

from headway.cache import (
    CacheConfig,
    Candidate,
    FullAttention,
    Lease,
    Outcome,
    ParallelLayout,
    PrefixCache,
    Prompt,
    Value,
)
from headway.cache.policy.placement import Placement
from headway.errors import ConfigError, LeaseError, ThreadError

PROMPT, ANSWER = list(range(20)), list(range(100, 110))


def cache_of(*groups: FullAttention, blocks: int = 100, **options: object) -> PrefixCache:
    config = CacheConfig(groups or [FullAttention("full", 64)], blocks, block_tokens=4, check=True, **options)  # type: ignore[arg-type]
    return PrefixCache(config)


def start(cache: PrefixCache, text: list[int], **wishes: object) -> Lease:
    """Compute a prompt; the first token of the answer is told."""
    lease = cache.lease(Prompt(text, **wishes))  # type: ignore[arg-type]
    cache.commit(cache.extend([lease.row], [lease.tokens - lease.computed]), sampled=[ANSWER[0]])
    return lease


def answer(cache: PrefixCache, lease: Lease, tokens: list[int]) -> None:
    for token in tokens:
        cache.commit(cache.extend([lease.row], [1]), sampled=[token])


def test_forgetting_reaches_a_lease_whose_answer_is_not_entered_yet() -> None:
    cache = cache_of()
    cache.finish([start(cache, [*PROMPT, 7, 7]).row])
    first, second = start(cache, PROMPT), start(cache, PROMPT)
    answer(cache, first, ANSWER[1:8])
    answer(cache, second, ANSWER[1:8])
    cache.finish([first.row])
    assert cache.forget(Prompt(PROMPT + ANSWER[:4])).leases_detached == 1
    cache.finish([second.row])
    assert cache.lookup(Prompt(PROMPT + ANSWER)).matched == 20


@pytest.mark.parametrize("wishes", [{}, {"no_store": True}])
def test_forgetting_detaches_what_runs_on_the_forgotten_edge(wishes: dict[str, object]) -> None:
    """It does not begin with the forgotten sequence, but what it reads lies on the edge that goes."""
    cache = cache_of()
    first = start(cache, PROMPT)
    answer(cache, first, ANSWER[1:8])
    cache.finish([first.row])
    second = start(cache, [*PROMPT[:10], *([5] * 5 if wishes else [])], **wishes)
    assert cache.forget(Prompt(PROMPT + ANSWER[:4])).leases_detached == 1
    answer(cache, second, [8] * 5)
    cache.finish([second.row])


def test_forgetting_leaves_other_namespaces_alone() -> None:
    cache = cache_of()
    cache.finish([start(cache, PROMPT).row])
    start(cache, [*PROMPT, 9], namespace=cache.namespace(salt="x"))
    assert cache.forget(Prompt(PROMPT)).leases_detached == 0


def test_a_lease_is_detached_once() -> None:
    cache = cache_of()
    cache.lease(Prompt(PROMPT))
    assert [cache.reset().leases_detached, cache.reset().leases_detached] == [1, 0]
    assert cache.forget_namespace(0).leases_detached == 0


@pytest.mark.parametrize("own_blocks", [False, True])
def test_a_lease_that_pins_what_another_published_comes_to_its_end(own_blocks: bool) -> None:
    cache = cache_of(blocks=20, pin_share=0.5)
    text = list(range(60))
    other, lease = cache.lease(Prompt(text[:40])), cache.lease(Prompt(text, pin=40), own_blocks=own_blocks)
    for _ in range(2):
        cache.commit(cache.extend([other.row], [20]))
    cache.finish([other.row])
    while lease.computed < 60:
        step = cache.extend([lease.row], [4])
        assert not step.exhausted.any(), f"stuck at {lease.computed}"
        cache.commit(step)
    assert lease.wishes[0].outcome is (Outcome.PIN_SHARE if own_blocks else Outcome.KEPT)


def test_what_is_available_with_two_tables_can_be_had_and_no_more() -> None:
    """Blocks of 4 x 4 tokens in one table and of 4 in the other, one lease that wrote all it reads."""
    groups = [FullAttention("full", 64), FullAttention("draft", 64, sharded=False)]
    cache = cache_of(*groups, blocks=60, layout=ParallelLayout(tp=4, dcp=4))
    for i in range(6):
        cache.finish([start(cache, [1000 * (i + 1) + j for j in range(32)]).row])
    start(cache, PROMPT)
    ample, short = copy.deepcopy(cache), copy.deepcopy(cache)
    assert ample._index.make_room(cache.available)
    assert not short._index.make_room(cache.available + 1)


def test_what_is_available_is_not_asked_beside_another_call() -> None:
    """The other thread is inside an eviction when this one asks; pins that are over would be ended in its middle."""
    inside, go = threading.Event(), threading.Event()

    class Slow(Value):
        def priority(self, candidate: Candidate) -> float:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go.wait(10)
            return super().priority(candidate)

    cache = PrefixCache(CacheConfig([FullAttention("full", 64)], 20, block_tokens=4, eviction=Slow()))
    cache.finish([start(cache, list(range(40))).row])
    thread = threading.Thread(target=lambda: cache.finish([start(cache, list(range(100, 160))).row]))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(ThreadError, match="another thread"):
        _ = cache.available
    go.set()
    thread.join()


def test_damaged_bytes_are_refused_as_such() -> None:
    cache = cache_of()
    cache.finish([start(cache, PROMPT).row])
    data, rng = cache.save(), random.Random(1)
    for at in [rng.randrange(24, len(data)) for _ in range(60)]:
        for wrong in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(ConfigError, match="damaged or cut"):
                PrefixCache.load(wrong)


def test_a_foreign_object_is_refused_when_it_is_saved() -> None:
    class Own(Value):
        pass

    cache = cache_of(eviction=Own())
    with pytest.raises(ConfigError, match="cannot be"):
        cache.save()


def test_long_names_of_namespaces_are_told_apart_and_not_kept() -> None:
    cache = cache_of()
    long = "s" * 100_000
    first, second = cache.namespace(salt=long), cache.namespace(salt=long + "t")
    assert first != second
    assert first == cache.namespace(salt=long)
    assert max(len(name) for name in cache._namespaces._numbers) < 100


def test_more_tokens_than_a_sequence_can_have_are_refused() -> None:
    cache = cache_of()
    rows = [cache.lease(Prompt([i, 1, 2])).row for i in range(6)]
    with pytest.raises(LeaseError, match="no more than a sequence can have"):
        cache.extend(rows, 2**62)


def test_an_interval_finer_than_the_grid_is_the_grid() -> None:
    placement = Placement(["interval:1"], 2_000_000, 0)
    assert [placement.next_interval(p) for p in (0, 1_999_999, 2_000_000)] == [2_000_000, 2_000_000, 4_000_000]
    assert [Placement(["interval:10"], 8, 0).next_interval(p) for p in (0, 8, 15, 16, 24)] == [8, 16, 16, 24, 40]
