"""Rotary frequencies that depend on the whole forward: which of them a model has, and which a forward uses.

transformers chooses the short or the long frequencies of LongRoPE by the largest position *in the forward*. Served so,
a row's numbers would depend on the rows beside it and on how its prompt was cut. Here the scheduler says which set a
row uses (`headway.runtime.interface.LongRope`), rows of one forward use one, and for a long one the model's own rotary
module is shown one more position, behind the original length, whose angles are taken off again. So the choice, the
frequencies and any factor that goes with them stay transformers' own.

Frequencies that grow with the length (dynamic NTK scaling) are fixed up to the length that the config names, and
requests may not be longer: behind it `generate()` makes each entry with frequencies of its own and keeps the largest
ones for the requests that follow, so that no two of its answers need agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from headway.errors import ModelError
from headway.runtime.interface import LongRope

__all__ = ["LongSet", "has_dynamic_rope", "long_rope_of"]

_LONG, _DYNAMIC = "longrope", "dynamic"


class LongSet:
    """Lets a model use its long set of rotary frequencies, for the length of a `with` block.

    Args:
        model: The model.
        rope: Its sets, or None where it has one; nothing ever happens then.
    """

    def __init__(self, model: PreTrainedModel, rope: LongRope | None) -> None:
        self._behind = 0 if rope is None else rope.original
        self._modules = [] if rope is None else list(_rotary_modules(model, _LONG))

    @contextmanager
    def used(self, long: bool) -> Iterator[None]:
        """Use the long set inside the block; nothing changes if not `long`."""
        with ExitStack() as stack:
            for module in self._modules if long else ():
                before = module.register_forward_pre_hook(self._show_more, with_kwargs=True)
                after = module.register_forward_hook(_hide_last)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _show_more(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        names = ("x", "position_ids", "layer_type")
        given = dict(zip(names, args, strict=False)) | kwargs
        positions: torch.Tensor = given["position_ids"]
        more = positions.new_full((*positions.shape[:-1], 1), self._behind)
        return (given.pop("x"),), given | {"position_ids": torch.cat([positions, more], dim=-1)}


def _hide_last(_: nn.Module, __: Any, output: Any) -> Any:
    """Angles without the last position: cosines and sines, or one tensor of complex numbers."""
    if isinstance(output, torch.Tensor):
        return output[..., :-1, :]
    return tuple(angles[..., :-1, :] for angles in output)


def has_dynamic_rope(model: PreTrainedModel) -> bool:
    """Whether a model's rotary frequencies change with the length of a sequence beyond what its config names."""
    return any(True for _ in _rotary_modules(model, _DYNAMIC))


def long_rope_of(model: PreTrainedModel, cache_argument: str) -> LongRope | None:
    """The two sets of rotary frequencies of a model, or None for a model with one.

    Args:
        model: The model.
        cache_argument: Name under which it takes its cache.

    Raises:
        ModelError: It has more than two: its layers switch at different lengths.
    """
    found: set[int] = set()
    for module in _rotary_modules(model, _LONG):
        parameters: Any = module.config.rope_parameters
        for each in parameters.values() if isinstance(module.rope_type, dict) else [parameters]:
            if each is not None and each["rope_type"] == _LONG:
                found.add(int(each["original_max_position_embeddings"]))
    if len(found) > 1:
        lengths = " and ".join(f"{length:,}" for length in sorted(found))
        raise ModelError(
            f"{type(model).__name__}: its layers switch between short and long rotary frequencies at different "
            f"lengths ({lengths} tokens); only one such length can be served"
        )
    return LongRope(original := found.pop(), _recomputed(model, original, cache_argument)) if found else None


def _recomputed(model: PreTrainedModel, original: int, cache_argument: str) -> bool:
    """Whether `generate()` throws its cache away when a sequence grows past `original`: it is asked."""

    class Full(DynamicCache):
        """A cache that says it holds as many tokens as the short set may see."""

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return original

    tokens = torch.ones((1, original + 1), dtype=torch.long)
    network: Any = model
    held = {cache_argument: Full(config=model.config)}
    inputs = network.prepare_inputs_for_generation(tokens, next_sequence_length=1, use_cache=True, **held)
    return bool(inputs["input_ids"].shape[1] > 1)


def _rotary_modules(model: PreTrainedModel, kind: str) -> Iterator[Any]:
    for module in model.modules():
        rope: Any = getattr(module, "rope_type", None)
        types = rope.values() if isinstance(rope, dict) else [rope]
        if any(isinstance(each, str) and kind in each for each in types):
            yield module
