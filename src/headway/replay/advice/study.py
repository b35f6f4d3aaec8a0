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
from typing import Any

from headway.cache import ParallelLayout, Recurrent
from headway.errors import ConfigError
from headway.replay.advice.engines import beside_running
from headway.replay.record import RunRecord
from headway.replay.sizing import Hardware, ModelChoice, memory_of, sized_model
from headway.replay.sweep.grid import Grid, Point, points_of
from headway.replay.timing import ClockChoice
from headway.replay.trace import Trace

__all__ = ["ENGINES", "Question", "Study", "Variant", "study"]

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
        refused: Why no larger decode-context-parallel size was run; empty where all were.
        absent: By engine that was not run: why not.
    """

    today: Variant
    layouts: Sequence[Variant]
    best: Variant
    changes: Sequence[Variant]
    engines: Mapping[str, Sequence[Variant]] = field(default_factory=dict)
    refused: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> list[Variant]:
        """All runs, each once, the layouts first."""
        return [*self.layouts, *self.changes, *(variant for runs in self.engines.values() for variant in runs)]


@dataclass(frozen=True)
class Question:
    """What advice is wanted for.

    Attributes:
        choice: The model, with the data types in use.
        hardware: Memory or GPUs.
        tp: Tensor-parallel size.
        trace: The trace.
        outputs: How answers are read.
        clock: Whether arrival times count. Imitated engines have no clock: theirs are one after another.
        running: Requests that run at once; in SGLang their states come out of the memory of the cache.
    """

    choice: ModelChoice
    hardware: Hardware
    tp: int
    trace: Trace
    outputs: str | None = None
    clock: ClockChoice = field(default_factory=ClockChoice)
    running: int = 16


Runner = Callable[[Sequence[Point]], Sequence[RunRecord]]


def study(asked: Question, run: Runner) -> Study:
    """Do the runs that matter.

    Args:
        asked: What advice is wanted for.
        run: Does the runs.

    Raises:
        ConfigError: A model or memory that cannot work, or `running` requests whose states fill the memory.
    """
    choice = asked.choice
    base: dict[str, Any] = {"tp": asked.tp, "kv_dtype": choice.kv_dtype, "state_dtype": choice.state_dtype}

    def variants(wanted: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
        settings = {name: base | dict(change) for name, change in wanted.items()}
        points = [_point(values, asked) for values in settings.values()]
        return [Variant(n, v, r) for (n, v), r in zip(settings.items(), run(points), strict=True)]

    left = _left_by_sglang(asked)
    sizes, refused = _allowed(asked)
    layouts = variants({f"dcp {dcp}": {"dcp": dcp} for dcp in sizes})
    most = max(variant.run.result.whole.compute_saved for variant in layouts)
    best = next(v for v in layouts if v.run.result.whole.compute_saved >= most - _ENOUGH)
    changes = variants(_changes(best, choice))
    engines: dict[str, list[Variant]] = {}
    absent: dict[str, str] = {}
    for name in ENGINES:
        try:
            engines[name] = variants(_engine(name, best, left))
        except ConfigError as error:  # the preset cannot hold this model
            absent[name] = str(error)
    return Study(layouts[0], layouts, best, changes, engines, refused, absent)


def _point(values: Mapping[str, Any], asked: Question) -> Point:
    clock, hardware = asked.clock, asked.hardware
    if values.get("preset"):
        clock, hardware = ClockChoice(), hardware if hardware.memory is None else Hardware(hardware.memory)
    grid = Grid(**{name: (value,) for name, value in values.items()}, outputs=asked.outputs, clock=clock)
    return points_of(grid, asked.choice, hardware, asked.trace)[0]


def _allowed(asked: Question) -> tuple[list[int], str]:
    """Divisors of tp that work as decode-context-parallel size, and why the first other one does not; 1 must work."""
    sizes, refused = [], ""
    for dcp in (size for size in range(1, asked.tp + 1) if asked.tp % size == 0):
        layout = ParallelLayout(tp=asked.tp, dcp=dcp)
        try:
            memory_of(asked.hardware, sized_model(asked.choice, layout), layout, timed=asked.clock.timed)
            sizes.append(dcp)
        except ConfigError as error:
            if dcp == 1:
                raise
            refused = refused or str(error)
    return sizes, refused


def _left_by_sglang(asked: Question) -> int | None:
    """Bytes of a rank that SGLang's running requests leave for its cache; None for endless. States are not split."""
    layout = ParallelLayout(tp=asked.tp)
    model = sized_model(asked.choice, layout)
    memory = memory_of(asked.hardware, model, layout, timed=asked.clock.timed)
    states = sum(group.state_bytes for group in model.groups if isinstance(group, Recurrent))
    return None if memory is None else beside_running(memory, asked.running, states)


def _changes(best: Variant, choice: ModelChoice) -> dict[str, dict[str, Any]]:
    dcp, memory = {"dcp": best.values["dcp"]}, best.run.memory
    wanted: dict[str, dict[str, Any]] = {"plain LRU": dcp | {"eviction": "lru"}}
    if memory is not None:
        wanted["half the memory"] = dcp | {"memory": str(memory // 2)}
        wanted["twice the memory"] = dcp | {"memory": str(memory * 2)}
    if choice.has_dtypes:
        if choice.kv_dtype in ("bf16", "fp32"):
            wanted["fp8 attention entries"] = dcp | {"kv_dtype": "fp8"}
        if choice.state_dtype == "fp32" and any(group.kind == Recurrent.__name__ for group in best.run.groups):
            wanted["bf16 states"] = dcp | {"state_dtype": "bf16"}
    return wanted


def _engine(name: str, best: Variant, left: int | None) -> dict[str, dict[str, Any]]:
    """Runs of an imitated engine; SGLang's in what is `left`."""
    dcp = best.values["dcp"]
    wanted: dict[str, dict[str, Any]] = {f"{name} today": {"preset": name, "dcp": 1}}
    if name == "sglang":
        split = {f"{name}, dcp {dcp}, ratio {r:g}": f"{name},memory_ratio={r}" for r in _RATIOS}
        wanted |= {text: {"preset": preset, "dcp": dcp} for text, preset in split.items()}
        if left is not None:
            wanted = {text: change | {"memory": str(left)} for text, change in wanted.items()}
    elif dcp > 1:
        wanted[f"{name}, dcp {dcp}"] = {"preset": name, "dcp": dcp}
    return wanted
