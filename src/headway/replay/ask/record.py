"""The record of a run from what was replayed, and what a configuration is told apart by."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

from headway.cache import LayerSpec
from headway.formats import Trace
from headway.progress import counting
from headway.replay.ask.catalogue import Model
from headway.replay.config import ReplayConfig
from headway.replay.config.groups import reach_of, size_of
from headway.replay.config.presets import preset_name
from headway.replay.run.curve import capacity_curve, sizes_around
from headway.tell.run import GroupSize, ModelName, ReplayResult, RunRecord

__all__ = ["record_of", "settings_of", "with_capacity"]

_OWN = ("groups", "memory", "layout", "cost", "layers", "kinds", "roofline")
"""Fields of a configuration that a record keeps apart from its policy."""


def record_of(result: ReplayResult, config: ReplayConfig, model: Model, trace: Trace) -> RunRecord:
    """The record of a run."""
    return RunRecord(
        model=ModelName(model.name, model.source, list(model.notes)),
        groups=_sizes(config),
        layout={"tp": config.layout.tp, "dcp": config.layout.dcp, "pcp": config.layout.pcp},
        memory=config.memory,
        cost={
            "linear": config.cost.linear,
            "quadratic": config.cost.quadratic,
            "source": model.cost_source or "assumed",
        },
        policy=_policy(config),
        trace={"format": trace.format, "block_tokens": trace.width},
        result=result,
    )


def with_capacity(run: RunRecord, config: ReplayConfig, trace: Trace) -> RunRecord:
    """The run with what other sizes of memory reuse, with a progress bar.

    As it is, where there is no such curve: with an endless memory, lower tiers, a preset of another engine, or a clock.
    """
    if config.memory is None or config.tiers or config.preset is not None or config.timing is not None:
        return run
    with counting("other sizes of memory", len(trace), "requests") as tell:
        curve = capacity_curve(trace, config, sizes_around(config.memory), progress=lambda done, _: tell(done))
    return replace(run, result=replace(run.result, capacity=curve))


def settings_of(config: ReplayConfig) -> dict[str, Any]:
    """Everything in a configuration that a result depends on, as plain values: two equal ones give equal results."""
    return {
        "groups": [asdict(size) for size in _sizes(config)],
        "layout": asdict(config.layout),
        "memory": config.memory,
        "cost": asdict(config.cost),
        "policy": _policy(config) | {"timing": None if config.timing is None else str(config.timing)},
        "roofline": None if config.roofline is None else str(config.roofline),
    }


def _sizes(config: ReplayConfig) -> list[GroupSize]:
    return [_size(group, config.layers.get(group.name, 0)) for group in config.groups]


def _size(group: LayerSpec, layers: int) -> GroupSize:
    kind = type(group).__name__
    return GroupSize(group.name, kind, size_of(group), group.lookahead, reach_of(group), group.sharded, layers)


def _policy(config: ReplayConfig) -> dict[str, Any]:
    values = {part.name: getattr(config, part.name) for part in fields(config) if part.name not in _OWN}
    values["preset"] = preset_name(config.preset)
    values["tiers"] = {tier.name: asdict(tier) for tier in config.tiers}
    if config.timing is not None:
        clock = config.timing
        values["timing"] = {"gpu": clock.roofline.gpu, "speed": f"x{clock.speed:g}"}
        values["timing"] |= {"at once": clock.max_running, "tokens per step": clock.step_tokens}
        values["timing"] |= {"waits for": f"{clock.wait_tokens} tokens"}
    plain = {name: list(v) if isinstance(v, list | tuple) else v for name, v in values.items()}
    return {name: v if isinstance(v, str | int | float | list | dict | None) else str(v) for name, v in plain.items()}
