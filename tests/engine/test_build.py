"""An engine as the server builds it, with each drafter: costs are measured, answers are right, drafts are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.families.tiny import tiny_config
from tests.runtime.drafting.tiny_drafters import save_tiny
from tests.runtime.tiny_models import generated, tiny_model, with_random_weights
from tests.server import tiny
from transformers import AutoModelForCausalLM, Qwen3Config

from headway.engine import EngineConfig, GenerationRequest, ParallelConfig, build
from headway.engine.build import build_engine, engine_of
from headway.engine.tier_options import TierOptions
from headway.errors import ConfigError, ModelError
from headway.runtime.interface import StoredTypes
from headway.runtime.loading import LoadedModel
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.stored import stored_layout
from headway.runtime.quality import Quality


def loaded(name: str, folder: Path | None = None) -> LoadedModel:
    model = tiny_model(name)
    return LoadedModel(name, model, tiny.tokenizer(), inspect_model(model), folder)


@pytest.mark.parametrize("memory", [1 << 20, 32 << 20])
@pytest.mark.parametrize("kind", ["lookup", "mtp", "dspark"])
def test_an_engine_with_drafts_answers_as_generate(kind: str, memory: int, tmp_path: Path):
    if kind != "lookup":
        save_tiny(kind, tiny_model("Qwen3Next"), tmp_path / "drafts" / kind)
    config = EngineConfig(memory=memory, max_running=4, max_batched_tokens=128, draft=kind, draft_tokens=3)
    built = engine_of(loaded("Qwen3Next", tmp_path), config)
    assert built.drafts is not None
    prompts = [np.tile(part, 3) for part in np.random.default_rng(0).integers(3, 256, (3, 9)).astype(np.int32)]
    engine = built.engine.start()
    try:
        handles = [engine.submit(GenerationRequest(prompt, 12, ignore_eos=True)) for prompt in prompts]
        results = [handle.result(300) for handle in handles]
        now = engine.snapshot(60)
    finally:
        engine.close()
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.tokens) == generated("Qwen3Next", tuple(prompt.tolist()), 12)[0]
    assert now.drafter == kind
    assert now.counters.drafted_tokens == sum(result.drafted for result in results)
    assert now.counters.accepted_tokens == sum(result.accepted for result in results)


def test_frequencies_that_change_with_the_length_are_capped_and_told(caplog: pytest.LogCaptureFixture):
    config = tiny_config(Qwen3Config, rope="dynamic")
    model = with_random_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), 0)
    built = engine_of(LoadedModel("m", model, tiny.tokenizer(), inspect_model(model)), EngineConfig(memory=8 << 20))
    assert built.engine.max_model_len == config.max_position_embeddings
    assert f"requests are limited to {config.max_position_embeddings} tokens" in caplog.text


def test_smaller_types_are_measured_told_of_and_hit_as_they_were_stored():
    """A prompt that is resumed from rounded entries, or a rounded state, goes on as it did."""
    prompt = np.random.default_rng(1).integers(3, 256, 90).astype(np.int32)
    for name, options in (("GptOss", {"kv_dtype": "fp8"}), ("Qwen3Next", {"state_dtype": "bf16"})):
        built = engine_of(loaded(name), EngineConfig(memory=8 << 20, max_batched_tokens=64, **options))
        engine = built.engine.start()
        try:
            first, again = (engine.submit(GenerationRequest(prompt, 8, ignore_eos=True)).result(300) for _ in range(2))
        finally:
            engine.close()
        assert built.quality is not None
        assert built.quality.types == StoredTypes.read(**{"kv_dtype": "auto", "state_dtype": "auto"} | options)
        assert built.engine.cache.geometry.groups[0].spec == built.layout.groups[0]
        assert built.layout == stored_layout(loaded(name).layout, built.quality.types)
        assert (first.cached_tokens, again.cached_tokens) == (0, 89)
        assert list(again.tokens) == list(first.tokens)
    assert engine_of(loaded("Qwen3Next"), EngineConfig(memory=8 << 20)).quality is None


def test_harm_that_a_type_does_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    harmed = Quality(StoredTypes("fp8_e4m3"), 99, 20.0, 30.0, 0.5)
    monkeypatch.setattr(build, "quality_of", lambda *_: harmed)
    assert engine_of(loaded("GptOss"), EngineConfig(memory=8 << 20, kv_dtype="fp8_e4m3")).quality == harmed
    assert "perplexity 30 instead of 20" in caplog.text


def test_a_model_that_cannot_verify_drafts_is_refused():
    with pytest.raises(ModelError, match="use --draft none"):
        engine_of(loaded("FalconMamba"), EngineConfig(memory=32 << 20, draft="lookup"))


@pytest.mark.parametrize("draft", ["mtp", "dspark", "/no/such/folder"])
def test_a_drafter_that_is_not_there_is_told_before_the_model_loads(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.setattr(build, "load_model", lambda *_: pytest.fail("the model is loaded"))
    with pytest.raises(ModelError, match=r"brings no such drafter along|nor a folder with the config"):
        build_engine(str(tmp_path), EngineConfig(draft=draft))


@pytest.mark.parametrize(
    ("tiers", "told"),
    [
        (TierOptions(host_memory=1 << 40), r"--host-memory: 2 ranks of 1.0 TiB are 2.0 TiB, and this machine has"),
        (TierOptions(disk="/dev/null/x:1GB"), "give --disk one that can"),
    ],
)
def test_t15_tiers_that_cannot_be_are_told_before_the_model_loads(
    tiers: TierOptions, told: str, monkeypatch: pytest.MonkeyPatch
):
    """Host memory is the same on every rank, and on all of them together no more than there is."""
    monkeypatch.setattr(build, "_build_on_ranks", lambda *_: pytest.fail("the model is loaded"))
    with pytest.raises(ConfigError, match=told):
        build_engine(None, EngineConfig(parallel=ParallelConfig(dcp=2), tiers=tiers))
