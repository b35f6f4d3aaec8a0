"""Prefill context parallelism: each rank computes its share of the tokens of a long chunk of a prompt.

A forward of a chunk is cut into as many runs of consecutive tokens as there are ranks, rank r the r-th. A rank computes
embeddings, projections, norms, MLPs and experts of its own tokens alone: the model runs on them as if they were the
chunk. Only what looks at other tokens needs the other ranks:

- *Attention.* The new keys and values are gathered, so that every rank stores what it stores in any other step. Where
  the entries are split by tokens, the queries are gathered too: a rank attends with all of them to its own entries, and
  gets back its own tokens, merged (`headway.runtime.parallel.context_parallel`). So each rank has 1/N of the work for
  any cut, because entries are dealt out in turn; no rank need have an early and a late part of the chunk. Windows and
  chunks are whole on every rank, which attends to them with its own queries alone.
- *States.* A recurrent mixer takes its states from the rank before, as from a chunk before, and hands on what it left.
  That is the path of a chunked prefill, which every model served here has and which is checked at start; no kind of
  mixer needs a line of its own. The mixers of the ranks run one after another, but the rank of earlier tokens is by
  then at its next layers: ranks wait for each other once per layer of attention, not per layer.
- At the end, the last rank gives its states and its logits to all.

So after every forward all ranks hold what they would hold had each computed everything: blocks, checkpoints and hits
know nothing of it. A chunk of few tokens, and a decoding step, is computed by all ranks alike.

Rejected: gathering tokens and computing some of the heads of a mixer on each rank (two exchanges of all tokens per
layer where one of a state does, and a record of how to cut each kind of mixer); the two-pass scan (a product of
transition matrices per segment, for each kind of mixer other ones, which transformers' kernels do not give out).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from headway.runtime.parallel.communicator import Communicator

__all__ = ["LEAST_SHARE", "TokenRanks", "share_of"]

LEAST_SHARE = 16
"""Tokens per rank from which a forward is split. A forward of fewer takes about as long as one of a single token."""


def share_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Which of `count` tokens rank `rank` of `size` computes, half-open: all of them where they are not split.

    Shares are equal but for the last, which has at least 2 tokens: a model computes one token by another path.
    """
    each = -(-count // size)
    if each < LEAST_SHARE or (size - 1) * each + 2 > count:
        return 0, count
    return rank * each, min(count, (rank + 1) * each)


class TokenRanks:
    """The ranks that split the tokens of a forward, seen from one of them.

    Args:
        ranks: The group, in the order of tokens.
    """

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self._unsent: list[Callable[[], object]] = []

    def gather(self, own: torch.Tensor, count: int, dim: int) -> torch.Tensor:
        """Put the shares of `count` tokens of all ranks one after another along dimension `dim`."""
        each = -(-count // self.ranks.size)
        filled = F.pad(own, (0, 0) * (own.ndim - 1 - dim) + (0, each - own.shape[dim]))
        return self.ranks.all_gather(filled).movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, count)

    def exchange(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Send every rank its share of the tokens along `dim`: [...] to [size, ...], row r this rank's, from rank r."""
        size, count = self.ranks.size, whole.shape[dim]
        each = -(-count // size)
        filled = F.pad(whole, (0, 0) * (whole.ndim - 1 - dim) + (0, size * each - count))
        parts = filled.reshape(*whole.shape[:dim], size, each, *whole.shape[dim + 1 :]).movedim(dim, 0)
        first, stop = share_of(count, self.ranks.rank, size)
        return self.ranks.all_to_all(parts.contiguous()).narrow(dim + 1, 0, stop - first)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """What the rank of the tokens before handed on; `like` on the first rank."""
        return self.ranks.take(like)

    def hand_on(self, part: torch.Tensor) -> None:
        """Give the rank of the tokens behind a tensor, which nobody changes until `from_last` has returned."""
        self._unsent.append(self.ranks.pass_on(part))

    def from_last(self, part: torch.Tensor) -> torch.Tensor:
        """Give every rank what the rank of the last tokens has. Waits for what was handed on."""
        for wait in self._unsent:
            wait()
        self._unsent.clear()
        return self.ranks.broadcast(part, self.ranks.size - 1)
