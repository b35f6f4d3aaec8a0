"""Tensor parallelism: every rank keeps its share of the weights, and computes with it.

What is cut says transformers' own plan for the model (`base_model_tp_plan` of its config): attention, MLP, experts, as
far as it goes. Recurrent mixers, which the plans leave whole, are cut by heads with records of Headway's
(`headway.runtime.parallel.mixers`). What the plan says is done here and not by transformers: its hooks want a device
mesh and wrap weights for training, and here the same few rules (cut, sum, gather) serve ranks that are processes,
threads, or not there at all, in a rehearsal without numbers that says what a rank will store.

Embeddings and the output head stay whole on every rank, whatever the plan: drafters read them on rank 0 alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headway.errors import ModelError
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.layout import Entries, Field, LayerLayout, ModelLayout, Part, Share
from headway.runtime.parallel.communicator import Communicator
from headway.runtime.parallel.cuts import Cut, even, gather_output, keep_share, scale_input, split_input, sum_once
from headway.runtime.parallel.mixers import CONVOLUTION_PARTS, MIXERS, split_mixer

__all__ = ["layout_of_share", "rules_of_reading", "split_model"]

_OUTPUT, _INPUT = -2, -1
"""Dimensions of a weight, counted from the last. The only one of a bias is of output features."""


@dataclass(frozen=True)
class _Style:
    """What a rank does with what a plan names, by a style of transformers' plans.

    Attributes:
        dim: The dimension along which weights are cut; None if they stay whole.
        parts: Projections that lie one after another there.
        heads: It is attention's: no head is torn.
        splits_input: A module takes this rank's share of its input.
        scales_input: A module takes its input by the number of ranks, because what it puts out is summed later.
        sums: What a module puts out is summed over the ranks.
        gathers: What a module puts out is put side by side.
    """

    dim: int | None = None
    parts: int = 1
    heads: bool = False
    splits_input: bool = False
    scales_input: bool = False
    sums: bool = False
    gathers: bool = False

    def cut(self, whole: torch.Tensor, head_dim: int | None) -> Cut:
        """The cut of a parameter; `head_dim` is that of its owner, if it has heads."""
        assert self.dim is not None, "a style without a dimension leaves parameters whole"
        dim = max(0, whole.ndim + self.dim)
        heads, torn = divmod(whole.shape[dim], head_dim or 1)
        if self.heads and head_dim is not None and not torn:
            return even(whole, dim, units=heads, what="heads")
        return even(whole, dim, self.parts)

    def exchange(self, module: nn.Module, ranks: Communicator) -> None:
        """Make a module's forward exchange what the style says."""
        if self.splits_input:
            split_input(module, ranks)
        if self.scales_input:
            scale_input(module, 1 / ranks.size)
        if self.sums:
            sum_once(module, ranks)
        if self.gathers:
            gather_output(module, ranks)


_WHOLE = _Style()
_STYLES = {
    "colwise": _Style(_OUTPUT, heads=True),
    "colwise_rep": _Style(_OUTPUT, gathers=True),
    "colwise_gather_output": _Style(_OUTPUT, gathers=True),
    "rowwise": _Style(_INPUT, heads=True, sums=True),
    "rowwise_rep": _Style(_INPUT, splits_input=True, sums=True),
    "rowwise_split_input": _Style(_INPUT, splits_input=True, sums=True),
    "packed_colwise": _Style(_OUTPUT, parts=2),
    "packed_rowwise": _Style(_INPUT, parts=2),
    "all_reduce": _Style(sums=True),
    "moe_tp_experts": _Style(sums=True),
    "moe_identity_expert": _Style(scales_input=True),
    # These matter to training, or to how transformers stores weights.
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "local_params": _WHOLE,
}
"""Styles of transformers' plans, by their names there."""


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
            style.exchange(module, ranks)


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


def _plan_of(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> Mapping[str, _Style]:
    """What the model's plan says of some of its modules and their parameters, without embeddings and head, by rule.

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
    if strange := sorted(set(plan.values()) - set(_STYLES)):
        raise ModelError(f"{name}: its tensor-parallel plan has a style that Headway cannot follow: {strange[0]}")
    return {rule: _STYLES[style] for rule, style in plan.items()}


def _split_parameters(
    path: str, model: PreTrainedModel, plan: Mapping[str, _Style], ranks: Communicator, shares: frozenset[str]
) -> None:
    """Cut a module's own parameters; where its owner computes in heads, no head is torn."""
    module, owner = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    for own, parameter in list(module.named_parameters(recurse=False)):
        called = f"{path}.{own}" if path else own
        style = plan.get(_generic(called)) or plan.get(_generic(path)) or _WHOLE
        whole = style.dim is None or (style.dim == _INPUT and own == "bias")
        if not whole and called not in shares:
            keep_share(module, own, style.cut(parameter, getattr(owner, "head_dim", None)), ranks, called)


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
        _with_parts(was, _layer(was, now, found, whole, model, tp), model, tp)
        for was, now in zip(whole.layers, found.layers, strict=True)
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


def _with_parts(was: LayerLayout, now: LayerLayout, model: PreTrainedModel, tp: int) -> LayerLayout:
    """A rank's layer with how each of its fields is cut out of the whole one's."""
    tokens, state = now.tokens, now.state
    if tokens is not None and was.tokens is not None:
        split = now.share is Share.SPLIT
        tokens = _cut(was.tokens, tokens, [_heads(field) if split else () for field in was.tokens.fields], tp)
    if state is not None and was.state is not None:
        mixer = next((m for m in model.modules() if getattr(m, "layer_idx", None) == was.index and _parts_of(m)), None)
        channels = () if mixer is None else _parts_of(mixer)
        parts = [channels if field.name.startswith("conv") else _heads(field) for field in was.state.fields]
        state = _cut(was.state, state, parts, tp)
    return replace(now, tokens=tokens, state=state)


def _heads(field: Field) -> tuple[Part, ...]:
    return (Part(field.shape[0], field.shape[0]),)


def _parts_of(mixer: nn.Module) -> tuple[Part, ...]:
    found: tuple[Part, ...] = vars(mixer).get(CONVOLUTION_PARTS, ())
    return found


def _cut(whole: Entries, share: Entries, parts: Sequence[tuple[Part, ...]], tp: int) -> Entries:
    fields = [
        replace(f, parts=p if _is_cut_so(w, f, p, tp) else None)
        for w, f, p in zip(whole.fields, share.fields, parts, strict=True)
    ]
    return replace(share, fields=tuple(fields))


def _is_cut_so(whole: Field, share: Field, parts: tuple[Part, ...], tp: int) -> bool:
    """Whether a share of a field has the shape that these parts give it; if not, nobody knows its cut for certain."""
    if (whole.name, whole.dtype, whole.shape[1:]) != (share.name, share.dtype, share.shape[1:]):
        return False
    if not parts:
        return whole.shape == share.shape
    runs = [part.of(0, tp) for part in parts]
    lengths = [stop - first for first, stop in (run for run in runs if run is not None)]
    return (
        len(lengths) == len(parts)
        and sum(part.length for part in parts) == whole.shape[0]
        and sum(lengths) == share.shape[0]
    )


def _as_any(model: PreTrainedModel) -> Any:
    return model
