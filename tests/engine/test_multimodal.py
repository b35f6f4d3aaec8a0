"""Text of checkpoints that take images too: their text part is served alone, and answers as transformers does.

Each checkpoint is made here: tiny, random, with its parts for images.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.server import tiny

from headway.engine import EngineConfig, GenerationRequest
from headway.engine.build import build_engine
from headway.runtime.loading import layout_without_weights

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 262,
    "max_position_embeddings": 512,
}
SIGHT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
"""Positions in time, height and width, which are one and the same in a text."""


def qwen3_vl() -> Any:
    sight = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    text = TEXT | {"head_dim": 8, "rope_parameters": SECTIONS}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=SIGHT | sight | {"deepstack_visual_indexes": [0]})


def gemma3() -> Any:
    text = TEXT | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3Config(text_config=text, vision_config=SIGHT | LAYERS, mm_tokens_per_image=4)


def mistral3() -> Any:
    sight = SIGHT | LAYERS | {"model_type": "pixtral", "head_dim": 16}
    return transformers.Mistral3Config(text_config=TEXT | {"head_dim": 8, "model_type": "mistral"}, vision_config=sight)


def lfm2_vl() -> Any:
    text = TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    sight = SIGHT | {"model_type": "siglip2_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Lfm2VlConfig(text_config=text, vision_config=sight | {"num_patches": 4, "patch_size": 14})


@pytest.mark.parametrize("make", [qwen3_vl, gemma3, mistral3, lfm2_vl])
def test_the_text_part_is_served_and_its_prefixes_are_reused(tmp_path: Path, make: Any):
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(make()).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3)
    whole.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    built = build_engine(str(tmp_path), EngineConfig(memory=8 << 20, max_batched_tokens=64, max_running=4, check=True))
    engine, prompts = built.engine.start(), [np.arange(at, at + 40, dtype=np.int32) for at in (3, 90, 200)]
    try:
        asked = [GenerationRequest(prompt, 12, ignore_eos=True) for prompt in prompts for _ in range(2)]
        answers = [engine.submit(request).result(60) for request in asked]
    finally:
        engine.close()
    for i, prompt in enumerate(prompts):
        first, second = answers[2 * i : 2 * i + 2]
        tokens = torch.from_numpy(prompt[None].astype(np.int64))
        with torch.no_grad():
            right = whole.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        assert first.tokens == second.tokens == tuple(right[0, len(prompt) :].tolist())
        assert (first.cached_tokens, second.cached_tokens) == (0, len(prompt) - 1)
    assert len({token for answer in answers for token in answer.tokens}) > 1
    size = sum(parameter.numel() for parameter in whole.parameters())
    assert built.layout.parameters < size, "what is for images is not kept"
    assert layout_without_weights(str(tmp_path))[1] == built.layout
