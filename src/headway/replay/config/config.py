"""What a trace is replayed against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.cache import DEFAULT_PLACEMENT, ComputeCost, EvictionPolicy, LayerSpec, ParallelLayout
from headway.errors import ConfigError
from headway.replay.config.presets import HeadwayInVllmPreset, Preset, SglangPreset, VllmPreset, preset_of
from headway.replay.config.roofline import Roofline, Timing
from headway.replay.config.tiers import Tier, check_tiers

__all__ = ["ReplayConfig"]


@dataclass(frozen=True)
class ReplayConfig:
    """What a trace is replayed against, in tokens and in bytes of one rank.

    Attributes:
        groups: Cache groups: bytes of one token and of one state on one rank, before context parallelism.
        memory: Bytes of one rank for the cache; None: so much that nothing is ever evicted.
        layout: Parallel layout.
        cost: What computing tokens costs.
        placement: Kinds of position that get a checkpoint, with interval:N in tokens.
        eviction: A name, as for the cache, or a policy object (a fresh one for each replay).
        alignment: States can be exported at multiples of that many tokens only.
        outputs: "never": no prompt contains an earlier answer. "continuation": where a prompt goes on from the end of
            an earlier one, it goes on with that one's answer. None: as the trace's format suggests.
        history_tokens: Tokens of evicted paths that are remembered; None: the cache's default.
        preset: Imitate another engine: "vllm", "sglang" or "marconi", with settings as in "vllm,running=32", or a
            record from `headway.replay`. Placement, eviction and alignment are then the preset's. Or this cache in
            another engine: "headway-in-vllm".
        layers: Layers in each group, by its name, as far as that is known; vLLM's pages are laid out by them.
        kinds: What kind of layers these are ("mla", "gqa", "kda", "gdn", ...), likewise.
        roofline: What steps cost, to say what reuse saves in time; None: nothing is said, and what lower tiers have is
            always read back.
        timing: Arrivals as recorded and steps that take time; None: each request ends before the next begins.
        tiers: Memory below the rank's own, the fastest first; what has no room is kept there and read back.
    """

    groups: Sequence[LayerSpec]
    memory: int | None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    cost: ComputeCost = field(default_factory=ComputeCost)
    placement: Sequence[str] = DEFAULT_PLACEMENT
    eviction: str | EvictionPolicy = "adaptive"
    alignment: int = 1
    outputs: str | None = None
    history_tokens: int | None = None
    preset: str | Preset | None = None
    timing: Timing | None = None
    roofline: Roofline | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    tiers: Sequence[Tier] = ()

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
        check_tiers(self.tiers, self.memory)
        if self.tiers and preset is not None:
            raise ConfigError(f"preset {self.preset!r} has no lower tiers of memory: leave out one of them")
        own = preset is not None and not isinstance(preset, HeadwayInVllmPreset)
        if own and chosen != (DEFAULT_PLACEMENT, "adaptive", 1):
            raise ConfigError("placement, eviction and alignment are the preset's: leave them out, or the preset")
