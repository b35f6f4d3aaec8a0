"""A tiny random hybrid model, a byte-level tokenizer and a chat template, in a directory for `headway serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, KimiLinearConfig, PretrainedConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def tokenizer() -> Any:
    """256 bytes and the special tokens."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|eos|>", pad_token="<|pad|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def save_model(path: Path, config: PretrainedConfig | None = None) -> Path:
    """Write the model and its tokenizer to `path`; or a model of another config, whose vocabulary is as large."""
    words = tokenizer()
    config = config or KimiLinearConfig(
        vocab_size=256 + len(SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=words.convert_tokens_to_ids("<|end|>"),
        pad_token_id=words.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and not name.endswith("dt_bias"):
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path
