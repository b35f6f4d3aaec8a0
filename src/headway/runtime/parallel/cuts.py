"""How tensors are cut among the ranks of tensor parallelism, and what becomes of what modules compute with shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError
from headway.runtime.model.layout import Part
from headway.runtime.parallel.communicator import Communicator

__all__ = [
    "Cut",
    "divide",
    "even",
    "gather_output",
    "keep_share",
    "scale_input",
    "split_input",
    "sum_once",
]


@dataclass(frozen=True)
class Cut:
    """A tensor's cut along one dimension, in parts that lie one after another.

    Attributes:
        dim: The dimension; negative counts from the last.
        parts: They cover it.
        what: What the units are, for messages.
    """

    dim: int
    parts: tuple[Part, ...]
    what: str = "elements"

    def of(self, whole: torch.Tensor, rank: int, size: int, name: str) -> torch.Tensor:
        """The share of one rank, a copy.

        Raises:
            ConfigError: It cannot be cut evenly; `name` is what the message calls it.
        """
        assert sum(part.length for part in self.parts) == whole.shape[self.dim], f"{name} is of another shape"
        start, pieces = 0, []
        for part in self.parts:
            share = part.of(rank, size)
            if share is None:
                raise ConfigError(
                    f"tp={size} does not divide the {part.units} {self.what} of {name}: choose a --tp that does"
                )
            pieces.append(whole.narrow(self.dim, start + share[0], share[1] - share[0]))
            start += part.length
        return torch.cat(pieces, dim=self.dim)


def even(whole: torch.Tensor, dim: int, parts: int = 1, units: int | None = None, what: str = "elements") -> Cut:
    """A cut into equal runs of each of `parts` equal parts.

    Args:
        whole: The tensor.
        dim: Its dimension to cut.
        parts: How many parts lie one after another.
        units: Units of each part; None for single elements.
        what: What the units are.
    """
    length = whole.shape[dim] // parts
    return Cut(dim, (Part(length, length if units is None else units),) * parts, what)


def keep_share(module: nn.Module, name: str, cut: Cut, ranks: Communicator, called: str) -> None:
    """Replace a module's parameter by this rank's share of it.

    Raises:
        ConfigError: It cannot be cut evenly; `called` is what the message calls it.
    """
    whole = module.get_parameter(name)
    share = cut.of(whole.detach(), ranks.rank, ranks.size, called)
    module.register_parameter(name, nn.Parameter(share, requires_grad=False))


def divide(module: nn.Module, name: str, size: int) -> None:
    """Divide a number that a module keeps of its own sizes; its parameters have been cut as evenly before."""
    setattr(module, name, getattr(module, name) // size)


def sum_once(module: nn.Module, ranks: Communicator) -> None:
    """Add up over the ranks what a module puts out. A bias stays on rank 0 alone, so that it counts once."""
    bias = module._parameters.get("bias")
    if bias is not None and ranks.rank > 0:
        module.register_parameter("bias", nn.Parameter(torch.zeros_like(bias), requires_grad=False))

    def add_up(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return ranks.all_reduce(output)

    module.register_forward_hook(add_up)


def gather_output(module: nn.Module, ranks: Communicator) -> None:
    """Put the ranks' shares of a module's output side by side, along the last dimension."""

    def gather(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return ranks.all_gather(output).movedim(0, -2).flatten(-2)

    module.register_forward_hook(gather)


def split_input(module: nn.Module, ranks: Communicator) -> None:
    """Give a module this rank's equal share of the last dimension of its input."""

    def take(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        whole, *others = args
        return (whole.chunk(ranks.size, dim=-1)[ranks.rank], *others)

    module.register_forward_pre_hook(take)


def scale_input(module: nn.Module, factor: float) -> None:
    """Multiply a module's input."""

    def scale(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        whole, *others = args
        return (whole * factor, *others)

    module.register_forward_pre_hook(scale)
