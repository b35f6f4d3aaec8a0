"""Ranks x interleave x models: the tokens of one rank without a cache, and the hits of one rank with it.

A scheduler and a cache drive all ranks, with prefix hits, chunks, preemption and a fork inside a block. To add a
dimension (a draft model, say), add a field to `Case` and use it in `Driver`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
from tests.engine.rank_executor import ThreadRanks
from tests.runtime.rank_threads import layout_of
from tests.runtime.tiny_models import generated, tiny_model

from headway.cache import CacheConfig, PrefixCache
from headway.engine import EngineConfig, GenerationRequest, RunningRequest, Scheduler
from headway.runtime.inspection import inspect_model

TOLERANCE = 1e-4
BLOCKS = 4000
FAMILIES = {"KDA": "KimiLinear", "GatedDeltaNet": "Qwen3Next", "Mamba-2": "GraniteMoeHybrid", "window": "GptOss"}
"""What each model has beside full attention."""
SEED = 7


@dataclass(frozen=True)
class Case:
    """One place of the matrix."""

    family: str
    ranks: int = 1
    interleave: int = 1
    form: str = "ag_rs"

    def __str__(self) -> str:
        return f"{self.family}-{self.ranks}-{self.interleave}-{self.form}"


LAYOUTS = [(2, 1, "ag_rs"), (2, 16, "a2a"), (4, 1, "a2a"), (4, 16, "ag_rs")]
CASES = [Case(family, *layout) for family, layout in product(FAMILIES, LAYOUTS)]


class Driver:
    """A scheduler over ranks, with a preemption every seventh step."""

    def __init__(self, case: Case) -> None:
        model = tiny_model(FAMILIES[case.family])
        layout = inspect_model(model)
        parallel = layout_of(case.ranks, case.interleave)
        config = CacheConfig(layout.groups, BLOCKS, layout=parallel, block_tokens=16, cost=layout.cost, check=True)
        self.cache = PrefixCache(config)
        self.executor = ThreadRanks(model, self.cache.geometry, BLOCKS, case.form)
        self.scheduler = Scheduler(self.cache, EngineConfig(max_batched_tokens=48, max_running=4))
        self.requests: list[RunningRequest] = []
        self._steps = 0

    def add(self, prompt: list[int], count: int) -> None:
        order = len(self.requests)
        asked = GenerationRequest(np.array(prompt, dtype=np.int32), count, breakpoints=(max(1, len(prompt) // 2),))
        self.requests.append(RunningRequest.start(asked, str(order), order, 0.0))
        self.scheduler.add(self.requests[-1])

    def step(self) -> bool:
        self._steps += 1
        if self._steps % 7 == 0:  # as if the oldest had got no memory in the step before
            self.scheduler._starved = self.scheduler.running[:1]
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return False
        self.scheduler.complete(scheduled, self.executor.run(scheduled.work))
        return True


def drive(case: Case) -> Driver:
    """Two prompts on one stem that part inside a block, a short one, then a follow-up to an answer."""
    driver = Driver(case)
    rng = np.random.default_rng(SEED)
    stem, left, right = (rng.integers(3, 256, n).tolist() for n in (70, 25, 30))
    driver.add(stem + left, 5)
    for _ in range(3):
        driver.step()
    driver.add(stem + right, 4)
    driver.add([5], 8)
    while driver.step():
        pass
    answered = driver.requests[0]
    driver.add(answered.tokens[: answered.known].tolist() + rng.integers(3, 256, 7).tolist(), 3)
    driver.add(stem + right, 2)
    while driver.step():
        pass
    return driver


def hits(driver: Driver) -> list[int | None]:
    return [request.cached_tokens for request in driver.requests]


@cache
def one_rank(family: str) -> list[int | None]:
    """Hits of one rank, which must itself reuse and preempt for the matrix to mean anything."""
    driver = drive(Case(family))
    found = hits(driver)
    assert all(found[i] for i in (1, 3, 4)), found
    assert driver.scheduler.counters.preemptions > 0
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_hits_are_those_of_one_rank(case: Case) -> None:
    driver = drive(case)
    for request in driver.requests:
        prompt = tuple(request.request.tokens.tolist())
        answer, first = generated(FAMILIES[case.family], prompt, request.request.max_tokens)
        assert request.answer.tolist() == answer
        assert (driver.executor.first[prompt] - first).abs().max().item() < TOLERANCE
    assert hits(driver) == one_rank(case.family)
    assert driver.scheduler.counters.preemptions > 0
    merged = driver.executor.ranked.ranks.exchange.calls[0]
    assert merged.count("all_to_all" if case.form == "a2a" else "reduce_scatter") > 10
    stats = driver.cache.stats()
    assert (stats.leases, stats.leased) == (0, 0)
