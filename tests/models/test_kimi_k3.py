"""Kimi-K3: read from published form, whole or not at all; its sizes; the parts that transformers has elsewhere too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.drafting.published_drafts import save_published
from tests.runtime.tiny_models import tiny_model
from torch.nn import functional
from transformers import AutoConfig, BailingHybridConfig
from transformers.integrations.mxfp4 import FP4_VALUES
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForgetGate
from typer.testing import CliRunner

from headway.cache import FullAttention, ParallelLayout, Recurrent
from headway.cli import app
from headway.errors import ModelError
from headway.models.kimi_k3 import KimiK3Config
from headway.models.kimi_k3.modeling import AttentionResidual, KimiK3DeltaAttention, situ
from headway.models.kimi_k3.tiny import tiny_config, write_tiny
from headway.replay.ask.catalogue import model_of
from headway.replay.ask.model_files import model_of_files
from headway.runtime.loading import layout_without_weights, load_model
from headway.runtime.sources import resolve_source

LAYERS = 5
PREFIX = "language_model.model.layers"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few layers in published form."""
    path = tmp_path_factory.mktemp("models") / "tiny-k3"
    write_tiny(path, Path(resolve_source(None)[1]), config=tiny_config(LAYERS))
    return path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def changed(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with other tensors (None: without), dots in their names written as two underscores."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    held = tensors(source) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({n: t for n, t in held.items() if t is not None}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tiny(tmp_path / name, None, seed=3, config=tiny_config(2))
    write_tiny(tmp_path / "c", None, seed=4, config=tiny_config(2))
    a, b, c = (b"".join(f.read_bytes() for f in sorted((tmp_path / n).glob("*.safetensors"))) for n in "abc")
    assert a == b != c


def test_published_weights_are_those_computed_with(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = load_model(str(published)).model
    assert "takes images" in caplog.text
    held = tensors(published)
    codes, scales = (held[f"{PREFIX}.2.block_sparse_moe.experts.5.w2.weight_{part}"] for part in ("packed", "scale"))
    numbers = [[FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]] for byte in codes[3].tolist()]
    right = torch.tensor(numbers).flatten() * 2.0 ** (scales[3].double() - 127).repeat_interleave(32)
    layer = model.model.layers[2]
    assert torch.equal(layer.mlp.experts.down_proj[5, 3].double(), right)
    width = codes.shape[1] * 2
    assert layer.mlp.experts.gate_up_proj.shape == (8, 2 * width, 32)
    own = held[f"{PREFIX}.2.self_attn.A_log"]
    assert len(own) == 128
    assert torch.equal(layer.self_attn.forget_gate.A_log, own[:4])
    assert torch.equal(layer.self_attn.g_b_proj.weight, held[f"{PREFIX}.2.self_attn.g_proj.weight"].float())
    assert torch.equal(layer.mlp_res.proj.weight, held[f"{PREFIX}.2.mlp_res_proj.weight"].float())


def test_experts_that_are_not_packed_load_too(published: Path, tmp_path: Path) -> None:
    model: Any = load_model(str(published)).model
    plain: dict[str, torch.Tensor | None] = {}
    for name in tensors(published):
        stem, dot, _ = name.rpartition(".weight_packed")
        if dot:
            path = stem.split(".")
            experts = model.model.layers[int(path[3])].mlp.experts
            expert, kind = int(path[-2]), path[-1]
            halves = experts.gate_up_proj[expert].detach().chunk(2)
            whole = {"w1": halves[0], "w3": halves[1], "w2": experts.down_proj[expert].detach()}[kind]
            plain |= {f"{stem}.weight_packed": None, f"{stem}.weight_scale": None}
            plain[f"{stem}.weight"] = whole.contiguous().bfloat16()
    folder = changed(published, tmp_path / "plain", **{name.replace(".", "__"): t for name, t in plain.items()})
    other: Any = load_model(str(folder)).model
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other(tokens).logits)


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        (f"{PREFIX}.1.mlp_res_proj.weight", None, "lacks weights: model.layers.1.mlp_res.proj.weight"),
        (f"{PREFIX}.1.block_sparse_moe.experts.3.w1.weight_scale", None, "lacks weights: .*1.mlp.experts.gate_up_proj"),
        (f"{PREFIX}.1.block_sparse_moe.experts.3.w2.weight_packed", None, "lacks weights: .*1.mlp.experts.down_proj"),
        (f"{PREFIX}.1.self_attn.A_log", torch.zeros(3), "other shapes .*A_log"),
        (f"{PREFIX}.1.self_attn.k_norm.weight", torch.zeros(3), "knows nothing of: .*self_attn.k_norm"),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    published: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, told: str
) -> None:
    folder = changed(published, tmp_path / "broken", **{name.replace(".", "__"): tensor})
    with pytest.raises(ModelError, match=told):
        load_model(str(folder))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    write_tiny(tmp_path / "bare", None, config=tiny_config(2))
    with pytest.raises(ModelError, match=r"no tokenizer .* put one .*tokenizer\.json"):
        load_model(str(tmp_path / "bare"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "silu"), ("mla_use_output_gate", False), ("latent_moe_use_norm", False), ("q_lora_rank", None)],
)
def test_what_is_computed_otherwise_is_refused(tmp_path: Path, field: str, value: object) -> None:
    config = tiny_config(2)
    config["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=field):
        layout_without_weights(str(tmp_path))


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    config = tiny_config(2)
    config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    write_tiny(tmp_path / "other", None, config=config)
    with pytest.raises(ModelError, match="compressed-tensors"):
        load_model(str(tmp_path / "other"))


def test_a_saved_configuration_is_read_again(tmp_path: Path) -> None:
    KimiK3Config(num_hidden_layers=9, attn_res_block_size=4).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is KimiK3Config
    assert config.layer_types == KimiK3Config(num_hidden_layers=9).layer_types
    assert (config.layer_types[-2:], config.attn_res_block_size) == (["full_attention"] * 2, 4)


def test_sizes_of_the_published_model_are_those_of_the_catalogue(tmp_path: Path) -> None:
    KimiK3Config().save_pretrained(tmp_path)
    read = model_of_files(tmp_path, ParallelLayout(), kv_dtype="bf16", state_dtype="fp32")
    listed = model_of("kimi-k3", ParallelLayout(), kv_dtype="bf16", state_dtype="fp32")
    ours, theirs = ([replace(group, name="group") for group in model.groups] for model in (read, listed))
    assert ours == theirs
    full, state = ours
    assert isinstance(full, FullAttention)
    assert isinstance(state, Recurrent)
    assert (full.bytes_per_token, state.state_bytes) == (27_648, 449_372_160)
    assert read.parameters == pytest.approx(listed.parameters, rel=1e-3)


def test_the_bounded_gate_is_that_of_another_model_with_one() -> None:
    model: Any = tiny_model("KimiK3")
    mixer = model.model.layers[0].self_attn
    assert isinstance(mixer, KimiK3DeltaAttention)
    gate = mixer.forget_gate
    config = BailingHybridConfig(
        hidden_size=64, head_dim=16, num_attention_heads=4, linear_num_heads=4, linear_head_dim=16
    )
    other = BailingHybridForgetGate(config)
    with torch.no_grad():
        other.A_log.copy_(gate.A_log)
        other.dt_bias.copy_(gate.dt_bias)
        other.f_proj.weight.copy_(gate.f_b_proj.weight @ gate.f_a_proj.weight)
        x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))
        assert (gate(x) - other(x)).abs().max() < 1e-5
        assert -5 <= gate(100 * x).min() < -4.9


def test_the_activation_saturates() -> None:
    config = KimiK3Config()
    gate, up = torch.tensor([-3.0, 0.5, 2.0, 60.0]), torch.tensor([1.0, -2.0, 300.0, 300.0])
    right = [4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25) for g, u in zip(gate, up, strict=True)]
    assert torch.allclose(situ(gate, up, config), torch.stack(right))
    assert situ(gate, up, config)[3].item() == pytest.approx(100.0)
    small = torch.tensor([1e-3])
    assert torch.allclose(situ(small, small, config), functional.silu(small) * small, rtol=1e-3)


def test_mixtures_of_earlier_sums() -> None:
    config = KimiK3Config(hidden_size=8)
    residual = AttentionResidual(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        residual.norm.weight.normal_(1.0, 0.3, generator=generator)
        residual.proj.weight.normal_(0.0, 1.0, generator=generator)
        total, *blocks = torch.randn(3, 2, 5, 8, generator=generator)
        assert residual(total, []) is total
        scores = torch.stack([residual.proj(residual.norm(v))[..., 0] for v in (*blocks, total)])
        right = (scores.softmax(0)[..., None] * torch.stack([*blocks, total])).sum(0)
        assert torch.allclose(residual(total, blocks), right, atol=1e-6)


def test_ranks_gain_room_for_the_bytes_that_they_split(published: Path, tmp_path: Path) -> None:
    """Latents of a drafter are split like the target's: two ranks have room for twice the tokens. Heads are not."""
    room = {}
    for kind in ("none", "latent", "grouped"):
        if kind != "none":
            save_published(kind, load_model(str(published)).model, tmp_path / kind)
        draft = kind if kind == "none" else str(tmp_path / kind)
        options = [str(published), "--dcp", "2", "--memory", "64MiB", "--json", "--draft", draft]
        found = json.loads(CliRunner().invoke(app, ["inspect", *options]).stdout)
        room[kind] = found["capacity"]["tokens"] / found["tokens_on_one_rank"]
    sizes = {g["name"]: g.get("bytes_per_token", 0) for g in found["groups"]}
    whole = sizes["full"] + sizes["draft"]
    assert room["none"] == room["latent"] == pytest.approx(2, rel=1e-3)
    assert room["grouped"] == pytest.approx(whole / (sizes["full"] / 2 + sizes["draft"]), rel=0.02)
