"""A faster Kimi Delta Attention core for training on a CPU: the same mathematics as transformers' chunked function.

transformers forms all pairwise decays of a 64-token chunk, a [64, 64, d] tensor for each head. Here a chunk has 16
tokens and the decay exp(G_i - G_j) is split at the middle of the chunk, exp(G_i - M) * exp(M - G_j), so that both
halves fit into fp32 and plain matrix products do the work. Should a channel ever decay so fast that a half would not
fit, that call forms the pairwise decays instead; no decay is clamped. Only training and its evaluation use this; the
exported model runs the library's own code.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.models.kimi_linear.modeling_kimi_linear as library
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 16
_LARGEST_EXPONENT = 40.0  # each half; the product of two stays far below the largest fp32 number


def _normalise(x: Tensor) -> Tensor:
    """Rows of unit length, with the library's epsilon."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _scores(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for x = q and x = k, over one chunk; entries with j > i are meaningless.

    `total` is G, the inclusive cumulative sum of the log decays, [..., CHUNK, d].
    """
    middle = total[..., CHUNK // 2 : CHUNK // 2 + 1, :]
    offset = total - middle
    if float(offset.detach().abs().max()) <= _LARGEST_EXPONENT:
        grow, shrink = offset.exp(), (-offset).exp()
        right = (k * shrink).transpose(-1, -2)
        return (q * grow) @ right, (k * grow) @ right
    pairs = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp(max=0.0).exp() * k.unsqueeze(-3)
    both = pairs @ torch.stack([q, k], dim=-1)
    return both[..., 0], both[..., 1]


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA from a zero state over [batch, tokens, heads, d] inputs.

    Returns the outputs in the layout of `value` and, if asked for, the last state [batch, heads, d, d].
    """
    batch, length, heads, width = key.shape
    extra = -length % CHUNK  # zero rows with no decay and no write leave the state as it is
    query, key, value, g = (pad(x, (0, 0, 0, 0, 0, extra)) for x in (query, key, value, g))
    beta, tokens = pad(beta, (0, 0, 0, extra)), length + extra
    shape = (batch, heads, tokens // CHUNK, CHUNK, -1)
    q, k, v, g = (x.transpose(1, 2).float().reshape(shape) for x in (query, key, value, g))
    write = beta.transpose(1, 2).float().reshape(shape)
    q, k = _normalise(q) * width**-0.5, _normalise(k)
    total = g.cumsum(-2)
    q_scores, k_scores = _scores(q, k, total)
    decay = total.exp()
    end = total[..., -1:, :]
    system = (write * k_scores).tril(-1) + torch.eye(CHUNK)
    right = write * torch.cat([v, k * decay], dim=-1)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(width, -1)
    to_end = (k * (end - total).exp()).transpose(-1, -2)
    per_chunk = (u, w, q_scores.tril(), q * decay, to_end, end.exp().transpose(-1, -2))
    state = torch.zeros(batch, heads, width, width)
    outputs: list[Tensor] = []
    for u_c, w_c, scores_c, q_c, k_c, decay_c in zip(*(x.unbind(2) for x in per_chunk), strict=True):
        correction = u_c - w_c @ state
        outputs.append(q_c @ state + scores_c @ correction)
        state = decay_c * state + k_c @ correction
    out = torch.stack(outputs, 2).reshape(batch, heads, tokens, width).transpose(1, 2)[:, :length]
    return out.to(value.dtype), state if output_final_state else None


def install() -> None:
    """Make the library's model use `chunk_kda` in this process."""
    library.chunk_kimi_delta_attention = chunk_kda


def check() -> float:
    """Largest difference to the library's own function, on slow and on very fast decays; raises above 1e-4."""
    worst = 0.0
    generator = torch.Generator().manual_seed(1)
    for speed in (0.05, 1.0, 30.0):
        q, k, v, g = (torch.randn(2, 90, 3, 32, generator=generator) for _ in range(4))
        beta = torch.rand(2, 90, 3, generator=generator)
        decays = -speed * g.abs()
        ours, state = chunk_kda(q, k, v, decays, beta, output_final_state=True)
        theirs, final = library.chunk_kimi_delta_attention(
            q, k, v, decays, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert state is not None
        worst = max(worst, float((ours - theirs).abs().max()), float((state - final).abs().max()))
    if worst > 1e-4:
        raise SystemExit(f"the training core differs from the library by {worst:.1e}")
    return worst
