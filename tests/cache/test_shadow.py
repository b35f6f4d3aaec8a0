"""Shadow directories: what another policy would keep, the choice between policies, and what the cache makes of it."""

from __future__ import annotations

import random

import numpy as np
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import Adaptive, CacheConfig, Candidate, Directory, FullAttention, PrefixCache, Prompt, Recurrent

GROUPS = [FullAttention("full", 64), Recurrent("state", 512)]


def _traffic(seed: int, requests: int = 150) -> list[tuple[list[int], int]]:
    """Conversations that go on, and now and then part: prompts, and a number for each answer."""
    rng, texts = random.Random(seed), [[100 * i, 1, 2, 3, 4, 5, 6, 7] for i in range(12)]
    found = []
    for i in range(requests):
        text = texts[min(rng.randrange(12), rng.randrange(12))]
        if rng.random() < 0.1:
            del text[rng.randrange(4, len(text) + 1) :]
        text += [10_000 + 50 * i + k for k in range(rng.randrange(2, 12))]
        found.append((text.copy(), 10_000 + 50 * i + 40))
        text.append(found[-1][1])
    return found


def _served(cache: PrefixCache, prompt: list[int], answer: int) -> int:
    lease = cache.lease(Prompt(prompt))
    hit: int = lease.hit.tokens
    while lease.computed < len(prompt):
        cache.commit(cache.extend([lease.row], [lease.next_stop - lease.computed]), sampled=[answer])
    cache.commit(cache.extend([lease.row], [1]), sampled=[answer + 1])
    cache.finish([lease.row])
    return hit


def _both(groups: list[FullAttention | Recurrent], blocks: int, seed: int) -> tuple[int, int]:
    """Tokens reused by the cache under least recently used, and by the directory of that size."""
    config = CacheConfig(groups, blocks, block_tokens=1, eviction="lru")
    cache, directory = PrefixCache(config), Directory(config, [blocks], adaptive=False)
    real = told = 0
    for prompt, answer in _traffic(seed):
        real += _served(cache, prompt, answer)
        told += directory.request(Prompt(prompt), np.array([*prompt, answer], dtype=np.int32).tobytes())[0][0]
    return real, told


def test_a_directory_reuses_what_the_cache_reuses_under_least_recently_used() -> None:
    for seed in range(3):
        for groups in (GROUPS, GROUPS[:1]):
            real, told = _both(groups, 300, seed)
            assert real > 1000, f"seed {seed}"
            assert abs(real - told) < 0.03 * real, f"seed {seed}: {real} and {told} tokens of {len(groups)} groups"


def test_shadows_keep_what_a_directory_keeps_to_the_last_mark_and_nearly_so_if_they_hear_late() -> None:
    """A cache that is not full only writes down who has ended. Paths that parted meanwhile part sooner for shadows."""
    for groups, blocks in ((GROUPS, 2500), (GROUPS[:1], 700)):
        config = CacheConfig(groups, blocks, block_tokens=1)
        now, late, directory = PrefixCache(config), PrefixCache(config), Directory(config, [blocks], adaptive=True)
        for i, (prompt, answer) in enumerate(_traffic(5, 250)):
            for cache in (now, late):
                _served(cache, prompt, answer)
            assert not now.catch_up()
            directory.request(Prompt(prompt), np.array([*prompt, answer], dtype=np.int32).tobytes())
            if i == 20:
                assert late.catch_up(5), "nothing has to go yet, and nobody has caught up"
        assert not late.catch_up(10), "what is evicted waits until shadows have heard"
        alone = directory._adaptive[0].each
        assert _kept(now) == [(shadow.tokens, shadow.marks, shadow.saved) for shadow in alone]
        assert all(
            abs(saved - one.saved) < 0.01 * one.saved for (*_, saved), one in zip(_kept(late), alone, strict=True)
        )
        assert len({shadow.saved for shadow in alone}) > 1, "the policies never differed"
        late.check()


def _kept(cache: PrefixCache) -> list[tuple[int, int, float]]:
    shadows = cache._index.reclaim.shadows
    assert shadows is not None
    return [(shadow.tokens, shadow.marks, shadow.saved) for shadow in shadows.each]


def test_memory_without_end_keeps_everything_under_every_policy() -> None:
    directory = Directory(CacheConfig(GROUPS, 1, block_tokens=1), [10**6, 200], adaptive=True)
    large = small = 0
    for prompt, answer in _traffic(7):
        lru, own = directory.request(Prompt(prompt), np.array([*prompt, answer], dtype=np.int32).tobytes())
        large, small = large + lru[0], small + lru[1]
        assert own[0] == lru[0]
    assert 0 < small < large


def test_the_invariants_of_shadows_hold_under_random_traffic() -> None:
    for groups in (GROUPS, GROUPS[:1]):
        cache = PrefixCache(CacheConfig(groups, 250, block_tokens=4, check=True, index_bytes=200_000))
        for prompt, answer in _traffic(3, 80):
            _served(cache, prompt, answer)
        copy = PrefixCache.load(cache.save())
        copy.check()
        assert [_served(one, [0, 1, 2, 3, 4, 5, 6, 7, 9], 5) for one in (cache, copy)] == [8, 8] or groups == GROUPS


def test_a_policy_is_followed_that_is_clearly_ahead() -> None:
    policy = Adaptive()
    policy.choose_among(floats=False)
    assert not policy.follow([100.0, 100.2, 90.0, 90.0]), "0.2% is noise"
    assert policy.without == frozenset()
    assert policy.follow([100.0, 90.0, 101.0, 90.0])
    assert policy.without == {"prompt_end", "boundary"}
    assert not policy.follow([101.2, 90.0, 101.0, 90.0])
    assert policy.follow([102.0, 90.0, 101.0, 90.0])
    assert policy.without == frozenset()


def test_what_the_followed_shadow_does_not_keep_goes_first_and_in_the_order_of_the_policy() -> None:
    policy = Adaptive()
    policy.choose_among(floats=False)
    kept = Candidate("junction", 8, 0, 0.001, 1.0, 1, 0, 0.0)
    gone, worth_more = kept._replace(kept=False, rate=5.0), kept._replace(kept=False, rate=9.0)
    assert policy.priority(gone) < policy.priority(worth_more) < policy.priority(kept)


def test_under_pressure_conversations_keep_the_ends_of_answers_and_prompts_leave_none() -> None:
    """Turns of many conversations in a small memory: the ends of prompts are never wanted, and are no longer taken."""
    engine = Engine.of(ATTENTION, STATE, blocks=150)
    texts = [tokens((1000 * i, 12)) for i in range(12)]
    for turn in range(60):
        for i, text in enumerate(texts):
            engine.run(text)
            texts[i] = np.append(text, tokens((1000 * i + 20 * turn + 50, 3)))[-200:]
    taken = engine.cache.counters.taken
    assert taken["prompt_end"] < taken["answer_end"]
