"""The cache that a transformers model writes to: its layers read and write the arena through block tables.

One `PagedCache` lives for one forward. Token layers store new entries in their slots and return the history with them;
state layers are transformers' own, loaded from the arena before the forward and stored after it.

Where ranks share the forward's tokens (`headway.runtime.parallel.prefill_context`), token layers gather the new entries
of all, and the states of a layer come from the rank before and go to the one behind: taken when the model first asks
for one, handed on when it has left all of them, or turns to something else.

Entries may be stored as a narrower type than the model computes with. Then attention reads each as it is stored,
rounded, those of the same forward too: what a token sees does not depend on where a prompt was cut or resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicLayer, LinearAttentionLayer

from headway.runtime.forward.arena import Arena
from headway.runtime.forward.plan import ForwardPlan, TokenPlan
from headway.runtime.model.attention import Scores, masked_attention
from headway.runtime.model.layout import LayerLayout, Share
from headway.runtime.model.stored import as_stored
from headway.runtime.parallel.context_parallel import HeadMerge, Partial, partial_attention
from headway.runtime.parallel.prefill_context import TokenRanks

__all__ = ["HybridLayer", "PagedCache", "PagedLayer", "StateLayer"]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer's token entries, in the arena.

    Args:
        views: The layer's fields in the arena, [blocks, block_tokens, heads, width] each.
        plan: What this forward reads and writes.
        length: Tokens before those that this rank computes, in its longest row.
        merge: The ranks that have the layer's other heads, where its tokens are split over the same ranks: each stores
            its tokens' entries of all their heads. None where it stores its own heads alone.
        tokens: The ranks that share the forward's tokens; None where every rank computes all.
    """

    is_sliding = False

    def __init__(
        self,
        views: tuple[torch.Tensor, ...],
        plan: TokenPlan,
        length: int,
        merge: HeadMerge | None = None,
        tokens: TokenRanks | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._merge = merge
        self._tokens = tokens
        self._views = views
        self._plan = plan
        self._length = length
        self.is_initialized = True
        self.keys = views[0]  # a model may ask whether a layer holds anything

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new entries and return all that the forward's tokens may see.

        Args:
            key_states: [rows, heads, tokens, key width], of the tokens that this rank computes.
            value_states: [rows, heads, tokens, value width].

        Returns:
            Keys and values, [rows, heads, plan.columns, width] each: of this rank's heads where they are just the new
            tokens', else of all heads that are stored.
        """
        keys = self._exchange(self._views[0], key_states)
        return keys, self._exchange(self._views[1], value_states)

    def _exchange(self, view: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        plan, dtype = self._plan, new.dtype
        if self._tokens is not None:
            new = self._tokens.gather(new, plan.count, dim=2)
        new = as_stored(new, view.dtype).to(dtype)
        rows = (new if self._merge is None else self._merge.gather_heads(new)).transpose(1, 2)
        entries = rows.reshape(-1, *rows.shape[2:])
        view[plan.write] = (entries if plan.kept is None else entries[plan.kept]).to(view.dtype)
        if plan.past_columns == 0:
            return new
        blocks = view[plan.past].to(dtype)
        past = blocks.flatten(1, 2)[:, : plan.past_columns]
        if plan.hidden is not None:
            past.masked_fill_(plan.hidden, 0)
        history = torch.cat([past, rows], dim=1) if plan.joined else past
        return history.transpose(1, 2)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory exists."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the keys, and 0. Only a model that builds its own mask asks, and that one is refused."""
        return self._plan.columns, 0

    def get_seq_length(self) -> int:
        """Tokens before the forward's own. All rows have equally many where a model asks (`uniform_starts`)."""
        return self._length

    def get_max_length(self) -> int:
        """-1: no fixed maximum."""
        return -1


class StateLayer(LinearAttentionLayer):
    """A layer's states, loaded from the arena.

    Args:
        states: The layer's fields by name, [rows, *shape] each; they are written in place.
        fresh: Whether the rows start without a state.
        number: States of each kind that the layer has.
        computed: The types that the model computes with, of fields that are stored as others.
    """

    def __init__(
        self, states: dict[str, torch.Tensor], fresh: bool, number: int, computed: Mapping[str, torch.dtype]
    ) -> None:
        super().__init__(number_of_states=number)
        self._states = states
        self._computed = computed
        self._loaded = not fresh
        if self._loaded:
            self._load()

    def _load(self) -> None:
        for name, home in self._states.items():
            kind, _, index = name.partition(":")
            i, tensor = int(index), home.to(self._computed.get(name, home.dtype))
            self.has_previous_state[i] = True
            if kind == "conv":
                self.conv_states[i] = tensor
                self.conv_kernel_size[i] = tensor.shape[-1]
                self.is_conv_states_initialized[i] = True
            else:
                self.recurrent_states[i] = tensor
                self.is_recurrent_states_initialized[i] = True

    def save(self) -> None:
        """Bring states back to where they were loaded from, unless the model wrote to them there."""
        for name, home in self._states.items():
            kind, _, index = name.partition(":")
            held = self.conv_states if kind == "conv" else self.recurrent_states
            tensor = held[int(index)]
            assert tensor is not None, f"the forward left {name} without a value"
            if tensor.data_ptr() != home.data_ptr():
                home.copy_(tensor)

    @property
    def names(self) -> set[str]:
        """Its states: `conv:0`, `recurrent:0`, ..."""
        return set(self._states)

    def packed(self) -> torch.Tensor:
        """The states where they are at home, uint8 [rows, bytes]: a copy."""
        homes = [home.flatten(1).view(torch.uint8) for home in self._states.values()]
        return torch.cat(homes, dim=1)

    def unpack(self, packed: torch.Tensor) -> None:
        """Fill the states where they are at home, and where the model finds them, with what another `packed`."""
        parts = torch.split(packed, [home[0].nbytes for home in self._states.values()], dim=1)
        for home, part in zip(self._states.values(), parts, strict=True):
            home.flatten(1).view(torch.uint8).copy_(part)
        if self._loaded:  # the model finds another copy of what is stored as a narrower type
            self._load()


class HybridLayer(StateLayer, PagedLayer):  # type: ignore[no-untyped-call, override]
    """A layer with states and token entries (parallel heads of attention and of a state-space model)."""

    def __init__(
        self,
        states: dict[str, torch.Tensor],
        fresh: bool,
        number: int,
        computed: Mapping[str, torch.dtype],
        views: tuple[torch.Tensor, ...],
        plan: TokenPlan,
        length: int,
        merge: HeadMerge | None = None,
        tokens: TokenRanks | None = None,
    ) -> None:
        PagedLayer.__init__(self, views, plan, length, merge, tokens)
        StateLayer.__init__(self, states, fresh, number, computed)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Set up a fresh state, as the state layer does; the token entries need nothing."""
        StateLayer.lazy_initialization(self, *args, **kwargs)


class _Relay:
    """Has the layers' states come from the rank of earlier tokens and go to that of later ones, a layer at a time."""

    def __init__(self, tokens: TokenRanks) -> None:
        self._tokens = tokens
        self._begun: set[int] = set()
        self._open: StateLayer | None = None
        self._missing: set[str] = set()

    def begin(self, layer: StateLayer) -> None:
        """Take the states of a layer, if this is the first that the model wants of it."""
        if id(layer) not in self._begun:
            self.end()
            self._begun.add(id(layer))
            self._open, self._missing = layer, layer.names
            layer.unpack(self._tokens.take(layer.packed()))

    def end(self) -> None:
        """Hand on what the model has left of the layer that it was at, if that has not been done."""
        if self._open is not None:
            self._open.save()
            self._tokens.hand_on(self._open.packed())
            self._open = None

    def left(self, layer: StateLayer, name: str) -> None:
        """Note that the model has left a state, and hand on those of its layer as soon as all of them are there.

        Raises:
            RuntimeError: The layer's states were handed on before: the rank of later tokens would go on from old ones.
        """
        if self._open is not layer:
            raise RuntimeError(f"a state ({name}) was changed after it had been handed on: --pcp is not for this model")
        self._missing.discard(name)
        if not self._missing:
            self.end()


class PagedCache(Cache):
    """The cache of one forward.

    Use: construct it, run the model with it while attending through it, then call `store`.

    Args:
        arena: The memory.
        plan: The forward.
        merge: Merges attention over the ranks that split the tokens; None where nothing is split.
    """

    def __init__(self, arena: Arena, plan: ForwardPlan, merge: HeadMerge | None = None) -> None:
        self._arena = arena
        self._plan = plan
        self._merge = merge
        self._tokens = merge.tokens if merge is not None and plan.shared else None
        self._relay = None if self._tokens is None else _Relay(self._tokens)
        self._fresh = plan.fresh and plan.own[0] == 0  # else there are states before, perhaps another rank's
        self._states = self._load_states()
        self._updated: int | None = None
        self._tables = {g.spec.name: g.table.index for g in arena.geometry.groups}
        super().__init__(layers=[self._layer(layer) for layer in arena.layout.layers])

    def _load_states(self) -> torch.Tensor | None:
        plan = self._plan
        if plan.states is None:
            return None
        if plan.fresh:
            return self._arena.new_states(*plan.states.shape)
        return self._arena.gather_states(plan.states)

    def _layer(self, layer: LayerLayout) -> Any:
        length = int(self._plan.starts.max()) + self._plan.own[0]
        if layer.state is None:
            if layer.tokens is None:  # a layer of cross-attention, which text alone passes by, stays empty
                return DummyLayer() if layer.kind == DummyLayer.__name__ else DynamicLayer()  # type: ignore[no-untyped-call]
            views, plan = self._arena.entries(layer.index), self._token_plan(layer)
            return PagedLayer(views, plan, length, self._gathers(layer), self._tokens)
        assert self._states is not None
        states = dict(self._arena.state_fields(self._states, layer.index))
        number = 1 + max(int(name.partition(":")[2]) for name in states)
        computed = {field.name: field.computed for field in layer.state.fields if field.computed is not None}
        if layer.tokens is None:
            return StateLayer(states, self._fresh, number, computed)
        views = self._arena.entries(layer.index)
        plan, merge = self._token_plan(layer), self._gathers(layer)
        return HybridLayer(states, self._fresh, number, computed, views, plan, length, merge, self._tokens)

    def _gathers(self, layer: LayerLayout) -> HeadMerge | None:
        """The ranks whose heads an entry of this layer has, or None where it has this rank's alone."""
        return self._merge if layer.share is Share.SPLIT and self._token_plan(layer).sharded else None

    def _token_plan(self, layer: LayerLayout) -> TokenPlan:
        assert layer.tokens is not None
        return self._plan.tables[self._tables[layer.tokens.group]]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new entries of a layer and return all that its tokens may see (see `PagedLayer.update`)."""
        if self._relay is not None:
            self._relay.end()
        self._updated = layer_idx
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states)
        return keys, values

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The inputs that a layer's convolution remembers, or None."""
        self._begin(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's state, or None."""
        self._begin(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take new inputs of a layer's convolution."""
        self._begin(layer_idx)
        found = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self._left(layer_idx, f"conv:{state_idx}")
        return found

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take a layer's new state."""
        self._begin(layer_idx)
        found = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._left(layer_idx, f"recurrent:{state_idx}")
        return found

    def _begin(self, index: int) -> None:
        layer = self.layers[index]
        if self._relay is not None and isinstance(layer, StateLayer):
            self._relay.begin(layer)

    def _left(self, index: int, name: str) -> None:
        layer = self.layers[index]
        if self._relay is not None and isinstance(layer, StateLayer):
            self._relay.left(layer, name)

    def store(self, keep: NDArray[np.bool_] | None = None) -> None:
        """Write the states that the forward left to their blocks. Token entries were written as they came.

        Args:
            keep: bool [rows], False for rows whose states are dropped: their blocks stay as they are. None for no row.
        """
        if self._states is None or self._plan.states is None:
            return
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.save()
        ids, states = self._plan.states, self._states
        if self._relay is not None and self._tokens is not None:
            self._relay.end()
            states = self._tokens.from_last(states)
        if keep is not None and not keep.all():
            kept = torch.from_numpy(np.flatnonzero(keep)).to(ids.device)
            ids, states = ids[kept], states[kept]
        self._arena.scatter_states(ids, states)

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Attention of one layer, each query seeing what its layer's kind lets it see (see `AttentionContext`)."""
        index = layer if self._updated is None else self._updated
        self._updated = None
        assert index is not None, "the dry run found which layer attends"
        source = self._arena.layout.source(index)
        plan = self._token_plan(source)
        queries = query.shape[2]
        skipped = self._plan.own[1] - queries
        if plan.merged:
            return self._attend_merged(plan, query, key, value, scores, self._gathers(source) is not None)
        if plan.is_plain_causal and queries == self._plan.count:
            return masked_attention(query, key, value, scores, causal=True)
        parts = [
            masked_attention(query[:, :, start:stop], key, value, scores, plan.mask(start + skipped, stop + skipped))
            for start, stop in plan.stretches(queries)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _attend_merged(
        self, plan: TokenPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, split: bool
    ) -> torch.Tensor:
        """Attend to this rank's entries, in as many stretches as its memory asks for; merge once with the others.

        Where heads are `split`, that is with the queries of all ranks' heads, and what comes back is for its own. So it
        is with tokens where ranks share them.
        """
        assert self._merge is not None, "the runner refused split tokens without ranks"
        sinks = scores.sinks
        if split:
            query = self._merge.gather_heads(query)
            sinks = None if sinks is None else self._merge.gather_heads(sinks[None])[0]
        wanted = query.shape[2]
        if self._tokens is not None:
            first, stop = self._plan.own
            filled = F.pad(query, (0, 0, stop - first - wanted, 0))  # a model may attend with its last tokens only
            query = self._tokens.gather(filled, self._plan.count, dim=2)
        queries = query.shape[2]
        skipped = self._plan.count - queries
        parts = []
        for start, stop in plan.stretches(queries, query.shape[1]):
            seen, mask = plan.reach(stop + skipped), plan.mask(start + skipped, stop + skipped)
            own = key[:, :, :seen], value[:, :, :seen]
            parts.append(partial_attention(query[:, :, start:stop], *own, scores, mask))
        merged = self._merge(Partial.join(parts), sinks, own=split, own_tokens=self._tokens is not None)
        return merged[:, :, -wanted:].to(query.dtype)
