"""Decode context parallelism: attention to entries that are split by tokens over ranks.

Every rank stores the entries of its own tokens, and attends to these only. What it gets is a *partial* output, with the
logarithm of the sum of its exponentials (log-sum-exp) beside it; the whole output is a weighted sum of the parts:

    weight_r = exp(lse_r - total),   total = log(sum_r exp(lse_r) + exp(sink)),   out = sum_r weight_r * out_r

So there are two functions and no case for any kind of step: `partial_attention`, from queries, a rank's keys and values
and what each query may see of them, and a merge. A step of one token, a verification of several, and a chunk of a
prompt behind a long history differ in their masks alone, and these are made from positions, which a rank knows of each
of its entries: what a query sees is cut globally and then mapped. (Cutting the local length by the number of later
queries is wrong wherever those tokens live on another rank.)

Where weights are replicated, every rank has all queries and no queries are gathered. Each rank merges an equal share of
the heads, and the merged heads are gathered: every rank goes on with the very same bits, because each head is merged by
one rank only. Where tensor parallelism has split a layer's heads over the ranks, queries are gathered first, and a
rank's share is just its own heads: nothing is gathered afterwards. Two ways to a rank's share:

- `ag_rs`: all-gather the log-sum-exps of all heads, weigh the own part, and reduce-scatter the sum over heads;
- `a2a`: all-to-all the parts of each share with their log-sum-exps in one more column, and sum locally.

Both move each output once. The second makes two collectives where the first makes three; the first leaves the sum to
the communication library. Whether any of them runs depends on the step alone, never on what a rank holds, so that all
ranks make the same calls.

Rejected: gathering the history of a chunked prefill on every rank (engines do, to use one kernel over all keys). It
holds all of a layer's history at once, which is what context parallelism is there to avoid, and it needs a second path
through the attention. Also rejected: every rank merging all heads by itself from gathered parts: less code, N times the
traffic.

With prefill context parallelism there are more ranks that split tokens (`headway.runtime.parallel.prefill_context`).
Parts merge to parts, so theirs are merged first, in one exchange: of all queries where all ranks go on with all, or of
each rank's own tokens where they share a forward. What is left is the merge above, of the parts of one rank of each.

An empty shard is common, in every sequence shorter than the interleave: its log-sum-exp is -inf, and its output must be
zero and not NaN. Merging is done in fp32 whatever the model's dtype is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from headway.errors import ConfigError
from headway.runtime.interface import COMMUNICATIONS
from headway.runtime.model.attention import Scores
from headway.runtime.parallel.communicator import Communicator
from headway.runtime.parallel.prefill_context import TokenRanks

__all__ = ["HeadMerge", "Partial", "merge", "partial_attention"]


@dataclass(frozen=True)
class Partial:
    """Attention to a part of the entries.

    Attributes:
        out: float32 [..., heads, queries, value width], normalised over the part; 0 where a query sees nothing of it.
        lse: float32 [..., heads, queries], natural logarithm of the sum of the exponentials of the scores; -inf where a
            query sees nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def join(parts: list[Partial]) -> Partial:
        """Put stretches of queries one after another."""
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([p.out for p in parts], dim=-2), torch.cat([p.lse for p in parts], dim=-1))


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor | None
) -> Partial:
    """Attend to the entries of one rank.

    Args:
        query: [rows, heads, queries, width].
        key: [rows, kv heads, columns, width]; kv heads divide heads.
        value: [rows, kv heads, columns, value width]. Columns that no query sees may hold any finite number.
        scores: How to compute the scores. Sinks are left to the merge, in which they count once.
        mask: bool, broadcastable to [rows, 1, queries, columns], True where a column is seen; None if all are.
    """
    rows, heads, queries, width = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    folded = query.reshape(rows, kv_heads, heads // kv_heads * queries, width)
    weights = (folded @ key.transpose(2, 3)).view(rows, heads, queries, columns).float() * scores.scale
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if mask is not None:
        weights = weights.masked_fill(~mask, float("-inf"))
    lse = weights.logsumexp(dim=-1)
    probabilities = (weights - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(value.dtype)
    out = probabilities.view(rows, kv_heads, heads // kv_heads * queries, columns) @ value
    return Partial(out.view(rows, heads, queries, value.shape[3]).float(), lse)


def merge(parts: Partial, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Merge the parts of all ranks.

    Args:
        parts: `out` [ranks, rows, heads, queries, value width] and `lse` [ranks, rows, heads, queries].
        sinks: [heads], a score per head that takes part in the softmax and carries no value.

    Returns:
        float32 [rows, heads, queries, value width]; 0 where a query sees nothing of any part.
    """
    return (_weights(parts.lse, sinks)[..., None] * parts.out).sum(dim=0)


def _weights(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """What each part counts: [ranks, rows, heads, queries] to the same; 0 for an empty part."""
    total = lse.logsumexp(dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[None, :, None])
    return (lse - total.masked_fill(total == float("-inf"), 0.0)).exp()


class HeadMerge:
    """Merges the parts of the ranks that split tokens, a share of the heads on each.

    Args:
        ranks: Those of decode context parallelism; one alone without it.
        communication: `ag_rs` or `a2a`, among these.
        tokens: Those of prefill context parallelism, which hold as many groups like `ranks`; None without it.

    Attributes:
        shard: This rank's number among all that split tokens, 0 to `shards` - 1.
        shards: How many those are.

    Raises:
        ConfigError: Another `communication`.
    """

    def __init__(self, ranks: Communicator, communication: str = "ag_rs", tokens: TokenRanks | None = None) -> None:
        if communication not in COMMUNICATIONS:
            raise ConfigError(
                f"{communication!r} is no form of communication between context-parallel ranks: use ag_rs or a2a"
            )
        self.ranks = ranks
        self.communication = communication
        self.tokens = tokens
        self.shard, self.shards = ranks.rank, ranks.size
        if tokens is not None:
            self.shard, self.shards = tokens.ranks.rank * ranks.size + ranks.rank, tokens.ranks.size * ranks.size

    def gather_heads(self, own: torch.Tensor) -> torch.Tensor:
        """Put the heads of all ranks side by side, in the order of ranks: [rows, heads, ...] to [rows, all, ...]."""
        return self.ranks.all_gather(own).movedim(0, 1).flatten(1, 2)

    def __call__(
        self, part: Partial, sinks: torch.Tensor | None = None, own: bool = False, own_tokens: bool = False
    ) -> torch.Tensor:
        """Merge this rank's part with those of the others, which call this for the same queries.

        Args:
            part: `out` [rows, heads, queries, value width], of all heads.
            sinks: As for `merge`, of all heads.
            own: Return this rank's heads alone: an equal share, in the order of `gather_heads`.
            own_tokens: Return this rank's queries alone: its share of a forward's tokens.

        Returns:
            float32 [rows, heads, queries, value width], of all heads and queries, the same bits on every rank; or of
            its own.
        """
        if self.tokens is not None:
            part = self._merge_tokens(self.tokens, part, own_tokens)
        share = self._gather_sums(part, sinks) if self.communication == "ag_rs" else self._exchange_parts(part, sinks)
        if own or self.ranks.size == 1:
            return share
        rows, heads, queries, width = part.out.shape
        return self.ranks.all_gather(share).movedim(0, 1).reshape(rows, -1, queries, width)[:, :heads]

    @staticmethod
    def _merge_tokens(tokens: TokenRanks, part: Partial, own: bool) -> Partial:
        """The parts of the ranks of prefill context parallelism as one, of all queries or of this rank's `own`."""
        packed = torch.cat([part.out, part.lse[..., None]], dim=-1)
        parts = tokens.exchange(packed, dim=2) if own else tokens.ranks.all_gather(packed)
        heard = Partial(parts[..., :-1], parts[..., -1])
        return Partial(merge(heard), heard.lse.logsumexp(dim=0))

    def _gather_sums(self, part: Partial, sinks: torch.Tensor | None) -> torch.Tensor:
        weights = _weights(self.ranks.all_gather(part.lse), sinks)[self.ranks.rank]
        return self.ranks.reduce_scatter(self._shares(weights[..., None] * part.out))

    def _exchange_parts(self, part: Partial, sinks: torch.Tensor | None) -> torch.Tensor:
        packed = self._shares(torch.cat([part.out, part.lse[..., None]], dim=-1))
        received = self.ranks.all_to_all(packed)
        own = None if sinks is None else self._shares(sinks.view(1, -1, 1, 1))[self.ranks.rank].flatten()
        return merge(Partial(received[..., :-1], received[..., -1]), own)

    def _shares(self, whole: torch.Tensor) -> torch.Tensor:
        """Split heads among the ranks: [rows, heads, ...] to [size, rows, share, ...], filled up with zeros."""
        size, heads = self.ranks.size, whole.shape[1]
        share = -(-heads // size)
        filled = F.pad(whole, (0, 0, 0, 0, 0, share * size - heads))
        return filled.view(whole.shape[0], size, share, *whole.shape[2:]).movedim(1, 0).contiguous()
