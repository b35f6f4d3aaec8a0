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

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.cache import LayerSpec
from headway.runtime.drafting.drafter import DraftRequest, Observed, Proposal, choose, proposals
from headway.runtime.drafting.layers import Attend, DraftLayer, DraftNorm, LayerEntries, LayerShape, attend
from headway.runtime.drafting.memory import DraftMemory, EntrySizes, Histories
from headway.runtime.drafting.target import Target
from headway.runtime.forward.arena import Arena
from headway.runtime.model.attention import Scores
from headway.runtime.model.layout import Entries
from headway.runtime.parallel.context_parallel import HeadMerge

__all__ = ["MtpDrafter", "MtpHead", "MtpNetwork"]

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
            attending: One function per layer.

        Returns:
            [rows, tokens, hidden]; `out_norm` of it goes to the target's output head.
        """
        x: Tensor = self.project(torch.cat([self.feature_norm(hidden), self.token_norm(embedded)], dim=-1))
        for layer, attend_layer in zip(self.layers, attending, strict=True):
            x = layer(x, positions, attend_layer)
        return x


class MtpHead(Protocol):
    """What `MtpDrafter` runs: a `MtpNetwork`, or a head that a checkpoint brings along.

    Attributes:
        out_norm: From its outputs to what the target's output head takes.
    """

    @property
    def out_norm(self) -> Callable[[Tensor], Tensor]:
        """The last norm, or nothing where the output has passed it."""
        ...

    def __call__(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, attending: Sequence[LayerEntries]
    ) -> Tensor:
        """One pass (see `MtpNetwork.forward`)."""
        ...


class MtpDrafter:
    """Drafts with one head (see `headway.runtime.drafting.drafter.Drafter`).

    Args:
        network: The head, with the target's dtype and on its device.
        target: The target.
        sizes: What the head keeps of a token.
        most: Most tokens of a draft.
        feature_layer: Layer of the target that it reads.
    """

    name = "mtp"
    lookahead = 1
    mixed_features = False

    def __init__(self, network: MtpHead, target: Target, sizes: EntrySizes, most: int, feature_layer: int) -> None:
        self.most = most
        self.feature_layers: tuple[int, ...] = (feature_layer,)
        self._network = network
        self._target = target
        self._sizes = sizes
        self.groups: tuple[LayerSpec, ...] = (sizes.group(self.lookahead),)
        self.entries: tuple[Entries, ...] = (sizes.entries,)
        self._last = torch.zeros((0, target.hidden), dtype=target.dtype, device=target.device)

    def attach(self, arena: Arena, merge: HeadMerge | None = None) -> None:
        """Keep entries in this arena, all of them on every rank."""
        self._memory = DraftMemory(arena, self._sizes)

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Do nothing: a rank can propose by itself."""

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
        attending = [_Storing(self._memory, i, observed, histories) for i in range(self._sizes.layers)]
        output = self._network(observed.features, self._target.embed(behind), positions, attending)
        self._remember(observed.rows, output[rows, last])

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

    def _chaining(self, requests: Sequence[DraftRequest], lengths: NDArray[np.int64]) -> list[LayerEntries]:
        """One per layer, with the history and all that it is extended by."""
        tables = [np.stack(held) for held in zip(*(request.tables for request in requests), strict=True)]
        histories = self._memory.histories(tables, lengths)
        return [_Chaining(*self._memory.read(layer, histories), histories.seen) for layer in range(self._sizes.layers)]


class _Storing(LayerEntries):
    """Causal attention over the history and the new tokens of a pass, whose entries are stored."""

    def __init__(self, memory: DraftMemory, layer: int, observed: Observed, histories: Histories) -> None:
        self._memory, self._layer, self._observed, self._histories = memory, layer, observed, histories

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        observed = self._observed
        self._memory.write(self._layer, observed.tables, observed.starts, observed.valid, (keys, values))
        past_keys, past_values = self._memory.read(self._layer, self._histories)
        return torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1)

    def mix(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores | None = None) -> Tensor:
        seen, count = self._histories.seen, query.shape[1]
        stretch = max(1, _MASK_ELEMENTS // (keys.shape[0] * keys.shape[1]))
        parts = []
        for start in range(0, count, stretch):
            part = query[:, start : start + stretch]
            parts.append(attend(part, keys, values, _causal(seen, count, start, part.shape[1]), scores))
        return torch.cat(parts, dim=1)


class _Chaining(LayerEntries):
    """Attention of one token after another to the history and to those before, which are stored nowhere."""

    def __init__(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        self._keys, self._values, self._seen = keys, values, seen

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._keys = torch.cat([self._keys, keys], dim=1)
        self._values = torch.cat([self._values, values], dim=1)
        self._seen = torch.cat([self._seen, self._seen.new_ones((len(self._seen), 1))], dim=1)
        return self._keys, self._values

    def mix(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores | None = None) -> Tensor:
        return attend(query, keys, values, self._seen[:, None, None], scores)


def _causal(seen: Tensor, count: int, start: int, queries: int) -> Tensor:
    """What queries [start, start + queries) of `count` new tokens see: bool [rows, 1, queries, columns]."""
    new = torch.ones((queries, count), dtype=torch.bool, device=seen.device).tril(start)
    past = seen[:, None, None].expand(-1, 1, queries, -1)
    return torch.cat([past, new.expand(len(seen), 1, -1, -1)], dim=-1)
