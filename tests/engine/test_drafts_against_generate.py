"""Greedy answers with drafts equal `generate()` of transformers, whatever is drafted, shared, preempted or evicted.

Trained drafters would accept what they please; these have random weights, and a part of their drafts is replaced by
what the model will say, so that every length of acceptance occurs. What the drafters themselves propose is compared
with a computation over the whole sequence without any cache: that shows whether their entries survive hits, copies and
rejections.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.drafting.tiny_drafters import TOKENS, Improved, reference, save_tiny
from tests.runtime.tiny_models import generated, tiny_model

from headway.cache import CacheConfig, CacheGeometry, PrefixCache
from headway.engine import (
    DraftPlanner,
    EngineConfig,
    GenerationRequest,
    RunningRequest,
    Scheduler,
)
from headway.engine.ranks.in_process import LocalExecutor
from headway.engine.scheduling.lower import LowerTiers
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.model.inspection import inspect_model
from headway.tiers import HostTier

MODELS = ("KimiLinear", "Qwen3Next", "GraniteMoeHybrid", "GptOss")
"""Full attention with KDA, with Gated DeltaNet, with Mamba-2, with windows."""
DRAFTERS = ("lookup", "mtp", "dspark")


class Driver:
    """A scheduler, a real model and a drafter, or none."""

    def __init__(
        self,
        name: str,
        drafter: Drafter | None,
        requests: int,
        config: EngineConfig,
        rule: AcceptanceRule = AcceptanceRule.MATCH,
        check: bool = True,
        grammars: Grammars | None = None,
        host_blocks: int = 0,
    ) -> None:
        model = tiny_model(name)
        layout = inspect_model(model)
        groups = (*layout.groups, *(drafter.groups if drafter else ()))
        geometry = CacheGeometry(groups, block_tokens=16)
        blocks = requests * geometry.peak_blocks(190)
        self.cache = PrefixCache(CacheConfig(groups, blocks, block_tokens=16, cost=layout.cost, check=check))
        runner = ModelRunner(model, layout, self.cache.geometry, blocks)
        runner.arena.data.fill_(0xFF)
        speculator = Speculator(runner, drafter, rule, grammars=grammars) if drafter else None
        self.executor = LocalExecutor(runner, speculator, grammars, host_blocks)
        planner = DraftPlanner(drafter.name, drafter.most) if drafter else None
        host = HostTier.beside(self.cache, host_blocks, self.executor.move_blocks) if host_blocks else None
        lower = None if host is None else LowerTiers(self.cache, host)
        self.scheduler = Scheduler(self.cache, config, planner=planner, long_rope=layout.long_rope, lower=lower)
        self.requests: list[RunningRequest] = []
        self._steps = 0

    def add(self, prompt: list[int], count: int) -> RunningRequest:
        asked = GenerationRequest(np.array(prompt, dtype=np.int32), count, breakpoints=(max(1, len(prompt) // 2),))
        order = len(self.requests)
        self.requests.append(RunningRequest.start(asked, str(order), order, 0.0))
        self.scheduler.add(self.requests[-1])
        return self.requests[-1]

    def step(self, preempt: bool = False) -> bool:
        self._steps += 1
        if preempt and self._steps % 6 == 0:  # as if the oldest had got no memory in the step before
            self.scheduler._starved = self.scheduler.running[:1]
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self.scheduler.complete(scheduled, self.executor.run(scheduled.work))
        return scheduled is not None

    def run(self, preempt: bool = False) -> None:
        while self.step(preempt):
            pass


def texts(seed: int) -> list[tuple[list[int], int]]:
    """Prompts on two stems that repeat themselves, and lengths of answers."""
    rng = np.random.default_rng(seed)
    stems = [np.tile(rng.integers(3, 256, 20), 4) for _ in range(2)]
    own = [rng.integers(3, 256, int(rng.integers(1, 25))) for _ in range(6)]
    return [
        ([*stems[i % 2][: int(rng.integers(20, 80))].tolist(), *part.tolist()], int(rng.integers(4, 20)))
        for i, part in enumerate(own)
    ]


def drafter_for(kind: str, name: str, folder: Path, seed: int, asked: list[tuple[list[int], int]]) -> Improved:
    model = tiny_model(name)
    source = kind if kind == "lookup" else str(save_tiny(kind, model, folder, seed))
    answers = {tuple(prompt): generated(name, tuple(prompt), count)[0] for prompt, count in asked}
    return Improved(load_drafter(source, model, None, TOKENS), answers, seed)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(MODELS, DRAFTERS), ("Phi3Long", "mtp"), ("PhimoeLong", "dspark"), ("LlamaLong", "lookup")],
)
def test_answers_equal_generate(name: str, kind: str, tmp_path: Path):
    seed = MODELS.index(name) if name in MODELS else 5  # one of its answers grows past 96 tokens
    rng = np.random.default_rng(seed)
    asked = texts(seed)
    config = EngineConfig(max_batched_tokens=int(rng.integers(24, 70)), max_running=4)
    later = [
        ([*p, *generated(name, tuple(p), count)[0], *rng.integers(3, 256, 5).tolist()], 6) for p, count in asked[:2]
    ]
    drafter = drafter_for(kind, name, tmp_path / "draft", seed, [*asked, *later])
    driver = Driver(name, drafter, 4, config)
    for prompt, count in asked:
        driver.add(prompt, count)
        for _ in range(int(rng.integers(3))):
            driver.step(preempt=True)
    driver.run(preempt=True)
    for prompt, count in later:
        driver.add(prompt, count)
    driver.run()
    counters = driver.scheduler.counters
    report = f"seed {seed}, {counters}"
    for request in driver.requests:
        prompt = tuple(request.request.tokens.tolist())
        assert request.answer.tolist() == generated(name, prompt, request.request.max_tokens)[0], report
    assert 0 < counters.accepted_tokens < counters.drafted_tokens, report
    assert counters.hit_tokens > 0, report
    assert counters.preemptions > 0, report
    stats = driver.cache.stats()
    assert (stats.leases, stats.leased) == (0, 0)
    if kind != "lookup":
        for tokens, proposed in drafter.seen[::13]:
            assert proposed == reference(kind, tmp_path / "draft", tiny_model(name), tokens, len(proposed)), report


@pytest.mark.parametrize(("name", "kind"), [("KimiLinear", "mtp"), ("GptOss", "dspark")])
def test_t25_what_comes_back_from_host_memory_is_drafted_on_as_if_it_had_stayed(name: str, kind: str, tmp_path: Path):
    """The drafter's own entries come back too, and nothing that it knew of who had the row before."""
    asked = texts(3)
    drafter = drafter_for(kind, name, tmp_path / "draft", 3, asked)
    driver = Driver(name, drafter, 1, EngineConfig(max_batched_tokens=64, max_running=2), host_blocks=400)
    for _ in range(2):
        for prompt, count in asked:
            driver.add(prompt, count)
        driver.run()
    for request in driver.requests:
        prompt = tuple(request.request.tokens.tolist())
        assert request.answer.tolist() == generated(name, prompt, request.request.max_tokens)[0]
    assert sum(bool(request.loaded) for request in driver.requests) >= 3, "the test has no point"
    assert driver.scheduler.counters.accepted_tokens > 0
    for tokens, proposed in drafter.seen[::5]:
        assert proposed == reference(kind, tmp_path / "draft", tiny_model(name), tokens, len(proposed))


@pytest.mark.parametrize("kind", DRAFTERS[1:])
@pytest.mark.parametrize("name", ["KimiLinear", "GptOss"])
def test_hits_are_those_without_drafts(name: str, kind: str, tmp_path: Path):
    """Entries of an MTP head depend on the next token, so its hits end one token earlier where that one differs."""
    asked = [(prompt, 6) for prompt, _ in texts(7)[:4]]
    more = [([*p, *generated(name, tuple(p), 6)[0], 5, 6, 7], 3) for p, _ in asked]
    config = EngineConfig(max_batched_tokens=64, max_running=1)
    found = []
    for drafter in (None, drafter_for(kind, name, tmp_path / "draft", 1, [*asked, *more])):
        driver = Driver(name, drafter, 40, config)
        for prompt, count in [*asked, *more]:
            driver.add(prompt, count)
            driver.run()
        found.append([request.cached_tokens or 0 for request in driver.requests])
    less = np.array(found[0]) - np.array(found[1])
    assert sum(hit > 0 for hit in found[0]) >= 4
    assert set(less.tolist()) <= ({0, 1} if kind == "mtp" else {0}), found
