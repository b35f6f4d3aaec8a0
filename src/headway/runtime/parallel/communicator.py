"""What one rank needs of a group of ranks: four collectives.

Attention, weights and drafts ask for no more, so the ranks may be processes (`headway.runtime.parallel.distributed`),
threads, or not there at all: `Rehearsal` finds out what a rank would store without any other rank.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Communicator", "Rehearsal"]


class Communicator(Protocol):
    """One rank's access to a group of ranks. All of them make the same calls in the same order.

    Attributes:
        rank: This rank, 0 to size - 1.
        size: Number of ranks.
    """

    rank: int
    size: int

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Give every rank every part: [...] to [size, ...], row r from rank r."""
        ...

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of the row that has this rank's number: [size, ...] to [...]."""
        ...

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r: [size, ...] to [size, ...], row r from rank r."""
        ...

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over ranks: [...] to [...], the same bits on every rank. `part` may be overwritten."""
        ...


class Rehearsal:
    """Rank 0 of ranks that are not there, for tensors without numbers: shapes come out right (see `Communicator`).

    Args:
        size: How many ranks are imagined.
    """

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """[...] to [size, ...]."""
        return part.expand(self.size, *part.shape)

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """[size, ...] to [...]."""
        return parts[0]

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """[size, ...] to [size, ...]."""
        return parts

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """[...] to [...]."""
        return part
