"""What can be set of each preset, and how a preset is named in text.

A name carries the version of the engine that the preset was checked against: `vllm-0.33`. The bare name means the
newest one there is: `vllm`, or with settings `vllm,block_tokens=1536,running=16`. Of Marconi, a paper, it is the number
on arXiv. `headway-in-vllm` is no imitation: it is this cache, on vLLM's pages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from headway.errors import ConfigError

__all__ = [
    "PRESETS",
    "HeadwayInVllmPreset",
    "MarconiPreset",
    "Preset",
    "SglangPreset",
    "VllmPreset",
    "described",
    "preset_name",
    "preset_of",
]


def _at_least(preset: str, settings: Preset, **least: int) -> None:
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise ConfigError(f"preset {preset}: {name} is {getattr(settings, name)}, it must be at least {low}")


@dataclass(frozen=True)
class VllmPreset:
    """Block-granular hashing, one pool of pages for all groups. The rules are in `headway.replay.imitate.vllm`.

    Attributes:
        block_tokens: Tokens in a block of full attention on one rank; 0: what vLLM takes for the model, see
            `headway.replay.config.vllm_pages`.
        state_groups: Groups that the recurrent layers fall into; 0: what the model's numbers of layers give.
        retention: Which states can be hit: "latest" (the last block boundary of the prompt, and junctions), "common"
            (these two, at multiples of what a page of attention covers over all ranks), or "dense" (wherever a step
            ended on a block boundary).
        match_unit: Tokens between two places where a hit can end, vLLM's `prefix_match_unit`; a divisor of
            `block_tokens`, for models with states. 0: `block_tokens`.
        geometry: Who is told of context parallelism: "group" (those groups that it splits), or "process" (all of them,
            the fault of vllm#53598: what is kept of a state under one size of blocks is looked for under another).
        running: Most requests that run at once. As many are in flight as long as there are any: arrival times are
            not used.
        step_tokens: Most tokens of one step.
        version: Of vLLM; a part of the preset's name.
    """

    block_tokens: int = 0
    state_groups: int = 0
    retention: str = "latest"
    match_unit: int = 0
    running: int = 16
    step_tokens: int = 8192
    geometry: str = "group"
    version: str = "0.33"

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the setting.
        """
        _at_least("vllm", self, block_tokens=0, state_groups=0, match_unit=0, running=1, step_tokens=1)
        for name, known in (("retention", ("latest", "common", "dense")), ("geometry", ("group", "process"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"preset vllm: {name} is {getattr(self, name)!r}, use {' or '.join(known)}")
        if self.step_tokens < self.running:
            raise ConfigError(
                f"preset vllm: step_tokens={self.step_tokens} is less than running={self.running}: every running "
                f"request needs one token of each step"
            )


@dataclass(frozen=True)
class HeadwayInVllmPreset:
    """This cache in vLLM's scheduler: its blocks are vLLM's pages. `headway.replay.config.scale` says how.

    Attributes:
        block_tokens: As for `VllmPreset`, with vLLM's own prefix caching off.
        state_groups: As for `VllmPreset`.
        version: Of vLLM; a part of the preset's name.
    """

    block_tokens: int = 0
    state_groups: int = 0
    version: str = "0.33"

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the setting.
        """
        _at_least("headway-in-vllm", self, block_tokens=0, state_groups=0)


@dataclass(frozen=True)
class SglangPreset:
    """Radix tree, states in slots, LRU. The rules are in `headway.replay.imitate.sglang`.

    Attributes:
        state_slots: Slots for states; 0: what `memory` gives (without limit if it is endless).
        chunk_tokens: Tokens of a prefill chunk.
        track_tokens: A running state is kept at multiples of that many tokens of the answer.
        grain_tokens: States lie at multiples of that many tokens.
        memory_ratio: Memory of states over memory of attention.
    """

    state_slots: int = 0
    chunk_tokens: int = 8192
    track_tokens: int = 256
    grain_tokens: int = 64
    memory_ratio: float = 0.9

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the setting.
        """
        _at_least("sglang", self, state_slots=0, chunk_tokens=1, track_tokens=1, grain_tokens=1)
        if not self.memory_ratio > 0:
            raise ConfigError(f"preset sglang: memory_ratio is {self.memory_ratio}, it must be positive")
        if self.chunk_tokens % self.grain_tokens or self.track_tokens % self.grain_tokens:
            raise ConfigError(
                f"preset sglang: chunk_tokens={self.chunk_tokens} and track_tokens={self.track_tokens} must be "
                f"multiples of grain_tokens={self.grain_tokens}"
            )


@dataclass(frozen=True)
class MarconiPreset:
    """Admission and score of Marconi. The rules are in `headway.replay.imitate.marconi`.

    Attributes:
        alpha: Weight of FLOP efficiency against recency; negative: tuned on the first requests of the trace.
        bootstrap: Share of the trace on which alpha is tuned.
    """

    alpha: float = -1.0
    bootstrap: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the setting.
        """
        if not 0.0 < self.bootstrap <= 1.0:
            raise ConfigError(f"preset marconi: bootstrap is {self.bootstrap}, it must lie in (0, 1]")


Preset = VllmPreset | HeadwayInVllmPreset | SglangPreset | MarconiPreset
"""Settings of one preset."""

PRESETS: dict[str, Preset] = {
    "vllm-0.33": VllmPreset(),
    "vllm-0.32": VllmPreset(version="0.32"),
    "headway-in-vllm-0.33": HeadwayInVllmPreset(),
    "sglang-0.5": SglangPreset(),
    "marconi-2411.19379": MarconiPreset(),
}
"""Presets by name and version, as they are without settings; of each engine the newest first."""
_A: dict[type, str] = {int: "a whole number", float: "a number", str: "a word"}


def preset_of(choice: str | Preset | None) -> Preset | None:
    """The settings that a name with settings stands for, such as `vllm,retention=dense`. None and "headway": none.

    Raises:
        ConfigError: Unknown preset or setting, or a value that cannot be read.
    """
    if choice is None or not isinstance(choice, str):
        return choice
    name, *rest = (part.strip() for part in choice.split(","))
    if name == "headway" and not rest:
        return None
    usual = PRESETS[_versioned(name)]
    types: dict[str, type] = {key: type(getattr(usual, key)) for key in _settings(usual)}
    values: dict[str, Any] = {}
    for part in rest:
        key, _, text = part.partition("=")
        if key not in types:
            raise ConfigError(f"preset {name} has no setting {key!r}; it has {', '.join(types)}")
        try:
            values[key] = types[key](text)
        except ValueError:
            raise ConfigError(f"preset {name}: {key}={text!r} is not {_A[types[key]]}") from None
    return replace(usual, **values)


def preset_name(choice: str | Preset | None) -> str | None:
    """A preset as it is shown: with its version, and with the settings that were given."""
    if not isinstance(choice, str):
        return None if choice is None else described(choice)
    name, comma, rest = choice.partition(",")
    return None if name.strip() == "headway" else f"{_versioned(name.strip())}{comma}{rest}"


def described(settings: Preset) -> str:
    """A preset with its version and all its settings, in words that `preset_of` reads."""
    usual = {key: getattr(settings, key) for key in _settings(settings)}
    name = next(
        name for name, kind in PRESETS.items() if type(kind) is type(settings) and replace(kind, **usual) == settings
    )
    return ",".join((name, *(f"{key}={value}" for key, value in usual.items())))


def _settings(preset: Preset) -> list[str]:
    """Names of what can be set: all but the version, which is a part of the name."""
    return [field.name for field in fields(preset) if field.name != "version"]


def _versioned(name: str) -> str:
    """The name with its version; the newest where it has none."""
    found = next((known for known in PRESETS if name in (known, known.rpartition("-")[0])), None)
    if found is None:
        raise ConfigError(
            f"unknown preset {name!r}: use one of {', '.join(PRESETS)}, or such a name without its version"
        )
    return found
