"""DSpark: one parallel pass over the whole draft, a cheap chain behind it, and an opinion of its own chances.

The layers attend to a *context* made of the target's outputs, one entry a token, which depends on that token's output
alone: the group has a `lookahead` of 0, and a hit costs nothing. A draft of n tokens is n inputs, the last known token
and n - 1 times a learned mask, which see the whole context and each other in both directions; the place of the known
token predicts the one behind it, and so on. Then the Markov head corrects each place's logits by the token chosen
before it, and the confidence head says how likely each place is to be accepted, given those before it.

Equations: DSpark paper and DeepSpec (section 4 of the project's fact sheet). Networks of our own stand here, published
ones in `published_dspark`: they have layers of another form, and as a mask a token of the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from headway.cache import LayerSpec
from headway.runtime.drafting.drafter import DraftRequest, Observed, Proposal, choose, proposals
from headway.runtime.drafting.layers import Attend, DraftLayer, DraftNorm, LayerEntries, LayerShape, attend
from headway.runtime.drafting.memory import DraftMemory, EntrySizes, Histories
from headway.runtime.drafting.target import Target
from headway.runtime.forward.arena import Arena
from headway.runtime.model.attention import Scores
from headway.runtime.model.layout import Entries
from headway.runtime.parallel.context_parallel import HeadMerge, partial_attention

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

    def entries(self, layer: int, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What layer `layer` keeps of a context [rows, tokens, hidden]: [rows, tokens, heads, width] each."""
        held = self.layers[layer]
        assert isinstance(held, DraftLayer)
        return held.keys_values(context, positions)

    def correction(self, before: Tensor) -> Tensor:
        """What the Markov head adds to the logits behind tokens `before`, int64 [...]: float32 [..., vocab]."""
        added: Tensor = self.markov_out(self.markov_in(before)).float()
        return added

    def chance(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Logit of being accepted, float32 [...], from outputs [..., hidden] and the token before each place.

        None if the network has no opinion.
        """
        found: Tensor = self.confidence(torch.cat([hidden, self.markov_in(before)], dim=-1))
        return found[..., 0].float()


class DSparkDrafter:
    """Drafts with a `DSparkNetwork` (see `headway.runtime.drafting.drafter.Drafter`).

    Args:
        network: The weights, with the target's dtype and on its device.
        target: The target.
        sizes: What the network keeps of a token.
        length: Tokens of a draft, as it was trained.
        feature_layers: Layers of the target that it reads.
        most: Most tokens of a draft that are used; `length` at most.
        mixed: Whether it reads mixtures of attention residuals (see `FeatureTap`).
        causal: Whether a place of a draft sees only places before it.
    """

    name = "dspark"
    lookahead = 0

    def __init__(
        self,
        network: DSparkNetwork,
        target: Target,
        sizes: EntrySizes,
        length: int,
        feature_layers: tuple[int, ...],
        most: int,
        *,
        mixed: bool = False,
        causal: bool = False,
    ) -> None:
        self.most = most
        self._length = length
        self.feature_layers = feature_layers
        self.mixed_features = mixed
        self._network = network
        self._target = target
        self._sizes = sizes
        self._causal = causal
        self.groups: tuple[LayerSpec, ...] = (sizes.group(self.lookahead),)
        self.entries: tuple[Entries, ...] = (sizes.entries,)
        self._prepared: Tensor | None = None

    def attach(self, arena: Arena, merge: HeadMerge | None = None) -> None:
        """Keep entries in this arena."""
        self._memory = DraftMemory(arena, self._sizes, merge)

    def observe(self, observed: Observed) -> None:
        """Store the context entries of verified tokens."""
        context = self._network.context(observed.features)
        places = observed.starts[:, None] + np.arange(observed.tokens.shape[1])
        positions = torch.from_numpy(places).to(self._target.device)
        for i in range(self._sizes.layers):
            entries = self._network.entries(i, context, positions)
            self._memory.write(i, observed.tables, observed.starts, observed.valid, entries)

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Run the layers, where that takes all ranks."""
        self._prepared = None if self._memory.merge is None else self._outputs(requests)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One pass over the drafts of all sequences, then their tokens from left to right."""
        hidden = self._outputs(requests) if self._prepared is None else self._prepared
        self._prepared = None
        return self._chain(requests, hidden)

    def _outputs(self, requests: Sequence[DraftRequest]) -> Tensor:
        """What the network puts out for the drafts of all sequences, [rows, length, hidden]; the same on all ranks."""
        device = self._target.device
        lengths = np.array([request.length - 1 for request in requests], dtype=np.int64)
        tables = [np.stack(held) for held in zip(*(request.tables for request in requests), strict=True)]
        histories = self._memory.histories(tables, lengths)
        positions = torch.from_numpy(lengths[:, None] + np.arange(self._length)).to(device)
        attending = [_Draft(self._memory, i, histories, self._causal) for i in range(self._sizes.layers)]
        inputs = self._network.inputs(self._target.embed(self._anchors(requests)), self._length)
        hidden: Tensor = self._network(inputs, positions, attending)
        return hidden

    def _anchors(self, requests: Sequence[DraftRequest]) -> Tensor:
        return torch.tensor([request.anchor for request in requests], device=self._target.device)

    def _chain(self, requests: Sequence[DraftRequest], hidden: Tensor) -> list[Proposal]:
        most = max(request.count for request in requests)
        base = self._target.logits(hidden[:, :most])
        before = self._anchors(requests)
        drafts = before[:, None][:, :0]
        found: list[Tensor | None] = []
        chances: list[Tensor] = []
        for k in range(self.most):
            if (chance := self._network.chance(hidden[:, k], before)) is not None:
                chances.append(chance.sigmoid())
            if k < most:
                before, distribution = choose(base[:, k] + self._network.correction(before), requests, drafts)
                drafts = torch.cat([drafts, before[:, None]], dim=1)
                found.append(distribution)
        made = proposals(requests, drafts, found)
        if not chances:
            return made
        confidence = torch.stack(chances, dim=1).float().cpu().numpy()
        return [replace(proposal, confidence=c) for proposal, c in zip(made, confidence, strict=True)]


class _Draft(LayerEntries):
    """Attention of a draft to the whole context, and to itself: all of it, or the places before."""

    def __init__(self, memory: DraftMemory, layer: int, histories: Histories, causal: bool) -> None:
        self._memory, self._histories, self._causal = memory, histories, causal
        self._past = memory.read(layer, histories)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past_keys, past_values = self._past
        return torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1)

    def mix(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores | None = None) -> Tensor:
        count, seen = query.shape[1], self._histories.seen
        own = seen.new_full((count, count), self._memory.counts_drafts)
        own = own.tril() if self._causal else own
        past = seen[:, None, None].expand(-1, 1, count, -1)
        mask = torch.cat([past, own.expand(len(seen), 1, -1, -1)], dim=-1)
        if self._memory.merge is None:
            return attend(query, keys, values, mask, scores)
        scores = scores or Scores(query.shape[-1] ** -0.5)
        turned = query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        return self._memory.merge(partial_attention(*turned, scores, mask)).to(query.dtype).transpose(1, 2)
