"""A chained multi-token-prediction head, in the manner of EAGLE and of DeepSeek's MTP.

At position j it reads what the target's last layer put out there and the embedding of the token at j + 1, and predicts
the token at j + 2. Fed with its own output and its own token it predicts the next one, and so on.

Its entry at j depends on the token at j + 1: the group has a `lookahead` of 1, and a hit is only served as far as that
token is known to agree. All entries that later drafts attend to come from the target's own outputs, in one pass over
the tokens that a forward has verified; that pass also yields the first token of the next draft. Only its last output, a
vector a request, is remembered outside the cache: it is made anew by the first forward of every lease, before it can be
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.cache import LayerSpec
from headway.runtime.drafting.drafter import DraftRequest, Observed, Proposal, choose, proposals
from headway.runtime.drafting.layers import Attend, DraftLayer, DraftNorm, LayerShape, attend
from headway.runtime.drafting.memory import DraftMemory, Histories, draft_group
from headway.runtime.drafting.target import Target
from headway.runtime.forward.arena import Arena

__all__ = ["MtpDrafter", "MtpNetwork"]

_MASK_ELEMENTS = 1 << 22
"""Elements of a mask that is built at once; a longer prompt attends in stretches."""


class MtpNetwork(nn.Module):
    """The head.

    Args:
        shape: Sizes of its layers.
        layers: Number of layers.
    """

    def __init__(self, shape: LayerShape, layers: int = 1) -> None:
        super().__init__()
        self.feature_norm = DraftNorm(shape.hidden, shape.eps)
        self.token_norm = DraftNorm(shape.hidden, shape.eps)
        self.project = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(layers))
        self.out_norm = DraftNorm(shape.hidden, shape.eps)

    def forward(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attending: Sequence[Attend]) -> Tensor:
        """One pass.

        Args:
            hidden: [rows, tokens, hidden], the target's features, or this head's outputs at the position before.
            embedded: [rows, tokens, hidden], embeddings of the token behind each position.
            positions: int64 [rows, tokens].
            attending: One function a layer.

        Returns:
            [rows, tokens, hidden]; `out_norm` of it goes to the target's output head.
        """
        x: Tensor = self.project(torch.cat([self.feature_norm(hidden), self.token_norm(embedded)], dim=-1))
        for layer, attend_layer in zip(self.layers, attending, strict=True):
            x = layer(x, positions, attend_layer)
        return x


class MtpDrafter:
    """Drafts with a `MtpNetwork` (see `headway.runtime.drafting.drafter.Drafter`).

    Args:
        network: The head, with the target's dtype and on its device.
        target: The target.
        shape: Sizes of the head's layers.
        most: Most tokens of a draft.
        feature_layer: Layer of the target that it reads.
    """

    name = "mtp"
    lookahead = 1

    def __init__(self, network: MtpNetwork, target: Target, shape: LayerShape, most: int, feature_layer: int) -> None:
        self.most = most
        self.feature_layers: tuple[int, ...] = (feature_layer,)
        self._network = network
        self._target = target
        self._sizes = len(network.layers), shape.kv_heads, shape.head_dim, target.dtype
        self.groups: tuple[LayerSpec, ...] = (draft_group(*self._sizes, self.lookahead),)
        self._last = torch.zeros((0, shape.hidden), dtype=target.dtype, device=target.device)

    def attach(self, arena: Arena) -> None:
        """Keep entries in this arena."""
        self._memory = DraftMemory(arena, *self._sizes)

    def observe(self, observed: Observed) -> None:
        """Store the entries of verified tokens, and what the head makes of the last of each row."""
        count = observed.tokens.shape[1]
        following = torch.from_numpy(np.maximum(observed.following, 0)).to(self._target.device)
        behind = torch.cat([observed.tokens[:, 1:], following[:, None]], dim=1)
        last = torch.from_numpy(observed.valid - 1).to(self._target.device)
        rows = torch.arange(len(last), device=self._target.device)
        behind[rows, last] = following
        positions = torch.from_numpy(observed.starts[:, None] + np.arange(count)).to(self._target.device)
        histories = self._memory.histories(observed.tables, observed.starts)
        attending = [self._storing(i, observed, histories) for i in range(len(self._network.layers))]
        output = self._network(observed.features, self._target.embed(behind), positions, attending)
        self._remember(observed.rows, output[rows, last])

    def _storing(self, layer: int, observed: Observed, histories: Histories) -> Attend:
        """Causal attention over the history and the new tokens, whose entries are stored."""

        def attending(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._memory.write(layer, observed.tables, observed.starts, observed.valid, (keys, values))
            past_keys, past_values = self._memory.read(layer, histories)
            keys, values = torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1)
            stretch = max(1, _MASK_ELEMENTS // (keys.shape[0] * keys.shape[1]))
            parts = []
            for start in range(0, query.shape[1], stretch):
                part = query[:, start : start + stretch]
                parts.append(attend(part, keys, values, _causal(histories.seen, query.shape[1], start, part.shape[1])))
            return torch.cat(parts, dim=1)

        return attending

    def _remember(self, rows: NDArray[np.int64], output: Tensor) -> None:
        self._make_room(int(rows.max()) + 1)
        self._last[torch.from_numpy(rows).to(output.device)] = output

    def _make_room(self, rows: int) -> None:
        if rows > len(self._last):
            more = self._last.new_zeros((2 * rows - len(self._last), self._last.shape[1]))
            self._last = torch.cat([self._last, more])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Chain the head from what it made of the last observed token of each sequence."""
        device = self._target.device
        self._make_room(1 + max(request.row for request in requests))  # a measurement asks before anything was observed
        hidden = self._last[torch.tensor([request.row for request in requests], device=device)][:, None]
        lengths = np.array([request.length - 1 for request in requests], dtype=np.int64)
        most = max(request.count for request in requests)
        attending = self._chaining(requests, lengths) if most > 1 else []
        drafts = torch.empty((len(requests), 0), dtype=torch.int64, device=device)
        found: list[Tensor | None] = []
        for k in range(most):
            if k > 0:
                positions = torch.from_numpy(lengths + k - 1).to(device)[:, None]
                hidden = self._network(hidden, self._target.embed(drafts[:, -1:]), positions, attending)
            logits = self._target.logits(self._network.out_norm(hidden[:, 0]))
            tokens, distribution = choose(logits, requests, drafts)
            drafts = torch.cat([drafts, tokens[:, None]], dim=1)
            found.append(distribution)
        return proposals(requests, drafts, found)

    def _chaining(self, requests: Sequence[DraftRequest], lengths: NDArray[np.int64]) -> list[Attend]:
        """One function a layer that attends to the history and to all that it has been called with."""
        tables = [np.stack(held) for held in zip(*(request.tables for request in requests), strict=True)]
        histories = self._memory.histories(tables, lengths)

        def chain(layer: int) -> Attend:
            held = list(self._memory.read(layer, histories))
            seen = histories.seen

            def attending(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                nonlocal seen
                held[0], held[1] = torch.cat([held[0], keys], dim=1), torch.cat([held[1], values], dim=1)
                seen = torch.cat([seen, seen.new_ones((len(seen), 1))], dim=1)
                return attend(query, held[0], held[1], seen[:, None, None])

            return attending

        return [chain(layer) for layer in range(len(self._network.layers))]


def _causal(seen: Tensor, count: int, start: int, queries: int) -> Tensor:
    """What queries [start, start + queries) of `count` new tokens see: bool [rows, 1, queries, columns]."""
    new = torch.ones((queries, count), dtype=torch.bool, device=seen.device).tril(start)
    past = seen[:, None, None].expand(-1, 1, queries, -1)
    return torch.cat([past, new.expand(len(seen), 1, -1, -1)], dim=-1)
