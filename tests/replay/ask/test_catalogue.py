"""The catalogue gives the sizes that its sources state, follows each layout's rules, and refuses what is unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cache import ChunkedLocal, FullAttention, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay.ask.catalogue import catalogue, draft_of, inspected_model, model_of
from headway.replay.ask.options import Hardware, ModelChoice, RankChoice
from headway.replay.ask.sizing import memory_of, sized_model
from headway.replay.config.gpus import GPUS, gpu_of

ONE = ParallelLayout()
SIZES = {
    "kimi-linear": (8_064, 43_417_600),
    "kimi-k3": (27_648, 449_372_160),
    "ling-3.0-flash": (8_064, 75_980_800),
    "qwen3-next": (24_576, 77_266_944),
    "qwen3.5-397b": (30_720, 192_061_440),
    "qwen3.5-122b": (24_576, 153_649_152),
    "qwen3.6-35b-a3b": (20_480, 64_389_120),
    "qwen3.8-27b": (65_536, 153_944_064),
    "qwen3.5-9b": (32_768, 51_511_296),
    "qwen3.5-0.8b": (12_288, 19_537_920),
    "qwen3.8-2.4t": (94_208, 587_292_672),
    "jamba2-mini": (16_384, 16_056_320),
    "bamba-9b": (12_288, 123_104_768),
    "nemotron-3-nano": (6_144, 49_082_368),
    "granite-4.0-h-small": (16_384, 152_819_712),
    "falcon-h1-34b": (147_456, 304_201_728),
    "minimax-text-01": (40_960, 293_601_280),
    "minimax-m2": (253_952, 0),
    "gpt-oss-120b": (36_864, 0),
    "gemma-4-31b": (81_920, 0),
    "llama-4-scout": (49_152, 0),
    "mimo-v2.5": (23_040, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    groups = model_of(name, ONE).groups
    attention, state = SIZES[name]
    assert groups[0] == FullAttention("attention", attention)
    assert sum(g.state_bytes for g in groups if isinstance(g, Recurrent)) == state


def test_windows_and_chunks() -> None:
    (window,) = (g for g in model_of("gpt-oss-120b", ONE).groups if isinstance(g, SlidingWindow))
    assert (window.window, window.bytes_per_token * 128) == (128, 4.5 * 2**20)
    (chunk,) = (g for g in model_of("llama-4-scout", ONE).groups if isinstance(g, ChunkedLocal))
    assert (chunk.chunk, chunk.bytes_per_token * 8192) == (8192, 1152 * 2**20)


def test_layouts_and_dtypes() -> None:
    k3 = model_of("Kimi-K3", ParallelLayout(tp=8, dcp=8)).groups
    assert k3 == (FullAttention("attention", 27_648), Recurrent("state", 56_171_520))
    small = model_of("kimi-k3", ParallelLayout(tp=8), kv_dtype="fp8_ds_mla", state_dtype="bf16").groups
    assert small == (FullAttention("attention", 15_744), Recurrent("state", 232_316_928 // 8))
    assert model_of("kimi-linear", ONE, kv_dtype="fp8").groups[0] == FullAttention("attention", 4_032)
    qwen = model_of("qwen3-next", ParallelLayout(tp=8, dcp=4)).groups
    assert qwen[0] == FullAttention("attention", 12_288)  # two heads over eight ranks: one each, four copies
    bamba = model_of("bamba-9b", ParallelLayout(tp=2)).groups
    assert bamba[1] == Recurrent("state", 29 * ((3 * 8192 // 2 + 3 * 256) * 2 + 128 * 64 * 128 * 4 // 2))


@pytest.mark.parametrize(
    ("name", "layout", "options", "message"),
    [
        ("qwen3-next", ParallelLayout(tp=8, dcp=8), {}, "2 key/value heads, so each is on 4 of 8 ranks"),
        ("gpt-oss-20b", ParallelLayout(tp=3), {}, "divides or multiplies"),
        ("kimi-k3", ParallelLayout(tp=64), {}, "96 heads"),
        ("gpt-oss-20b", ONE, {"kv_dtype": "fp8_ds_mla"}, "latent"),
        ("kimi-k3", ONE, {"kv_dtype": "int3"}, "unknown dtype"),
        ("glm-5.3-flash", ONE, {}, "index entries is not known .* --attention-bytes"),
        ("kimi-k4", ONE, {}, "nearest: kimi-k3"),
        ("nope/config.json", ONE, {}, "there is no such file or folder"),
    ],
)
def test_refusals(name: str, layout: ParallelLayout, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(name, layout, **options)


def test_every_entry_has_a_source_and_works_or_says_what_is_unknown() -> None:
    for name, entry in catalogue()["models"].items():
        assert entry["source"], name
        if "unknown" not in entry:
            assert model_of(name, ONE).groups


def test_gpus_are_plausible_and_found_by_the_names_that_people_write() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert gpu.source
        assert gpu.fp8_flops is None or 1.9 < gpu.fp8_flops / gpu.bf16_flops < 2.1, "dense fp8 is twice bf16"
        assert 30 < gpu.bf16_flops / gpu.memory_bandwidth < 500, "FLOP a byte of any GPU with matrix units"
    assert gpu_of("A100").memory_bytes == 80 * 10**9
    assert gpu_of("H200-SXM") is GPUS["h200"]
    with pytest.raises(ConfigError, match="did you mean mi300x"):
        gpu_of("mi300")


def test_drafts() -> None:
    assert draft_of("kimi-k3-mla") == FullAttention("draft", 5_760)
    assert draft_of("2048:1") == FullAttention("draft", 2048, 1)
    assert draft_of("4096:0:replicated") == FullAttention("draft", 4096, 0, False)
    for wrong in ("eagle", "12:x", "12:1:twice"):
        with pytest.raises(ConfigError, match="unknown draft"):
            draft_of(wrong)


INSPECTED: dict[str, Any] = {
    "model": "mine",
    "parameters": 1000,
    "flops": {"linear": 2.0, "quadratic": 0.5},
    "parallel": {"tp": 2},
    "groups": [
        {"name": "full", "kind": "prefix", "bytes_per_token": 64, "lookahead": 0},
        {"name": "near", "kind": "window", "bytes_per_token": 32, "reach": 100},
        {"name": "state", "kind": "state", "state_bytes": 5000},
    ],
}


def test_what_inspect_prints_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(INSPECTED, indent=2))
    model = inspected_model(path, ParallelLayout(tp=2))
    assert model.groups == (FullAttention("full", 64), SlidingWindow("near", 32, 100), Recurrent("state", 5000))
    assert sized_model(ModelChoice(str(path)), RankChoice(2)).cost.quadratic == 0.5
    with pytest.raises(ConfigError, match="--tp 4"):
        sized_model(ModelChoice(str(path)), RankChoice(4))
    with pytest.raises(ConfigError, match="inspect with --tp 2 --dcp 2"):
        sized_model(ModelChoice(str(path)), RankChoice(2, 2))
    with pytest.raises(ConfigError, match=r"--kv-dtype: the bytes that stand in .*mine.json do not change"):
        sized_model(ModelChoice(str(path)), RankChoice(2, kv_dtype="fp8"))
    layers = [{"index": 0, "keeps": {"full": {}}}, {"index": 1, "keeps": {"state": {}}}, {"index": 2, "keeps": {}}]
    path.write_text(json.dumps(INSPECTED | {"parallel": {"tp": 4, "dcp": 4}, "layers": layers}))
    for dcp in (1, 2, 4):  # `inspect` has said that 4 copies are there
        assert sized_model(ModelChoice(str(path)), RankChoice(4, dcp)).layers == {"full": 1, "state": 1}
    for wrong, message in (
        ({}, r"not the output of `headway inspect MODEL --json`: .*field 'groups': is missing"),
        (INSPECTED | {"groups": [{"name": "g", "kind": "odd"}]}, r"field 'groups\[0\].kind'"),
        (INSPECTED | {"parameters": "many"}, "field 'parameters': expected a whole number, found str 'many'"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=message):
            inspected_model(path, ONE)


def test_bytes_by_hand() -> None:
    model = sized_model(ModelChoice(None, 100, 5000, ["10:64"], draft="7:1"), RankChoice())
    assert [g.name for g in model.groups] == ["attention", "window0", "state", "draft"]
    for choice, message in (
        (ModelChoice(), "which model"),
        (ModelChoice("kimi-k3", 5), "not both"),
        (ModelChoice(None, 5, 0, ["7"]), "bytes of one token and tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            sized_model(choice, RankChoice())


def test_memory() -> None:
    model = model_of("kimi-linear", ONE)
    assert memory_of(Hardware("20GB"), model, ONE) == 20_000_000_000
    assert memory_of(Hardware("endless"), model, ONE) is None
    assert memory_of(Hardware(gpu="h200"), model, ONE) == int(141e9 * 0.9 - 98.2e9)
    two = ParallelLayout(tp=2)
    assert memory_of(Hardware(gpu="h100", gpus=2, weights="50GB", gpu_share=0.5), model, two) == 15_000_000_000
    other = model_of("qwen3-next", ONE)
    for hardware, message in (
        (Hardware(), "how much memory"),
        (Hardware(gpu="abacus"), "unknown GPU"),
        (Hardware(gpu="h100"), "leave nothing"),
        (Hardware(gpu="h200", gpus=3), "tp x pcp = 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            memory_of(hardware, model, ONE)
    for hardware, message in (
        (Hardware("1GB", gpus=2, weights="9GB", gpu_share=0.5), "--gpus, --weights, --gpu-share: go with --gpu"),
        (Hardware("1GB", gpu="h100", gpu_share=0.5), "--gpu-share: go with --gpu"),
    ):
        with pytest.raises(ConfigError, match=message):
            hardware.check()
    Hardware("1GB", gpu="h100", gpus=2).check()
    Hardware(gpu="h100", gpus=2, weights="9GB", gpu_share=0.5).check()
    with pytest.raises(ConfigError, match="how many parameters qwen3-next"):
        memory_of(Hardware(gpu="h200"), other, ONE)
