"""What a drafter reads of the target: outputs of its decoder layers, taken by hooks while a forward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from headway.errors import ModelError

__all__ = ["FINAL", "FeatureTap"]

FINAL = -2
"""In the place of a layer: the decoder's output, behind its last norm."""


class FeatureTap:
    """Keeps the outputs of some decoder layers of the last forward.

    Args:
        model: The target.
        layers: Numbers of layers, 0 for the first; -1 for the embeddings, `FINAL` for what is behind the last norm.
        mixed: Of a model with attention residuals, keep what the next part reads instead: the mixture that the next
            layer's mixer is given, or behind the last layer the one that the last norm is given.

    Raises:
        ModelError: The model has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], mixed: bool = False) -> None:
        self._mixed = mixed
        self._layers = tuple(layers)
        self._kept: dict[int, torch.Tensor] = {}
        self._handles = [
            self._module(model, layer).register_forward_hook(self._hook(layer)) for layer in dict.fromkeys(layers)
        ]

    def _module(self, model: PreTrainedModel, layer: int) -> torch.nn.Module:
        network: Any = model
        if layer == -1:
            return cast("torch.nn.Module", network.get_input_embeddings())
        if layer == FINAL:
            return cast("torch.nn.Module", network.get_decoder())
        modules = getattr(network.get_decoder(), "layers", None)
        name = type(model).__name__
        if modules is None:
            raise ModelError(f"{name} has no list of decoder layers to draft from: use --draft lookup or none")
        if not 0 <= layer < len(modules):
            raise ModelError(
                f"the drafter reads layer {layer} of its target, {name} has {len(modules)}: it is another model's"
            )
        if not self._mixed:
            return cast("torch.nn.Module", modules[layer])
        behind = layer + 1 < len(modules)
        reader = modules[layer + 1] if behind else network.get_decoder()
        mixture = getattr(reader, "self_attention_res" if behind else "output_attn_res", None)
        if mixture is None:
            raise ModelError(f"the drafter reads mixtures of attention residuals, which {name} has not")
        return cast("torch.nn.Module", mixture)

    def _hook(self, layer: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._kept[layer] = output if isinstance(output, torch.Tensor) else output[0]

        return keep

    def take(self) -> torch.Tensor:
        """The outputs of the last forward, side by side in the order asked for: [rows, tokens, layers * hidden]."""
        features = torch.cat([self._kept[layer] for layer in self._layers], dim=-1)
        self._kept.clear()
        return features

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
