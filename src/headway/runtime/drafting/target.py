"""What a trained drafter borrows of its target: the embeddings and the output head, both frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.errors import ModelError

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A target model as its drafter sees it.

    Attributes:
        embeddings: From token ids to vectors of the hidden size.
        head: From vectors of the hidden size to logits.
        hidden: The hidden size.
        vocab: Width of the logits.
        layers: Decoder layers.
        dtype: Type of its weights.
        device: Its device.
    """

    embeddings: torch.nn.Module
    head: torch.nn.Module
    hidden: int
    vocab: int
    layers: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel) -> Target:
        """See a model as a target.

        Raises:
            ModelError: It has no embeddings, output head or list of decoder layers.
        """
        network: Any = model
        embeddings, head = network.get_input_embeddings(), network.get_output_embeddings()
        layers = getattr(network.get_decoder(), "layers", None)
        if embeddings is None or head is None or layers is None:
            raise ModelError(
                f"{type(model).__name__} has no embeddings, output head or list of decoder layers that a drafter could "
                f"share: use --draft lookup or none"
            )
        config = model.config.get_text_config(decoder=True)
        return cls(
            embeddings, head, int(config.hidden_size), int(head.weight.shape[0]), len(layers), model.dtype, model.device
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings, [..., hidden], of token ids."""
        found: Tensor = self.embeddings(tokens)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [..., vocab], of normed hidden vectors."""
        found: Tensor = self.head(hidden)
        return found.float()
