"""Tiny checkpoints in published form with random weights: what the judges of this folder are tested on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tests.models import dspark_oracle, kimi_k3_oracle

K3_CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 50,
    "hidden_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 3,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6],
        "full_attn_layers": [4, 7, 8],
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "intermediate_size": 40,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}

DSPARK_CONFIG: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "num_target_layers": 3,
    "target_hidden_size": 48,
    "target_num_hidden_layers": 8,
    "target_layer_ids": [1, 4, 6],
    "mask_token_id": 47,
    "markov_rank": 10,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def k3(folder: Path, **changes: torch.Tensor) -> Path:
    """A Kimi-K3 of eight layers, three blocks of AttnRes; `changes` replace tensors, by names without their prefix."""
    shapes = kimi_k3_oracle.published_shapes(K3_CONFIG)
    tensors = random_tensors({name: (8,) if name.endswith(".A_log") else shape for name, shape in shapes.items()})
    tensors |= changes
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(2, 2)
    return write(folder, {"model_type": "kimi_k3", "text_config": K3_CONFIG}, tensors)


def dspark(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A DSpark drafter in MLA form for `k3`; `config` adds to its configuration."""
    whole = DSPARK_CONFIG | (config or {})
    return write(folder, whole, random_tensors(dspark_oracle.published_shapes(whole), seed=8))


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 7) -> dict[str, torch.Tensor]:
    """Weights that make every part count: norms near one, matrices that keep a vector's length."""
    numbers = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith("_packed"):
            tensors[name] = torch.from_numpy(numbers.integers(0, 256, shape, dtype=np.uint8))
        elif name.endswith("_scale"):
            tensors[name] = torch.from_numpy(numbers.integers(122, 126, shape, dtype=np.uint8))
        else:
            values = numbers.standard_normal(shape)
            values = 1 + 0.2 * values if "norm" in name else values * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
            tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """`config.json` and the tensors in two shards."""
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for shard in range(2):
        part = {name: tensors[name].contiguous() for name in names[shard::2]}
        save_file(part, folder / f"model-{shard + 1:05}-of-00002.safetensors")
    return folder
