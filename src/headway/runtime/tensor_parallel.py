"""Tensor parallelism: every rank keeps its share of the weights, and computes with it.

What is cut says transformers' own plan for the model (`base_model_tp_plan` of its config): attention, MLP, experts, as
far as it goes. Recurrent mixers, which the plans leave whole, are cut by heads with records of Headway's
(`headway.runtime.mixers`). What the plan says is done here and not by transformers: its hooks want a device mesh and
wrap weights for training, and here the same few rules (cut, sum, gather) serve ranks that are processes, threads, or
not there at all, in a rehearsal without numbers that says what a rank will store.

Embeddings and the output head stay whole on every rank, whatever the plan: drafters read them on rank 0 alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.errors import ModelError
from headway.runtime.communicator import Communicator
from headway.runtime.cuts import Cut, even, gather_output, keep_share, scale_input, split_input, sum_once
from headway.runtime.inspection import inspect_model
from headway.runtime.layout import LayerLayout, ModelLayout, Share
from headway.runtime.mixers import MIXERS, split_mixer

__all__ = ["layout_of_share", "rules_of_reading", "split_model"]

_ParameterRule = Callable[[torch.Tensor, int | None], Cut]


def _rows(whole: torch.Tensor, unit: int | None) -> Cut:
    """Output features, which are the last dimension but one; those of a bias are its only one."""
    return _even(whole, max(0, whole.ndim - 2), unit)


def _columns(whole: torch.Tensor, unit: int | None) -> Cut:
    """Input features."""
    return _even(whole, whole.ndim - 1, unit)


def _even(whole: torch.Tensor, dim: int, unit: int | None) -> Cut:
    """Equal runs of `dim`, of whole units of `unit` elements if there are such."""
    if unit is None or whole.shape[dim] % unit:
        return even(whole, dim)
    return even(whole, dim, units=whole.shape[dim] // unit, what="heads")


def _packed_rows(whole: torch.Tensor, unit: int | None) -> Cut:
    """Output features of two projections, one after the other."""
    return even(whole, max(0, whole.ndim - 2), parts=2)


def _packed_columns(whole: torch.Tensor, unit: int | None) -> Cut:
    return even(whole, whole.ndim - 1, parts=2)


_CUTS: dict[str, _ParameterRule] = {
    "colwise": _rows,
    "colwise_rep": _rows,
    "colwise_gather_output": _rows,
    "rowwise": _columns,
    "rowwise_rep": _columns,
    "rowwise_split_input": _columns,
    "packed_colwise": _packed_rows,
    "packed_rowwise": _packed_columns,
}
"""Styles of transformers' plans by the cut that they make of a weight."""
_BIAS_ONCE = {"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"}
"""Styles under which a bias is not cut: it counts on one rank."""
_BY_HEADS = {"colwise", "rowwise"}
"""Styles of attention that computes some of the heads."""
_SUMMED = {"rowwise", "rowwise_rep", "rowwise_split_input", "all_reduce", "moe_tp_experts"}
_GATHERED = {"colwise_rep", "colwise_gather_output"}
_SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
_NOTHING = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
"""Styles that matter to training, or to how transformers stores weights."""
_KNOWN = {*_CUTS, *_SUMMED, *_GATHERED, *_SPLIT_INPUT, *_NOTHING, "moe_identity_expert"}


def split_model(model: PreTrainedModel, ranks: Communicator, shares: frozenset[str] = frozenset()) -> None:
    """Leave a model with this rank's share of its weights. Its forward then calls the other ranks.

    Args:
        model: The whole model, on any device; without numbers too.
        ranks: The ranks that share it.
        shares: Names of parameters that have been cut already.

    Raises:
        ModelError: There is no plan for the model, or one that cannot be followed.
        ConfigError: The number of ranks does not divide its heads or sizes.
    """
    mixers, planned = _parted(model)
    plan = _plan_of(model, planned)
    for mixer in mixers.values():
        split_mixer(mixer, ranks)
    for path, module in planned.items():
        _split_parameters(path, model, plan, ranks, shares)
        if (style := plan.get(_generic(path))) is not None:
            _hook(module, style, ranks)


def rules_of_reading(model: PreTrainedModel) -> Mapping[str, str]:
    """The rules of a model's plan under which nothing may be cut yet, with the style that says so.

    Raises:
        ModelError: As for `split_model`.
    """
    mixers, planned = _parted(model)
    plan = _plan_of(model, planned)
    inside = {_generic(f"{path}.{name}") for path, mixer in mixers.items() for name, _ in mixer.named_modules()}
    return {rule: "replicate" for rule in _as_any(model).tp_plan if rule not in plan or rule in inside}


def _parted(model: PreTrainedModel) -> tuple[Mapping[str, nn.Module], Mapping[str, nn.Module]]:
    """A model's recurrent mixers, and its other modules, by their paths."""
    modules = dict(model.named_modules())
    mixers = {path: module for path, module in modules.items() if type(module).__name__ in MIXERS}
    inside = tuple(f"{path}." for path in mixers)
    return mixers, {p: m for p, m in modules.items() if p not in mixers and not p.startswith(inside)}


def _plan_of(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> Mapping[str, str]:
    """What the model's plan says of some of its modules and their parameters, without what stays whole: rule to style.

    Raises:
        ModelError: Nothing, or something in a style that is not known here.
    """
    name, network = type(model).__name__, _as_any(model)
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    within = {path: module for path, module in modules.items() if not any(module is end for end in ends)}
    present = {_generic(path) for path in within}
    present |= {_generic(f"{path}.{own}") for path, m in within.items() for own, _ in m.named_parameters(recurse=False)}
    rules: Mapping[str, str] = network.tp_plan or {}
    plan = {r: style for r, style in rules.items() if r in present and not style.startswith("embedding")}
    if not plan:
        raise ModelError(
            f"{name}: transformers has no tensor-parallel plan for the layers of this model, so --tp cannot be served: "
            f"use --dcp without --tp, which leaves the weights whole on every rank"
        )
    if strange := sorted(set(plan.values()) - _KNOWN):
        raise ModelError(f"{name}: its tensor-parallel plan has a style that Headway cannot follow: {strange[0]}")
    return plan


def _split_parameters(
    path: str, model: PreTrainedModel, plan: Mapping[str, str], ranks: Communicator, shares: frozenset[str]
) -> None:
    """Cut a module's own parameters; where its owner computes in heads, no head is torn."""
    module, owner = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    for own, parameter in list(module.named_parameters(recurse=False)):
        called = f"{path}.{own}" if path else own
        style = plan.get(_generic(called)) or plan.get(_generic(path)) or ""
        if called not in shares and style in _CUTS and not (own == "bias" and style in _BIAS_ONCE):
            unit = getattr(owner, "head_dim", None) if style in _BY_HEADS else None
            keep_share(module, own, _CUTS[style](parameter, unit), ranks, called)


def _hook(module: nn.Module, style: str, ranks: Communicator) -> None:
    """Make a module's forward exchange what its style says."""
    if style in _SPLIT_INPUT:
        split_input(module, ranks)
    if style in _SUMMED:
        sum_once(module, ranks)
    if style in _GATHERED:
        gather_output(module, ranks)
    if style == "moe_identity_expert":
        scale_input(module, 1 / ranks.size)


def _generic(path: str) -> str:
    """A module's path as plans name it: numbers of layers become stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def layout_of_share(whole: ModelLayout, model: PreTrainedModel, tp: int) -> ModelLayout:
    """The layout of a model that `split_model` has cut.

    Args:
        whole: The layout of the whole model.
        model: What a rank has of it. On ranks that are there, all of them call this together.
        tp: How many ranks there are.

    Raises:
        ModelError: A layer was left in a state that cannot be served.
    """
    found = inspect_model(model)
    layers = tuple(
        _layer(was, now, found, whole, model, tp) for was, now in zip(whole.layers, found.layers, strict=True)
    )
    return replace(whole, layers=layers, groups=found.groups, tp=tp, rank_parameters=found.parameters)


def _layer(
    was: LayerLayout, now: LayerLayout, found: ModelLayout, whole: ModelLayout, model: PreTrainedModel, tp: int
) -> LayerLayout:
    """What a rank keeps of a layer, and whether that is some of the heads."""
    if was.state is not None and now.state is not None and now.state.bytes >= was.state.bytes:
        kinds = {type(m).__name__ for m in model.modules() if getattr(m, "layer_idx", None) == was.index}
        raise ModelError(
            f"{whole.model}: layer {was.index} ({', '.join(sorted(kinds))}) keeps a recurrent state that Headway "
            f"cannot split by heads, so --tp cannot be served: use --dcp without --tp"
        )
    cached, caches = whole.source(was.index).tokens, found.source(was.index).tokens
    if cached is None or caches is None:
        return now
    had, has = cached.fields[0].shape[0], caches.fields[0].shape[0]
    queries = now.heads * tp == was.heads
    if now.heads == was.heads and has == had:
        return now
    if queries and has * tp == had:
        return replace(now, share=Share.SPLIT)
    if queries and has == had == 1:
        return replace(now, share=Share.QUERIES)
    raise ModelError(
        f"{whole.model}: in layer {was.index} a rank of {tp} computes {now.heads} of {was.heads} query heads and keeps "
        f"{has} of {had} key/value heads, which do not go together: use --dcp without --tp"
    )


def _as_any(model: PreTrainedModel) -> Any:
    return model
