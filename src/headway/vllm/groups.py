"""What vLLM's planner made of a model, as groups of the cache.

vLLM has one id space of blocks ("pages"): whatever group a block belongs to, its id stands for one page of every KV
tensor. So a page is the cache's block, and each group of vLLM gets a block table of its own, with the span that vLLM
gave it. Recurrent states are used in place (vLLM's Mamba cache mode "none"): one page per group and request, which
together are the cache's one state.

The kinds are a closed table by exact class name. A kind that is not in it, and whatever the planner does that the table
does not provide for, is refused by name when the engine starts: a wrong guess would be a silent loss of hits, or worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.cache import ChunkedLocal, FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError

__all__ = ["Group", "Groups", "read_groups"]

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_CHUNK = "ChunkedLocalAttentionSpec"
_STATE = "MambaSpec"
_BACK = "serve this model without --scheduler-cls headway.vllm.Scheduler"


@dataclass(frozen=True)
class Group:
    """One KV cache group of vLLM.

    Attributes:
        index: Its place in vLLM's list.
        name: The cache's name for it.
        kind: "full", "window", "chunk" or "state".
        span: Tokens of the sequence that a page covers; 0 for states.
        spec: vLLM's own spec.
        layers: Number of its layers.
        drafts: Pages for states after draft tokens, besides the state's own.
    """

    index: int
    name: str
    kind: str
    span: int
    spec: Any
    layers: int
    drafts: int = 0


@dataclass(frozen=True)
class Groups:
    """All groups of a model, and what the cache is told about them.

    Attributes:
        groups: In vLLM's order.
        specs: The cache's specs, one per group, in the same order.
        layout: The parallel layout.
        blocks: Blocks that the cache has: all but block 0, vLLM's null block.
        block_bytes: Bytes of a page over all layers, rounded up so that every group's tokens divide it.
    """

    groups: tuple[Group, ...]
    specs: tuple[LayerSpec, ...]
    layout: ParallelLayout
    blocks: int
    block_bytes: int

    @property
    def states(self) -> tuple[int, ...]:
        """VLLM's indices of the groups of states."""
        return tuple(group.index for group in self.groups if group.kind == "state")

    @property
    def attention(self) -> tuple[int, ...]:
        """VLLM's indices of all other groups."""
        return tuple(group.index for group in self.groups if group.kind != "state")


def read_groups(kv_cache_config: Any, layout: ParallelLayout, lookahead: int = 0) -> Groups:
    """Groups of the cache for those of a `KVCacheConfig`.

    Args:
        kv_cache_config: vLLM's.
        layout: Parallel layout.
        lookahead: Later tokens on which the entries of draft layers depend.

    Raises:
        ConfigError: A group that cannot be served; says which, why and what to do.
    """
    planned = kv_cache_config.kv_cache_groups
    if not planned:
        raise ConfigError("this model has no KV cache, so there is nothing to keep: " + _BACK)
    groups = tuple(_read(i, group, layout) for i, group in enumerate(planned))
    unit = math.lcm(*[group.spec.block_size for group in groups if group.kind != "state"])
    page = max(_page_bytes(group) for group in groups)
    block_bytes = -(-page // unit) * unit
    specs = tuple(_spec(group, block_bytes, layout, lookahead) for group in groups)
    return Groups(groups, specs, layout, kv_cache_config.num_blocks - 1, block_bytes)


def _read(index: int, planned: Any, layout: ParallelLayout) -> Group:
    """One group, checked."""
    inner = _layer_specs(planned.kv_cache_spec)
    spec, name = inner[0], type(inner[0]).__name__
    if len({type(one).__name__ for one in inner}) > 1:
        kinds = ", ".join(sorted({type(one).__name__ for one in inner}))
        _refuse(index, f"mixes layers of several kinds ({kinds})")
    kind = _kind(name)
    if kind is None:
        _refuse(index, f"consists of {name} layers, which the cache does not know")
    for one in inner:
        _check_spec(index, one, layout)
    if getattr(planned, "host_resident", False) or getattr(getattr(planned, "role", None), "value", "default") != (
        "default"
    ):
        _refuse(index, "lives in host memory (HiSparse)")
    shards = layout.shards if getattr(spec, "dcp_sharded", False) else 1
    span = 0 if kind == "state" else spec.block_size * shards
    drafts = spec.num_speculative_blocks if kind == "state" else 0
    return Group(index, f"{kind}{index}", str(kind), span, planned.kv_cache_spec, len(planned.layer_names), drafts)


def _kind(name: str) -> str | None:
    kinds = {**dict.fromkeys(_FULL, "full"), **dict.fromkeys(_WINDOW, "window"), _CHUNK: "chunk", _STATE: "state"}
    return kinds.get(name)


def _layer_specs(spec: Any) -> Sequence[Any]:
    """The specs of a group's layers: one for all, or one for each."""
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        return list(spec.kv_cache_specs.values())
    return [spec]


def _check_spec(index: int, spec: Any, layout: ParallelLayout) -> None:
    """Refuse what a spec of a known kind may ask for and the cache cannot do."""
    name = type(spec).__name__
    if name == _STATE:
        if spec.mamba_cache_mode != "none":
            raise ConfigError(
                f"KV cache group {index} keeps its states in mode {spec.mamba_cache_mode!r}, which belongs to vLLM's "
                "own prefix caching: start with --no-enable-prefix-caching, and without --mamba-cache-mode"
            )
        return
    if getattr(spec, "tokens_per_state", 1) != 1:
        _refuse(index, f"stores one entry for {spec.tokens_per_state} tokens")
    if getattr(spec, "prefix_replay_tokens", 0) or not getattr(spec, "prefix_cacheable", True):
        _refuse(index, "is rebuilt after a hit by computing tokens again (bounded replay)")
    if getattr(spec, "non_causal", False):
        _refuse(index, "has attention that is not causal")
    if spec.dcp_sharded and layout.shards > 1 and name not in _FULL:
        _refuse(index, f"consists of {name} layers split over context-parallel ranks")


def _refuse(index: int, why: str) -> None:
    raise ConfigError(f"KV cache group {index} {why}: Headway cannot serve that yet; {_BACK}")


def _page_bytes(group: Group) -> int:
    """Bytes of one page of a group over all of its layers, on one rank."""
    page = int(group.spec.page_size_bytes)
    return page if type(group.spec).__name__ == "UniformTypeKVCacheSpecs" else page * group.layers


def _spec(group: Group, block_bytes: int, layout: ParallelLayout, lookahead: int) -> LayerSpec:
    """The cache's spec for a group: as many bytes per token as make its block hold what vLLM's holds."""
    spec = _layer_specs(group.spec)[0]
    if group.kind == "state":
        return Recurrent(group.name, block_bytes)
    size = block_bytes // spec.block_size
    if group.kind == "window":
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return SlidingWindow(group.name, size, window, lookahead, own_table=True)
    if group.kind == "chunk":
        return ChunkedLocal(group.name, size, spec.attention_chunk_size, lookahead, own_table=True)
    sharded = bool(spec.dcp_sharded) and layout.shards > 1
    return FullAttention(group.name, size, lookahead, sharded=sharded, own_table=True)
