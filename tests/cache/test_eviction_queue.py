"""The queue of what could be evicted: its order while priorities change, and that its size and work are bounded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import Candidate, EvictionPolicy
from headway.cache.policy.eviction import EVICTIONS, EvictionQueue, Value, eviction_policy
from headway.errors import ConfigError


@dataclass(eq=False)
class Item:
    """Something of a worth that may change, which can be held."""

    worth: float
    held: bool = False
    entry: int = -1


class Bench:
    """A queue of items, and how often it asked what one is worth."""

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.asked = 0
        self.queue: EvictionQueue[Item] = EvictionQueue(self._describe, policy or Value())

    def _describe(self, item: Item) -> Candidate | None:
        self.asked += 1
        return None if item.held else Candidate("junction", 1, 0, item.worth, 1.0, 1, 0, 0.0)

    def add(self, worth: float) -> Item:
        item = Item(worth)
        self.queue.push(item)
        return item

    def pop(self) -> float | None:
        found = self.queue.pop()
        return None if found is None else found[0].worth


def test_order_while_nothing_changes() -> None:
    bench = Bench()
    for worth in (3, 1, 2, 5, 4):
        bench.add(worth)
    assert [bench.pop() for _ in range(6)] == [1, 2, 3, 4, 5, None]
    assert len(bench.queue) == 0


def test_what_has_risen_is_put_back() -> None:
    """All have risen, unevenly: the lowest as they are now goes, and nothing is lost on the way."""
    bench = Bench()
    items = [bench.add(worth) for worth in range(20)]
    for item in items:
        item.worth = 100 - 2 * item.worth + 50
    assert [bench.pop() for _ in items] == sorted(item.worth for item in items)


def test_what_is_held_is_passed_over_until_it_is_pushed_again() -> None:
    bench = Bench()
    items = [bench.add(worth) for worth in range(5)]
    for item in items[:4]:
        item.held = True
    assert bench.pop() == 4
    assert (bench.pop(), len(bench.queue)) == (None, 0)
    items[2].held = False
    bench.queue.push(items[2])
    assert bench.pop() == 2


@pytest.mark.parametrize("drift", [lambda i, n: -i, lambda i, n: i, lambda i, n: (i * 7919) % n])
def test_the_queue_does_not_outgrow_its_items(drift: Callable[[int, int], float]) -> None:
    """Worths fall, rise or jump with every eviction, and every victim is replaced: 200 items stay 200."""
    bench, living = Bench(), []
    for step in range(5000):
        living.append(bench.add(drift(step, 5000)))
        if len(living) > 200:
            found = bench.queue.pop()
            assert found is not None
            living.remove(found[0])
        living[step % len(living)].worth = drift(step, 5000)
    assert len(bench.queue) == 200
    assert len(bench.queue._heap) <= 4 * 200 + 65, "outdated entries are forgotten, and what they hold with them"
    assert len(bench.queue._asked) <= 4 * 200 + 65


def test_an_eviction_does_not_ask_everybody() -> None:
    """A kind is found to be worth more, so 5,000 candidates rise at once: no single eviction pays for all of them."""
    bench = Bench()
    items = [bench.add(1 + i / 5000) for i in range(5000)]
    for item in items:
        item.worth += 10
    for _ in range(50):
        bench.asked = 0
        bench.pop()
        assert bench.asked < 100
    assert len(bench.queue) == 4950


def test_a_policy_of_ever_higher_answers_ends() -> None:
    """Whoever is asked once more has risen above all others."""

    class Counting(EvictionPolicy):
        asked = 0

        def priority(self, candidate: Candidate) -> float:
            self.asked += 1
            assert self.asked < 100_000, "it is asked without end"
            return float(self.asked)

    bench = Bench(Counting())
    for worth in range(300):
        bench.add(worth)
    assert sorted(bench.pop() or 0 for _ in range(300)) == list(range(300))


def test_a_priority_that_is_no_number_is_refused() -> None:
    class Broken(EvictionPolicy):
        def priority(self, candidate: Candidate) -> float:
            return math.nan

    with pytest.raises(ConfigError, match=r"eviction policy Broken gives Candidate\(kind='junction', .* priority nan"):
        Bench(Broken()).add(1)


def test_a_policy_that_raises_loses_nothing_of_the_queue() -> None:
    class Shaky(Value):
        down = False

        def priority(self, candidate: Candidate) -> float:
            if self.down:
                raise RuntimeError("down")
            return super().priority(candidate)

    policy = Shaky()
    bench = Bench(policy)
    for worth in range(10):
        bench.add(worth)
    policy.down = True
    for _ in range(5):
        with pytest.raises(RuntimeError, match="down"):
            bench.pop()
        with pytest.raises(RuntimeError, match="down"):
            bench.add(11)
    policy.down = False
    assert sorted(bench.pop() or 0 for _ in range(len(bench.queue))) == list(range(10))


class Chaos(EvictionPolicy):
    """Answers anything, infinities too."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def priority(self, candidate: Candidate) -> float:
        return self.random.choice([math.inf, -math.inf, 0.0, self.random.gauss(0, 1e300), candidate.rate])


@pytest.mark.parametrize("name", [*EVICTIONS, "chaos"])
@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_random_requests_under_every_policy(name: str, groups: tuple[object, ...]) -> None:
    """A pool for about three prompts; the cache checks itself after every call, and in the end nothing is missing."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = Engine.of(*groups, blocks=60, eviction=Chaos(seed) if name == "chaos" else eviction_policy(name))
    for _ in range(80):
        stem, rest = rng.randrange(3), rng.randrange(8)
        text = tokens((1 + stem, rng.randrange(1, 40)), (10 + rest, rng.randrange(1, 30)))
        pin = rng.choice([0, 0, 0, len(text)])
        engine.run(text, answer=[7] * rng.randrange(1, 6), pin=pin)
        engine.now[0] += rng.choice([0.0, 1000.0, 4000.0])
    engine.now[0] += 10_000
    stats = engine.cache.stats()
    assert (stats.leased, stats.pinned, stats.free + stats.evictable) == (0, 0, 60)
    assert stats.counters.blocks_evicted > 60
