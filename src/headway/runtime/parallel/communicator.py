"""What one rank needs of a group of ranks: five collectives, and to hand something on to the next rank.

Attention, weights, states and drafts ask for no more, so the ranks may be processes
(`headway.runtime.parallel.distributed`), threads, or not there at all: `Rehearsal` finds out what a rank would store
without any other rank.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def broadcast(self, part: torch.Tensor, root: int) -> torch.Tensor:
        """Give every rank what rank `root` has. `part` may be overwritten."""
        ...

    def pass_on(self, part: torch.Tensor) -> Callable[[], object]:
        """Send the next rank a tensor, without waiting for it. The last rank sends nothing.

        Returns:
            What waits until it is sent. Until then `part` stays as it is.
        """
        ...

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """What the rank before has passed on, in order, of the shape and type of `like`; on rank 0 `like` itself."""
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

    def broadcast(self, part: torch.Tensor, root: int) -> torch.Tensor:
        """[...] to [...]."""
        return part

    def pass_on(self, part: torch.Tensor) -> Callable[[], object]:
        """Send nothing."""
        return lambda: None

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """[...] to [...]."""
        return like
