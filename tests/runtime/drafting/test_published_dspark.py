"""Published DSpark drafters propose what their tensors say, over hits, rejections and preemption, on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.test_drafts_against_generate import Driver, texts
from tests.runtime.drafting.published_drafts import LENGTH, published_reference, save_published
from tests.runtime.drafting.tiny_drafters import Improved
from tests.runtime.tiny_models import generated, tiny_model

from headway.engine import EngineConfig
from headway.errors import ConfigError, ModelError
from headway.runtime.drafting.loading import groups_without_weights, load_drafter

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": ("latent", {}),
    "latent, causal, of mixtures": ("latent", {"full_attention_causal": True, "aux_hidden_stream": "attn_res"}),
    "grouped": ("grouped", {"enable_confidence_head": False}),
    "grouped, causal": ("grouped", {"dflash_config": {"causal": True}, "full_attention_causal": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_tensors(form: str, tmp_path: Path) -> None:
    name, (kind, changes) = "KimiK3", FORMS[form]
    model = tiny_model(name)
    path = save_published(kind, model, tmp_path, 3, changes)
    if kind == "grouped":
        weights = load_file(path / "model.safetensors")
        save_file({f"model.{name}": tensor for name, tensor in weights.items()}, path / "model.safetensors")
    asked = texts(3)
    answers = {tuple(prompt): generated(name, tuple(prompt), count)[0] for prompt, count in asked}
    drafter = Improved(load_drafter(str(path), model, None), answers, 3)
    driver = Driver(name, drafter, 4, EngineConfig(max_batched_tokens=40, max_running=4))
    for prompt, count in asked:
        driver.add(prompt, count)
        driver.step(preempt=True)
    driver.run(preempt=True)
    for request in driver.requests:
        assert request.answer.tolist() == answers[tuple(request.request.tokens.tolist())]
    counters = driver.scheduler.counters
    assert counters.accepted_tokens > 0
    assert counters.hit_tokens > 0
    for tokens, proposed in drafter.seen[::7]:
        assert proposed == published_reference(path, model, tokens, len(proposed))


def test_latents_are_split_over_ranks_and_heads_are_not(tmp_path: Path) -> None:
    model = tiny_model("KimiK3")
    for kind, each, sharded in (("latent", 2 * (32 + 8) * 4, True), ("grouped", 2 * 2 * 2 * 8 * 4, False)):
        path = save_published(kind, model, tmp_path / kind)
        (group,) = groups_without_weights(str(path), None, torch.float32)
        assert (group.sharded, group.lookahead, getattr(group, "bytes_per_token", 0)) == (sharded, 0, each)
        assert load_drafter(str(path), model, None).groups == (group,)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"aux_hidden_stream": "other"}, "aux_hidden_stream is 'other'"),
        ({"draft_vocab_size": 99}, "draft_vocab_size"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"markov_head_type": "gated"}, "'gated'"),
        ({"block_size": 40}, "block_size is 40"),
        ({"hidden_size": 32}, "trained for another model"),
    ],
)
def test_what_is_not_run_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = tiny_model("KimiK3")
    path = save_published("latent", model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=told):
        load_drafter(str(path), model, None)


def test_weights_that_are_not_those_of_the_config(tmp_path: Path) -> None:
    model = tiny_model("KimiK3")
    path = save_published("latent", model, tmp_path)
    weights = load_file(path / "model.safetensors")
    shape = weights["layers.0.self_attn.kv_b_proj.weight"].shape
    for name, tensor in (("layers.0.self_attn.kv_b_proj.weight", None), ("layers.0.extra.weight", torch.zeros(shape))):
        other = weights | ({} if tensor is None else {name: tensor})
        save_file({n: t for n, t in other.items() if tensor is not None or n != name}, path / "model.safetensors")
        with pytest.raises(ModelError, match=name):
            load_drafter(str(path), model, None)
    with pytest.raises(ConfigError, match=f"trained for {LENGTH}"):
        load_drafter(str(path), model, None, LENGTH + 1)


def test_features_have_norms_of_their_own_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    model = tiny_model("KimiK3")
    path = save_published("latent", model, tmp_path)
    weights = load_file(path / "model.safetensors")
    weights |= {f"fc_norm.{i}.weight": torch.full((64,), float(i + 1)) for i in range(3)}
    save_file(weights, path / "model.safetensors")
    network: Any = load_drafter(str(path), model, None)
    features = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (1, 2, 192)).astype(np.float32))
    scaled = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-5) for part in features.chunk(3, -1)]
    projected = (
        torch.cat([(i + 1) * part for i, part in enumerate(scaled)], -1) @ weights["context_proj.weight"].float().T
    )
    right = projected * torch.rsqrt(projected.square().mean(-1, keepdim=True) + 1e-5) * weights["context_norm.weight"]
    with torch.no_grad():
        assert (network._network.context(features) - right).abs().max() < 1e-5
