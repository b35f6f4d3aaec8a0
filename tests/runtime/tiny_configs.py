"""Arguments of the tiny models: the class of the config, and what makes it small."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "KimiLinear": (
        "KimiLinearConfig",
        MLA
        | {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
            "layer_types": THREE_TO_ONE,
            "routed_scaling_factor": 2.446,
        },
    ),
    "KimiK3": (
        "KimiK3Config",
        MLA
        | {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 6,
            "q_lora_rank": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "routed_expert_hidden_size": 48,
            "attn_res_block_size": 3,
            "layer_types": [*THREE_TO_ONE, "linear_attention", "full_attention"],
        },
    ),
    "BailingHybrid": (
        "BailingHybridConfig",
        MLA
        | {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "layer_group_size": 4,
            "num_mtp_layers": 0,
        },
    ),
    "Qwen3Next": (
        "Qwen3NextConfig",
        GQA
        | LINEAR
        | {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "full_attention_interval": 4,
        },
    ),
    "Qwen3_5": (
        "Qwen3_5TextConfig",
        GQA | LINEAR | {"intermediate_size": 128, "num_hidden_layers": 4, "layer_types": THREE_TO_ONE},
    ),
    "OlmoHybrid": (
        "OlmoHybridConfig",
        {
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "NemotronH": (
        "NemotronHConfig",
        GQA
        | {
            "intermediate_size": 128,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "chunk_size": 64,
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {
            "intermediate_size": 64,
            "shared_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
            "position_embedding_type": None,
        },
    ),
    "FalconH1": (
        "FalconH1Config",
        GQA
        | {
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
    ),
    "Lfm2": (
        "Lfm2Config",
        {
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
    "GptOss": (
        "GptOssConfig",
        GQA
        | {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
        },
    ),
    "Gemma3": (
        "Gemma3TextConfig",
        GQA | {"intermediate_size": 128, "num_hidden_layers": 6, "sliding_window": 32},
    ),
    "Llama4": (
        "Llama4TextConfig",
        GQA
        | {
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 32,
            "no_rope_layer_interval": 4,
            "floor_scale": 16,
        },
    ),
    "DeepseekV3": (
        "DeepseekV3Config",
        MLA
        | {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "Qwen3": ("Qwen3Config", GQA | {"intermediate_size": 128, "num_hidden_layers": 3}),
    "Gemma4": (
        "Gemma4TextConfig",
        GQA
        | {
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "sliding_window": 32,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "MiMoV2Flash": (
        "MiMoV2FlashConfig",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 33,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Mamba2": (
        "Mamba2Config",
        {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "Jamba": (
        "JambaConfig",
        {
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 8,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "FalconMamba": ("FalconMambaConfig", {"num_hidden_layers": 2, "state_size": 16}),
    "Zamba2": (
        "Zamba2Config",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "chunk_size": 64,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
    "MiniMax": (
        "MiniMaxConfig",
        GQA
        | {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 64,
        },
    ),
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
    ),
}

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Bamba": (
        "BambaConfig",
        {
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_layer_indices": [2],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
    ),
    "Gemma2": (
        "Gemma2Config",
        GQA
        | {
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "sliding_window": 32,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "Gemma3n": (
        "Gemma3nTextConfig",
        GQA
        | {
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "sliding_window": 32,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "GPT2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "Lfm2Moe": (
        "Lfm2MoeConfig",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
        },
    ),
    "Llama": ("LlamaConfig", GQA | {"intermediate_size": 128, "num_hidden_layers": 3}),
    "MiniMaxM2": (
        "MiniMaxM2Config",
        GQA | {"intermediate_size": 64, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Mistral": ("MistralConfig", GQA | {"intermediate_size": 128, "num_hidden_layers": 3, "sliding_window": 32}),
    "Mixtral": (
        "MixtralConfig",
        GQA | {"intermediate_size": 128, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Olmo3": ("Olmo3Config", GQA | {"intermediate_size": 128, "num_hidden_layers": 4, "sliding_window": 32}),
    "Phi3": (
        "Phi3Config",
        {"intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "Qwen3_5Moe": (
        "Qwen3_5MoeTextConfig",
        GQA
        | LINEAR
        | {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": THREE_TO_ONE,
        },
    ),
}
"""More classes that the self-check finds sound; too many to run every test with."""

_TWO_SETS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 96,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
}

LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3Long": (
        "Phi3Config",
        MORE["Phi3"][1]
        | {"original_max_position_embeddings": 96, "rope_parameters": _TWO_SETS | {"partial_rotary_factor": 1.0}},
    ),
    "PhimoeLong": (
        "PhimoeConfig",
        {
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "rope_parameters": _TWO_SETS | {"short_mscale": 1.1, "long_mscale": 1.3},
        },
    ),
    "LlamaLong": ("LlamaConfig", MORE["Llama"][1] | {"rope_parameters": _TWO_SETS | {"factor": 4.0}}),
}
"""With two sets of rotary frequencies. `generate()` computes the first two anew at 96 tokens, and not the third."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV32": (
        "DeepseekV32Config",
        MODELS["DeepseekV3"][1] | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    ),
    "Inkling": (
        "InklingTextConfig",
        GQA | {"intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3, "n_routed_experts": 4},
    ),
    "Falcon": ("FalconConfig", {"num_hidden_layers": 2, "num_attention_heads": 4}),
}
"""Classes whose attention asks for what is not computed here."""

WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextWide": (
        "Qwen3NextConfig",
        MODELS["Qwen3Next"][1]
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    ),
    "Gemma3Wide": ("Gemma3TextConfig", MODELS["Gemma3"][1] | {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "KimiK3Wide": ("KimiK3Config", MODELS["KimiK3"][1] | {"linear_num_heads": 8}),
    "NemotronHWide": ("NemotronHConfig", MODELS["NemotronH"][1] | {"n_groups": 4}),
    "DeepseekV2": ("DeepseekV2Config", MODELS["DeepseekV3"][1] | {"topk_method": "greedy"}),
}
"""For tensor parallelism: heads, or groups of them, for four or eight ranks; and one whose heads share a latent."""
