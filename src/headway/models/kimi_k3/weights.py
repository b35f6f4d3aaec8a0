"""From the names and forms of published weights to those of the layers here, as they are read.

Two forms differ from what is computed with. Experts are packed in MXFP4: two 4-bit numbers to a byte, the first in the
low half, and a power of two for each 32 of them. `A_log` has 128 entries, of which the first count, one per head; the
others are what a kernel's block is filled up with. (One port reads it as one value per channel of a head instead; three
others do not.)
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

__all__ = ["published_names"]

_PACKED, _SCALE = "weight_packed", "weight_scale"
_A_LOG = "self_attn.forget_gate.A_log"


class _FirstHeads(ConversionOps):
    """`A_log` as far as there are heads."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        (whole,) = itertools.chain(*input_dict.values())
        return {name: [whole.flatten()[: model.get_parameter(name).numel()]]}


class _Unpack(ConversionOps):
    """Packed experts to one tensor of all, projections side by side.

    Where a part is missing there is no result, and the loader says what was not found.
    """

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        parts = [input_dict.get(pattern, []) for pattern in source_patterns]
        if len({len(part) for part in parts}) > 1:
            return {}
        dtype = model.get_parameter(name).dtype
        unpacked = [_unpacked(packed, scales, dtype) for packed, scales in zip(parts[::2], parts[1::2], strict=True)]
        return {name: [torch.cat(unpacked, dim=1)]}


def _unpacked(packed: list[Tensor], scales: list[Tensor], dtype: torch.dtype) -> Tensor:
    """[out, in / 2] and [out, in / 32] of each expert to [experts, out, in].

    The loader has cast the bytes to the dtype of the weights, in which whole numbers below 256 are exact.
    """
    scale = torch.stack(scales).to(torch.uint8)
    blocks = torch.stack(packed).to(torch.uint8)
    blocks = blocks.view(*scale.shape, -1)
    return convert_moe_packed_tensors(blocks, scale, dtype=dtype).transpose(1, 2).contiguous()


def published_names() -> list[WeightConverter | WeightRenaming]:
    """The rules, in transformers' form: names are changed by all that fit, then at most one rule converts."""
    experts = r"\.experts.*."
    residuals = [
        WeightRenaming(rf"\.{name}_{part}\.", rf".{name}.{part}.")
        for name in ("self_attention_res", "mlp_res", "output_attn_res")
        for part in ("norm", "proj")
    ]
    return [
        WeightRenaming(r"^language_model\.", ""),
        *get_checkpoint_conversion_mapping("kimi_linear"),
        WeightRenaming(r"self_attn\.g_proj\.", "self_attn.g_b_proj."),
        *residuals,
        WeightConverter(_A_LOG, _A_LOG, [_FirstHeads()]),
        WeightConverter(
            [f"{experts}{name}.{kind}" for name in ("w1", "w3") for kind in (_PACKED, _SCALE)],
            r"\.experts.gate_up_proj",
            [_Unpack()],
        ),
        WeightConverter([f"{experts}w2.{kind}" for kind in (_PACKED, _SCALE)], r"\.experts.down_proj", [_Unpack()]),
    ]
