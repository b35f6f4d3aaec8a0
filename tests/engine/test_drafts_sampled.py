"""Sampled answers with drafts, through the whole engine on a model with recurrent states.

`token` and `block`: the law of four tokens is compared with the model's own, over all sequences, by chi-square.
`match`: every answer is the one without drafts. Seeds are fixed, so the tests do not fail by chance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.test_drafts_against_generate import Driver, texts
from tests.runtime.drafting.tiny_drafters import Improved, save_tiny
from tests.runtime.tiny_models import tiny_model

from headway.engine import EngineConfig, GenerationRequest, RunningRequest
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import DraftRequest, Proposal, choose, proposals
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.drafting.lookup import PromptLookup
from headway.runtime.forward.sampling import distributions
from headway.runtime.interface import SampleRow, SamplingParams

MODEL, TOP, LENGTH = "KimiLinear", 3, 4
PARAMS = SamplingParams(temperature=1.5, top_k=TOP)
PROMPT = np.random.default_rng(5).integers(3, 256, 24).astype(np.int32)
Context = tuple[int, ...]


@pytest.fixture(scope="module")
def logits() -> dict[Context, torch.Tensor]:
    """The model's logits behind every answer that it can give, up to LENGTH tokens."""
    found: dict[Context, torch.Tensor] = {}
    contexts: list[Context] = [()]
    for _ in range(LENGTH):
        rows = torch.tensor([[*PROMPT.tolist(), *context] for context in contexts])
        positions = torch.arange(rows.shape[1])[None].expand(len(rows), -1)
        with torch.no_grad():
            last = tiny_model(MODEL)(input_ids=rows, position_ids=positions, use_cache=False)["logits"][:, -1].float()
        found.update(zip(contexts, last, strict=True))
        contexts = [(*c, int(t)) for c, row in zip(contexts, last, strict=True) for t in row.topk(TOP).indices.tolist()]
    return found


class Distorted(PromptLookup):
    """Drafts drawn from the model's own distributions, bent: likely and unlikely tokens alike are proposed."""

    name = "distorted"

    def __init__(self, logits: dict[Context, torch.Tensor]) -> None:
        super().__init__(3)
        noise = torch.Generator().manual_seed(3)
        self._logits = {c: row + 0.7 * torch.randn(len(row), generator=noise) for c, row in logits.items()}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        most = max(request.count for request in requests)
        drafts = torch.empty((len(requests), 0), dtype=torch.int64)
        found = []
        for _ in range(most):
            contexts = [(*r.sample.output.tolist(), *row) for r, row in zip(requests, drafts.tolist(), strict=True)]
            unknown = next(iter(self._logits.values()))  # behind a token that the model never says
            rows = torch.stack([self._logits.get(context, unknown) for context in contexts])
            tokens, distribution = choose(rows, requests, drafts)
            drafts = torch.cat([drafts, tokens[:, None]], dim=1)
            found.append(distribution)
        return proposals(requests, drafts, found)


def law(logits: dict[Context, torch.Tensor]) -> dict[Context, float]:
    """Probability of every answer of LENGTH tokens."""
    row = SampleRow(PARAMS, 0, PROMPT, np.empty(0, dtype=np.int32))
    probabilities = {c: distributions(values[None], [row])[0] for c, values in logits.items()}
    answers: dict[Context, float] = {(): 1.0}
    for _ in range(LENGTH):
        answers = {
            (*c, token): p * float(probabilities[c][token])
            for c, p in answers.items()
            for token in probabilities[c].nonzero()[:, 0].tolist()
        }
    return answers


def excess(counts: Counter[Context], expected: dict[Context, float]) -> float:
    """Chi-square statistic in standard deviations above its mean; cells of fewer than 5 expected are put together."""
    total = counts.total()
    assert set(counts) <= set(expected)
    cells = sorted(((total * p, counts[c]) for c, p in expected.items()), key=lambda cell: cell[0])
    pooled, rest = [], [0.0, 0]
    for want, got in cells:
        rest = [rest[0] + want, rest[1] + got]
        if rest[0] >= 5:
            pooled.append(rest)
            rest = [0.0, 0]
    pooled[-1] = [pooled[-1][0] + rest[0], pooled[-1][1] + rest[1]]
    statistic = sum((got - want) ** 2 / want for want, got in pooled)
    freedom = len(pooled) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def ask(driver: Driver, prompt: Sequence[int], count: int, params: SamplingParams, seed: int) -> RunningRequest:
    order = len(driver.requests)
    asked = GenerationRequest(np.array(prompt, dtype=np.int32), count, params)
    request = RunningRequest.start(asked, str(order), order, 0.0)
    request.seed = seed
    driver.requests.append(request)
    driver.scheduler.add(request)
    return request


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_the_law_is_the_model_s(rule: AcceptanceRule, logits: dict[Context, torch.Tensor]):
    drafter = Distorted(logits)
    config = EngineConfig(max_batched_tokens=1024, max_running=128)
    driver = Driver(MODEL, drafter, 140, config, rule, check=False)
    ask(driver, PROMPT.tolist(), 1, PARAMS, 0)
    driver.run()
    for seed in range(1000):
        ask(driver, PROMPT.tolist(), LENGTH, PARAMS, seed)
    driver.run()
    counters = driver.scheduler.counters
    assert 0.3 < counters.accepted_tokens / counters.drafted_tokens < 0.9, "neither always right nor always wrong"
    found = Counter(tuple(request.answer.tolist()) for request in driver.requests[1:])
    expected = law(logits)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    assert excess(found, expected) < 4
    even = {c: 1 / len(expected) for c in itertools.chain(expected)}
    assert excess(found, even) > 10, "the test would notice another law"


@pytest.mark.parametrize("kind", ["lookup", "mtp", "dspark"])
def test_by_match_a_seed_gives_the_answer_that_it_gives_without_drafts(kind: str, tmp_path: Path):
    model = tiny_model(MODEL)
    source = kind if kind == "lookup" else str(save_tiny(kind, model, tmp_path / "draft"))
    params = [
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=0.2, frequency_penalty=0.3),
    ]
    config = EngineConfig(max_batched_tokens=60, max_running=3)
    drafter: Improved | None = None
    answers: dict[tuple[int, ...], list[int]] = {}
    for _ in range(2):
        driver = Driver(MODEL, drafter, 4, config)
        for seed, (prompt, _) in enumerate(texts(2)):
            ask(driver, prompt, 12, params[seed % 3], seed)
        driver.run(preempt=drafter is not None)
        found = {tuple(r.request.tokens.tolist()): r.answer.tolist() for r in driver.requests}
        assert not answers or answers == found
        answers = found
        drafter = Improved(load_drafter(source, model, None, 3), answers, seed=1)
    counters = driver.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.preemptions > 0
