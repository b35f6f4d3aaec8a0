"""Tiny random Kimi-K3 in exactly the published form, to try and to test: the real one has 2.8 trillion weights.

And a drafter for it in the form of the published ones with latent attention, as random: its drafts are seldom right.

Every branch of the model is there: a dense first layer, blocks of attention residuals and layers between, two layers of
latent attention in a row at the end, experts packed in MXFP4, an `A_log` of 128 entries of which the first few count,
tensors of the tower for images, and several files with an index. Numbers are drawn so that every part moves the logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["tiny_config", "tiny_draft_config", "write_tiny", "write_tiny_draft"]

_SHARDS = 3
_GROUP = 32
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def tiny_config(layers: int = 17, vocabulary: int = 4096) -> dict[str, Any]:
    """What its `config.json` says.

    Args:
        layers: Decoder layers; every fourth and the last attend, as in the published model. Blocks are of 12.
        vocabulary: Tokens.
    """
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": _linear_attention(layers),
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "quantization_config": _quantisation(),
        **tokens,
    }
    outer = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},  # code of its own, which is never run
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **tokens,
    }
    return outer | {"text_config": text, "vision_config": {"model_type": "kimi_k3_vision", "vt_num_hidden_layers": 1}}


def _linear_attention(layers: int) -> dict[str, Any]:
    full = sorted({*range(4, layers + 1, 4), layers})
    return {
        "full_attn_layers": full,
        "kda_layers": sorted({*range(1, layers + 1)} - {*full}),
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    }


def _quantisation() -> dict[str, Any]:
    form = "mxfp4-pack-quantized"
    weights = {"num_bits": 4, "group_size": _GROUP, "type": "float", "strategy": "group", "scale_dtype": "torch.uint8"}
    group = {"format": form, "targets": [r"re:.*block_sparse_moe\.experts\..*"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def write_tiny(folder: Path, tokenizer: Path | None, seed: int = 0, config: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint: the same bytes for the same arguments.

    Args:
        folder: Where to; it is made.
        tokenizer: The folder of a model whose tokenizer it gets, of no more tokens than it has; None for none.
        seed: Seed of the weights.
        config: What `config.json` says, such as `tiny_config()`, which is the default.
    """
    config = tiny_config() if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        for name in _TOKENIZER:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    draw = _Draw(seed)
    tensors = list(_tensors(config["text_config"], draw))
    files = [f"model-{i + 1:05d}-of-{_SHARDS:05d}.safetensors" for i in range(_SHARDS)]
    places = {name: files[i * _SHARDS // len(tensors)] for i, (name, _) in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors if places[n] == file}, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for _, tensor in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class _Draw:
    """Random tensors, one after another."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 0.1, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (mean + std * torch.randn(shape, generator=self._generator)).to(dtype)

    def norm(self, width: int) -> Tensor:
        return self.normal(width, mean=1.0)

    def packed(self, rows: int, columns: int) -> dict[str, Tensor]:
        """An MXFP4 matrix whose numbers are about 0.1."""
        codes = torch.randint(0, 256, (rows, columns // 2), generator=self._generator, dtype=torch.uint8)
        scale = torch.randint(121, 124, (rows, columns // _GROUP), generator=self._generator, dtype=torch.uint8)
        return {"weight_packed": codes, "weight_scale": scale}


def _tensors(text: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    """All tensors by their published names, in the order of the layers."""
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    yield "language_model.model.embed_tokens.weight", draw.normal(vocabulary, hidden, std=2.0)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"language_model.model.layers.{layer}"
        kda = layer + 1 in text["linear_attn_config"]["kda_layers"]
        dense = layer < text["first_k_dense_replace"]
        for part in ("self_attention_res", "mlp_res"):
            yield from _residual(f"{prefix}.{part}", hidden, draw)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", draw.norm(hidden)
        mixer = _kda(text, draw) if kda else _mla(text, draw)
        yield from ((f"{prefix}.self_attn.{name}", tensor) for name, tensor in mixer)
        if dense:
            yield from _mlp(f"{prefix}.mlp", hidden, text["intermediate_size"], draw)
        else:
            yield from ((f"{prefix}.block_sparse_moe.{name}", tensor) for name, tensor in _moe(text, draw))
    yield from _residual("language_model.model.output_attn_res", hidden, draw)
    yield "language_model.model.norm.weight", draw.norm(hidden)
    yield "language_model.lm_head.weight", draw.normal(vocabulary, hidden, std=0.15)
    yield "vision_tower.patch_embed.proj.weight", draw.normal(8, 3, 2, 2)
    yield "mm_projector.proj.0.weight", draw.normal(hidden, 8)


def _residual(prefix: str, hidden: int, draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}_norm.weight", draw.norm(hidden)
    yield f"{prefix}_proj.weight", draw.normal(1, hidden)


def _kda(text: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    """A KDA mixer. Its decays are spread from near 1, so that a state remembers, to near the bound."""
    of = text["linear_attn_config"]
    hidden, heads, width = text["hidden_size"], of["num_heads"], of["head_dim"]
    for name in ("q", "k", "v"):
        yield f"{name}_proj.weight", draw.normal(heads * width, hidden)
        yield f"{name}_conv1d.weight", draw.normal(heads * width, 1, of["short_conv_kernel_size"], std=0.4)
    yield "b_proj.weight", draw.normal(heads, hidden)
    yield "f_a_proj.weight", draw.normal(width, hidden)
    yield "f_b_proj.weight", draw.normal(heads * width, width)
    yield "A_log", draw.normal(128, std=0.4, dtype=torch.float32)
    yield "dt_bias", draw.normal(heads * width, std=2.0, mean=-4.0, dtype=torch.float32)
    yield "g_proj.weight", draw.normal(heads * width, hidden)
    yield "o_norm.weight", draw.norm(width)
    yield "o_proj.weight", draw.normal(hidden, heads * width)


def _mla(text: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, heads, value = text["hidden_size"], text["num_attention_heads"], text["v_head_dim"]
    query, latent = text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    yield "q_a_proj.weight", draw.normal(query, hidden)
    yield "q_a_layernorm.weight", draw.norm(query)
    yield "q_b_proj.weight", draw.normal(heads * (nope + rope), query)
    yield "kv_a_proj_with_mqa.weight", draw.normal(latent + rope, hidden)
    yield "kv_a_layernorm.weight", draw.norm(latent)
    yield "kv_b_proj.weight", draw.normal(heads * (nope + value), latent)
    yield "g_proj.weight", draw.normal(heads * value, hidden)
    yield "o_proj.weight", draw.normal(hidden, heads * value)


def _mlp(prefix: str, hidden: int, width: int, draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.gate_proj.weight", draw.normal(width, hidden)
    yield f"{prefix}.up_proj.weight", draw.normal(width, hidden)
    yield f"{prefix}.down_proj.weight", draw.normal(hidden, width)


def _moe(text: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, latent, width = text["hidden_size"], text["routed_expert_hidden_size"], text["moe_intermediate_size"]
    yield "gate.weight", draw.normal(text["num_experts"], hidden)
    yield "gate.e_score_correction_bias", draw.normal(text["num_experts"], dtype=torch.float32)
    yield "routed_expert_down_proj.weight", draw.normal(latent, hidden)
    yield "routed_expert_norm.weight", draw.norm(latent)
    yield "routed_expert_up_proj.weight", draw.normal(hidden, latent)
    for expert in range(text["num_experts"]):
        for name, rows, columns in (("w1", width, latent), ("w2", latent, width), ("w3", width, latent)):
            for part, tensor in draw.packed(rows, columns).items():
                yield f"experts.{expert}.{name}.{part}", tensor
    yield from _mlp("shared_experts", hidden, width * text["num_shared_experts"], draw)


def tiny_draft_config(layers: int = 17, vocabulary: int = 4096) -> dict[str, Any]:
    """What `config.json` of a drafter for a tiny model of so many layers and tokens says."""
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_target_layers": 3,
        "target_layer_ids": sorted({0, layers // 2, layers - 2}),
        "block_size": 7,
        "mask_token_id": vocabulary - 1,
        "markov_rank": 16,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def write_tiny_draft(folder: Path, seed: int = 0, config: Mapping[str, Any] | None = None) -> None:
    """Write a drafter: the same bytes for the same arguments, as of `write_tiny`."""
    config = tiny_draft_config() if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(_draft_tensors(config, _Draw(seed))), folder / "model.safetensors", metadata={"format": "pt"})


def _draft_tensors(config: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, vocabulary, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    yield "context_proj.weight", draw.normal(hidden, len(config["target_layer_ids"]) * hidden)
    yield "context_norm.weight", draw.norm(hidden)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"layers.{layer}.{norm}.weight", draw.norm(hidden)
        mixer = ((name, tensor) for name, tensor in _mla(config, draw) if name != "g_proj.weight")
        yield from ((f"layers.{layer}.self_attn.{name}", tensor) for name, tensor in mixer)
        yield from _mlp(f"layers.{layer}.mlp", hidden, config["intermediate_size"], draw)
    yield "final_norm.weight", draw.norm(hidden)
    yield "markov_head.markov_w1.weight", draw.normal(vocabulary, rank)
    yield "markov_head.markov_w2.weight", draw.normal(vocabulary, rank)
    yield "confidence_head.proj.weight", draw.normal(1, hidden + rank)
    yield "confidence_head.proj.bias", draw.normal(1)
