"""A grid of settings, and the configuration at each of its points."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from headway.cache import DEFAULT_PLACEMENT, ParallelLayout
from headway.errors import ConfigError
from headway.replay.catalogue import Model
from headway.replay.presets.run import check_preset
from headway.replay.record import settings_of
from headway.replay.scaling import ReplayConfig, scale
from headway.replay.sizing import Hardware, ModelChoice, memory_of, sized_model
from headway.replay.sweep.release import release_mark
from headway.replay.timing import ClockChoice, timing_of
from headway.replay.trace import Trace

__all__ = ["Grid", "Point", "fingerprint", "numbers", "points_of", "words"]


@dataclass(frozen=True)
class Grid:
    """Values of each setting; every combination is a point.

    Attributes:
        memory: Bytes of one rank as text ("20GB", "endless"); None: what the hardware leaves.
        tp: Tensor-parallel sizes.
        dcp: Decode-context-parallel sizes.
        pcp: Prefill-context-parallel sizes.
        kv_dtype: Data types of attention entries.
        state_dtype: Data types of recurrent states.
        placement: Kinds of position that get a checkpoint.
        eviction: Eviction policies by name.
        alignment: Tokens at whose multiples states can be exported.
        preset: Presets of other engines; None: this cache.
        outputs: How answers are read, see `ReplayConfig`. The same at all points.
        clock: Whether arrival times count, and what steps may hold. The same at all points.
    """

    memory: Sequence[str | None] = (None,)
    tp: Sequence[int] = (1,)
    dcp: Sequence[int] = (1,)
    pcp: Sequence[int] = (1,)
    kv_dtype: Sequence[str] = ("bf16",)
    state_dtype: Sequence[str] = ("fp32",)
    placement: Sequence[Sequence[str]] = (DEFAULT_PLACEMENT,)
    eviction: Sequence[str] = ("value",)
    alignment: Sequence[int] = (1,)
    preset: Sequence[str | None] = (None,)
    outputs: str | None = None
    clock: ClockChoice = field(default_factory=ClockChoice)


_SAME = ("outputs", "clock")
"""Fields of a grid that are no axes."""


@dataclass(frozen=True)
class Point:
    """One run to do.

    Attributes:
        config: Its configuration.
        model: Its model.
        key: Name of trace, configuration and release together: equal keys mean equal results.
        values: Its values of the grid, by setting.
    """

    config: ReplayConfig
    model: Model
    key: str
    values: dict[str, Any] = field(default_factory=dict)


def points_of(grid: Grid, choice: ModelChoice, hardware: Hardware, trace: Trace) -> list[Point]:
    """The points of a grid, each once.

    Args:
        grid: Values of each setting.
        choice: The model; its data types are those of the grid.
        hardware: Where the memory is from, for points without one of their own.
        trace: The trace that will be run.

    Raises:
        ConfigError: A combination that cannot work; names it.
    """
    axes = [part.name for part in fields(Grid) if part.name not in _SAME]
    mark = fingerprint(trace)
    found: dict[str, Point] = {}
    for combination in product(*(getattr(grid, name) for name in axes)):
        values = dict(zip(axes, combination, strict=True))
        try:
            config, model = _configured(values, grid, choice, hardware)
            scale(config, trace.width, len(trace.symbols), len(trace))
            check_preset(config)
        except ConfigError as error:
            told = ", ".join(f"{name} {v}" for name, v in values.items() if len(getattr(grid, name)) > 1)
            raise ConfigError(f"{told}: {error}" if told else str(error)) from None
        made = {"trace": mark, "release": release_mark(), "model": model.name}
        text = json.dumps(made | settings_of(config), sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        found.setdefault(key, Point(config, model, key, values))
    return list(found.values())


def fingerprint(trace: Trace) -> str:
    """A name for what a trace says, whatever its file is called."""
    digest = hashlib.blake2b(f"{trace.width} {trace.outputs}".encode(), digest_size=12)
    for column in (trace.symbols, trace.offsets, trace.prompt_tokens, trace.answer_tokens, trace.times):
        digest.update(column.tobytes())
    for column in (trace.answers, trace.answer_offsets, trace.boundaries, trace.boundary_offsets):
        digest.update(column.tobytes())
    return digest.hexdigest()


def words(option: str, text: str) -> list[str]:
    """The values of an option, separated by commas.

    Raises:
        ConfigError: There are none.
    """
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"{option} is empty: write values separated by commas")
    return found


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers of an option, separated by commas.

    Raises:
        ConfigError: Something else.
    """
    found = words(option, text)
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in found):
        raise ConfigError(f"{option} {text!r}: write whole numbers above 0 separated by commas, such as 1,2,8")
    return [int(word) for word in found]


def _configured(
    values: dict[str, Any], grid: Grid, choice: ModelChoice, hardware: Hardware
) -> tuple[ReplayConfig, Model]:
    layout = ParallelLayout(tp=values["tp"], dcp=values["dcp"], pcp=values["pcp"])
    model = sized_model(replace(choice, kv_dtype=values["kv_dtype"], state_dtype=values["state_dtype"]), layout)
    timing = timing_of(grid.clock, hardware, model, layout)
    if values["memory"] is not None:  # with a clock, the GPU still says how fast steps are
        timed = replace(hardware, memory=values["memory"], share=Hardware.share)
        hardware = Hardware(values["memory"]) if timing is None else timed
    memory = memory_of(hardware, model, layout, timed=timing is not None)
    policy = {name: values[name] for name in ("placement", "eviction", "alignment")}
    if values["preset"] is not None:
        policy["preset"] = values["preset"]
    config = ReplayConfig(
        model.groups,
        memory,
        layout,
        model.cost,
        outputs=grid.outputs,
        timing=timing,
        layers=model.layers,
        **policy,
    )
    return config, model
