"""From tokens to symbols: the cache's configuration for a trace whose symbols are blocks of many tokens.

The cache is run as it is, on symbols. A symbol of s tokens has s times the bytes of a token; what tokens are split
over under context parallelism is applied here (s / shards tokens a rank), because a rank stores a part of every
symbol. A window of w tokens needs its last w - 1 entries to resume: it becomes the symbols that hold them, with bytes
such that a resume point weighs what it weighs in tokens. The compute of symbols is that of their tokens.

A pool block holds one symbol of every kind of layer, or more. A state takes whole blocks, so it would be rounded up by
as much as a symbol weighs; where that is more than 2% each trace block is told apart into 2, 4 or 8 symbols. A trace of
tokens (width 1) needs none of this: it is run with the true layout and blocks of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.cache import (
    DEFAULT_PLACEMENT,
    CacheConfig,
    ChunkedLocal,
    ComputeCost,
    EvictionPolicy,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.errors import ConfigError
from headway.replay.clock.roofline import Timing
from headway.replay.presets.settings import Preset, SglangPreset, VllmPreset, preset_of
from headway.replay.specs import checkpoint_blocks, reach_of

__all__ = ["ReplayConfig", "Scale", "scale"]

_ROUNDING = 0.02
_PARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class ReplayConfig:
    """What a trace is replayed against, in tokens and in bytes of one rank.

    Attributes:
        groups: Cache groups: bytes of one token and of one state on one rank, before context parallelism.
        memory: Bytes of one rank for the cache; None: so much that nothing is ever evicted.
        layout: Parallel layout.
        cost: What computing tokens costs.
        placement: Kinds of position that get a checkpoint, with interval:N in tokens.
        eviction: "value", "lru" or a policy object (a fresh one for each replay).
        alignment: States can be exported at multiples of that many tokens only.
        outputs: "never": no prompt contains an earlier answer. "continuation": where a prompt goes on from the end of
            an earlier one, it goes on with that one's answer. None: as the trace's format suggests.
        history_tokens: Tokens of evicted paths that are remembered; None: the cache's default.
        preset: Imitate another engine: "vllm", "sglang" or "marconi", with settings as in "vllm,running=32", or a
            record from `headway.replay`. Placement, eviction and alignment are then the preset's.
        layers: Layers in each group, by its name, as far as that is known; the preset `vllm` groups its pages by them.
        timing: Arrivals as recorded and steps that take time; None: each request ends before the next begins.
    """

    groups: Sequence[LayerSpec]
    memory: int | None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    cost: ComputeCost = field(default_factory=ComputeCost)
    placement: Sequence[str] = DEFAULT_PLACEMENT
    eviction: str | EvictionPolicy = "value"
    alignment: int = 1
    outputs: str | None = None
    history_tokens: int | None = None
    preset: str | Preset | None = None
    timing: Timing | None = None
    layers: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the field.
        """
        if self.outputs not in (None, "never", "continuation", "recorded"):
            raise ConfigError(f"outputs is {self.outputs!r}: use 'never' or 'continuation'")
        if self.memory is not None and self.memory < 1:
            raise ConfigError(f"memory is {self.memory} bytes, it must be positive")
        if self.alignment < 1:
            raise ConfigError(f"alignment is {self.alignment} tokens, it must be at least 1")
        chosen = tuple(self.placement), self.eviction, self.alignment
        preset = preset_of(self.preset)
        if self.timing is not None and isinstance(preset, VllmPreset | SglangPreset):
            raise ConfigError(
                f"preset {self.preset!r} has no clock: arrival times are replayed for the cache itself and for "
                f"marconi; use clock 'order'"
            )
        if preset is not None and chosen != (DEFAULT_PLACEMENT, "value", 1):
            raise ConfigError("placement, eviction and alignment are the preset's: leave them out, or the preset")


@dataclass(frozen=True)
class Scale:
    """How a trace is run.

    Attributes:
        cache: Configuration of the cache, in symbols.
        parts: Symbols that a trace block is told apart into.
        symbol: Tokens in a symbol.
        block_bytes: Bytes of a pool block on one rank.
    """

    cache: CacheConfig
    parts: int
    symbol: int
    block_bytes: int


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
    parts = next((p for p in _PARTS if width % p == 0 and _fits(config, width, p)), 0)
    parts = parts or max(p for p in _PARTS if width % p == 0)
    symbol = width // parts
    groups, layout, block_tokens = _in_symbols(config, symbol)
    probe = CacheConfig(groups, 1, block_tokens=block_tokens, layout=layout).geometry()
    if config.memory is None:
        spans = max(1, min((t.span for t in probe.prefix_tables), default=1))
        endless = 2 * (endless_symbols * parts // spans + 4 * requests)
        blocks = endless + (4 * requests + 64) * checkpoint_blocks(probe) + 1024
    else:
        blocks = config.memory // probe.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"memory of {config.memory} bytes is less than one block of {probe.block_bytes} bytes: give more"
        )
    cache = CacheConfig(
        groups=groups,
        blocks=blocks,
        block_tokens=block_tokens,
        layout=layout,
        checkpoint_alignment=_aligned(config.alignment, symbol),
        placement=[_placed(kind, symbol) for kind in config.placement],
        eviction=config.eviction,
        cost=ComputeCost(config.cost.linear * symbol, config.cost.quadratic * symbol * symbol),
        exports_inside=True,
        history_tokens=None if config.history_tokens is None else config.history_tokens // symbol,
    )
    return Scale(cache, parts, symbol, probe.block_bytes)


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
