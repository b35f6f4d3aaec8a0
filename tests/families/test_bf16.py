"""In bf16, Headway's answers are no further from those of fp32 than the answers of `generate()` are.

Equality is promised for fp32 only: in bf16 the same sums in another order round otherwise, and near ties between two
tokens fall either way. So both are compared with the truth, which is `generate()` in fp32 with the same weights.

The statistic is a sign test. For each answer, count the tokens that differ from the truth, ours and those of
`generate()` in bf16. Of the answers where the two counts differ, ours should be the larger one in half of the cases.
The test fails if so many or more would come by chance, in a fair coin, less often than once in 1,000 times.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from tests.families.drive import drive, scarce_memory
from tests.runtime.tiny_models import answer_of, tiny_model
from tests.server import tiny
from transformers import PreTrainedModel

from headway.engine import EngineConfig
from headway.engine.build import engine_of
from headway.runtime.loading import LoadedModel
from headway.runtime.model.inspection import inspect_model

FAMILIES = ("Qwen3Next", "FalconH1", "Lfm2", "GptOss", "Gemma4", "Llama4", "Qwen3")
REQUESTS = 20
CHANCE = 1e-3


@pytest.mark.slow  # fewer answers would prove nothing; `make test` has bf16 beside fp32 in `tests/runtime`
def test_our_share_of_other_tokens_is_not_above_that_of_generate() -> None:
    torch.set_num_threads(1)
    pairs: list[tuple[int, int]] = []
    tokens = 0
    for seed, name in enumerate(FAMILIES):
        for ours, theirs, count in differing(name, seed):
            pairs.append((ours, theirs))
            tokens += count
    worse, better = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    shares = [f"{sum(column) / tokens:.3f}" for column in zip(*pairs, strict=True)]
    report = f"{len(pairs)} answers, {tokens} tokens; differ: ours, theirs {shares}; worse {worse}, better {better}"
    assert worse + better >= 10, f"too few answers differ to judge by: {report}"
    assert at_least(worse, worse + better) > CHANCE, report


def differing(name: str, seed: int) -> list[tuple[int, int, int]]:
    """For each answer: tokens of ours and of `generate()` in bf16 that are not those of fp32, and all tokens."""
    coarse = copy.deepcopy(tiny_model(name)).to(torch.bfloat16)
    alone, exact = copy.deepcopy(coarse), copy.deepcopy(coarse).float()
    loaded = LoadedModel(name, coarse, tiny.tokenizer(), inspect_model(coarse))
    config = EngineConfig(max_batched_tokens=48, max_running=4, max_retries=9, memory=scarce_memory(coarse))
    served = drive(engine_of(loaded, config), seed, REQUESTS)
    assert sum(each.cached_tokens for each in served) > 0
    found = []
    for each in served:
        prompt, count = each.request.tokens.tolist(), each.request.max_tokens
        truth, theirs = answer(exact, prompt, count), answer(alone, prompt, count)
        found.append((others(each.tokens, truth), others(theirs, truth), count))
    return found


def answer(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    return answer_of(model, prompt, count)[0]


def others(tokens: Sequence[int], truth: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(tokens, truth, strict=True))


def at_least(heads: int, throws: int) -> float:
    """How often a fair coin shows `heads` or more in so many throws."""
    return sum(math.comb(throws, k) for k in range(heads, throws + 1)) / 2**throws
