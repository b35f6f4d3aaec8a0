"""How tensor parallelism cuts recurrent mixers by heads: one record a kind, and the classes that are of it.

transformers' plans leave recurrent mixers whole, or gather what they project, so that every rank would keep every
state. Heads of KDA, Gated DeltaNet and Mamba-2 do not see each other between the input projections and the output
projection: a rank that has some of the rows of the former, and the columns of the latter, keeps the states of its heads
alone, and what the ranks put out adds up to the whole. Only projections that are fused need care (each part is cut by
itself), a head's partners (keys that several value heads share, groups of Mamba-2), and a norm over more than a head.

The classes' own code computes the share: the sizes that they keep are divided along. A record has to speak of every
parameter of its class, so a class that grows one is refused instead of computed wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError, ModelError
from headway.runtime.model.layout import Part
from headway.runtime.parallel.communicator import Communicator
from headway.runtime.parallel.cuts import Cut, divide, keep_share, sum_once

__all__ = ["CONVOLUTION_PARTS", "MIXERS", "split_mixer"]

CONVOLUTION_PARTS = "headway_convolution_parts"
"""Attribute of a mixer that was split: a tuple of `Part`, how the channels of its convolution were cut."""


@dataclass(frozen=True)
class _Mixer:
    """How one mixer is cut.

    Attributes:
        cuts: Parameters that are cut, by name. A class of the kind need not have all.
        whole: Parameters that every rank keeps, by name.
        output: The module whose partial outputs are summed; its weight is among the cuts, its bias counts once.
        numbers: Sizes that are divided by the number of ranks, by name.
        groups: Groups of heads that share keys, of which a rank may have a part; 0 if there are none.
        norm: A gated norm over such groups, by name; "" if there is none.
    """

    cuts: Mapping[str, Cut]
    whole: tuple[str, ...]
    output: str
    numbers: tuple[str, ...]
    groups: int = 0
    norm: str = ""


def _kimi_delta(mixer: Any) -> _Mixer:
    heads, width = mixer.num_heads, mixer.qkv_dim
    rows, each = (Part(width, heads),), (Part(heads, heads),)
    projections = ("q_proj", "k_proj", "v_proj", "g_b_proj", "g_proj", "forget_gate.f_b_proj", "forget_gate.f_proj")
    return _Mixer(
        cuts={f"{name}.weight": Cut(0, rows, "heads") for name in projections}
        | {
            "conv1d.weight": Cut(0, rows * 3, "heads"),
            "b_proj.weight": Cut(0, each, "heads"),
            "forget_gate.dt_bias": Cut(0, rows, "heads"),
            "forget_gate.A_log": Cut(0 if mixer.forget_gate.A_log.ndim == 1 else 2, each, "heads"),
            "o_proj.weight": Cut(1, rows, "heads"),
        },
        whole=("forget_gate.f_a_proj.weight", "g_a_proj.weight", "o_norm.weight"),
        output="o_proj",
        numbers=("num_heads", "qkv_dim", "conv_dim", "forget_gate.num_heads", "forget_gate.qkv_dim"),
    )


def _gated_delta(mixer: Any) -> _Mixer:
    """Key heads decide: a key head and the value heads that share it stay together."""
    keys, values = mixer.num_k_heads, mixer.num_v_heads
    key, value = Part(mixer.key_dim, keys), Part(mixer.value_dim, keys)
    each = Cut(0, (Part(values, keys),), "key heads")
    fused = Part(2 * (mixer.key_dim + mixer.value_dim), keys)

    def rows(*parts: Part) -> Cut:
        return Cut(0, parts, "key heads")

    return _Mixer(
        cuts={
            "in_proj_qkvz.weight": rows(fused),  # key head by key head
            "in_proj_ba.weight": rows(Part(2 * values, keys)),
            "in_proj_qkv.weight": rows(key, key, value),
            "in_proj_z.weight": rows(value),
            "in_proj_b.weight": each,
            "in_proj_a.weight": each,
            "q_proj.weight": rows(key),
            "k_proj.weight": rows(key),
            "v_proj.weight": rows(value),
            "g_proj.weight": rows(value),
            "b_proj.weight": each,
            "a_proj.weight": each,
            "conv1d.weight": rows(key, key, value),
            "A_log": each,
            "dt_bias": each,
            "out_proj.weight": Cut(1, (value,), "key heads"),
            "o_proj.weight": Cut(1, (value,), "key heads"),
        },
        whole=("norm.weight", "o_norm.weight"),
        output="out_proj" if hasattr(mixer, "out_proj") else "o_proj",
        numbers=("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
    )


def _mamba2(mixer: Any) -> _Mixer:
    """Groups of heads share B and C; where ranks outnumber groups, all ranks with heads of a group have its B and C."""
    heads, groups = mixer.num_heads, mixer.n_groups
    inner = Part(mixer.intermediate_size, heads)
    shared = Part(groups * mixer.ssm_state_size, groups, shared=True)
    each = Part(heads, heads)

    def rows(*parts: Part) -> Cut:
        return Cut(0, parts, "heads or groups")

    projected, convolved = rows(inner, inner, shared, shared, each), rows(inner, shared, shared)
    return _Mixer(
        cuts={
            "in_proj.weight": projected,
            "in_proj.bias": projected,
            "conv1d.weight": convolved,
            "conv1d.bias": convolved,
            "dt_bias": rows(each),
            "A_log": rows(each),
            "D": rows(each),
            "norm.weight": rows(inner),
            "out_proj.weight": Cut(1, (inner,), "heads"),
        },
        whole=("out_proj.bias",),
        output="out_proj",
        numbers=("num_heads", "intermediate_size"),
        groups=groups,
        norm="norm",
    )


MIXERS: dict[str, Callable[[Any], _Mixer]] = {
    "KimiLinearDeltaAttention": _kimi_delta,
    "KimiK3DeltaAttention": _kimi_delta,
    "BailingHybridDeltaAttention": _kimi_delta,
    "Qwen3NextGatedDeltaNet": _gated_delta,
    "Qwen3_5GatedDeltaNet": _gated_delta,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "OlmoHybridGatedDeltaNet": _gated_delta,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
}
"""The classes of mixers that can be cut by heads, and what makes their record."""


def split_mixer(mixer: nn.Module, ranks: Communicator) -> None:
    """Leave a mixer with its share of the heads, and let its output be summed over the ranks.

    Args:
        mixer: One of a class in `MIXERS`.
        ranks: The ranks that share it.

    Raises:
        ConfigError: Its heads or groups cannot be shared evenly.
        ModelError: It has a parameter that its record does not know.
    """
    kind = type(mixer).__name__
    record = MIXERS[kind](mixer)
    names = [name for name, _ in mixer.named_parameters()]
    strange = [name for name in names if name not in record.cuts and name not in record.whole]
    if strange:
        raise ModelError(
            f"{kind} has a parameter {strange[0]!r} that Headway does not know how to share among ranks: use --dcp "
            f"without --tp"
        )
    for name in names:
        if name in record.cuts:
            owner, _, own = name.rpartition(".")
            keep_share(mixer.get_submodule(owner), own, record.cuts[name], ranks, f"{kind}.{name}")
    for name in record.numbers:
        owner, _, own = name.rpartition(".")
        divide(mixer.get_submodule(owner), own, ranks.size)
    if record.groups:
        _share_groups(mixer, record, ranks)
    vars(mixer)[CONVOLUTION_PARTS] = record.cuts["conv1d.weight"].parts  # its state has the channels of its weight
    convolution: Any = mixer.get_submodule("conv1d")
    convolution.in_channels = convolution.out_channels = convolution.groups = len(convolution.weight)
    sum_once(mixer.get_submodule(record.output), ranks)


def _share_groups(mixer: Any, record: _Mixer, ranks: Communicator) -> None:
    """Set the number of groups that a rank has, and let a norm over a torn group see all of it."""
    mixer.n_groups = max(1, record.groups // ranks.size)
    mixer.conv_dim = mixer.intermediate_size + 2 * mixer.n_groups * mixer.ssm_state_size
    if record.groups < ranks.size:
        _span_norm(getattr(mixer, record.norm), ranks, ranks.size // record.groups)


def _span_norm(norm: Any, ranks: Communicator, span: int) -> None:
    """Let a gated RMS norm take its mean over `span` consecutive ranks, which hold one group together.

    Raises:
        ConfigError: The norm is not one over groups of heads.
    """
    if not hasattr(norm, "group_size") or norm.group_size != span * len(norm.weight):
        raise ConfigError(
            f"tp={ranks.size}: {type(norm).__name__} is over something else than the groups of its mixer, and its mean "
            f"cannot be taken over ranks: use --dcp without --tp"
        )
    first = ranks.rank // span * span

    def forward(hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        gated = hidden_states.float()
        if gate is not None:
            gated = gated * nn.functional.silu(gate.float())
        squares = ranks.all_gather(gated.square().sum(dim=-1, keepdim=True))[first : first + span].sum(dim=0)
        normed = gated * torch.rsqrt(squares / norm.group_size + norm.variance_epsilon)
        scaled: torch.Tensor = norm.weight * normed.to(hidden_states.dtype)
        return scaled

    norm.forward = forward
