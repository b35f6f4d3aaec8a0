"""Copies of a cache: whole ones go on by themselves, half ones are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CacheConfig, PrefixCache, Prompt
from headway.errors import LeaseError


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def cache(*groups: Any, **options: Any) -> Engine:
    """An engine whose cache reads the real clock, which can be pickled."""
    return Engine(PrefixCache(CacheConfig(groups, blocks=100, block_tokens=4, check=True, **options)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_a_copy_goes_on_equally_and_apart(duplicate: Callable[[Any], Any], groups: tuple[object, ...]) -> None:
    engine = cache(*groups)
    engine.run(tokens((1, 30)))
    engine.run(tokens((1, 20), (2, 10)), pin=20)
    other = Engine(duplicate(engine.cache))
    assert other.cache.stats() == engine.cache.stats()
    assert other.hit(tokens((1, 30))) == engine.hit(tokens((1, 30))) == 29
    before = engine.cache.stats()
    assert other.run(tokens((1, 30), (3, 5))) == 30
    assert engine.cache.stats() == before
    assert engine.hit(tokens((1, 30), (3, 6))) == 30
    assert engine.run(tokens((1, 30), (3, 5))) == 30
    assert other.cache.stats() == engine.cache.stats()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_in_the_middle_of_a_step_lands_it(duplicate: Callable[[Any], Any]) -> None:
    engine = cache(ATTENTION, STATE)
    lease = engine.start(tokens((1, 30)))
    engine.step(lease, count=10)
    step = engine.cache.extend([lease.row], [10])
    other, its_lease, its_step = duplicate((engine.cache, lease, step))
    other.commit(its_step)
    assert (its_lease.computed, lease.computed) == (20, 10)
    engine.cache.fail(step)
    other.check()
    engine.cache.check()


def test_a_shallow_copy_is_refused() -> None:
    with pytest.raises(LeaseError, match="deepcopy"):
        copy.copy(cache(ATTENTION).cache)


def test_a_copy_has_no_listeners() -> None:
    engine = cache(ATTENTION)
    heard: list[object] = []
    engine.cache.subscribe(heard.append)
    Engine(copy.deepcopy(engine.cache)).run(tokens((1, 20)))
    assert heard == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_explanations_and_configurations_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    engine = cache(ATTENTION, STATE)
    engine.run(tokens((1, 30)))
    story = engine.cache.explain(Prompt(tokens((1, 20), (2, 5))))
    assert duplicate(story) == story
    assert duplicate(engine.cache.config) == engine.cache.config


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_deep_conversation_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    """Two thousand branch points above each other: a copy needs no recursion as deep as that."""
    engine = Engine(PrefixCache(CacheConfig((ATTENTION,), blocks=4000, block_tokens=4)))
    for length in range(2000, 0, -2):
        engine.run(tokens((1, length), (2 + length, 2)))
    assert duplicate(engine.cache).lookup(Prompt(tokens((1, 2000)))).tokens == 1999
