"""What a Kimi-K3 checkpoint says of its text model, in one flat configuration.

A published `config.json` has the text model's fields in `text_config`, under the model type of Kimi-Linear, with parts
for images beside it. Here they are fields of one configuration of the model type `kimi_k3`: what reads a model then
need not know that there was anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import KimiLinearConfig

__all__ = ["KimiK3Config"]

_FIXED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("situ", "activations"),
    "moe_router_activation_func": ("sigmoid", "scores of experts"),
    "latent_moe_use_norm": (True, "a norm behind the experts"),
    "mla_use_nope": (True, "attention without rotary positions"),
    "mla_use_output_gate": (True, "a gate on the output of attention"),
    "moe_layer_freq": (1, "experts in every layer behind the dense ones"),
}
"""Fields of published configurations with the only value that is computed here, and what they are about."""
_GROUP = 32
"""Numbers of a packed weight that share a scale."""


@strict
class KimiK3Config(KimiLinearConfig):
    """Configuration of Kimi-K3's text model; the defaults are those of the published model.

    Attributes:
        linear_lower_bound: Bound of KDA's log decays, negative.
        routed_expert_hidden_size: Width of the latent in which routed experts work.
        attn_res_block_size: Layers whose outputs are added up to one source of the attention residuals.
        activation_situ_beta: Where the gate's tanh saturates.
        activation_situ_linear_beta: Where the tanh of what is gated saturates.
        latent_norm_eps: Added to the mean square in the norms of latents; the reference code and transformers use 1e-6
            there, other engines `rms_norm_eps`.
    """

    model_type = "kimi_k3"

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    moe_intermediate_size: int = 3072
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 96
    n_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    q_lora_rank: int | None = 1536
    num_experts_per_tok: int | None = 16
    num_local_experts: int = 896
    hidden_act: str = "situ"
    linear_num_heads: int = 96
    linear_lower_bound: float = -5.0
    routed_expert_hidden_size: int = 3584
    attn_res_block_size: int = 12
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    latent_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        """Take what published configurations nest, and refuse what is computed otherwise here.

        Raises:
            ValueError: What it is.
        """
        attention = kwargs.setdefault("linear_attn_config", {})
        if not attention and self.layer_types is None:
            last = self.num_hidden_layers
            full = sorted({*range(4, last + 1, 4), last})
            attention |= {"full_attn_layers": full, "kda_layers": sorted({*range(1, last + 1)} - {*full})}
        self.linear_lower_bound = attention.get("gate_lower_bound", self.linear_lower_bound)
        super().__post_init__(**kwargs)
        fixed = [
            (name, kwargs.get(name, getattr(self, name, right)), right, what) for name, (right, what) in _FIXED.items()
        ]
        fixed.append(("use_full_rank_gate", attention.get("use_full_rank_gate", True), True, "gates of KDA's output"))
        for name, found, value, what in fixed:
            if found != value:
                raise ValueError(f"{name} is {found!r}, and Kimi-K3 is computed with {value!r} alone ({what})")
        if self.q_lora_rank is None or self.linear_lower_bound >= 0 or self.attn_res_block_size < 1:
            raise ValueError(
                f"q_lora_rank is {self.q_lora_rank}, gate_lower_bound {self.linear_lower_bound}, attn_res_block_size "
                f"{self.attn_res_block_size}: the first must be a number, the second negative, the third positive"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a published configuration, or one that was saved from here."""
        text = dict(config_dict.get("text_config") or {})
        text.pop("model_type", None)
        outer = {k: v for k, v in config_dict.items() if k not in ("text_config", "vision_config", "auto_map")}
        merged = outer | text
        if _is_packed(merged.get("quantization_config")):
            del merged["quantization_config"]  # `weights` unpacks the experts as they are read
        return super().from_dict(merged, **kwargs)


def _is_packed(quantised: Any) -> bool:
    """Whether a quantisation is the published one: experts in MXFP4, by groups of 32, and nothing of activations."""
    if not isinstance(quantised, Mapping):
        return False
    groups = [g for g in quantised.get("config_groups", {}).values() if isinstance(g, Mapping)]
    formats = {quantised.get("format"), *(g.get("format") for g in groups)} - {None}
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), Mapping)]
    plain = all(g.get("input_activations") is None for g in groups)
    sizes = {(w.get("num_bits"), w.get("group_size")) for w in weights}
    return formats == {"mxfp4-pack-quantized"} and sizes <= {(4, _GROUP)} and plain
