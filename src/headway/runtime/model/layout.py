"""What a model stores, tensor by tensor, and the cache groups that follow from it.

A *field* is one tensor that a layer keeps: a token's keys or values, or one of its states. Fields of the layers of one
kind lie one after another in the bytes of their group; this module says where, and nothing here touches a tensor.

In a block, a token group's region holds one sub-region per field, `[block_tokens, *shape]`, and not one record per
token: so a layer's history is read as whole runs of a block, and a field of any dtype is aligned as long as the block
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from headway.cache import (
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.errors import ConfigError, ModelError
from headway.runtime.interface import LongRope

__all__ = [
    "STATE_ALIGNMENT",
    "Entries",
    "Field",
    "LayerLayout",
    "LayoutBuilder",
    "ModelLayout",
    "Part",
    "Share",
    "layout_of_ranks",
]

_FULL = "full"
"""Name of the group of full attention."""
STATE_ALIGNMENT = 16
"""Bytes to which every state field is aligned, so that a typed view of it exists whatever lies before it."""
_ENTRIES = ("keys", "values")
"""Names of the fields of a token's entries."""
_TOKEN_ALIGNMENT = 4
"""Bytes to which a token's entries are aligned: those of another group, of a wider type, may lie behind them."""


def layout_of_ranks(tp: int = 1, dcp: int = 1, interleave: int = 1, pcp: int = 1) -> ParallelLayout:
    """The layout that the cache is set up for.

    Decode context parallelism reuses the ranks of tensor parallelism. Without tensor parallelism (`tp` 1) it has ranks
    of its own, each with the whole model: as many as it splits tokens over, and nothing of the specs is split by heads.
    Prefill context parallelism has all of these ranks `pcp` times.

    Raises:
        ConfigError: Sizes that do not go together.
    """
    return ParallelLayout(tp=dcp if tp == 1 else tp, dcp=dcp, pcp=pcp, interleave=interleave)


@dataclass(frozen=True)
class Part:
    """A run of a tensor's dimension that is cut among the ranks by itself: the queries in a fused projection, say.

    Attributes:
        length: Elements.
        units: What may not be torn: heads, for example. Every rank gets an equal run of them.
        shared: Where ranks outnumber units, neighbouring ranks may have the same one.
    """

    length: int
    units: int
    shared: bool = False

    def of(self, rank: int, size: int) -> tuple[int, int] | None:
        """The share of rank `rank` of `size`, [first, stop) in elements of the part; None if it cannot be cut so."""
        each = self.length // self.units
        if self.units % size == 0:
            count = self.units // size
            return rank * count * each, (rank + 1) * count * each
        if self.shared and size % self.units == 0:
            unit = rank * self.units // size
            return unit * each, (unit + 1) * each
        return None

    def owner(self, rank: int, size: int) -> bool:
        """Whether no rank before `rank` has the same share."""
        return rank == 0 or self.of(rank - 1, size) != self.of(rank, size)


@dataclass(frozen=True)
class Field:
    """One tensor that a layer keeps.

    Attributes:
        name: `keys`, `values`, `conv:0`, `recurrent:0`, ...
        shape: Its shape for one token ([heads, width]) or one state (without the batch dimension).
        dtype: The type that it is stored as.
        offset: First byte: within one token's entry of the group, or within the group's state.
        parts: How the whole tensor's first dimension is cut among the ranks that share the weights; nothing where each
            has all of it; None where that is not known for certain.
        computed: The type that the model computes with, where that is a wider one; None where it is `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    parts: tuple[Part, ...] | None = ()
    computed: torch.dtype | None = None

    @property
    def bytes(self) -> int:
        """Bytes of one token or one state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entries:
    """What a layer keeps in one cache group.

    Attributes:
        group: Name of the group.
        fields: Its tensors.
    """

    group: str
    fields: tuple[Field, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one token or one state, without padding."""
        return sum(field.bytes for field in self.fields)


class Share(Enum):
    """What of a layer's attention is a rank's."""

    WHOLE = "whole"
    """All heads, of queries as of keys and values."""
    SPLIT = "split"
    """Some of the heads, with their keys and values."""
    QUERIES = "queries"
    """Some of the query heads, and all of what they attend to: one latent, or one head."""


@dataclass(frozen=True)
class LayerLayout:
    """What one layer keeps.

    Attributes:
        index: The layer's number, as the model passes it to its cache.
        kind: The name of the transformers class that keeps it (`DynamicLayer`, `LinearAttentionLayer`, ...).
        tokens: Entries of each token, or None.
        state: Recurrent and convolution states, or None. A hybrid layer has both.
        entries_of: The layer whose keys and values this one attends to, where it keeps none of its own; else None.
        heads: Query heads that a rank computes; 0 for a layer without attention.
        share: What of the layer's attention that is.
    """

    index: int
    kind: str
    tokens: Entries | None = None
    state: Entries | None = None
    entries_of: int | None = None
    heads: int = 0
    share: Share = Share.WHOLE

    @property
    def in_full(self) -> bool:
        """Whether the layer keeps entries of full attention."""
        return self.tokens is not None and self.tokens.group == _FULL


@dataclass(frozen=True)
class ModelLayout:
    """Everything the runtime knows about a model without knowing its name.

    Attributes:
        model: How the model calls itself (its class).
        layers: One record per layer.
        groups: The cache groups, token-indexed ones first.
        dtype: Type of the weights.
        vocab_size: Width of the logits.
        max_tokens: Longest sequence that the model's config admits, or None.
        parameters: Number of parameters.
        active_parameters: Parameters that one token uses, embeddings left out.
        cost: Compute of a prompt, in floating-point operations.
        uniform_starts: True for a model that asks its cache for one length for all rows of a batch: rows run together
            only if they start at the same position.
        tp: Tensor-parallel size that the groups' bytes are for.
        rank_parameters: Parameters that one rank holds; fewer than all of them where ranks share them.
        gathered: Ranks whose heads an entry of full attention has, in layers that are split by heads: where ranks split
            the tokens as well, each holds the entries of its own tokens and of all their heads.
        long_rope: Its two sets of rotary frequencies, or None for a model with one.
        dynamic_rope: Whether its rotary frequencies change with every token behind `max_tokens` (dynamic NTK scaling).
    """

    model: str
    layers: tuple[LayerLayout, ...]
    groups: tuple[LayerSpec, ...]
    dtype: torch.dtype
    vocab_size: int
    max_tokens: int | None
    parameters: int
    active_parameters: int
    cost: ComputeCost
    uniform_starts: bool = False
    tp: int = 1
    rank_parameters: int = 0
    gathered: int = 1
    long_rope: LongRope | None = None
    dynamic_rope: bool = False

    def group(self, name: str) -> LayerSpec:
        """Return the group called `name` (KeyError if there is none)."""
        return {group.name: group for group in self.groups}[name]

    def source(self, index: int) -> LayerLayout:
        """Return the layer whose keys and values layer `index` attends to: itself, or the one it shares with."""
        layer = self.layers[index]
        return layer if layer.entries_of is None else self.layers[layer.entries_of]

    def over(self, dcp: int) -> ModelLayout:
        """The same model where the tokens of full attention are split over `dcp` ranks.

        Raises:
            ModelError: Ranks compute with a share of the heads each, and keep what only all heads together can use.
        """
        if dcp > 1 and any(x.share is Share.QUERIES and self.source(x.index).in_full for x in self.layers):
            raise ModelError(
                f"{self.model}: its heads share one latent, and a rank of {self.tp} computes some of the heads, so the "
                f"latent cannot be split by tokens over {dcp} ranks: leave out --dcp, or --tp"
            )
        if not any(layer.share is Share.SPLIT for layer in self.layers):
            return self

        def gathered(layer: LayerLayout, field: Field) -> Field:
            if layer.share is Share.SPLIT and layer.in_full and field.name in _ENTRIES:
                return replace(field, shape=(field.shape[0] * dcp // self.gathered, *field.shape[1:]))
            return field

        return replace(self._with_fields(gathered), gathered=dcp)

    def stored_as(self, entries: torch.dtype | None = None, states: torch.dtype | None = None) -> ModelLayout:
        """The same model where some of what it keeps is stored as another type than it computes with.

        Args:
            entries: What keys and values, or latents, of all token-indexed groups are stored as; None: as computed.
            states: What recurrent states are stored as. Convolution states stay: they are small, and hold the last few
                inputs as they are.

        Raises:
            ConfigError: The model keeps nothing of the kind, or computes with a type that is no wider.
        """
        smaller = self._stored_as("--kv-dtype", _ENTRIES, entries)
        return smaller._stored_as("--state-dtype", ("recurrent",), states)

    def _stored_as(self, option: str, names: tuple[str, ...], dtype: torch.dtype | None) -> ModelLayout:
        if dtype is None:
            return self
        fields = [f for layer in self.layers for part in (layer.tokens, layer.state) if part for f in part.fields]
        computed = {f.computed or f.dtype for f in fields if f.name.startswith(names)}
        what = "entries of attention" if names is _ENTRIES else "recurrent states"
        if not computed:
            raise ConfigError(f"{option}: {self.model} keeps no {what}: leave it out")
        if any(dtype.itemsize > wide.itemsize for wide in computed):
            widest = " and ".join(sorted(str(wide).removeprefix("torch.") for wide in computed))
            raise ConfigError(
                f"{option}: {self.model} computes its {what} in {widest}, and a wider type would hold the same numbers "
                f"in more memory: leave it out"
            )

        def stored(layer: LayerLayout, field: Field) -> Field:
            wide = field.computed or field.dtype
            if not field.name.startswith(names) or wide == dtype:
                return field
            return replace(field, dtype=dtype, computed=wide)

        return self._with_fields(stored)

    @property
    def narrows_entries(self) -> bool:
        """Whether entries of attention are stored as a narrower type than they are computed with."""
        return any(f.computed is not None for x in self.layers if x.tokens is not None for f in x.tokens.fields)

    def _with_fields(self, change: Callable[[LayerLayout, Field], Field]) -> ModelLayout:
        """The same with every field changed, all of them placed anew."""
        builder = LayoutBuilder()
        layers = []
        for layer in self.layers:
            tokens, state = layer.tokens, layer.state
            if tokens is not None:
                spec = self.group(tokens.group)
                size = getattr(spec, "window", 0) or getattr(spec, "chunk", 0)
                kept = [change(layer, field) for field in tokens.fields]
                tokens = builder.place(tokens.group, tokens.group.partition("-")[0], size, kept)
            if state is not None:
                kept = [change(layer, field) for field in state.fields]
                state = builder.place(state.group, "state", 0, kept)
            layers.append(replace(layer, tokens=tokens, state=state))
        return replace(self, layers=tuple(layers), groups=builder.groups())


class LayoutBuilder:
    """Gathers the fields of a model's layers into groups, in layer order.

    Args:
        tp: Tensor-parallel size. Key/value heads are divided by it, and kept whole where there are fewer heads than
            ranks; channels and heads of states are divided by it; a single latent head is kept whole.
    """

    def __init__(self, tp: int = 1) -> None:
        self.tp = tp
        self._sizes: dict[str, int] = {}
        self._needs: dict[str, tuple[str, int]] = {}

    def tokens(self, need: str, size: int, fields: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> Entries:
        """Add a layer's token entries.

        Args:
            need: `full`, `window` or `chunk`.
            size: The window or the chunk in tokens; 0 for `full`.
            fields: Name, shape [heads, width] of one token, and dtype.

        Returns:
            The layer's entries in the group of its need.

        Raises:
            ConfigError: Heads that tensor parallelism can neither split nor repeat evenly.
        """
        made = [self._field(name, (self._heads(shape[0]), *shape[1:]), dtype) for name, shape, dtype in fields]
        return self.place(need if need == _FULL else f"{need}-{size}", need, size, made)

    def state(self, fields: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> Entries:
        """Add a layer's states: name, shape without the batch dimension, and dtype of each.

        Raises:
            ConfigError: The first dimension (channels or heads) is not divisible by the tensor-parallel size.
        """
        for name, shape, _ in fields:
            if shape[0] % self.tp:
                raise ConfigError(
                    f"tp={self.tp} does not divide the {shape[0]} channels or heads of a layer's {name} state: "
                    f"choose a tp that divides {shape[0]}"
                )
        made = [self._field(name, (shape[0] // self.tp, *shape[1:]), dtype) for name, shape, dtype in fields]
        return self.place("state", "state", 0, made)

    def place(self, group: str, need: str, size: int, fields: Sequence[Field]) -> Entries:
        """Add fields of a layer, as they are but for their offsets.

        Args:
            group: Name of the group.
            need: `full`, `window`, `chunk` or `state`.
            size: The window or the chunk in tokens; else 0.
            fields: The fields.
        """
        self._needs[group] = (need, size)
        alignment, made = STATE_ALIGNMENT if need == "state" else 1, []
        for field in fields:
            offset = -(-self._sizes.get(group, 0) // alignment) * alignment
            made.append(replace(field, offset=offset))
            self._sizes[group] = offset + field.bytes
        return Entries(group, tuple(made))

    def groups(self) -> tuple[LayerSpec, ...]:
        """Return the specs of all groups added so far, token-indexed ones first."""
        order = sorted(
            self._needs,
            key=lambda name: (("full", "window", "chunk", "state").index(self._needs[name][0]), name),
        )
        return tuple(self._spec(name) for name in order)

    def _heads(self, heads: int) -> int:
        """Heads that one rank keeps: a share of them, or one where ranks outnumber heads (a latent is one head)."""
        if heads % self.tp and self.tp % heads:
            raise ConfigError(
                f"tp={self.tp} neither divides {heads} key/value heads nor is a multiple of them: choose a tp that does"
            )
        return max(1, heads // self.tp)

    def _field(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Field:
        return Field(name, shape, dtype, 0, () if self.tp == 1 else None)

    def _spec(self, name: str) -> LayerSpec:
        need, size = self._needs[name]
        alignment = STATE_ALIGNMENT if need == "state" else _TOKEN_ALIGNMENT
        total = -(-self._sizes[name] // alignment) * alignment
        if need == _FULL:
            return FullAttention(name, total)
        if need == "window":
            return SlidingWindow(name, total, window=size)
        if need == "chunk":
            return ChunkedLocal(name, total, chunk=size)
        return Recurrent(name, total)
