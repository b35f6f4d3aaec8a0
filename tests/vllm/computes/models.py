"""Tiny models with random weights of families that vLLM and transformers both have, and what transformers computes.

Sizes are those that vLLM's CPU kernels take: heads of 32, states of GatedDeltaNet of 128 by 128. Weights are large, so
that the best token is seldom nearly a tie, and states decay slowly, so that a wrong one shows hundreds of tokens later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

__all__ = ["FAMILIES", "OPTIONS", "VOCABULARY", "forgotten", "log_probabilities", "make", "rounding"]

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
_DELTA = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 4,
}
_EXPERTS = {  # all of them for each token: which one is best would fall either way in bf16
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def _nemotron() -> Any:
    common = {name: value for name, value in _COMMON.items() if name != "num_hidden_layers"}
    return hf.NemotronHConfig(
        **common,
        head_dim=32,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=64,
    )


def _mamba2() -> Any:
    common = {
        name: value
        for name, value in _COMMON.items()
        if name not in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    }
    return hf.Mamba2Config(**common, num_heads=8, head_dim=32, state_size=16, n_groups=1, chunk_size=64, expand=2)


def _granite() -> Any:
    return hf.GraniteMoeHybridConfig(
        **_COMMON,
        **_MAMBA2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=128,
        position_embedding_type="rope",
        attention_multiplier=0.17,
    )


def _lfm2() -> Any:
    return hf.Lfm2Config(
        **_COMMON | {"tie_word_embeddings": True},  # vLLM ties them whatever is asked
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        conv_dim=128,  # two names that vLLM reads and transformers has given up
        block_dim=128,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**_COMMON, head_dim=32),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**_COMMON, **_WINDOWS, head_dim=32, query_pre_attn_scalar=32),
    "gpt-oss": lambda: hf.GptOssConfig(**_COMMON, **_WINDOWS, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "LFM2": _lfm2,
    "LFM2 without the rotary kernel": _lfm2,
    "Qwen3-Next": lambda: hf.Qwen3NextConfig(**_COMMON | _EXPERTS | _DELTA, head_dim=32),
    "Olmo Hybrid": lambda: hf.OlmoHybridConfig(**_COMMON | _DELTA),
    "Granite hybrid": _granite,
    "Mamba-2": _mamba2,
    "Nemotron-H": _nemotron,
    "Falcon-H1": lambda: hf.FalconH1Config(**_COMMON, **_MAMBA2, mamba_d_ssm=256, head_dim=32),
    "Jamba": lambda: hf.JambaConfig(
        **_COMMON,
        num_experts=1,
        num_experts_per_tok=1,
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_dt_rank=8,
    ),
}
"""Name of a family to what makes its configuration."""

OPTIONS: dict[str, dict[str, Any]] = {
    "LFM2 without the rotary kernel": {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
}
"""Options of vLLM that a family needs to be computed rightly."""


def make(family: str, folder: Path) -> None:
    """Write a tiny model of a family, always with the same weights, all of which bf16 has exactly."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.dtype = torch.float32
    model = hf.AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # rates of decay
            parameter.data = torch.linspace(0.02, 0.3, parameter.numel()).log().view_as(parameter)
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)


@functools.lru_cache(maxsize=2)
def _model(folder: Path, dtype: torch.dtype) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


@torch.no_grad()
def log_probabilities(folder: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes of a text in one forward: float32 [len(tokens), VOCABULARY]."""
    return torch.log_softmax(_model(folder, dtype)(torch.tensor([list(tokens)])).logits[0].float(), dim=-1)


def rounding(folder: Path, tokens: Sequence[int]) -> float:
    """By how much the log-probabilities of a text's tokens by transformers in bf16 differ from those in fp32."""
    gap = (log_probabilities(folder, tokens, torch.bfloat16) - log_probabilities(folder, tokens)).abs()
    return float(gap[range(len(tokens) - 1), tokens[1:]].max())


def forgotten(folder: Path, tokens: Sequence[int]) -> float:
    """By how much log-probabilities behind the last token change without all before it: what a lost hit would show."""
    return float((log_probabilities(folder, tokens)[-1] - log_probabilities(folder, tokens[-1:])[-1]).abs().max())
