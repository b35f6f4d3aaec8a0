"""The layers of Kimi-K3: what it adds to Kimi-Linear, whose layers transformers has.

- KDA with a bounded gate, which transformers has for another model, and a gate of full rank on its output.
- Latent attention with a gate on its output.
- Routed experts that work in a latent, with an activation that saturates (SiTU).
- Attention residuals: instead of one sum of all that went before, what a part of a layer reads is a mixture of sums,
  each over a block of layers. The scores of the mixture are made from the sums themselves, so every token mixes by
  itself, and nothing has to be kept from token to token.

The attention residuals, with P the running sum and R the list of what each block began with:

    layer l     R gains P if l begins a block; the mixer reads a mixture of P and of R as it was *before* that
                P becomes the mixer's output if l begins a block, else gains it
                the feed-forward reads a mixture of P and of R, and P gains its output
    behind all  the output is a mixture of P and of R

So a decoder layer puts out P, as the layers of other models put out their residual stream: what reads the outputs of
layers (drafters) finds there what it finds elsewhere. R is a list that the layers of one forward share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers import initialization as init
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearDeltaAttention,
    KimiLinearForCausalLM,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearTopkRouter,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from headway.models.kimi_k3.configuration import KimiK3Config

__all__ = [
    "AttentionResidual",
    "KimiK3Attention",
    "KimiK3DecoderLayer",
    "KimiK3DeltaAttention",
    "KimiK3Experts",
    "KimiK3ForCausalLM",
    "KimiK3MLP",
    "KimiK3MoE",
    "KimiK3Model",
    "KimiK3PreTrainedModel",
    "situ",
]


def situ(gate: Tensor, up: Tensor, config: KimiK3Config) -> Tensor:
    """The gated activation, computed in fp32: `b tanh(gate/b) sigmoid(gate) * l tanh(up/l)`."""
    wide, linear = gate.float(), up.float()
    b, l = config.activation_situ_beta, config.activation_situ_linear_beta  # noqa: E741
    return (b * torch.tanh(wide / b) * torch.sigmoid(wide) * (l * torch.tanh(linear / l))).to(gate.dtype)


class KimiK3DeltaAttention(KimiLinearDeltaAttention):
    """KDA. The output's gate is one projection, under the name of the second of Kimi-Linear's two."""

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.activation = "silu"  # of the convolution; the config's is the feed-forward's
        self.conv_kernel_size = config.linear_conv_kernel_dim - 1  # columns to keep: the newest comes with the token
        bounded: Any = Glm5NextTextForgetGate
        self.forget_gate = bounded(config)
        self.g_a_proj = nn.Identity()  # type: ignore[assignment]
        self.g_b_proj = nn.Linear(config.hidden_size, self.qkv_dim, bias=False)


class _Held(nn.Linear):
    """A projection that its owner applies itself: called, it passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class KimiK3Attention(KimiLinearAttention):
    """Latent attention without positions, and a gate on what it puts out."""

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width: int = self.num_heads * config.v_head_dim  # type: ignore[operator]
        self.q_a_layernorm = KimiLinearRMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.kv_a_layernorm = KimiLinearRMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        self.o_proj = _Held(width, config.hidden_size, bias=False)
        self.g_b_proj = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As for `KimiLinearAttention`."""
        mixed, weights = super().forward(hidden_states, *args, **kwargs)
        gated = mixed * torch.sigmoid(self.g_b_proj(hidden_states))
        return functional.linear(gated, self.o_proj.weight), weights


class KimiK3MLP(nn.Module):
    """A gated feed-forward: of the first layers, and of the experts that all tokens share."""

    def __init__(self, config: KimiK3Config, intermediate_size: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        output: Tensor = self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config))
        return output


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """Routed experts, from the latent to the latent, in the form that transformers' kernels compute."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        width, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, latent))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, latent, width))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        config: Any = self.config
        gate, up = gate_up.chunk(2, dim=-1)
        return situ(gate, up, config)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, latent] to the same, from the experts [tokens, k] and their weights."""
        output: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return output


class KimiK3MoE(nn.Module):
    """Experts: routed by the whole width, computed in a latent, and the shared ones beside them."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiLinearTopkRouter(config)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
        self.experts = KimiK3Experts(config)
        self.routed_expert_norm = KimiLinearRMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
        self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[rows, tokens, hidden] to the same."""
        _, weights, chosen = self.gate(hidden_states)
        latent = self.routed_expert_down_proj(hidden_states)
        routed = self.experts(latent.flatten(0, 1), chosen, weights).view_as(latent)
        output: Tensor = self.routed_expert_up_proj(self.routed_expert_norm(routed)) + self.shared_experts(
            hidden_states
        )
        return output


class AttentionResidual(nn.Module):
    """The mixture of earlier sums that a part of a layer reads."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.norm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, total: Tensor, blocks: list[Tensor]) -> Tensor:
        """Mix the running sum with what the blocks began with, [rows, tokens, hidden] each; fp32 inside.

        A source's score is the projection of its norm; what is mixed are the sources as they are.
        """
        if not blocks:
            return total
        sources = torch.stack([*blocks, total], dim=-2).float()
        scale = torch.rsqrt(sources.square().mean(-1) + self.norm.variance_epsilon)
        scores = (sources @ (self.norm.weight.float() * self.proj.weight[0].float())) * scale
        return (scores.softmax(-1)[..., None] * sources).sum(-2).to(total.dtype)


class KimiK3DecoderLayer(nn.Module):
    """One layer: a mixer and a feed-forward, each reading a mixture of sums."""

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        recurrent = (config.layer_types or [])[layer_idx] == "linear_attention"
        sparse = (config.mlp_layer_types or [])[layer_idx] == "sparse"
        self.begins_block = layer_idx % config.attn_res_block_size == 0
        self.self_attention_res = AttentionResidual(config)
        self.input_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = (KimiK3DeltaAttention if recurrent else KimiK3Attention)(config, layer_idx)
        self.mlp_res = AttentionResidual(config)
        self.post_attention_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = KimiK3MoE(config) if sparse else KimiK3MLP(config, config.intermediate_size)

    def forward(self, total: Tensor, blocks: list[Tensor], **kwargs: Any) -> Tensor:
        """The running sum behind the layer, [rows, tokens, hidden]; `blocks` gains `total` if a block begins here."""
        read = self.self_attention_res(total, blocks)
        mixed = self.self_attn(hidden_states=self.input_layernorm(read), **kwargs)
        mixed = mixed if isinstance(mixed, Tensor) else mixed[0]
        if self.begins_block:
            blocks.append(total)
            total = mixed
        else:
            total = total + mixed
        output: Tensor = total + self.mlp(self.post_attention_layernorm(self.mlp_res(total, blocks)))
        return output


class KimiK3PreTrainedModel(KimiLinearPreTrainedModel):
    """What transformers asks of all models of a kind."""

    config_class = KimiK3Config
    _no_split_modules = ["KimiK3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(KimiLinearTopkRouter, index=0),
        "hidden_states": KimiK3DecoderLayer,
        "attentions": KimiK3Attention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Glm5NextTextForgetGate):
            init.zeros_(module.A_log)
            init.zeros_(module.dt_bias)
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)


class KimiK3Model(KimiK3PreTrainedModel):
    """The decoder."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res = AttentionResidual(config)
        self.norm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """As for `KimiLinearModel`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        total = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + total.shape[1], device=total.device)[None]
        given = {
            "config": self.config,
            "inputs_embeds": total,
            "attention_mask": attention_mask,
            "cache": cache,
            "position_ids": position_ids,
        }
        masks = {
            "full_attention": create_causal_mask(**given),
            "linear_attention": create_recurrent_attention_mask(**given),
        }
        blocks: list[Tensor] = []
        for kind, layer in zip(self.config.layer_types or [], self.layers, strict=True):
            total = layer(total, blocks, attention_mask=masks[kind], cache=cache, **kwargs)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(self.output_attn_res(total, blocks)), cache=cache)


class KimiK3ForCausalLM(KimiK3PreTrainedModel, KimiLinearForCausalLM):
    """The language model; its forward is that of `KimiLinearForCausalLM`."""

    def __init__(self, config: KimiK3Config) -> None:
        KimiK3PreTrainedModel.__init__(self, config)
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
