"""Where a drafter's entries lie: a cache group of its own, in the same arena, by the same block tables.

Entries by heads are whole on every rank: they are a few per cent of the target's, and rank 0 alone proposes
(`headway.runtime.drafting.agreement`) and needs no other rank for it. Latents, of which there is one head, are split by
tokens as the target's are: a drafter of Kimi-K3 has a fifth of its target's bytes per token, and whole on every rank it
would take most of the room that splitting gives. Each rank then attends to the entries of its own tokens, and the parts
are merged (`headway.runtime.parallel.context_parallel`).

Only entries of tokens that the target has verified are ever written. What a draft attends to of itself stays in
registers, so there is nothing transient that a prefix hit could find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.cache import FullAttention
from headway.runtime.forward.arena import Arena
from headway.runtime.model.layout import Entries, Field
from headway.runtime.parallel.context_parallel import HeadMerge

__all__ = ["DraftMemory", "EntrySizes", "Histories"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

GROUP = "draft"
"""Name of the group."""


@dataclass(frozen=True)
class EntrySizes:
    """What a drafter keeps of a token.

    Attributes:
        layers: Its layers.
        keys: Heads of the keys and their width, in every layer.
        values: The same of the values.
        dtype: Type of both.
        sharded: Whether ranks split the tokens.
    """

    layers: int
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    sharded: bool = False

    @property
    def entries(self) -> Entries:
        """Where they lie within a token's bytes: keys and values, layer by layer."""
        fields: list[Field] = []
        for i in range(self.layers):
            for part, shape in (("keys", self.keys), ("values", self.values)):
                fields.append(Field(f"{part}:{i}", shape, self.dtype, sum(field.bytes for field in fields)))
        return Entries(GROUP, tuple(fields))

    def group(self, lookahead: int) -> FullAttention:
        """The cache group, for entries that depend on `lookahead` later tokens."""
        each = math.prod(self.keys) + math.prod(self.values)
        return FullAttention(GROUP, self.layers * each * self.dtype.itemsize, lookahead, sharded=self.sharded)


@dataclass(frozen=True)
class Histories:
    """Which entries some sequences have on this rank.

    Attributes:
        blocks: int64 [rows, blocks], 0 where none is held.
        columns: Entries of the longest.
        seen: bool [rows, columns], True where a column is the row's own.
    """

    blocks: Tensor
    columns: int
    seen: Tensor


class DraftMemory:
    """Entries of a drafter's layers in an arena.

    Args:
        arena: The arena; its geometry has the drafter's group.
        sizes: What is kept of a token.
        merge: The ranks that split tokens, if there are several.

    Attributes:
        merge: The ranks that split these entries; None where this one holds all of them.
    """

    def __init__(self, arena: Arena, sizes: EntrySizes, merge: HeadMerge | None = None) -> None:
        views = arena.views(sizes.entries)
        self._views = list(zip(views[::2], views[1::2], strict=True))
        self._table = arena.geometry.group(GROUP).table
        self._device = arena.device
        self.merge = merge if self._table.shards > 1 else None
        self._rank = 0 if self.merge is None else self.merge.shard

    @property
    def counts_drafts(self) -> bool:
        """Whether what a draft attends to of itself is counted on this rank: it must be on one of them."""
        return self._rank == 0

    def histories(self, tables: Sequence[Int32s], lengths: Int64s) -> Histories:
        """Plan to read the first entries of some sequences.

        Args:
            tables: One int32 [rows, width] array per block table of the geometry.
            lengths: int64 [rows], entries of each.
        """
        own = self._table.local_length(lengths, self._rank)
        columns = int(own.max())
        held = tables[self._table.index][:, : -(-columns // self._table.block_tokens)]
        seen = np.arange(columns) < own[:, None]
        return Histories(self._tensor(np.maximum(held, 0).astype(np.int64)), columns, self._tensor(seen))

    def read(self, layer: int, histories: Histories) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [rows, columns, heads, width] each, 0 where a column is not the row's own."""
        keys, values = self._views[layer]
        hidden = ~histories.seen[:, :, None, None]
        return self._read(keys, histories, hidden), self._read(values, histories, hidden)

    def write(
        self, layer: int, tables: Sequence[Int32s], starts: Int64s, valid: Int64s, entries: tuple[Tensor, Tensor]
    ) -> None:
        """Store entries of consecutive tokens, those of this rank.

        Args:
            layer: The layer.
            tables: As for `histories`.
            starts: int64 [rows], position of each row's first token.
            valid: int64 [rows], how many of its tokens to store.
            entries: Keys and values, [rows, tokens, heads, width] each.
        """
        table = self._table
        positions = starts[:, None] + np.arange(entries[0].shape[1])
        kept = (np.arange(entries[0].shape[1]) < valid[:, None]) & (table.owner(positions) == self._rank)
        row, token = np.nonzero(kept)
        position = positions[row, token]
        block = tables[table.index][row, position // table.span].astype(np.int64)
        where = self._tensor(block), self._tensor(table.local_index(position) % table.block_tokens)
        chosen = self._tensor(row), self._tensor(token)
        for view, values in zip(self._views[layer], entries, strict=True):
            view[where] = values[chosen]

    def _read(self, view: Tensor, histories: Histories, hidden: Tensor) -> Tensor:
        gathered = view[histories.blocks].flatten(1, 2)[:, : histories.columns]
        return gathered.masked_fill(hidden, 0)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
