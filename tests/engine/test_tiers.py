"""Host memory and a disk below real models: what is read back gives the answers of `generate()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.tiny_models import generated, tiny_model
from tests.server import tiny

from headway.engine import Engine, EngineConfig, GenerationRequest, RequestResult
from headway.engine.build import engine_of
from headway.engine.tier_options import TierOptions
from headway.errors import ConfigError
from headway.runtime.loading import LoadedModel
from headway.runtime.model.inspection import inspect_model
from headway.tiers import Rates


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models compute as fast as anything can be read: nothing is known of that, so that loads are made."""
    monkeypatch.setattr(Rates, "computed", lambda *_: None)


MODELS = ["Qwen3Next", "KimiLinear", "GptOss", "Gemma3", "Llama4", "DeepseekV3", "Qwen3", "Mamba2", "Lfm2", "FalconH1"]
PROMPTS = [tuple(np.random.default_rng(seed).integers(3, 256, 70).tolist()) for seed in range(6)]


@contextmanager
def engine(name: str, folder: Path, tiers: TierOptions, seed: int = 0, **options: object) -> Iterator[Engine]:
    model = tiny_model(name, seed)
    if options.pop("dtype", "fp32") == "bf16":
        model = type(model)(model.config).to(torch.bfloat16).eval()
    weights = folder / f"{name}-{seed}-{model.dtype}"
    if not weights.exists():
        model.save_pretrained(weights)
    loaded = LoadedModel(name, model, tiny.tokenizer(), inspect_model(model), weights)
    config = EngineConfig(max_running=2, max_batched_tokens=64, check=True, tiers=tiers, **options)  # type: ignore[arg-type]
    made = engine_of(loaded, config).engine.start()
    try:
        yield made
    finally:
        made.close()


def asked(made: Engine, prompts: Sequence[tuple[int, ...]], salt: str = "") -> list[RequestResult]:
    """One after another."""
    requests = [GenerationRequest(np.array(p, np.int32), 8, ignore_eos=True, salt=salt) for p in prompts]
    return [made.submit(request).result(120) for request in requests]


def check(
    name: str,
    results: Sequence[RequestResult],
    prompts: Sequence[tuple[int, ...]],
    entries: torch.dtype | None = None,
) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.tokens) == generated(name, prompt, 8, entries)[0]


def small_memory(name: str, folder: Path, **options: str) -> int:
    """Room for about two of the prompts."""
    with engine(name, folder, TierOptions(), memory=8 << 20, **options) as made:
        geometry = made.cache.geometry
    return 2 * geometry.peak_blocks(96) * (-(-geometry.block_bytes // 64) * 64)


@pytest.mark.parametrize("name", MODELS)
def test_what_memory_gave_up_comes_back_from_the_host_and_over_a_restart_from_the_disk(name: str, tmp_path: Path):
    memory = small_memory(name, tmp_path)
    tiers = TierOptions(host_memory=64 << 20, disk=f"{tmp_path}/disk:100MB")
    with engine(name, tmp_path, tiers, memory=memory) as made:
        check(name, asked(made, PROMPTS), PROMPTS)
        again = asked(made, PROMPTS)
        check(name, again, PROMPTS)
    assert [one.cached_tokens for one in again] == [69] * 6
    assert sum("host" in one.loaded for one in again) >= 3
    with engine(name, tmp_path, tiers, memory=memory) as made:
        restarted = asked(made, PROMPTS[:3])
    check(name, restarted, PROMPTS[:3])
    assert [(one.cached_tokens, one.loaded) for one in restarted] == [(69, {"disk": 69})] * 3


@pytest.mark.parametrize("name", ["KimiLinear", "GptOss"])
def test_entries_in_fp8_come_back_from_the_host_and_the_disk_and_to_no_other_types(name: str, tmp_path: Path):
    fp8 = {"kv_dtype": "fp8_e4m3"}
    tiers = TierOptions(host_memory=64 << 20, disk=f"{tmp_path}/disk:100MB")
    with engine(name, tmp_path, tiers, memory=small_memory(name, tmp_path, **fp8), **fp8) as made:
        check(name, asked(made, PROMPTS), PROMPTS, torch.float8_e4m3fn)
        again = asked(made, PROMPTS)
        check(name, again, PROMPTS, torch.float8_e4m3fn)
    assert [one.cached_tokens for one in again] == [69] * 6
    assert sum("host" in one.loaded for one in again) >= 3
    others = [{}, {"kv_dtype": "bf16"}, *([fp8 | {"state_dtype": "bf16"}] if name == "KimiLinear" else [])]
    for types, tokens in (*((other, 0) for other in others), (fp8, 69)):
        with engine(name, tmp_path, tiers, memory=8 << 20, **types) as made:
            (result,) = asked(made, PROMPTS[:1])
        assert result.cached_tokens == tokens, types
    check(name, [result], PROMPTS[:1], torch.float8_e4m3fn)


@pytest.mark.parametrize("block_tokens", [5, 32])
def test_blocks_of_another_size_read_the_same_objects(block_tokens: int, tmp_path: Path):
    tiers = TierOptions(disk=f"{tmp_path}/disk:100MB")
    for name in ("GptOss", "Qwen3Next"):
        with engine(name, tmp_path, tiers, memory=8 << 20) as made:
            asked(made, PROMPTS[:2])
        with engine(name, tmp_path, tiers, memory=8 << 20, block_tokens=block_tokens) as made:
            results = asked(made, PROMPTS[:2])
        check(name, results, PROMPTS[:2])
        assert [one.loaded for one in results] == [{"disk": 69}] * 2


def test_t18_t20_t21_nothing_is_shared_across_salts_weights_and_dtypes(tmp_path: Path):
    tiers = TierOptions(disk=f"{tmp_path}/disk:100MB")
    with engine("Qwen3Next", tmp_path, tiers, memory=8 << 20) as made:
        asked(made, PROMPTS[:1], salt="alice")
        assert [one.cached_tokens for one in asked(made, PROMPTS[:1], salt="bob")] == [0]
    with engine("Qwen3Next", tmp_path, tiers, memory=8 << 20) as made:
        assert [one.cached_tokens for one in asked(made, PROMPTS[:1])] == [0]
        assert [one.cached_tokens for one in asked(made, PROMPTS[:1], salt="alice")] == [69], "the control"
    with engine("Qwen3Next", tmp_path, tiers, seed=1, memory=8 << 20) as made:
        assert [one.cached_tokens for one in asked(made, PROMPTS[:1], salt="alice")] == [0], "other weights"
    with engine("Qwen3Next", tmp_path, tiers, memory=8 << 20, dtype="bf16") as made:
        assert [one.cached_tokens for one in asked(made, PROMPTS[:1], salt="alice")] == [0], "another dtype"


def test_a_reset_is_done_when_the_disk_is_empty(tmp_path: Path):
    tiers = TierOptions(host_memory=8 << 20, disk=f"{tmp_path}/disk:100MB")
    with engine("Qwen3Next", tmp_path, tiers, memory=8 << 20) as made:
        asked(made, PROMPTS)
        made.reset()
        assert not [file for file in (tmp_path / "disk").rglob("*") if file.is_file() and file.name != "about"]
        assert [one.cached_tokens for one in asked(made, PROMPTS[:1])] == [0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"disk": "/var/cache/headway"}, "folder and its size"),
        ({"store": "valkey://localhost"}, "store-key FILE"),
        ({"tier_write": "back"}, "add --disk"),
        ({"store_key": "key"}, "add --disk or --store"),
        ({"disk": "/tmp/x:1GB", "tier_write": "never"}, "through, selective, back"),
        ({"tier_grace": 60.0}, "add --disk or --store"),
        ({"host_memory": 0}, "at least 1"),
    ],
)
def test_options_that_cannot_work_say_what_to_change(options: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=told):
        TierOptions(**options)  # type: ignore[arg-type]


def test_tiers_that_hold_nothing_are_refused_by_name(tmp_path: Path):
    for tiers in (TierOptions(host_memory=1), TierOptions(disk=f"{tmp_path}/disk:1")):
        name = "--disk" if tiers.below else "--host-memory"
        with pytest.raises(ConfigError, match=f"{name}: 1 B"), engine("Qwen3Next", tmp_path, tiers, memory=8 << 20):
            pass
