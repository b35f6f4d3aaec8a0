"""The whole engine without its thread, over real models: answers equal `generate()` of transformers.

Random batches, chunks, sharing, preemption, failed steps and eviction pressure; fp32, greedy, and the logits of each
first token agree to 1e-4. The memory starts full of NaN, so that a read of what nobody wrote shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.tiny_configs import LONG
from tests.runtime.tiny_models import SOUND, generated, tiny_model
from tests.server import tiny
from transformers import PreTrainedModel

from headway.cache import CacheConfig, CacheGeometry, PrefixCache
from headway.engine import (
    EngineConfig,
    GenerationRequest,
    RowAnswer,
    RunningRequest,
    Scheduler,
    StepWork,
)
from headway.engine.build import engine_of
from headway.engine.ranks.in_process import LocalExecutor
from headway.runtime.forward.batch import RunBatch, RunResult
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.loading import LoadedModel
from headway.runtime.model.inspection import inspect_model
from headway.runtime.selfcheck import SelfCheck, self_check

TOLERANCE = 1e-4
SINGLE_STEPS = ("Jamba", "FalconMamba")
"""Models that continue token by token only."""


class Recorder(LocalExecutor):
    """Keeps the logits of first tokens by prompt, and fails now and then after it has written to memory."""

    def __init__(self, model: PreTrainedModel, geometry: CacheGeometry, blocks: int, seed: int, rate: float) -> None:
        runner = ModelRunner(model, inspect_model(model), geometry, blocks)
        runner.arena.data.fill_(0xFF)
        super().__init__(runner)
        self.first: dict[tuple[int, ...], torch.Tensor] = {}
        self._logits: torch.Tensor | None = None
        self._dice = np.random.default_rng(seed)
        self._rate = rate
        run = runner.run

        def keep(batch: RunBatch) -> RunResult:
            result = run(batch)
            self._logits = result.logits
            return result

        runner.run = keep  # type: ignore[method-assign]

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        output = super().run(work)
        if self._dice.random() < self._rate:
            raise RuntimeError("the device says no")
        assert self._logits is not None
        granted = [sample for sample, count in zip(work.samples, work.step.counts, strict=True) if count > 0]
        for sample, logits in zip(granted, self._logits, strict=True):
            if sample is not None and len(sample.output) == 0:
                self.first[tuple(sample.prompt.tolist())] = logits
        return output


class Driver:
    """A scheduler and a real model."""

    def __init__(self, name: str, blocks: int, config: EngineConfig, seed: int, failures: float) -> None:
        model = tiny_model(name)
        layout = inspect_model(model)
        self.cache = PrefixCache(
            CacheConfig(
                layout.groups, blocks, block_tokens=16, placement=config.placement, cost=layout.cost, check=True
            )
        )
        self.executor = Recorder(model, self.cache.geometry, blocks, seed, failures)
        self.scheduler = Scheduler(self.cache, config, long_rope=layout.long_rope)
        self.requests: list[RunningRequest] = []
        self._steps = 0

    def add(self, prompt: list[int], count: int) -> RunningRequest:
        order = len(self.requests)
        asked = GenerationRequest(np.array(prompt, dtype=np.int32), count, breakpoints=(max(1, len(prompt) // 2),))
        self.requests.append(RunningRequest.start(asked, str(order), order, 0.0))
        self.scheduler.add(self.requests[-1])
        return self.requests[-1]

    def step(self) -> bool:
        self._steps += 1
        if self._steps % 10 == 0:  # as if the oldest had got no memory in the step before
            self.scheduler._starved = self.scheduler.running[:1]
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return False
        try:
            output = self.executor.run(scheduled.work)
        except RuntimeError as error:
            self.scheduler.fail(scheduled, error)
        else:
            self.scheduler.complete(scheduled, output)
        return True


@pytest.mark.parametrize("name", [*SOUND, *LONG, *SINGLE_STEPS])
def test_answers_equal_generate(name: str):
    seed = [*SOUND, *LONG, *SINGLE_STEPS].index(name)
    rng = np.random.default_rng(seed)
    config = EngineConfig(max_batched_tokens=int(rng.integers(20, 90)), max_running=4, max_retries=9)
    if name in SINGLE_STEPS:
        config = replace(config, step_price=3.0, max_batched_tokens=300, placement=("prompt_end", "answer_end"))
    geometry = CacheGeometry(inspect_model(tiny_model(name)).groups, block_tokens=16)
    one = geometry.peak_blocks(190)
    room_for = 2 if not geometry.tail_tables else 3 if geometry.prefix_tables else 6  # requests, checkpoints included
    blocks = room_for * one
    driver = Driver(name, blocks, config, seed, failures=0.03)
    stems = rng.integers(3, 256, (2, 110)).tolist()
    for i in range(9):
        own = rng.integers(3, 256, int(rng.integers(1, 40))).tolist()
        driver.add(stems[i % 2][: int(rng.integers(20, 110))] + own, int(rng.integers(1, 20)))
        for _ in range(int(rng.integers(3))):
            driver.step()
    while driver.step():
        pass
    for request in driver.requests[:3]:
        driver.add(request.tokens[: request.known].tolist() + rng.integers(3, 256, 7).tolist(), 5)
    while driver.step():
        pass
    report = f"seed {seed}, cached {[r.cached_tokens for r in driver.requests]}"
    for request in driver.requests:
        prompt = tuple(request.request.tokens.tolist())
        answer, first = generated(name, prompt, request.request.max_tokens)
        assert request.answer.tolist() == answer, report
        assert (driver.executor.first[prompt] - first).abs().max().item() < TOLERANCE, report
    counters = driver.scheduler.counters
    assert counters.hit_tokens + counters.resumed_hit_tokens * (name in SINGLE_STEPS) > 0, report
    assert counters.preemptions > 0, report
    stats = driver.cache.stats()
    assert (stats.leases, stats.leased) == (0, 0)
    assert stats.counters.blocks_evicted > 0, report


@pytest.mark.parametrize("name", SINGLE_STEPS)
def test_a_model_that_continues_token_by_token_resumes_where_that_is_cheaper(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def checked(*given: Any) -> SelfCheck:
        return replace(self_check(*given), step_price=10.0)  # what a clock says differs from run to run

    monkeypatch.setattr("headway.engine.build.self_check", checked)
    model = tiny_model(name)
    loaded = LoadedModel(name, model, tiny.tokenizer(), inspect_model(model))
    built = engine_of(loaded, EngineConfig(memory=32 << 20, max_running=4, max_batched_tokens=300))
    assert "less is reused" in caplog.text
    assert built.engine.config.step_price == 10
    prompts = np.random.default_rng(0).integers(3, 256, (6, 60)).astype(np.int32)
    asked = [GenerationRequest(prompt[: 30 + 5 * i], 12, ignore_eos=True) for i, prompt in enumerate(prompts)]
    engine = built.engine.start()
    try:
        handles = [engine.submit(replace(request)) for request in [*asked, *asked]]
        results = [handle.result(300) for handle in handles]
        told = [
            np.array([*request.tokens, *result.tokens, 7], np.int32)
            for request, result in zip(asked, results[:6], strict=True)
        ]
        more = [replace(request, tokens=tokens) for request, tokens in zip(asked, told, strict=True)]
        results += [engine.submit(request).result(300) for request in more]
    finally:
        engine.close()
    for request, result in zip([*asked, *asked, *more], results, strict=True):
        assert list(result.tokens) == generated(name, tuple(request.tokens.tolist()), 12)[0]
    cached = [result.cached_tokens for result in results]
    assert cached[12:] == [
        len(request.tokens) + min(result.settled[0], 11) for request, result in zip(asked, results[:6], strict=True)
    ], "one step behind the answer, or where its text ends, if that is inside a character"
    assert cached[:6] == [0] * 6
    assert set(cached[6:12]) <= {0, *(len(request.tokens) - 1 for request in asked)}
