"""Over the real prefix cache, with sharing, random chunks, preemption and eviction: answers equal `generate()`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime.mini_engine import MiniEngine, Request
from tests.runtime.tiny_models import SOUND, generated, tiny_model

from headway.cache import CacheGeometry
from headway.runtime.interface import AS_COMPUTED, StoredTypes
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.stored import stored_layout

TOLERANCE = 1e-4


def scarce(name: str, types: StoredTypes = AS_COMPUTED) -> int:
    """Blocks that hold two or three running requests of 170 tokens in chunks of 70, and nothing else."""
    geometry = CacheGeometry(stored_layout(inspect_model(tiny_model(name)), types).groups, block_tokens=16)
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
    seed = SOUND.index(name)
    engine = MiniEngine(tiny_model(name), blocks=4000 if pressure == "roomy" else scarce(name), seed=seed)
    requests = drive(engine, seed)
    assert sum(hit > 0 for hit in engine.hits) >= (3 if pressure == "roomy" else 1)
    assert (engine.evictions > 0) == (pressure == "scarce")
    for request in requests:
        answer, first = generated(name, tuple(request.prompt), request.wanted)
        assert request.answer == answer, f"seed {seed}, hits {engine.hits}"
        assert request.first is not None
        assert (request.first - first).abs().max().item() < TOLERANCE
    engine.cache.check()
    assert engine.cache.leases == 0


@pytest.mark.parametrize("name", ["KimiLinear", "GptOss", "DeepseekV3", "FalconH1", "Gemma4"])
def test_answers_of_entries_in_fp8_are_those_of_a_cache_that_rounds(name: str) -> None:
    """Latents, windows and sinks, full attention alone, states in the same layers, shared entries: cut anywhere."""
    seed, types = SOUND.index(name), StoredTypes("fp8_e4m3")
    engine = MiniEngine(tiny_model(name), scarce(name, types), seed, types=types)
    requests = drive(engine, seed)
    assert any(hit > 0 for hit in engine.hits)
    assert engine.evictions > 0
    for request in requests:
        prompt = tuple(request.prompt)
        answer, first = generated(name, prompt, request.wanted, torch.float8_e4m3fn)
        assert request.answer == answer, f"seed {seed}, hits {engine.hits}"
        assert request.first is not None
        assert (request.first - first).abs().max() < 0.1 * (generated(name, prompt, 1)[1] - first).abs().max()
    engine.cache.check()
