"""The decoder layer that trained drafters are made of, and the one way in which it attends.

A plain layer of our own: root-mean-square norms, grouped queries with rotary positions, a gated feed-forward. What it
attends to is the caller's: in training whole sequences with a mask, in serving the entries in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headway.runtime.drafting.memory import EntrySizes
from headway.runtime.model.attention import Scores, masked_attention

__all__ = ["Attend", "DraftLayer", "DraftNorm", "LayerEntries", "LayerShape", "attend"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From a layer's queries [rows, tokens, heads, width] and its new keys and values [rows, tokens, kv heads, width] to
what it attends, [rows, tokens, heads, width]."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer.

    Attributes:
        hidden: Width of the stream; the target's.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Width of a head; even.
        intermediate: Width of the feed-forward.
        rope_theta: Base of the rotary wavelengths.
        eps: Added to the mean square in norms.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def entries(self, layers: int, dtype: torch.dtype) -> EntrySizes:
        """What so many layers keep of a token."""
        return EntrySizes(layers, (self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim), dtype)


class LayerEntries(ABC):
    """What one layer attends to during one pass. As an `Attend` it does both steps at once."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Extend, then mix."""
        return self.mix(query, *self.extend(keys, values))

    @abstractmethod
    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take new entries, [rows, tokens, heads, width]; returns all that there are, [rows, columns, heads, width]."""

    @abstractmethod
    def mix(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores | None = None) -> Tensor:
        """Attend to keys and values that were made of all entries: [rows, tokens, heads, value width]."""


class DraftNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * scaled.to(x.dtype)


class DraftLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_norm = DraftNorm(shape.hidden, shape.eps)
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.mlp_norm = DraftNorm(shape.hidden, shape.eps)
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Entries of normed inputs [rows, tokens, hidden] at `positions`, int64 [rows, tokens]."""
        heads = (*x.shape[:2], self.shape.kv_heads, self.shape.head_dim)
        return self._rotate(self.k_proj(x).view(heads), positions), self.v_proj(x).view(heads)

    def forward(self, x: Tensor, positions: Tensor, attending: Attend) -> Tensor:
        """The stream behind the layer, [rows, tokens, hidden] as `x`."""
        normed = self.input_norm(x)
        query = self.q_proj(normed).view(*x.shape[:2], self.shape.heads, self.shape.head_dim)
        keys, values = self.keys_values(normed, positions)
        x = x + self.o_proj(attending(self._rotate(query, positions), keys, values).flatten(2))
        normed = self.mlp_norm(x)
        output: Tensor = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return output

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions, halves paired, [rows, tokens, heads, width]."""
        half = self.shape.head_dim // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = positions[..., None].float() * self.shape.rope_theta**-steps
        cos, sin = angles.cos()[:, :, None].to(x.dtype), angles.sin()[:, :, None].to(x.dtype)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, scores: Scores | None = None
) -> Tensor:
    """Softmax attention.

    Args:
        query: [rows, tokens, heads, width].
        keys: [rows, columns, kv heads, width].
        values: As keys.
        mask: bool, broadcastable to [rows, 1, tokens, columns], True where a column is seen; None if all are.
        scores: How to compute the scores; by the width of a head if not given.

    Returns:
        [rows, tokens, heads, width].
    """
    scores = scores or Scores(query.shape[-1] ** -0.5)
    mixed = masked_attention(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), scores, mask)
    return mixed.transpose(1, 2)
