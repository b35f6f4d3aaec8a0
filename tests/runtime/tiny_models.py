"""Tiny random models of every class that the runtime is tested with: `tiny_model("KimiLinear")`.

Weights are drawn N(0, 0.15), so that every layer moves the logits: a model initialised as transformers does it would
hide a dead layer. Norms stay about where they were. Time steps (`dt_bias`) are small, so that a state remembers, yet
clear of the lower limit that some classes apply in one of their two paths only. A forward takes milliseconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from tests.runtime.tiny_configs import COMMON, LONG, MODELS, MORE, REFUSED, WIDE
from transformers import DynamicCache, PreTrainedModel

from headway.models import kimi_k3
from headway.runtime.model.inspection import cache_argument

SOUND = (
    "KimiLinear",
    "BailingHybrid",
    "Qwen3Next",
    "Qwen3_5",
    "OlmoHybrid",
    "NemotronH",
    "GraniteMoeHybrid",
    "FalconH1",
    "Lfm2",
    "GptOss",
    "Gemma3",
    "Llama4",
    "DeepseekV3",
    "Qwen3",
    "Gemma4",
    "MiMoV2Flash",
    "Mamba2",
    "Zamba2",
    "KimiK3",
)
"""Models of `MODELS` whose chunked continuation equals their own full forward in transformers."""

ALSO_SOUND = (*MORE, *LONG)


@cache
def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Return the tiny model `name` in fp32 on the CPU. The same object for the same arguments: do not change it."""
    config_name, arguments = (MODELS | MORE | WIDE | LONG | REFUSED)[name]
    config = getattr(kimi_k3 if hasattr(kimi_k3, config_name) else transformers, config_name)(**(COMMON | arguments))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return with_random_weights(model, seed)


def with_random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw a model's weights anew, in place, and let it answer beyond its end token; returns it."""
    generator = torch.Generator().manual_seed(seed)
    step = -4.0 if hasattr(model.config, "linear_lower_bound") else -2.0  # a bounded gate forgets faster
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            centre = step if path.endswith("dt_bias") else parameter if "norm" in path else 0.0
            parameter.copy_(centre + torch.empty_like(parameter).normal_(0.0, 0.15, generator=generator))
    model.generation_config.eos_token_id = None
    return model


class RoundedCache(DynamicCache):
    """transformers' own cache, of entries that were rounded to a type before it took them."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__(config=config)
        self._dtype = dtype

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        limit = torch.finfo(self._dtype).max
        rounded = (t.clamp(-limit, limit).to(self._dtype).to(t.dtype) for t in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


@cache
def generated(
    name: str, prompt: tuple[int, ...], count: int, entries: torch.dtype | None = None
) -> tuple[list[int], torch.Tensor]:
    """Greedy answer of a tiny model by transformers alone, and the logits of its first token."""
    return answer_of(tiny_model(name), prompt, count, entries)


def answer_of(
    model: PreTrainedModel, prompt: Sequence[int], count: int, entries: torch.dtype | None = None
) -> tuple[list[int], torch.Tensor]:
    """Greedy answer of a model by transformers alone, and the logits of its first token."""
    tokens = torch.tensor([prompt])
    held = {} if entries is None else {cache_argument(model): RoundedCache(model.config, entries)}
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **held,
    )
    return output.sequences[0, len(prompt) :].tolist(), output.logits[0][0]
