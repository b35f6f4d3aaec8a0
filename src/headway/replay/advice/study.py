"""The runs that matter for a decision, in three rounds.

1. Every decode-context-parallel size that the model allows. The *layout* taken is the smallest one within half a point
   of compute of the best: splitting tokens costs communication that a replay does not see.
2. Around that layout, one change at a time: half and twice the memory, plain LRU, and fewer bytes a number for entries
   and states where there are fewer. Fewer bytes change what the model computes, so they are offered and not taken.
3. Where this release imitates other engines: each as it comes, as it comes on the new layout, and with its own best
   split of memory.

Rejected: a full grid. It runs ten times as long, and what it adds (two changes that only pay together) has not been
seen on the traces at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.cache import ParallelLayout, Recurrent
from headway.errors import ConfigError
from headway.replay.advice.engines import beside_running
from headway.replay.model_files import is_model_files
from headway.replay.record import RunRecord
from headway.replay.sizing import Hardware, ModelChoice, memory_of, sized_model
from headway.replay.sweep.grid import Grid, Point, points_of
from headway.replay.trace import Trace

__all__ = ["ENGINES", "Study", "Variant", "study"]

ENGINES = ("vllm", "sglang")
"""Engines that are imitated, by the name of their preset."""
_RATIOS = (0.25, 0.5, 0.9, 2.0, 4.0)
"""Splits of SGLang's memory that are tried; 0.9 is what it does by itself."""
_ENOUGH = 0.005


@dataclass(frozen=True)
class Variant:
    """One set of settings and what it gave.

    Attributes:
        name: What is changed, for people.
        values: Its values of the grid.
        run: The run.
    """

    name: str
    values: Mapping[str, Any]
    run: RunRecord


@dataclass(frozen=True)
class Study:
    """What was found.

    Attributes:
        today: The given settings without context parallelism.
        layouts: A run for each decode-context-parallel size.
        best: The layout taken.
        changes: Changes of one setting on that layout.
        engines: By engine: as it comes today, on the new layout, and with its best settings.
    """

    today: Variant
    layouts: Sequence[Variant]
    best: Variant
    changes: Sequence[Variant]
    engines: Mapping[str, Sequence[Variant]] = field(default_factory=dict)

    @property
    def variants(self) -> list[Variant]:
        """All runs, each once, the layouts first."""
        return [*self.layouts, *self.changes, *(variant for runs in self.engines.values() for variant in runs)]


Runner = Callable[[Sequence[Point]], Sequence[RunRecord]]


def study(
    choice: ModelChoice,
    hardware: Hardware,
    tp: int,
    trace: Trace,
    run: Runner,
    outputs: str | None = None,
    *,
    running: int = 16,
) -> Study:
    """Do the runs that matter.

    Args:
        choice: The model, with the data types in use.
        hardware: Memory or GPUs.
        tp: Tensor-parallel size.
        trace: The trace.
        run: Does the runs.
        outputs: How answers are read.
        running: Requests that run at once; in SGLang their states come out of the memory of the cache.

    Raises:
        ConfigError: A model or memory that cannot work, or `running` requests whose states fill the memory.
    """
    base: dict[str, Any] = {"tp": tp, "kv_dtype": choice.kv_dtype, "state_dtype": choice.state_dtype}

    def variants(wanted: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
        settings = {name: base | dict(change) for name, change in wanted.items()}
        points = [_point(values, choice, hardware, trace, outputs) for values in settings.values()]
        return [Variant(n, v, r) for (n, v), r in zip(settings.items(), run(points), strict=True)]

    left = _left_by_sglang(choice, hardware, tp, running)
    sizes = _allowed(choice, hardware, tp)
    layouts = variants({f"dcp {dcp}": {"dcp": dcp} for dcp in sizes})
    most = max(variant.run.result.whole.compute_saved for variant in layouts)
    best = next(v for v in layouts if v.run.result.whole.compute_saved >= most - _ENOUGH)
    changes = variants(_changes(best, choice))
    engines = {}
    for name in ENGINES:
        engines[name] = _engine(name, best, left, variants)
    return Study(layouts[0], layouts, best, changes, {name: runs for name, runs in engines.items() if runs})


def _point(
    values: Mapping[str, Any], choice: ModelChoice, hardware: Hardware, trace: Trace, outputs: str | None
) -> Point:
    grid = Grid(**{name: (value,) for name, value in values.items()}, outputs=outputs)
    return points_of(grid, choice, hardware, trace)[0]


def _allowed(choice: ModelChoice, hardware: Hardware, tp: int) -> list[int]:
    """Divisors of tp that the model's heads allow as decode-context-parallel size; 1 must work."""
    sizes = []
    for dcp in (size for size in range(1, tp + 1) if tp % size == 0):
        layout = ParallelLayout(tp=tp, dcp=dcp)
        try:
            memory_of(hardware, sized_model(choice, layout), layout)
            sizes.append(dcp)
        except ConfigError:
            if dcp == 1:
                raise
    return sizes


def _left_by_sglang(choice: ModelChoice, hardware: Hardware, tp: int, running: int) -> int | None:
    """Bytes of a rank that SGLang's running requests leave for its cache; None for endless. States are not split."""
    layout = ParallelLayout(tp=tp)
    model = sized_model(choice, layout)
    memory = memory_of(hardware, model, layout)
    states = sum(group.state_bytes for group in model.groups if isinstance(group, Recurrent))
    return None if memory is None else beside_running(memory, running, states)


def _changes(best: Variant, choice: ModelChoice) -> dict[str, dict[str, Any]]:
    dcp, memory = {"dcp": best.values["dcp"]}, best.run.memory
    wanted: dict[str, dict[str, Any]] = {"plain LRU": dcp | {"eviction": "lru"}}
    if memory is not None:
        wanted["half the memory"] = dcp | {"memory": str(memory // 2)}
        wanted["twice the memory"] = dcp | {"memory": str(memory * 2)}
    if choice.name is not None and _has_dtypes(choice.name):
        if choice.kv_dtype in ("bf16", "fp32"):
            wanted["fp8 attention entries"] = dcp | {"kv_dtype": "fp8"}
        if choice.state_dtype == "fp32" and any(group.kind == Recurrent.__name__ for group in best.run.groups):
            wanted["bf16 states"] = dcp | {"state_dtype": "bf16"}
    return wanted


def _has_dtypes(name: str) -> bool:
    """Whether the model's bytes follow from data types, and are not fixed in a file."""
    return is_model_files(Path(name)) or not Path(name).is_file()


def _engine(
    name: str, best: Variant, left: int | None, variants: Callable[[Mapping[str, Mapping[str, Any]]], list[Variant]]
) -> list[Variant]:
    """Runs of an imitated engine, or none where the preset cannot hold this model; SGLang's in what is `left`."""
    dcp = best.values["dcp"]
    wanted = {f"{name} today": {"preset": name, "dcp": 1}}
    if name == "sglang":
        split = {f"{name}, dcp {dcp}, ratio {r:g}": f"{name},memory_ratio={r}" for r in _RATIOS}
        wanted |= {text: {"preset": preset, "dcp": dcp} for text, preset in split.items()}
        if left is not None:
            wanted = {text: change | {"memory": str(left)} for text, change in wanted.items()}
    elif dcp > 1:
        wanted[f"{name}, dcp {dcp}"] = {"preset": name, "dcp": dcp}
    try:
        return variants(wanted)
    except ConfigError:
        return []
