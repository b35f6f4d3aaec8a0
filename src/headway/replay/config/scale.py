"""From tokens to symbols: the cache's configuration for a trace whose symbols are blocks of many tokens.

The cache is run as it is, on symbols. A symbol of s tokens has s times the bytes of a token; what tokens are split
over under context parallelism is applied here (s / shards tokens a rank), because a rank stores a part of every
symbol. A window of w tokens needs its last w - 1 entries to resume: it becomes the symbols that hold them, with bytes
such that a resume point weighs what it weighs in tokens. The compute of symbols is that of their tokens.

In vLLM (`headway-in-vllm`) blocks are vLLM's pages: a page holds as many symbols as it covers, of attention or of a
window, and a state takes a page for each of its groups. Symbols are as wide as pages and trace blocks allow. The end of
a prompt's last whole page is a message boundary, as `headway.vllm` passes it. Where
groups with equal needs take several pages for a stretch of tokens, which this cache counts as one block, a pool block
is that many pages.

A pool block holds one symbol of every kind of layer, or more. A state takes whole blocks, so it would be rounded up by
as much as a symbol weighs; where that is more than 2% each trace block is told apart into 2, 4 or 8 symbols. Of windows
and chunks a request holds what lies in reach and what its step computes, so there symbols have 16 tokens, or the next
more into which blocks can be told apart. A trace of tokens (width 1) needs none of this: it is run with the true layout
and blocks of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, lcm

from headway.cache import (
    CacheConfig,
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.cache.shape.checks import MOST_BLOCKS
from headway.errors import ConfigError
from headway.replay.config.config import ReplayConfig
from headway.replay.config.groups import checkpoint_blocks, reach_of
from headway.replay.config.presets import HeadwayInVllmPreset, VllmPreset, preset_of
from headway.replay.config.vllm_pages import PagePlan, PageTable, page_plan
from headway.sizes import format_bytes

__all__ = ["Scale", "page_plan_of", "scale"]

_ROUNDING = 0.02
_PARTS = (1, 2, 4, 8)
_FINE = 16
"""Tokens in a symbol where there are windows or chunks."""


@dataclass(frozen=True)
class Scale:
    """How a trace is run.

    Attributes:
        cache: Configuration of the cache, in symbols.
        parts: Symbols that a trace block is told apart into.
        symbol: Tokens in a symbol.
        block_bytes: Bytes of a pool block on one rank.
        reserved: Bytes of the memory that are none of the cache's.
        page: Tokens of a page at whose last multiple in a prompt a message is said to end; 0: nowhere.
    """

    cache: CacheConfig
    parts: int
    symbol: int
    block_bytes: int
    reserved: int = 0
    page: int = 0

    def bytes_of(self, blocks: int) -> int:
        """Memory of one rank that has so many blocks."""
        return blocks * self.block_bytes + self.reserved

    def boundaries(self, marks: Iterable[int], tokens: int, symbols: int) -> tuple[int, ...]:
        """Message boundaries of a prompt in symbols, each at the end of the last whole trace block before it.

        Args:
            marks: They, in tokens.
            tokens: Tokens of the prompt.
            symbols: Its symbols.
        """
        width = self.parts * self.symbol
        ends = [mark // width * self.parts for mark in marks]
        if self.page:
            ends.append((tokens - 1) // self.page * self.page // self.symbol)
        return tuple(min(end, symbols) for end in ends if end)


def scale(config: ReplayConfig, width: int, endless_symbols: int = 0, requests: int = 0) -> Scale:
    """The cache's configuration for a trace of blocks of `width` tokens.

    Args:
        config: The configuration in tokens.
        width: Tokens in a trace block.
        endless_symbols: Trace symbols in all prompts, for the size of an endless memory.
        requests: Requests in the trace, for the same.

    Raises:
        ConfigError: Alignment that does not fit the trace's blocks, memory for less than one block.
    """
    blocks_of = _pages_in_symbols if isinstance(preset_of(config.preset), HeadwayInVllmPreset) else _blocks_in_symbols
    found = blocks_of(config, width)
    symbol, probe = found.symbol, CacheConfig(found.groups, 1, block_bytes=found.unit, layout=found.layout).geometry()
    if config.memory is None:
        spans = max(1, min((t.span for t in probe.prefix_tables), default=1))
        endless = 2 * (endless_symbols * (width // symbol) // spans + 4 * requests)
        blocks = endless + (4 * requests + 64) * checkpoint_blocks(probe) + 1024
    else:
        blocks = (config.memory - found.reserved) // found.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"memory of {config.memory} bytes is less than one block of {found.block_bytes} bytes: give more"
        )
    if config.memory is not None and blocks > MOST_BLOCKS:
        raise ConfigError(
            f"memory of {format_bytes(config.memory, 1000)} is more than a cache can number: at most {MOST_BLOCKS:,} "
            f"blocks of {found.block_bytes} bytes. Give less, or 'endless'"
        )
    cache = CacheConfig(
        groups=found.groups,
        blocks=blocks,
        block_bytes=found.unit,
        layout=found.layout,
        checkpoint_alignment=_aligned(config.alignment, symbol),
        placement=[_placed(kind, symbol) for kind in config.placement],
        eviction=config.eviction,
        cost=ComputeCost(config.cost.linear * symbol, config.cost.quadratic * symbol * symbol),
        exports_inside=True,
        history_tokens=None if config.history_tokens is None else config.history_tokens // symbol,
    )
    return Scale(cache, width // symbol, symbol, found.block_bytes, found.reserved, found.page)


def page_plan_of(config: ReplayConfig, settings: VllmPreset | HeadwayInVllmPreset) -> PagePlan:
    """The pages that vLLM makes of the model, with its own prefix caching or with this cache.

    Raises:
        ConfigError: A model that it lays out in a way that is not modelled.
    """
    return page_plan(
        config.groups,
        config.layers,
        config.kinds,
        config.layout,
        version=settings.version,
        caching=isinstance(settings, VllmPreset),
        block_tokens=settings.block_tokens,
        state_groups=settings.state_groups,
    )


@dataclass(frozen=True)
class _Blocks:
    """Pool blocks in symbols.

    Attributes:
        groups: Cache groups, in units of which a block has `unit`.
        layout: Parallel layout that is left to apply.
        unit: Units in a block.
        symbol: Tokens in a symbol.
        block_bytes: Bytes of a block on one rank.
        reserved: Bytes of the memory that are none of the cache's.
        page: As in `Scale`.
    """

    groups: list[LayerSpec]
    layout: ParallelLayout
    unit: int
    symbol: int
    block_bytes: int
    reserved: int = 0
    page: int = 0


def _blocks_in_symbols(config: ReplayConfig, width: int) -> _Blocks:
    """This cache's own blocks."""
    if any(reach_of(group) for group in config.groups):
        parts = width // next(size for size in range(min(width, _FINE), width + 1) if width % size == 0)
    else:
        parts = next((p for p in _PARTS if width % p == 0 and _fits(config, width, p)), 0)
        parts = parts or max(p for p in _PARTS if width % p == 0)
    symbol = width // parts
    groups, layout, block_tokens = _in_symbols(config, symbol)
    size = CacheConfig(groups, 1, block_tokens=block_tokens, layout=layout).geometry().block_bytes
    return _Blocks(groups, layout, size, symbol, size)


def _pages_in_symbols(config: ReplayConfig, width: int) -> _Blocks:
    """VLLM's pages. One of them is its null block."""
    settings = preset_of(config.preset)
    assert isinstance(settings, HeadwayInVllmPreset)
    plan = page_plan_of(config, settings)
    tables = [table for table in plan.tables if table.span]
    run = lcm(*(table.groups for table in tables))
    spans = [table.span * run // table.groups for table in tables]
    symbol = gcd(width, *spans)
    unit = lcm(*(span // symbol for span in spans))
    groups = [
        _table_group(i, t, unit * symbol // s, symbol) for i, (t, s) in enumerate(zip(tables, spans, strict=True))
    ]
    if plan.state_groups:
        groups.append(Recurrent("state", -(-plan.state_groups // run) * unit))
    page = plan.block_tokens if plan.state_groups else 0
    return _Blocks(groups, ParallelLayout(), unit, symbol, run * plan.page_bytes, plan.page_bytes, page)


def _table_group(number: int, table: PageTable, size: int, symbol: int) -> LayerSpec:
    if table.kind is FullAttention:
        return FullAttention(f"attention{number}", size)
    return SlidingWindow(f"window{number}", size, max(1, -(-(table.reach - 1) // symbol)) + 1)


def _fits(config: ReplayConfig, width: int, parts: int) -> bool:
    """Whether symbols of width / parts tokens describe memory well: states and blocks are hardly rounded up."""
    groups, layout, block_tokens = _in_symbols(config, width // parts)
    geometry = CacheConfig(groups, 1, block_tokens=block_tokens, layout=layout).geometry()
    state = geometry.state_table
    rounded = state.state_blocks * geometry.block_bytes / state.state_bytes - 1 if state else 0.0
    return width // parts == 1 or (rounded <= _ROUNDING and block_tokens <= parts)


def _in_symbols(config: ReplayConfig, symbol: int) -> tuple[list[LayerSpec], ParallelLayout, int]:
    """Groups, layout and symbols in a block of the first table."""
    if symbol == 1:
        return list(config.groups), config.layout, 16
    groups = [_scaled(group, symbol, config.layout.shards) for group in config.groups]
    weights: dict[object, int] = {}
    for group in groups:
        if not isinstance(group, Recurrent):
            key = (type(group), group.sharded, reach_of(group))
            weights[key] = weights.get(key, 0) + group.bytes_per_token
    each = list(weights.values()) or [1]
    return groups, ParallelLayout(), -(-max(each) // each[0])


def _scaled(group: LayerSpec, symbol: int, shards: int) -> LayerSpec:
    if isinstance(group, Recurrent):
        return group
    lookahead = group.lookahead // symbol
    if isinstance(group, FullAttention):
        split = shards if group.sharded else 1
        return FullAttention(group.name, -(-symbol * group.bytes_per_token // split), lookahead, group.sharded)
    if isinstance(group, SlidingWindow):
        needed = max(1, -(-(group.window - 1) // symbol))
        per_symbol = max(1, -(-(group.window - 1) * group.bytes_per_token // needed))
        return SlidingWindow(group.name, per_symbol, needed + 1, lookahead)
    chunk = max(1, -(-group.chunk // symbol))
    return ChunkedLocal(group.name, symbol * group.bytes_per_token, chunk, lookahead)


def _aligned(alignment: int, symbol: int) -> int:
    if alignment % symbol and symbol % alignment:
        raise ConfigError(
            f"alignment of {alignment} tokens does not fit symbols of {symbol} tokens: choose a multiple of {symbol} "
            f"or a divisor of it"
        )
    return max(1, alignment // symbol)


def _placed(kind: str, symbol: int) -> str:
    head, _, number = kind.partition(":")
    if head != "interval" or not number.isdigit():
        return kind
    return f"interval:{max(1, round(int(number) / symbol))}"
