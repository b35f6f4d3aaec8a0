"""DSpark: one parallel pass over the whole draft, a cheap chain behind it, and an opinion of its own chances.

The layers attend to a *context* made of the target's outputs, one entry a token, which depends on that token's output
alone: the group has a `lookahead` of 0, and a hit costs nothing. A draft of n tokens is n inputs, the last known token
and n - 1 times a learned mask, which see the whole context and each other in both directions; the place of the known
token predicts the one behind it, and so on. Then the Markov head corrects each place's logits by the token chosen
before it, and the confidence head says how likely each place is to be accepted, given those before it.

Equations: DSpark paper and DeepSpec (section 4 of the project's fact sheet). Kept apart from the published drafters:
the mask is a vector of the drafter, not a token of the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from headway.cache import LayerSpec
from headway.runtime.drafting.drafter import DraftRequest, Observed, Proposal, choose, proposals
from headway.runtime.drafting.layers import Attend, DraftLayer, DraftNorm, LayerShape, attend
from headway.runtime.drafting.memory import DraftMemory, Histories
from headway.runtime.drafting.target import Target
from headway.runtime.forward.arena import Arena
from headway.runtime.model.layout import Entries

__all__ = ["DSparkDrafter", "DSparkNetwork"]


class DSparkNetwork(nn.Module):
    """The drafter's weights.

    Args:
        shape: Sizes of its layers.
        layers: Number of layers.
        features: Layers of the target that it reads.
        vocab: Tokens of the target's vocabulary.
        rank: Width of the Markov head.
    """

    def __init__(self, shape: LayerShape, layers: int, features: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.context_project = nn.Linear(features * shape.hidden, shape.hidden, bias=False)
        self.context_norm = DraftNorm(shape.hidden, shape.eps)
        self.mask = nn.Parameter(torch.zeros(shape.hidden))
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(layers))
        self.out_norm = DraftNorm(shape.hidden, shape.eps)
        self.markov_in = nn.Embedding(vocab, rank)
        self.markov_out = nn.Linear(rank, vocab, bias=False)
        self.confidence = nn.Linear(shape.hidden + rank, 1)

    def context(self, features: Tensor) -> Tensor:
        """What context entries are made of: [rows, tokens, hidden] of [rows, tokens, features * hidden]."""
        projected: Tensor = self.context_norm(self.context_project(features))
        return projected

    def inputs(self, anchors: Tensor, length: int) -> Tensor:
        """Inputs of drafts of `length` tokens: [rows, length, hidden] of embedded anchors [rows, hidden]."""
        masks = self.mask.to(anchors.dtype).expand(len(anchors), length - 1, -1)
        return torch.cat([anchors[:, None], masks], dim=1)

    def forward(self, x: Tensor, positions: Tensor, attending: Sequence[Attend]) -> Tensor:
        """The parallel pass over `inputs`: normed outputs, [rows, length, hidden], for the target's output head."""
        for layer, attend_layer in zip(self.layers, attending, strict=True):
            x = layer(x, positions, attend_layer)
        normed: Tensor = self.out_norm(x)
        return normed

    def correction(self, before: Tensor) -> Tensor:
        """What the Markov head adds to the logits behind tokens `before`, int64 [...]: float32 [..., vocab]."""
        added: Tensor = self.markov_out(self.markov_in(before)).float()
        return added

    def chance(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logit of being accepted, float32 [...], from outputs [..., hidden] and the token before each place."""
        found: Tensor = self.confidence(torch.cat([hidden, self.markov_in(before)], dim=-1))
        return found[..., 0].float()


class DSparkDrafter:
    """Drafts with a `DSparkNetwork` (see `headway.runtime.drafting.drafter.Drafter`).

    Args:
        network: The weights, with the target's dtype and on its device.
        target: The target.
        shape: Sizes of the layers.
        length: Tokens of a draft, as it was trained.
        feature_layers: Layers of the target that it reads.
        most: Most tokens of a draft that are used; `length` at most.
    """

    name = "dspark"
    lookahead = 0

    def __init__(
        self,
        network: DSparkNetwork,
        target: Target,
        shape: LayerShape,
        length: int,
        feature_layers: tuple[int, ...],
        most: int,
    ) -> None:
        self.most = most
        self._length = length
        self.feature_layers = feature_layers
        self._network = network
        self._target = target
        self._sizes = shape.entries(len(network.layers), target.dtype)
        self.groups: tuple[LayerSpec, ...] = (self._sizes.group(self.lookahead),)
        self.entries: tuple[Entries, ...] = (self._sizes.entries,)

    def attach(self, arena: Arena) -> None:
        """Keep entries in this arena."""
        self._memory = DraftMemory(arena, self._sizes)

    def observe(self, observed: Observed) -> None:
        """Store the context entries of verified tokens."""
        context = self._network.context(observed.features)
        places = observed.starts[:, None] + np.arange(observed.tokens.shape[1])
        positions = torch.from_numpy(places).to(self._target.device)
        for i, layer in enumerate(self._network.layers):
            assert isinstance(layer, DraftLayer)
            entries = layer.keys_values(context, positions)
            self._memory.write(i, observed.tables, observed.starts, observed.valid, entries)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One pass over the drafts of all sequences, then their tokens from left to right."""
        device = self._target.device
        lengths = np.array([request.length - 1 for request in requests], dtype=np.int64)
        anchors = torch.tensor([request.anchor for request in requests], device=device)
        tables = [np.stack(held) for held in zip(*(request.tables for request in requests), strict=True)]
        histories = self._memory.histories(tables, lengths)
        positions = torch.from_numpy(lengths[:, None] + np.arange(self._length)).to(device)
        attending = [self._attending(i, histories) for i in range(len(self._network.layers))]
        hidden = self._network(self._network.inputs(self._target.embed(anchors), self._length), positions, attending)
        return self._chain(requests, anchors, hidden)

    def _chain(self, requests: Sequence[DraftRequest], anchors: Tensor, hidden: Tensor) -> list[Proposal]:
        most = max(request.count for request in requests)
        base = self._target.logits(hidden[:, :most])
        drafts = anchors[:, None][:, :0]
        found: list[Tensor | None] = []
        chances: list[Tensor] = []
        before = anchors
        for k in range(self.most):
            chances.append(self._network.chance(hidden[:, k], before).sigmoid())
            if k < most:
                before, distribution = choose(base[:, k] + self._network.correction(before), requests, drafts)
                drafts = torch.cat([drafts, before[:, None]], dim=1)
                found.append(distribution)
        confidence = torch.stack(chances, dim=1).float().cpu().numpy()
        return [replace(p, confidence=c) for p, c in zip(proposals(requests, drafts, found), confidence, strict=True)]

    def _attending(self, layer: int, histories: Histories) -> Attend:
        """Attention to the whole context and to the whole draft."""
        past_keys, past_values = self._memory.read(layer, histories)

        def attending(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            own = histories.seen.new_ones(keys.shape[:2])
            seen = torch.cat([histories.seen, own], dim=1)[:, None, None]
            return attend(query, torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1), seen)

        return attending
