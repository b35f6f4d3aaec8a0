"""Published DSpark drafters of random weights, and what they should propose, from their tensors by published names.

The computation here shares nothing with Headway's: sequences are whole, there is no cache, and every formula is written
out, rotary positions as complex numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from headway.models.kimi_k3.tiny import tiny_draft_config, write_tiny_draft

LENGTH = 4


def save_published(
    kind: str, model: PreTrainedModel, path: Path, seed: int = 0, changes: dict[str, Any] | None = None
) -> Path:
    """Write a drafter for a model, `latent` or `grouped`, to a folder."""
    config = model.config.get_text_config(decoder=True)
    layers, vocabulary = config.num_hidden_layers, config.vocab_size
    told = tiny_draft_config(layers, vocabulary) | {"block_size": LENGTH, "hidden_size": config.hidden_size}
    if kind == "grouped":
        told |= {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8}
    told |= changes or {}
    write_tiny_draft(path, seed, told)
    if kind == "grouped":
        weights = load_file(path / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        for name in [name for name in weights if ".self_attn." in name]:
            del weights[name]
        for layer in range(told["num_hidden_layers"]):
            for name, rows, columns in (("q", 32, 64), ("k", 16, 64), ("v", 16, 64), ("o", 64, 32)):
                drawn = torch.randn(rows, columns, generator=generator)
                weights[f"layers.{layer}.self_attn.{name}_proj.weight"] = 0.2 * drawn
            for name in ("q", "k"):
                weights[f"layers.{layer}.self_attn.{name}_norm.weight"] = 1 + 0.2 * torch.randn(8, generator=generator)
        renamed = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
        weights = {
            renamed.get(n.partition(".")[0], n.partition(".")[0]) + n[n.index(".") :]: t for n, t in weights.items()
        }
        save_file(weights, path / "model.safetensors")
    return path


@torch.no_grad()
def published_reference(path: Path, model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """The greedy draft behind `tokens`."""
    told = json.loads((path / "config.json").read_text())
    renamed = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    held = {n.removeprefix("model."): t for n, t in load_file(path / "model.safetensors").items()}
    weights = {
        renamed.get(n.partition(".")[0], n.partition(".")[0]) + n[n.index(".") :]: t.float() for n, t in held.items()
    }
    network: Any = model
    context = _norm(
        _features(told, network, tokens[:-1]) @ weights["context_proj.weight"].T, weights["context_norm.weight"]
    )
    anchors = torch.tensor([tokens[-1], *[told["mask_token_id"]] * (told["block_size"] - 1)])
    x = network.get_input_embeddings()(anchors)
    attend = _grouped if told["architectures"][0] == "Qwen3DSparkModel" else _latent
    for layer in range(told["num_hidden_layers"]):
        own = {n.removeprefix(f"layers.{layer}."): t for n, t in weights.items() if n.startswith(f"layers.{layer}.")}
        x = x + attend(told, own, context, _norm(x, own["input_layernorm.weight"]))
        read = _norm(x, own["post_attention_layernorm.weight"])
        gated = functional.silu(read @ own["mlp.gate_proj.weight"].T) * (read @ own["mlp.up_proj.weight"].T)
        x = x + gated @ own["mlp.down_proj.weight"].T
    logits = network.get_output_embeddings()(_norm(x, weights["final_norm.weight"]))
    draft, before = [], tokens[-1]
    for place in logits[:count]:
        added = weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][before]
        before = int((place + added).argmax())
        draft.append(before)
    return draft


def _features(told: dict[str, Any], network: Any, tokens: list[int]) -> Tensor:
    """What the layers put out, side by side; or the mixtures that are read of it."""
    outputs: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(
            lambda _, __, output, i=i: outputs.__setitem__(i, output if torch.is_tensor(output) else output[0])
        )
        for i, layer in enumerate(network.get_decoder().layers)
    ]
    network(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    if told.get("aux_hidden_stream") != "attn_res":
        return torch.cat([outputs[i][0] for i in told["target_layer_ids"]], dim=-1)
    outputs[-1] = network.get_input_embeddings()(torch.tensor([tokens]))
    size, found = network.config.attn_res_block_size, []
    for i in told["target_layer_ids"]:
        sources = [outputs[start - 1][0] for start in range(0, i + 1, size)] + [outputs[i][0]]
        mixture = network.model.layers[i + 1].self_attention_res
        weight = mixture.norm.weight * mixture.proj.weight[0]
        scores = torch.stack([(v * weight).sum(-1) * torch.rsqrt(v.square().mean(-1) + 1e-5) for v in sources])
        found.append((scores.softmax(0)[..., None] * torch.stack(sources)).sum(0))
    return torch.cat(found, dim=-1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _rotated(x: Tensor, positions: Tensor, theta: float, *, pairs: bool) -> Tensor:
    """[tokens, ..., width] turned by positions; neighbours make a pair, or the two halves do."""
    width = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, width, 2) / width)
    turn = torch.polar(torch.ones(len(positions), width // 2), positions[:, None] * frequencies)
    turn = turn.view(len(positions), *[1] * (x.ndim - 2), width // 2)
    split = x.unflatten(-1, (width // 2, 2)) if pairs else x.unflatten(-1, (2, width // 2)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(split.contiguous()) * turn)
    return turned.flatten(-2) if pairs else turned.transpose(-1, -2).flatten(-2)


def _softmax_attention(told: dict[str, Any], query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[drafts, heads, width], [all, heads, width]: every draft sees the context, and the drafts, or those before it."""
    scores = torch.einsum("qhw,khw->hqk", query, keys) * query.shape[-1] ** -0.5
    if told.get("full_attention_causal"):
        drafts = len(query)
        scores[:, :, -drafts:].masked_fill_(torch.ones(drafts, drafts).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khw->qhw", scores.softmax(-1), values).flatten(1)


def _latent(told: dict[str, Any], own: dict[str, Tensor], context: Tensor, x: Tensor) -> Tensor:
    heads, nope, rank = told["num_attention_heads"], told["qk_nope_head_dim"], told["kv_lora_rank"]
    theta, places = told["rope_parameters"]["rope_theta"], torch.arange(len(context) + len(x))
    query = _norm(x @ own["self_attn.q_a_proj.weight"].T, own["self_attn.q_a_layernorm.weight"])
    query = (query @ own["self_attn.q_b_proj.weight"].T).view(len(x), heads, -1)
    turned = _rotated(query[..., nope:], places[len(context) :], theta, pairs=True)
    made = torch.cat([context, x]) @ own["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = _norm(made[:, :rank], own["self_attn.kv_a_layernorm.weight"])
    rotary = _rotated(made[:, rank:], places, theta, pairs=True)
    wide = (latent @ own["self_attn.kv_b_proj.weight"].T).view(len(made), heads, -1)
    keys = torch.cat([wide[..., :nope], rotary[:, None].expand(-1, heads, -1)], -1)
    mixed = _softmax_attention(told, torch.cat([query[..., :nope], turned], -1), keys, wide[..., nope:])
    return mixed @ own["self_attn.o_proj.weight"].T


def _grouped(told: dict[str, Any], own: dict[str, Tensor], context: Tensor, x: Tensor) -> Tensor:
    width, theta = told["head_dim"], told["rope_parameters"]["rope_theta"]
    places, every = torch.arange(len(context) + len(x)), torch.cat([context, x])
    query = _norm((x @ own["self_attn.q_proj.weight"].T).view(len(x), -1, width), own["self_attn.q_norm.weight"])
    keys = _norm((every @ own["self_attn.k_proj.weight"].T).view(len(every), -1, width), own["self_attn.k_norm.weight"])
    values = (every @ own["self_attn.v_proj.weight"].T).view(len(every), -1, width)
    query = _rotated(query, places[len(context) :], theta, pairs=False)
    keys = _rotated(keys, places, theta, pairs=False)
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    return _softmax_attention(told, query, keys, values) @ own["self_attn.o_proj.weight"].T
