"""DSpark drafters as they are published: other layers and names, the same way to draft.

Two forms, both of transformers' layers: with latent attention (`k3_dspark`, of Kimi-K3), whose entries are one latent
and one rotary key per token and layer and are split over ranks by tokens; and with grouped heads (Qwen3's layer), whose
entries every rank holds. A layer keeps entries of the context, which it makes with its own projections of keys and
values, and attends to them and to the draft (`headway.runtime.drafting.dspark`).

Embeddings and output head are the target's; a checkpoint may repeat them. The mask is the embedding of a token.

`_NAMES` says where tensors go. Their names were read in engines that load such checkpoints (vLLM, an MLX port), no
checkpoint was at hand. `fc_norm` is of one trainer and known from an engine's tests alone: it is the least sure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from headway.errors import ModelError
from headway.runtime.drafting.dspark import DSparkNetwork
from headway.runtime.drafting.layers import Attend, DraftNorm, LayerEntries
from headway.runtime.drafting.memory import EntrySizes
from headway.runtime.drafting.published import LayerCache
from headway.runtime.drafting.target import Target
from headway.runtime.interface import MOST_DRAFT_TOKENS
from headway.runtime.model.attention import AttentionSwitch

__all__ = ["DSparkConfig", "PublishedDSpark", "is_published_dspark", "load_published_dspark"]

_USUAL_TOKENS = 7
"""Tokens of a draft where the config has no `block_size`: some leave it to whoever serves."""
_LATENT, _GROUPED = "K3DSparkModel", ("Qwen3DSparkModel", "DSparkDraftModel")
"""Architectures of the two forms; the last is also that of others, and is told by its model type."""
_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_NAMES = {
    r"(context_proj|fc)\.": "context_project.",
    r"(context_norm|hidden_norm)\.": "context_norm.",
    r"(final_norm|norm)\.": "out_norm.",
    r"markov_head\.markov_w1\.": "markov_in.",
    r"markov_head\.markov_w2\.": "markov_out.",
    r"confidence_head\.proj\.": "confidence.",
    r"fc_norm\.": "feature_norms.",  # unverified
}
"""Beginnings of published names, behind an optional `model.`, and ours; names of layers are the same."""
_LEFT = re.compile(r"(embed_tokens|lm_head|rotary_emb|mask_embedding|t2d)\b")
"""Tensors that are not needed: the target's, computed ones, and what training used."""


@dataclass(frozen=True)
class DSparkConfig:
    """What a published config says.

    Attributes:
        latent: Whether its layers have latent attention.
        layers: Its layers' configuration, as transformers takes it.
        feature_layers: Layers of the target that it reads.
        draft_tokens: Tokens of a draft.
        mask_token: The token whose embedding stands for tokens to come.
        markov_rank: Width of the Markov head.
        confidence: Whether it has a confidence head.
        confidence_with_markov: Whether that head reads the token before.
        mixed: Whether it reads mixtures of attention residuals.
        causal: Whether a place of a draft sees only places before it.
    """

    latent: bool
    layers: DeepseekV3Config | Qwen3Config
    feature_layers: tuple[int, ...]
    draft_tokens: int
    mask_token: int
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool
    mixed: bool
    causal: bool

    @classmethod
    def of(cls, path: Path, found: Mapping[str, Any]) -> DSparkConfig:
        """Read a config.

        Raises:
            ModelError: A field is missing, or says what is not run; the message names it.
        """
        told = {**found, **(found.get("dflash_config") or {})}
        mask = _one_of(path, told, "mask_token_id", "dspark_noise_token_id")
        features = _one_of(path, told, "target_layer_ids", "dspark_target_layer_ids")
        fault = next((fault for fault in _faults(told, features) if fault), None)
        if fault is not None:
            raise ModelError(f"{path / 'config.json'} is not the config of a DSpark drafter that is run here: {fault}")
        latent = _LATENT in (found.get("architectures") or [])
        return cls(
            latent=latent,
            layers=_latent_layers(told) if latent else _grouped_layers(told),
            feature_layers=tuple(features),
            draft_tokens=int(told.get("block_size") or _USUAL_TOKENS),
            mask_token=int(mask),
            markov_rank=int(told["markov_rank"]),
            confidence=bool(told.get("enable_confidence_head", False)),
            confidence_with_markov=bool(told.get("confidence_head_with_markov", False)),
            mixed=told.get("aux_hidden_stream", "prefix") == "attn_res",
            causal=bool(told.get("full_attention_causal", False) or told.get("causal", False)),
        )

    def sizes(self, dtype: torch.dtype) -> EntrySizes:
        """What its layers keep of a token: latents are split over ranks, heads are not."""
        config: Any = self.layers
        if self.latent:
            latent, rope = (1, config.kv_lora_rank), (1, config.qk_rope_head_dim)
            return EntrySizes(config.num_hidden_layers, latent, rope, dtype, sharded=True)
        heads = (config.num_key_value_heads, config.head_dim)
        return EntrySizes(config.num_hidden_layers, heads, heads, dtype)


def is_published_dspark(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a published DSpark drafter in one of the two forms."""
    names = config.get("architectures") or []
    grouped = any(name in names for name in _GROUPED) and config.get("model_type") == "qwen3"
    return _LATENT in names or grouped


def _one_of(path: Path, told: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if told.get(name) is not None:
            return told[name]
    raise ModelError(f"{path / 'config.json'} of a DSpark drafter lacks {names[0]}")


def _faults(told: Mapping[str, Any], features: Any) -> list[str | None]:
    """What cannot be run, or None for each that can."""
    missing = next((name for name in (*_REQUIRED, "markov_rank") if not isinstance(told.get(name), int)), None)
    whole = isinstance(features, list) and features and all(type(layer) is int for layer in features)
    nope = [name for name in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm") if told.get(name)]
    stream, tokens = told.get("aux_hidden_stream", "prefix"), told.get("block_size") or _USUAL_TOKENS
    anchored = told.get("sample_from_anchor", True) and not told.get("dspark_bonus_anchor", False)
    sliding = "sliding_attention" in (told.get("layer_types") or []) or told.get("use_sliding_window", False)
    head = told.get("markov_head_type", "vanilla")
    fewer = told.get("draft_vocab_size") not in (None, told.get("vocab_size"))
    return [
        f"{missing} is missing" if missing else None,
        None if whole else f"target_layer_ids is {features!r}, it must be a list of layer numbers",
        f"{nope[0]} is set" if nope else None,
        None if stream in ("prefix", "attn_res") else f"aux_hidden_stream is {stream!r}, known are prefix and attn_res",
        None if anchored else "its anchor proposes nothing (sample_from_anchor is false)",
        "its layers see a sliding window" if sliding else None,
        None if head == "vanilla" else f"its Markov head is of the kind {head!r}",
        "its vocabulary is smaller than the target's (draft_vocab_size)" if fewer else None,
        "its logits are scaled (logit_scale)" if told.get("logit_scale", 1.0) != 1.0 else None,
        None if 1 <= tokens <= MOST_DRAFT_TOKENS else f"block_size is {tokens}, it must be at most {MOST_DRAFT_TOKENS}",
    ]


def _rotary(told: Mapping[str, Any], theta: float) -> dict[str, Any]:
    given = told.get("rope_parameters") or told.get("rope_scaling") or {}
    return {"rope_type": "default", "rope_theta": told.get("rope_theta", theta), **given}


def _shared(told: Mapping[str, Any]) -> dict[str, Any]:
    names = (*_REQUIRED, "num_key_value_heads", "rms_norm_eps", "hidden_act", "max_position_embeddings")
    return {name: told[name] for name in names if told.get(name) is not None}


def _latent_layers(told: Mapping[str, Any]) -> DeepseekV3Config:
    """DeepSeek's layer with a plain feed-forward."""
    widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    given = _shared(told) | {name: told[name] for name in widths if name in told}
    dense = {"first_k_dense_replace": told["num_hidden_layers"], "num_key_value_heads": told["num_attention_heads"]}
    return DeepseekV3Config(**given | dense, rope_parameters=_rotary(told, 50000.0))


def _grouped_layers(told: Mapping[str, Any]) -> Qwen3Config:
    given = _shared(told) | {name: told[name] for name in ("head_dim", "attention_bias") if name in told}
    return Qwen3Config(**given, rope_parameters=_rotary(told, 1000000.0))


class PublishedDSpark(DSparkNetwork):
    """A published network (see `DSparkNetwork`).

    Args:
        config: Its sizes.
        target: The target.
        feature_norms: Whether each feature has a norm of its own.
        confidence_bias: Whether the confidence head has a bias.
    """

    def __init__(self, config: DSparkConfig, target: Target, feature_norms: bool, confidence_bias: bool) -> None:
        nn.Module.__init__(self)
        layers: Any = config.layers
        hidden, eps, features = layers.hidden_size, layers.rms_norm_eps, len(config.feature_layers)
        self._config = config
        self.feature_norms = nn.ModuleList(DraftNorm(hidden, eps) for _ in range(features if feature_norms else 0))
        self.context_project = nn.Linear(features * hidden, hidden, bias=False)
        self.context_norm = DraftNorm(hidden, eps)
        kind: Any = DeepseekV3DecoderLayer if config.latent else Qwen3DecoderLayer
        self.layers = nn.ModuleList(kind(layers, i) for i in range(layers.num_hidden_layers))
        for layer in self.layers if config.latent else ():
            attention: Any = layer.self_attn
            attention.q_a_layernorm.variance_epsilon = attention.kv_a_layernorm.variance_epsilon = eps
        self.out_norm = DraftNorm(hidden, eps)
        self.markov_in = nn.Embedding(layers.vocab_size, config.markov_rank)
        self.markov_out = nn.Linear(config.markov_rank, layers.vocab_size, bias=False)
        read = hidden + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence: Any = nn.Linear(read, 1, bias=confidence_bias) if config.confidence else None
        self._rotate: Any = (DeepseekV3RotaryEmbedding if config.latent else Qwen3RotaryEmbedding)(layers)
        self._switch = AttentionSwitch(self)
        mask = target.embed(torch.tensor([config.mask_token], device=target.device))[0]
        self.register_buffer("mask", mask.detach().clone(), persistent=False)

    def context(self, features: Tensor) -> Tensor:
        """As for `DSparkNetwork`."""
        if len(self.feature_norms):
            parts = features.chunk(len(self.feature_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.feature_norms, parts, strict=True)], dim=-1)
        return super().context(features)

    def forward(self, x: Tensor, positions: Tensor, attending: Sequence[Attend]) -> Tensor:
        """As for `DSparkNetwork`; `attending` are `LayerEntries`."""
        angles = self._rotate(x, position_ids=positions)
        for layer, entries in zip(self.layers, attending, strict=True):
            assert isinstance(entries, LayerEntries)
            cache = LayerCache(entries)
            with self._switch.attending(cache):
                x = layer(x, attention_mask=None, position_ids=positions, cache=cache, position_embeddings=angles)
        normed: Tensor = self.out_norm(x)
        return normed

    def entries(self, layer: int, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As for `DSparkNetwork`: the latent and the rotary key, or keys and values by heads."""
        attention: Any = self.layers[layer].self_attn
        cos, sin = self._rotate(context, position_ids=positions)
        if self._config.latent:
            rotated: Any = apply_rotary_pos_emb_interleave
            widths = (attention.kv_lora_rank, attention.qk_rope_head_dim)
            latent, key = attention.kv_a_proj_with_mqa(context).split(widths, dim=-1)
            key = rotated(key[:, None], key[:, None], cos, sin)[1]
            return attention.kv_a_layernorm(latent)[:, :, None], key.transpose(1, 2)
        heads = (*context.shape[:2], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(context).view(heads)).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, cos, sin)[1].transpose(1, 2), attention.v_proj(context).view(heads)

    def chance(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """As for `DSparkNetwork`."""
        if self.confidence is None:
            return None
        read = torch.cat([hidden, self.markov_in(before)], -1) if self._config.confidence_with_markov else hidden
        found: Tensor = self.confidence(read)
        return found[..., 0].float()


def load_published_dspark(path: Path, config: DSparkConfig, target: Target) -> PublishedDSpark:
    """Read the weights of a published drafter: all of them, and no others.

    Raises:
        ModelError: It is for another target, or its weights are not those of its config.
    """
    layers: Any = config.layers
    if (layers.hidden_size, layers.vocab_size) != (target.hidden, target.vocab):
        raise ModelError(
            f"the drafter in {path} is for a hidden size of {layers.hidden_size} and {layers.vocab_size} tokens, the "
            f"model has {target.hidden} and {target.vocab}: it was trained for another model"
        )
    weights = {_name(name): tensor for name, tensor in _read(path).items() if not _LEFT.search(name)}
    if not config.confidence:  # a head that was trained along, and is not to be used
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("confidence.")}
    norms = any(name.startswith("feature_norms.") for name in weights)
    network = PublishedDSpark(config, target, norms, "confidence.bias" in weights)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the weights of the drafter in {path} are not those of its config: {reason}") from error
    return network.to(target.device, target.dtype).eval()


def _name(published: str) -> str:
    """Our name of a tensor."""
    name = published.removeprefix("model.")
    for begin, ours in _NAMES.items():
        if match := re.match(begin, name):
            return ours + name[match.end() :]
    return name


def _read(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"the folder {path} of a drafter has no safetensors file")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot load the weights of the drafter in {path}: {reason}") from error
