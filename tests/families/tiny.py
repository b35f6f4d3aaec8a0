"""Tiny configurations of any class of transformers, made by rule from the names of its own fields.

A configuration class says by its defaults which fields it has and what kinds of layer it mixes. A rule gives each
field a small, odd size; `AMENDMENTS` holds what a class demands besides, because it couples fields or names one in a
way that no other class does. Sizes are odd on purpose: one key/value head, a vocabulary that is no multiple of 8, a
window smaller than a block and no multiple of anything, short convolutions of 3 and of 12 taps.
"""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

__all__ = ["CONVOLUTIONS", "ORIGINAL_LENGTH", "ROPE", "WINDOW", "has_convolution", "tiny_config"]

VOCABULARY = 251
HIDDEN = 64
HEADS = 4
WIDTH = 16
LAYERS = 4
WINDOW = 13
CHUNK = 24
LENGTH = 512
ORIGINAL_LENGTH = 64
CONVOLUTIONS = (3, 12)

_CONVOLUTION = (
    r"conv_kernel|conv_kernel_size|\w*_conv_kernel_dim|\w*conv_kernel_size|mamba_d_conv|conv_L_cache|conv1d_width"
)
_RULES: tuple[tuple[str, int], ...] = (
    (r"\w*vocab_size\w*", VOCABULARY),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r"num_kv_shared_layers|altup_num_inputs|zero_expert_num", 2),
    (r"index_topk_blocks", 2),
    (r"index_local_blocks", 1),
    (r"index_block_size", 4),
    (r"index_topk|keep_window_size|router_hidden_size|rel_extent", 8),
    (r"floor_scale|log_scaling_n_floor", 16),
    (r"(num_hidden_layers|n_layers?|num_layers|depth|num_blocks)", LAYERS),
    (r"hidden_size_per_layer_input|laurel_rank|\w*adapter_rank", 8),
    (r"hidden_size|adapter_\w*(in|out|input)\w*_(dim|size)|d_model|embed_dim|lru_width", HIDDEN),
    (r"(num_key_value_heads|num_kv_heads|kv_n_heads|\w*_num_key_value_heads)", 1),
    (r"mamba_n_groups|mamba_ngroups|n_groups?|topk_group|n_shared_experts|num_mem_blocks", 1),
    (r"num_experts_per_tok\w*|moe_top_?k|top_k_experts|moe_k", 2),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_shared_experts|moe_num_shared_experts", 1),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"(\w*num_attention_heads\w*|n_heads?|num_heads|\w*_num_heads|\w*_num_value_heads)", HEADS),
    (r"linear_num_key_heads", 2),
    (r"index_n_heads|indexer_n_heads", 2),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", WIDTH + 8),
    (r"\w*head_dim|\w*_d_head|kv_channels", WIDTH),
    (r"mamba_d_ssm", 128),
    (r"\w*kv_lora_rank", 32),
    (r"\w*lora_rank|\w*_dt_rank|time_step_rank|\w*_rank", 24),
    (r"sliding_window_pattern|max_window_layers", 2),
    (r"\w*sliding_window\w*|attention_window_size|window_size|local_attention\w*", WINDOW),
    (r"attention_chunk_size", CHUNK),
    (r"(mamba_)?chunk_size|block_size", 16),
    (r"mamba_d_state|ssm_state_size|state_size", WIDTH),
    (r"max_position_embeddings|max_seq_len|context_length", LENGTH),
    (r"original_max_position_embeddings", ORIGINAL_LENGTH),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"\w*eos_token_id", 2),
    (r"image_size|input_size", 28),
    (r"patch_size", 14),
)
"""Fields by name, the first that matches. Applied where the class has the field and its default is a number or None."""

_NULL = re.compile(
    r"\w*sliding_window|sliding_window_size|num_key_value_heads|head_dim|attention_chunk_size|pad_token_id"
    r"|n_routed_experts|n_shared_experts|num_experts_per_tok"
)
_WIDE = re.compile(r"\w*intermediate_size\w*|\w*ffn\w*(dim|size)")

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "conv", "minimax_m3_sparse")
"""Kinds of layer that are tried wherever a class knows them, for a class whose default has fewer."""

HYBRID = ["hybrid", "hybrid_sliding"] * 2
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
AMENDMENTS: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "bamba": {"attn_layer_indices": [2]},
    "cohere_compass_text": {
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4} for name in SLIDING_FULL},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
    },
    "diffllama": {"num_key_value_heads": 2},
    "gemma3n_text": {"intermediate_size": 128, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False},
    "inkling2_loop_text": {"layer_types": HYBRID},
    "inkling2_text": {"layer_types": HYBRID},
    "inkling_text": {"layer_types": HYBRID},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [24, 40]},
    "zamba2": {"use_mem_rope": True},
    "xlstm": {"qk_dim_factor": 1.0},
    "zaya": {"num_experts_per_tok": 1, "layer_types": HYBRID, "cca_time0": 3},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": VOCABULARY,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": WIDTH,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}
"""By model type: what its class demands beyond the rules, or what lets the tiny model have all kinds of layer."""

ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "short_mscale": 1.0,
        "long_mscale": 1.25,
    },
}
"""Kinds of scaled rotary positions, with their parameters."""


def fields_of(kind: type[PretrainedConfig]) -> set[str]:
    """Names of the fields that a configuration class takes."""
    return {
        name
        for base in kind.__mro__
        for name in vars(base).get("__annotations__", {})
        if not isinstance(getattr(kind, name, None), property)
    }


def has_convolution(kind: type[PretrainedConfig]) -> bool:
    """Whether the class has a short convolution, whose width can be chosen."""
    return any(re.fullmatch(_CONVOLUTION, name) for name in fields_of(kind))


def tiny_config(kind: type[PretrainedConfig], convolution: int = 3, rope: str | None = None) -> PretrainedConfig:
    """A tiny configuration of a class.

    Args:
        kind: The class.
        convolution: Width of short convolutions.
        rope: One of `ROPE`, for scaled rotary positions of its text model; None leaves them as the class has them.

    Raises:
        Exception: Whatever the class says against it.
    """
    config = _config(kind, convolution)
    if rope is not None:
        text = config.get_text_config(decoder=True)
        text.rope_parameters = _scaled(config, text, rope)
        if rope == "dynamic":  # scales beyond the length that the model was made for
            text.max_position_embeddings = ORIGINAL_LENGTH + WINDOW
    return config


def _config(kind: type[PretrainedConfig], convolution: int) -> PretrainedConfig:
    default = kind()
    values = _values(default, convolution)
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            values[name] = _config(type(part), convolution)
    return kind(**(values | AMENDMENTS.get(kind.model_type, {})))


def _values(default: PretrainedConfig, convolution: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in fields_of(type(default)):
        value = _default(default, name)
        if isinstance(value, bool) or not (isinstance(value, int) or (value is None and _NULL.fullmatch(name))):
            continue
        if (ruled := _ruled(name, convolution)) is not None:
            values[name] = ruled
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # heads of a latent are no groups
        values["num_key_value_heads"] = HEADS
    if "use_sliding_window" in fields_of(type(default)):
        values["use_sliding_window"] = True
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
        kinds = dict.fromkeys(getattr(default, name, None) or ())
        if name == "layer_types":
            kinds |= dict.fromkeys(kind for kind in _ATTENTION if _names(type(default), kind))
        if kinds and name in fields_of(type(default)):
            values[name] = [list(kinds)[i % len(kinds)] for i in range(LAYERS)]
    return values


def _names(kind: type[PretrainedConfig], word: str) -> bool:
    """Whether the module of a configuration class, or that of its models, has a word as a string."""
    home = Path(str(inspect.getsourcefile(kind)))
    homes = [home, home.with_name(home.name.replace("configuration_", "modeling_"))]
    return any(f'"{word}"' in path.read_text(encoding="utf-8") for path in homes if path.exists())


def _default(default: PretrainedConfig, name: str) -> Any:
    """A field's default; what differs per layer has that of the class."""
    try:
        return getattr(default, name, None)
    except Exception:  # transformers raises a RuntimeError of its own
        return getattr(type(default), name, None)


def _ruled(name: str, convolution: int) -> int | None:
    if re.fullmatch(_CONVOLUTION, name):
        return convolution
    if _WIDE.fullmatch(name):
        return 2 * HIDDEN if name == "intermediate_size" else HIDDEN
    return next((value for pattern, value in _RULES if re.fullmatch(pattern, name)), None)


def _scaled(config: PretrainedConfig, text: PretrainedConfig, rope: str) -> dict[str, Any]:
    """The rotary parameters of a configuration, scaled; LongRoPE has a factor for each frequency of the model."""
    own = dict(text.rope_parameters or {})
    nested = {key: dict(value) for key, value in own.items() if isinstance(value, dict)}
    if not nested:
        return {**own, **_parameters(config, rope, "")}
    for value in nested.values():
        if value["rope_type"] == "proportional":  # rotates a part of a head in a way of its own
            value.pop("partial_rotary_factor", None)
    return own | {key: {**value, **_parameters(config, rope, f"{key}_")} for key, value in nested.items()}


def _parameters(config: PretrainedConfig, rope: str, prefix: str) -> dict[str, Any]:
    parameters = {"rope_type": rope, **ROPE[rope]}
    if rope == "longrope":
        linear = copy.deepcopy(config)
        text = linear.get_text_config(decoder=True)
        text.rope_parameters = _scaled(linear, text, "linear")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(linear)
        wanted = [
            b for n, b in model.named_buffers() if n.rpartition(".")[2] == f"{prefix}inv_freq" and "vision" not in n
        ]
        frequencies = wanted[0].shape[-1]
        parameters["short_factor"] = [1.0 + 0.05 * i for i in range(frequencies)]
        parameters["long_factor"] = [2.0 + 0.5 * i for i in range(frequencies)]
    return parameters
