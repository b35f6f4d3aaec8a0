"""The optimiser: momentum with orthogonalised updates (Muon) for matrices, AdamW for everything else.

The update of a matrix is its momentum with all singular values moved close to one, by a few steps of a matrix
polynomial. Stacks of matrices (the experts) are handled as a batch. On this model it needs clearly fewer tokens than
AdamW alone, and the extra work is about a tenth of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Singular values near one, same singular vectors; works on the last two dimensions."""
    a, b, c = _POLYNOMIAL
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.transpose(-1, -2) if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.transpose(-1, -2) if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for parameters with two or more dimensions."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One update; `closure` is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(gradient))
                average.lerp_(gradient, 1 - group["momentum"])
                update = orthogonalise(gradient.lerp(average, group["momentum"]))
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def make(model: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """The two optimisers of a model; embeddings, output head, router, convolutions and vectors go to AdamW."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        special = any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.weight", "conv1d", "A_log"))
        (others if special or parameter.ndim < 2 else matrices).append(parameter)
    adam = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.01)
    return [Muon(matrices, lr=matrix_lr), adam]
