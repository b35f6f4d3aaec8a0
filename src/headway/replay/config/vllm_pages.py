"""How vLLM lays a model's cache out in pages: one id space, and one size for attention, windows and states.

In our words, from its public source (0.32: `vllm/v1/core/kv_cache_utils.py`, 0.33: `kv_cache_planning.py`; both:
`Platform.update_block_size_for_backend`). A *page* is what one block id means on a rank, over all layers of a group.

1. A block has 16 tokens (64 for latent attention without states). With states it has as many as it takes for a layer's
   attention to hold a layer's state, rounded up to the grain: 128 tokens with latent attention, else 16. With its own
   prefix caching, 0.33 also keeps blocks at multiples of where GatedDeltaNet's prefill kernel exports states: 64.
2. Chunked attention (Llama 4) switches the management by kinds off: windows and chunks are kept as full attention.
3. Layers of one kind, reach and size form a bucket. Full attention alone is one group of all layers. Otherwise a layer
   with less bytes in a block gets larger blocks if these divide, and is padded if not, and so is a state.
4. Every group has the same number of layers: that of the smallest bucket; or of the largest, where that has less than
   half as many again. What does not divide is padded. A page has the bytes of that many layers.

What it gives was compared with vLLM's own functions: `tools/record_vllm_pages.py`. Not modelled: block sizes that other
kernels ask for (FlashAttention 4, FlashInfer on Blackwell), layouts with the block outermost, drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

from headway.cache import ChunkedLocal, FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay.config.groups import reach_of, size_of

__all__ = ["PagePlan", "PageTable", "page_plan"]

_BLOCK, _LATENT_BLOCK, _LATENT_GRAIN, _GDN_GRAIN = 16, 64, 128, 64
_HALF_AS_MANY_AGAIN = Fraction(3, 2)


@dataclass(frozen=True)
class PageTable:
    """What pages of groups that need the same entries hold.

    Attributes:
        kind: FullAttention, SlidingWindow or Recurrent.
        groups: Groups of layers: pages that a stretch of tokens, or a state, takes.
        span: Tokens of the sequence that such a page covers, over all ranks; 0 for states.
        reach: Tokens of a window, else 0.
    """

    kind: type[LayerSpec]
    groups: int
    span: int = 0
    reach: int = 0


@dataclass(frozen=True)
class PagePlan:
    """The pages of a model on one rank.

    Attributes:
        page_bytes: Bytes of a page.
        block_tokens: Tokens of the block of full attention on one rank.
        tables: What the pages hold: full attention first, then windows, states at the end.
    """

    page_bytes: int
    block_tokens: int
    tables: tuple[PageTable, ...]

    @property
    def state_groups(self) -> int:
        """Pages of a state."""
        return sum(table.groups for table in self.tables if table.kind is Recurrent)


@dataclass(frozen=True)
class _Bucket:
    """Layers of one kind, reach and size: how many, and bytes of a token, or of a state, of one of them."""

    kind: type[LayerSpec]
    reach: int
    size: Fraction
    layers: int
    block: int = 0


def page_plan(
    groups: Sequence[LayerSpec],
    layers: Mapping[str, int],
    kinds: Mapping[str, str],
    layout: ParallelLayout,
    *,
    version: str = "0.33",
    caching: bool = True,
    block_tokens: int = 0,
    state_groups: int = 0,
) -> PagePlan:
    """Lay a model out.

    Args:
        groups: Cache groups, on one rank before context parallelism.
        layers: Layers in each of them, by name.
        kinds: What these are, by name, as far as it is known: "mla" and "gdn" count.
        layout: The parallel layout.
        version: Of vLLM: "0.32" or "0.33".
        caching: Whether vLLM's own prefix caching is on.
        block_tokens: Tokens of the block of full attention on one rank; 0: as the rules give.
        state_groups: Take one group of attention and that many groups of states, whatever the layers are; 0: as the
            layers say.

    Raises:
        ConfigError: No full attention, numbers of layers that are not known, drafts with lookahead, windows under
            context parallelism, or a block that is too small for a state.
    """
    buckets = _as_told(groups, layout, state_groups) if state_groups else _buckets(groups, layers, layout)
    latent = any(kinds.get(group.name) == "mla" for group in groups if isinstance(group, FullAttention))
    token = next(bucket.size for bucket in buckets if bucket.kind is FullAttention)
    state = max((bucket.size for bucket in buckets if bucket.kind is Recurrent), default=Fraction(0))
    grain = (_LATENT_GRAIN if state else _LATENT_BLOCK) if latent else _BLOCK
    if state and caching and version != "0.32" and "gdn" in kinds.values():
        grain = lcm(grain, _GDN_GRAIN)
    least = max(1, ceil(state / (token * grain))) * grain
    block = block_tokens or least
    if block * token < state:
        raise ConfigError(
            f"vLLM's pages: a block of {block} tokens has fewer bytes than a state: block_tokens must be at least "
            f"{ceil(state / token)}; vLLM takes {least}"
        )
    buckets = _whole(buckets) if any(bucket.kind is ChunkedLocal for bucket in buckets) else buckets
    if all(bucket.kind is FullAttention for bucket in buckets):
        size = sum(bucket.size * bucket.layers for bucket in buckets) * block
        return PagePlan(ceil(size), block, (PageTable(FullAttention, 1, block * layout.shards),))
    buckets, page = _unified(buckets, block)
    counts = [bucket.layers for bucket in buckets]
    each = min(counts) if max(counts) >= min(counts) * _HALF_AS_MANY_AGAIN else max(counts)
    tables: dict[tuple[type[LayerSpec], int, int], int] = {}
    for bucket in buckets:
        shards = layout.shards if bucket.kind is FullAttention else 1
        key = bucket.kind, bucket.block * shards, bucket.reach
        tables[key] = tables.get(key, 0) + -(-bucket.layers // each)
    order = (FullAttention, SlidingWindow, Recurrent)
    found = [PageTable(kind, count, span, reach) for (kind, span, reach), count in tables.items()]
    found.sort(key=lambda table: order.index(table.kind))
    first = next(bucket.block for bucket in buckets if bucket.kind is FullAttention)
    return PagePlan(ceil(page * each), first, tuple(found))


def _buckets(groups: Sequence[LayerSpec], layers: Mapping[str, int], layout: ParallelLayout) -> list[_Bucket]:
    """Layers by kind, reach and size."""
    found: dict[tuple[type[LayerSpec], int, Fraction], int] = {}
    if not any(isinstance(group, FullAttention) for group in groups):
        raise ConfigError("vLLM's pages: this model has no full attention, and models without it are not modelled")
    mixed = not all(isinstance(group, FullAttention) for group in groups)
    for group in groups:
        count = layers.get(group.name, 0) or (0 if mixed else 1)
        if not count:
            raise ConfigError(
                f"vLLM's pages: how many layers group {group.name!r} has is not known, and pages follow from it: give "
                f"the model by its name or its config.json, or state_groups, as in vllm,state_groups=3: layers with "
                f"states over layers with attention, rounded up"
            )
        wide = layout.shards > 1 and not isinstance(group, Recurrent)
        if group.lookahead or (wide and not group.sharded):
            raise ConfigError(
                f"vLLM's pages: group {group.name!r} is not modelled (drafts with lookahead, and entries that every "
                f"rank of a context-parallel group keeps)"
            )
        key = type(group), reach_of(group), Fraction(size_of(group), count)
        found[key] = found.get(key, 0) + count
    return [_Bucket(kind, reach, size, count) for (kind, reach, size), count in found.items()]


def _as_told(groups: Sequence[LayerSpec], layout: ParallelLayout, state_groups: int) -> list[_Bucket]:
    """All attention as one layer, and all states as so many."""
    token = sum(size_of(group) for group in groups if isinstance(group, FullAttention))
    state = sum(size_of(group) for group in groups if isinstance(group, Recurrent))
    kinds = {group.name: 1 for group in groups}
    found = _buckets([group for group in groups if not isinstance(group, Recurrent)], kinds, layout)
    if not state:
        return found
    if any(bucket.kind is not FullAttention for bucket in found):
        raise ConfigError("vLLM's pages: state_groups is for models with full attention and states")
    return [
        _Bucket(FullAttention, 0, Fraction(token), 1),
        _Bucket(Recurrent, 0, Fraction(state, state_groups), state_groups),
    ]


def _whole(buckets: Sequence[_Bucket]) -> list[_Bucket]:
    """Windows and chunks as full attention."""
    return [
        bucket if bucket.kind is Recurrent else _Bucket(FullAttention, 0, bucket.size, bucket.layers)
        for bucket in buckets
    ]


def _unified(buckets: Sequence[_Bucket], block: int) -> tuple[list[_Bucket], Fraction]:
    """The buckets with blocks whose layers have the same bytes, and these bytes."""
    sizes = [bucket.size if bucket.kind is Recurrent else bucket.size * block for bucket in buckets]
    most = max(sizes)
    found = []
    for bucket, size in zip(buckets, sizes, strict=True):
        times = most / size
        blocks = 0 if bucket.kind is Recurrent else block * (int(times) if times.denominator == 1 else 1)
        found.append(_Bucket(bucket.kind, bucket.reach, bucket.size, bucket.layers, blocks))
    return found, most
