"""Models from directories, and one clear line for what is not a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.tiny_models import tiny_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from headway.cache import CacheGeometry, FullAttention
from headway.cli import app
from headway.errors import ConfigError, ModelError
from headway.runtime import sources
from headway.runtime.loading import layout_without_weights, load_model, resolve_device, resolve_source
from headway.runtime.model import memory
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.memory import blocks_that_fit, capacity, default_memory
from headway.sizes import format_bytes, parse_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny KimiLinear model with a tokenizer of 256 words."""
    path = tmp_path_factory.mktemp("models") / "tiny-kimi"
    tiny_model("KimiLinear").save_pretrained(path)
    words = models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(path)
    return path


def test_a_directory(saved: Path) -> None:
    loaded = load_model(str(saved))
    assert loaded.name == "tiny-kimi"
    assert loaded.layout == inspect_model(tiny_model("KimiLinear"))
    assert loaded.layout.dtype == torch.float32
    assert len(loaded.tokenizer) == 256


def test_bf16(saved: Path) -> None:
    loaded = load_model(str(saved), dtype="bf16")
    assert loaded.layout.dtype == torch.bfloat16
    assert loaded.layout.group("full").bytes_per_token == 80


def test_the_layout_without_weights_is_that_of_the_loaded_model(saved: Path) -> None:
    name, layout = layout_without_weights(str(saved))
    assert (name, layout) == ("tiny-kimi", load_model(str(saved)).layout)
    assert layout_without_weights(str(saved), dtype="bf16")[1].group("full").bytes_per_token == 80


def test_what_is_not_a_model(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "file").write_text("x")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    no_weights = tmp_path / "no-weights"
    no_weights.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (no_weights / file).write_text((saved / file).read_text())
    for source, words in {
        str(tmp_path / "nothing"): "there is no directory",
        str(tmp_path): "without a config.json",
        str(tmp_path / "file"): "is a file",
        str(broken): "cannot load the config",
        str(no_weights): "cannot load the weights",
        "surely/not-on-the-hub": "there is no folder",
    }.items():
        with pytest.raises(ModelError, match=words) as caught:
            load_model(source)
        assert "\n" not in str(caught.value)


def test_names_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = resolve_source(None)
    assert name == "headway-builtin"
    assert (Path(folder) / "drafts" / "mtp" / "config.json").is_file()
    assert resolve_source("org/name") == ("org/name", "org/name")
    with pytest.raises(ModelError, match="there is no directory"):
        resolve_source("./name")
    monkeypatch.setattr(sources, "PACKAGE", "headway_not_installed")
    with pytest.raises(ModelError, match=r"not installed: `pip install headway-builtin-model`.*packages/builtin-model"):
        resolve_source(None)


def test_devices_and_dtypes(saved: Path) -> None:
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="not a device"):
        resolve_device("gpu0")
    with pytest.raises(ConfigError, match="not a dtype"):
        load_model(str(saved), dtype="fp8")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("4GiB", 4 * 1024**3),
        ("512 MB", 512_000_000),
        ("1.5g", 1_500_000_000),
        ("2kib", 2048),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "0", "4 GiBs", "4PB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert [format_bytes(x) for x in (512, 2048, 3 * 1024**2, 5 * 1024**3)] == [
        "512 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


def test_blocks_in_memory() -> None:
    geometry = CacheGeometry(inspect_model(tiny_model("KimiLinear")).groups, block_tokens=16)
    assert blocks_that_fit(2560 * 100 + 5, geometry) == 100
    held = capacity(100, geometry)
    assert (held.tokens, held.checkpoint_blocks, held.checkpoints, held.bytes) == (1600, 9, 11, 256_000)
    with pytest.raises(ConfigError, match="a single request needs 10"):
        blocks_that_fit(2560 * 9, geometry)
    full = CacheGeometry(inspect_model(tiny_model("Qwen3")).groups, block_tokens=16)
    assert capacity(10, full).checkpoints is None
    assert default_memory("cpu") > 0


def test_inspect_prints_json(saved: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(saved), "--json", "--memory", "1MiB"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["model"] == "tiny-kimi"
    assert [group["name"] for group in found["groups"]] == ["full", "state"]
    assert found["groups"][0] == {
        "name": "full",
        "kind": "prefix",
        "table": 0,
        "lookahead": 0,
        "bytes_per_token": 160,
        "block_tokens": 16,
        "shards": 1,
        "span": 16,
    }
    assert found["groups"][1]["state_blocks"] == 9
    assert found["capacity"]["blocks"] == 1024**2 // 2560
    assert found["shortest_reusable_prefix"] == 1
    assert found["shortest_prompt_with_a_hit"] == 2
    assert len(found["layers"]) == 4


def test_inspect_under_context_parallelism(saved: Path) -> None:
    options = ["--tp", "4", "--dcp", "4", "--json", "--memory", "1MiB"]
    result = CliRunner().invoke(app, ["inspect", str(saved), *options])
    found = json.loads(result.output)
    assert (found["groups"][0]["shards"], found["groups"][0]["span"]) == (4, 64)
    assert found["groups"][1]["state_bytes"] == 5376
    assert found["capacity"]["tokens"] == found["capacity"]["blocks"] * 64


def test_inspect_without_tensor_parallelism_has_the_whole_model_on_every_rank(saved: Path) -> None:
    """What `headway serve --dcp 4` would make of it: states as on one rank, and four times the tokens."""
    options = ["inspect", str(saved), "--memory", "1MiB"]
    one = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    split = json.loads(CliRunner().invoke(app, [*options, "--dcp", "4", "--json"]).output)
    assert split["parallel"] == {"tp": 1, "dcp": 4, "pcp": 1, "interleave": 1}
    assert split["groups"][1] == one["groups"][1]
    assert split["capacity"]["blocks"] == one["capacity"]["blocks"]
    assert split["capacity"]["tokens"] == 4 * one["capacity"]["tokens"] == 4 * split["tokens_on_one_rank"]
    shown = CliRunner().invoke(app, [*options, "--dcp", "4"], env={"COLUMNS": "160"}).output
    assert "4.00 times as many as on one rank" in shown


def test_inspect_has_the_same_ranks_once_per_rank_of_prefill_context_parallelism(saved: Path) -> None:
    options = ["inspect", str(saved), "--memory", "1MiB", "--tp", "2"]
    two, four = (
        json.loads(CliRunner().invoke(app, [*options, *more, "--json"]).output) for more in ([], ["--pcp", "2"])
    )
    assert four["parallel"] == {"tp": 2, "dcp": 1, "pcp": 2, "interleave": 1}
    assert four["groups"][1] == two["groups"][1]
    assert four["capacity"]["tokens"] == 2 * two["capacity"]["tokens"] == 2 * four["tokens_on_one_rank"]
    shown = CliRunner().invoke(app, [*options, "--pcp", "2"], env={"COLUMNS": "160"}).output
    assert "2.00 times as many as without --pcp" in shown


def test_inspect_gives_ranks_the_memory_that_they_would_share(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --memory: ranks of one machine divide what one rank would take."""
    monkeypatch.setattr(memory, "default_memory", lambda device: 4 << 20)
    layouts = (["--dcp", "2"], 2), (["--tp", "2", "--dcp", "2"], 2), (["--tp", "2", "--pcp", "2"], 4)
    for options, ranks in layouts:
        by_default, given = (
            json.loads(CliRunner().invoke(app, ["inspect", str(saved), *options, *more, "--json"]).output)
            for more in ([], ["--memory", str((4 << 20) // ranks)])
        )
        assert by_default["capacity"] == given["capacity"]
    shown = CliRunner().invoke(app, ["inspect", str(saved), *options], env={"COLUMNS": "160"}).output
    assert "the default on this machine, shared by 4 ranks" in shown


def test_inspect_prints_tables(saved: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(saved), "--memory", "1MiB"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for words in ("LinearAttentionLayer", "every token before p", "the state after p", "shortest reusable prefix: 1"):
        assert words in result.output


def test_inspect_refuses_layouts_that_cannot_be(tmp_path: Path) -> None:
    tiny_model("Qwen3").save_pretrained(tmp_path / "q")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "q"), "--tp", "4", "--dcp", "4"])
    assert isinstance(result.exception, ConfigError)
    assert "tp=4 does not divide the 2 heads of model.layers.0.self_attn.k_proj.weight" in str(result.exception)


def test_inspect_says_what_splitting_tokens_gains_where_heads_are_split_too(tmp_path: Path) -> None:
    """Two ranks hold a head of keys and values each. With all tokens or with all heads of half of them: as much."""
    tiny_model("Qwen3").save_pretrained(tmp_path / "q")
    options = ["inspect", str(tmp_path / "q"), "--memory", "1MiB", "--tp", "2"]
    whole, split = (
        json.loads(CliRunner().invoke(app, [*options, *more, "--json"]).output) for more in ([], ["--dcp", "2"])
    )
    assert [found["groups"][0]["bytes_per_token"] for found in (whole, split)] == [384, 768]
    assert [found["groups"][0]["span"] for found in (whole, split)] == [16, 32]
    assert split["capacity"]["tokens"] == whole["capacity"]["tokens"] == split["tokens_on_one_rank"]
    shown = CliRunner().invoke(app, [*options, "--dcp", "2"], env={"COLUMNS": "160"}).output
    assert "1.00 times as many as without --dcp" in shown
    assert f"a rank holds {split['parameters_on_a_rank']:,} of the parameters" in shown
    assert split["parameters_on_a_rank"] < split["parameters"]


def test_tokens_are_counted_over_all_tables_of_full_attention() -> None:
    """A draft that every rank keeps has a table of its own, with fewer tokens in a block than the target's."""
    groups = [FullAttention("full", 8), FullAttention("draft", 32, sharded=False)]
    geometry = CacheGeometry(groups, block_tokens=16)
    assert [table.span for table in geometry.tables] == [16, 4]
    assert capacity(100, geometry).tokens == 320  # 5 blocks for each 16 tokens


def rewritten(saved: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> str:
    """A copy of a model with other weights, or another config."""
    shutil.copytree(saved, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, to / "model.safetensors", {"format": "pt"}
    )
    told = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(told | config))
    return str(to)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.pop(NORM), f"lacks weights: {NORM};"),
        (lambda w: w.update({NORM: torch.ones(3)}), rf"has weights of other shapes .*: {NORM} \[3\] for \[64\];"),
        (lambda w: w.update(extra=torch.ones(3)), "knows nothing of: extra;"),
        (lambda w: [w.pop(k) for k in list(w) if ".layers.2." in k], r"lacks weights: .* and \d+ more;"),
    ],
    ids=["missing", "mismatched", "left", "many"],
)
def test_a_checkpoint_that_is_not_what_its_config_says(saved: Path, tmp_path: Path, change: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text) as refused:
        load_model(rewritten(saved, tmp_path / "m", change))
    assert "\n" not in str(refused.value)


def test_a_weight_that_is_nan_is_named(saved: Path, tmp_path: Path) -> None:
    source = rewritten(saved, tmp_path / "m", lambda w: [w[NORM].fill_(torch.nan)])
    with pytest.raises(ModelError, match=f"its weight {NORM} has numbers that are NaN"):
        load_model(source)


def test_weights_that_a_checkpoint_may_have_besides(saved: Path, tmp_path: Path) -> None:
    known = ("mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.visual.blocks.0.norm.weight")
    source = rewritten(saved, tmp_path / "m", lambda w: w.update({name: torch.ones(3) for name in known}))
    assert load_model(source).layout == load_model(str(saved)).layout


def test_tied_embeddings_are_not_missing(tmp_path: Path, saved: Path) -> None:
    config = tiny_model("Qwen3").config.to_dict() | {"tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(type(tiny_model("Qwen3").config)(**config))
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(saved / file, tmp_path)
    load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"model.Q4_K_M.gguf": ""}, "holds GGUF weights"),
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, r"adapter \(LoRA\) for 'org/base'.*merge"),
        ({"config.json": '{"model_type": "llama", "draft_vocab_size": 32000}'}, r"drafter \(EAGLE-3\).*give the model"),
        ({"config.json": '{"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}'}, r"drafter \(DFlash\)"),
        ({"config.json": '{"model_type": "t5", "is_encoder_decoder": true}'}, r"an encoder-decoder \(t5\)"),
        ({"config.json": '{"model_type": "bart"}'}, r"an encoder-decoder \(bart\)"),
        (
            {"config.json": '{"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}'},
            r"quantised \(awq\)",
        ),
        ({"config.json": '{"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}', "c.py": "1/0"}, "never run"),
    ],
)
def test_formats_that_are_not_served_are_named(tmp_path: Path, files: dict[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=text) as refused:
        load_model(str(tmp_path))
    assert "\n" not in str(refused.value)


MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What a code of four bits stands for (OCP Microscaling Formats 1.0, E2M1)."""


def test_mxfp4_weights_are_dequantised_as_they_load(saved: Path, tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
        quantization_config={"quant_method": "mxfp4"},
    )
    plain = AutoModelForCausalLM.from_config(config)
    weights, expected = {}, {}
    for name, weight in plain.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            weights[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs))
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32))  # exponents, of blocks of 32 inputs
        pairs = codes[..., 0::2] + 16 * codes[..., 1::2]  # the first of two in the lower half of a byte
        weights[f"{name}_blocks"] = pairs.reshape(experts, outputs, inputs // 32, 16).to(torch.uint8)
        weights[f"{name}_scales"] = scales.to(torch.uint8)
        values = MXFP4[codes] * torch.exp2(scales - 127.0).repeat_interleave(32, dim=-1)
        expected[name] = values.transpose(1, 2)
    config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(saved / file, tmp_path)
    loaded = load_model(str(tmp_path), dtype="fp32").model.state_dict()
    assert len(expected) == 2
    for name, values in expected.items():
        assert torch.equal(loaded[name], values), name


def test_a_gguf_file_is_named() -> None:
    with pytest.raises(ModelError, match=r"'org/model.gguf' holds GGUF weights"):
        resolve_source("org/model.gguf")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--interleave", "3"), "leave --interleave out"),
        (("--dcp", "2", "--interleave", "3"), "does not divide block_tokens=16"),
    ],
)
def test_inspect_refuses_what_serve_refuses(options: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["inspect", *options])
    assert isinstance(result.exception, ConfigError)
    assert text in str(result.exception)
