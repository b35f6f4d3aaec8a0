"""Sampled answers with drafts on two ranks: the tokens and log probabilities of one rank, by every rule.

Rank 0 draws with the seed of the request, and the others follow it. Seeds are fixed, so nothing here is left to chance;
a number would have to lie within rounding of the border between two tokens for an answer to differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tests.engine.ranks.rank_executor import ThreadRanks
from tests.runtime.drafting.tiny_drafters import TOKENS, save_tiny
from tests.runtime.parallel.rank_threads import layout_of
from tests.runtime.tiny_models import tiny_model

from headway.cache import CacheConfig, PrefixCache
from headway.engine import DraftPlanner, EngineConfig, GenerationRequest, RunningRequest, Scheduler, TokenLogprob
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.interface import SamplingParams
from headway.runtime.model.inspection import inspect_model

BLOCKS = 2000
PARAMS = (
    SamplingParams(temperature=0.9, logprobs=3),
    SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.6, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, min_p=0.01),
)


@dataclass
class Told:
    """What clients were told, and how many drafted tokens were judged and accepted."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    drafted: int
    accepted: int


def told(ranks: int, kind: str, rule: AcceptanceRule, folder: Path) -> Told:
    model = tiny_model("Qwen3Next")
    source = str(save_tiny(kind, model, folder, seed=3))
    drafters = [load_drafter(source, model if r == 0 else copy.deepcopy(model), None, TOKENS) for r in range(ranks)]
    layout = inspect_model(model)
    parallel, groups = layout_of(ranks, 4), (*layout.groups, *drafters[0].groups)
    cache = PrefixCache(CacheConfig(groups, BLOCKS, layout=parallel, block_tokens=16, cost=layout.cost, check=True))
    executor = ThreadRanks(model, cache.geometry, BLOCKS, "a2a", drafters, rule)
    scheduler = Scheduler(
        cache, EngineConfig(max_batched_tokens=64, max_running=4), planner=DraftPlanner(kind, drafters[0].most)
    )
    rng = np.random.default_rng(11)
    requests = []
    for i, params in enumerate(PARAMS):
        asked = GenerationRequest(rng.integers(3, 256, 20 + 9 * i).astype(np.int32), 24, params)
        requests.append(RunningRequest.start(asked, str(i), i, 0.0))
        requests[-1].seed = 100 + i
        scheduler.add(requests[-1])
    logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
    while (scheduled := scheduler.schedule()) is not None:
        for update in scheduler.complete(scheduled, executor.run(scheduled.work)):
            if update.delta is not None:
                logprobs[update.request.order] += update.delta.logprobs
    counters = scheduler.counters
    answers = [request.answer.tolist() for request in requests]
    return Told(answers, logprobs, counters.drafted_tokens, counters.accepted_tokens)


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_two_ranks_say_what_one_says(kind: str, rule: AcceptanceRule, tmp_path: Path) -> None:
    one, two = (told(ranks, kind, rule, tmp_path / str(ranks)) for ranks in (1, 2))
    assert two.tokens == one.tokens
    assert (two.drafted, two.accepted) == (one.drafted, one.accepted)
    assert one.drafted > 0
    if rule is not AcceptanceRule.MATCH:
        assert 0 < one.accepted < one.drafted, "some drafts are accepted and some are not"
    assert [len(found) for found in one.logprobs] == [24, 24, 24, 0]
    for got, expected in zip(chain(*two.logprobs), chain(*one.logprobs), strict=True):
        assert got.token == expected.token
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in expected.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in expected.top], abs=1e-4)
