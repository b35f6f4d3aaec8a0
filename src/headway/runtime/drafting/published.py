"""Heads for multi-token prediction that a checkpoint brings along, as layers of the target's own class.

transformers builds and loads them (`MtpModel`); here one of them drafts as a `MtpNetwork` of ours does, over the same
draft group: its layer asks its cache for what it attends to, and attends by the function that Headway registers.

DeepSeek's form: the head reads what is behind the target's last norm, and its own last norm is part of it. A checkpoint
may have several heads, each trained for one place of a draft; the first one drafts all of them, fed with its own
output. The others would need entries that look two tokens ahead and more.

Rejected: running `MtpModel` as it stands. It drafts for one sequence, over a cache that nobody shares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from headway.errors import ModelError
from headway.runtime.drafting.layers import LayerEntries
from headway.runtime.drafting.memory import EntrySizes
from headway.runtime.model.attention import AttentionSwitch, Scores
from headway.runtime.sources import head_weights

__all__ = ["LayerCache", "PublishedHead", "has_published_head", "published_sizes"]

_KNOWN = ("deepseek_v3", "glm4_moe")
"""Model types whose heads were compared with transformers' own use of them."""


def has_published_head(folder: Path) -> bool:
    """Whether a checkpoint has weights of such heads.

    Raises:
        ModelError: It has, and they are in a form that is not run.
    """
    config = _config(folder)
    heads = head_weights(config)
    if not any(heads.search(name) for name in _weights(folder)):
        return False
    if config.model_type not in _KNOWN:
        raise ModelError(
            f"--draft mtp: the model brings heads for multi-token prediction along in the form of {config.model_type}, "
            f"which is not run (those of {' and '.join(_KNOWN)} are): use --draft lookup, or none"
        )
    return True


def published_sizes(folder: Path, dtype: torch.dtype) -> EntrySizes:
    """What the head of a checkpoint that has one keeps of a token: as much as a layer of its model."""
    config = _config(folder)
    if config.model_type == "deepseek_v3":  # the latent and the rotary key
        return EntrySizes(1, (1, config.kv_lora_rank), (1, config.qk_rope_head_dim), dtype)
    heads = (config.num_key_value_heads, config.head_dim)
    return EntrySizes(1, heads, heads, dtype)


class PublishedHead(nn.Module):
    """The first head of a checkpoint (see `headway.runtime.drafting.mtp.MtpHead`).

    Args:
        model: The target, as it was loaded from its folder.

    Raises:
        ModelError: Weights of it are missing.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        try:
            heads = _load(model)
        except RuntimeError as error:
            raise ModelError(f"--draft mtp: cannot load the heads of the model: {error}") from error
        self.layer = heads.layers[0].to(model.device).eval()
        self._rotate: Any = heads.rotary_emb
        self._switch = AttentionSwitch(heads)
        self.out_norm = nn.Identity()

    def forward(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attending: Sequence[LayerEntries]) -> Tensor:
        """One pass (see `headway.runtime.drafting.mtp.MtpNetwork.forward`)."""
        places = positions + 1  # a head's rotary positions are those of the tokens that it is given
        entries = LayerCache(attending[0])
        with self._switch.attending(entries):
            output: Tensor = self.layer(
                embedded,
                hidden,
                position_embeddings=self._rotate(embedded, position_ids=places),
                attention_mask=None,
                position_ids=places,
                cache=entries,
            )
        return output


class LayerCache:
    """The cache of one layer, as transformers asks for it, and the attention to it."""

    def __init__(self, entries: LayerEntries) -> None:
        self._entries = entries

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, [rows, heads, columns, width], with new ones."""
        held = self._entries.extend(keys.transpose(1, 2), values.transpose(1, 2))
        return held[0].transpose(1, 2), held[1].transpose(1, 2)

    def attend(self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See `headway.runtime.model.attention.AttentionContext`."""
        turned = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return self._entries.mix(*turned, scores).transpose(1, 2)


def _load(model: Any) -> Any:
    """The heads, made by transformers. It knows layer numbers of a few checkpoints alone, and is told those of this."""
    model._keys_to_ignore_on_load_unexpected = [head_weights(model.config.get_text_config(decoder=True)).pattern]
    try:
        return MtpModel.from_pretrained(model)
    finally:
        del model._keys_to_ignore_on_load_unexpected


def _config(folder: Path) -> Any:
    """The config of a checkpoint's language model."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot load the config of the model in {folder}: {reason}") from error


def _weights(folder: Path) -> list[str]:
    """Names of the weights of a checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_text())["weight_map"])
    if not (folder / "model.safetensors").is_file():
        return []
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return list(weights.keys())
