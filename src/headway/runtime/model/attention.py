"""The attention function that Headway registers with transformers, under the name `headway`.

transformers builds no mask for an attention function it knows no mask for, and hands the function the layer, its
queries, and the keys and values that the layer's cache returned. That cache is ours, so what each query may see follows
from the block tables alone, exactly, for every layer kind, for ragged batches, and without one mask function per model.
The models' own masks remain the independent reference that `headway.runtime.selfcheck` compares with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from headway.errors import ModelError

__all__ = ["NAME", "AttentionContext", "AttentionSwitch", "Scores", "masked_attention"]

NAME = "headway"

_SILENT = frozenset(
    ("dropout", "sliding_window", "position_ids", "use_cache", "logits_to_keep", "return_dict", "num_items_in_batch")
)
"""Keywords of a call that change nothing here: windows are the cache layer's, and nothing is dropped at inference."""
_MEANINGS = {
    "indices": "sparse attention over an index",
    "block_indices": "sparse attention over an index of blocks",
    "position_bias": "a bias on attention scores that depends on positions",
    "sinks": "attention sinks that differ from token to token",
    "is_causal": "attention to later tokens",
}
"""What a model wants with keywords that are refused, in a user's words."""


@dataclass(frozen=True)
class Scores:
    """How a layer wants its attention scores computed.

    Attributes:
        scale: Factor of the scores.
        softcap: Scores become softcap * tanh(scores / softcap); None for no cap.
        sinks: [heads], a score per head that takes part in the softmax and carries no value; None without sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionContext(Protocol):
    """The forward that is running: it knows what each query may see."""

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Attention of the layer that updated the cache last, or of `layer` if it has attended since.

        Args:
            layer: What the attending module says is its number. A module that several layers share says nothing or the
                number of one of them, so it is asked only where a layer attends to entries that it did not store.
            query: [rows, heads, queries, width]; the last `queries` of the forward's tokens.
            key: [rows, kv heads, columns, width].
            value: [rows, kv heads, columns, value width].
            scores: How to compute the scores.

        Returns:
            [rows, heads, queries, value width].
        """
        ...


_CONTEXT: ContextVar[AttentionContext | None] = ContextVar("headway_attention", default=None)


class AttentionSwitch:
    """Lets one model attend through a context, for the length of a `with` block.

    The name of the attention function is part of the model's config, so one model must not run in two threads at once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        self._configs = list(
            {id(config): config for config in found if hasattr(config, "_attn_implementation")}.values()
        )

    @contextmanager
    def attending(self, context: AttentionContext) -> Iterator[None]:
        """Attend through `context` inside the block; outside it, the model is as it was."""
        before = [(config, config._attn_implementation) for config in self._configs]
        token = _CONTEXT.set(context)
        try:
            for config in self._configs:
                config._attn_implementation = NAME
            yield
        finally:
            for config, name in before:
                config._attn_implementation = name
            _CONTEXT.reset(token)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Softmax attention with grouped heads.

    Args:
        query: [rows, heads, queries, width].
        key: [rows, kv heads, columns, width]; kv heads divide heads.
        value: [rows, kv heads, columns, value width].
        scores: How to compute the scores.
        mask: bool, broadcastable to [rows, 1, queries, columns], True where a column is seen; None if all are.
        causal: Instead of a mask, query i sees columns 0 to i.

    Returns:
        [rows, heads, queries, value width], in the dtype of `query`.
    """
    if scores.softcap is None and scores.sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scores.scale, enable_gqa=grouped
        )
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    return _explicit_attention(query, key, value, scores, mask)


def _explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention with a cap or sinks, which the fused kernels do not offer."""
    rows, heads, queries, width = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    folded = query.reshape(rows, kv_heads, -1, width)
    weights = (folded @ key.transpose(2, 3)).view(rows, heads, queries, columns).float() * scores.scale
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if mask is not None:
        weights = weights.masked_fill(~mask, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, -1, 1, 1).expand(rows, heads, queries, 1)
        weights = torch.cat([weights, sinks], dim=-1)
    probabilities = weights.softmax(dim=-1)[..., :columns].to(value.dtype)
    mixed = probabilities.reshape(rows, kv_heads, -1, columns) @ value
    return mixed.view(rows, heads, queries, -1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it: returns [rows, queries, heads, value width] and no weights.

    Raises:
        ModelError: The model asks for more than is computed here; nothing that it hands over is dropped.
    """
    context = _CONTEXT.get()
    name = type(module).__name__
    if context is None:
        raise ModelError(
            f"{name} attends through {NAME!r} outside a forward of Headway: set its attn_implementation back"
        )
    if attention_mask is not None:
        raise ModelError(f"{name} builds an attention mask of its own, which a ragged batch cannot satisfy")
    unknown = [key for key, held in more.items() if held is not None and held is not False and key not in _SILENT]
    if is_causal is False:
        unknown.append("is_causal")
    if unknown:
        wants = ", ".join(_MEANINGS.get(key, f"what its attention calls {key!r}") for key in unknown)
        raise ModelError(f"{name} needs {wants}, which Headway does not compute")
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    layer = getattr(module, "layer_idx", None)
    return context.attend(layer, query, key, value, scores).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
