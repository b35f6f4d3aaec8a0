"""Entries and states that are stored as a narrower type than the model computes with.

Numbers become narrower in one place (`as_stored`): they are clamped to the range of the type and rounded. Attention
entries are rounded before anything attends to them, so each is read as it is stored from its first use on, and an
answer does not depend on chunks, hits or ranks. That holds only for a model that attends to what its cache returns
(`headway.runtime.model.inspection.require_read_back`).

States are another matter. A kernel keeps a state in its own type from the first to the last token of a forward; only
what is stored between forwards can be rounded. So with narrower states an answer may depend, in the last bits of a
state, on where forwards ended.

The scale of fp8 entries is 1: a number of 448 or more is stored as 448, one below 0.001 as 0. Rejected: scales that are
measured from the first tokens or per block. What a block holds would then depend on what was computed first, and two
requests could not share it.
"""

from __future__ import annotations

import torch

from headway.runtime.interface import StoredTypes
from headway.runtime.model.layout import ModelLayout

__all__ = ["as_stored", "stored_layout"]

_TYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def as_stored(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers as they are stored: rounded to `dtype`, and what is out of its range to its ends. NaN stays NaN."""
    if dtype is torch.float8_e4m3fn and numbers.dtype is not dtype:
        numbers = numbers.clamp(-_LARGEST, _LARGEST)
    return numbers.to(dtype)


def stored_layout(layout: ModelLayout, types: StoredTypes) -> ModelLayout:
    """What a model stores if its entries and states are stored as these types.

    Raises:
        ConfigError: The model keeps nothing of the kind, or computes with a type that is no wider.
    """
    return layout.stored_as(_TYPES[types.entries], _TYPES[types.states])
