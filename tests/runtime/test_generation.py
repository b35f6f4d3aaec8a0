"""Over the real prefix cache, with sharing, random chunks, preemption and eviction: answers equal `generate()`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime.mini_engine import MiniEngine, Request
from tests.runtime.tiny_models import SOUND, tiny_model
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.runtime.inspection import inspect_model

TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def generated(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy answer by transformers alone, and the logits of its first token."""
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return output.sequences[0, len(prompt) :].tolist(), output.scores[0][0]


def scarce(name: str) -> int:
    """Blocks that hold two or three running requests of 170 tokens in chunks of 70, and nothing else."""
    geometry = CacheGeometry(inspect_model(tiny_model(name)).groups, block_tokens=16)
    reaches = [t.window or t.chunk for t in geometry.tables]
    return (3 if geometry.tail_tables else 2) * sum(
        t.blocks_for(min(190, reach + 70) if reach else 190) + 1
        for t, reach in zip(geometry.tables, reaches, strict=True)
    )


def drive(engine: MiniEngine, seed: int) -> list[Request]:
    """Nine requests on two shared stems, then follow-ups to three answers."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(3, 256, (2, 110)).tolist()
    requests = []
    for i in range(9):
        prompt = stems[i % 2][: int(rng.integers(20, 110))] + rng.integers(3, 256, int(rng.integers(1, 40))).tolist()
        requests.append(engine.submit(prompt, int(rng.integers(1, 12))))
    engine.run(preempt_rate=0.05)
    requests += [engine.submit(r.tokens + rng.integers(3, 256, 7).tolist(), 5) for r in requests[:3]]
    engine.run()
    return requests


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("pressure", ["roomy", "scarce"])
def test_answers_equal_generate(name: str, pressure: str) -> None:
    model = tiny_model(name)
    seed = SOUND.index(name)
    engine = MiniEngine(model, blocks=4000 if pressure == "roomy" else scarce(name), seed=seed)
    requests = drive(engine, seed)
    assert sum(hit > 0 for hit in engine.hits) >= (3 if pressure == "roomy" else 1)
    assert (engine.evictions > 0) == (pressure == "scarce")
    for request in requests:
        answer, first = generated(model, request.prompt, request.wanted)
        assert request.answer == answer, f"seed {seed}, hits {engine.hits}"
        assert request.first is not None
        assert (request.first - first).abs().max().item() < TOLERANCE
    engine.cache.check()
    assert engine.cache.leases == 0
