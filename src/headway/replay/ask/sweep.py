"""The command `headway sweep`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.cache import DEFAULT_PLACEMENT
from headway.option_records import with_records
from headway.progress import counting
from headway.replay.ask import options as opt
from headway.replay.ask.folder import SweepFolder
from headway.replay.ask.grid import Point, numbers, points_of, words
from headway.replay.ask.record import with_capacity
from headway.replay.ask.setting import Setting
from headway.replay.ask.workers import Workload, run_points
from headway.sizes import counted
from headway.tell import Comparison, RunRecord, compare, with_facts
from headway.tell.page import has_report, write_report
from headway.tell.terminal import show_runs

__all__ = ["GridChoice", "draw", "finish_points", "sweep", "tell_counts"]

_EXAMPLE_MEMORY = "1GB,2GB,4GB,8GB"


@dataclass(frozen=True)
class _MemoryGrid(opt.Hardware):
    """The GPUs, and sizes of memory."""

    memory: Annotated[str | None, opt.option(opt.GRID, "Memory of one rank: 5GB,20GB,80GB,endless.")] = None
    host_memory: Annotated[str | None, opt.option(opt.GRID, "Host memory of one rank below it: 0,80GB.")] = None
    disk: Annotated[str | None, opt.option(opt.GRID, "Disk of one rank below these: 0,500GB.")] = None
    store: Annotated[str | None, opt.option(opt.GRID, "A store of one rank below these: 0,2TB.")] = None


@dataclass(frozen=True)
class GridChoice:
    """Values of each setting."""

    dcp: Annotated[str, opt.option(opt.GRID, "Decode-context-parallel sizes: 1,2,8.")] = "1"
    placement: Annotated[
        list[str] | None,
        opt.option(opt.GRID, "Kinds of position with commas, as in `headway replay`; repeat the option."),
    ] = None
    eviction: Annotated[str, opt.option(opt.GRID, "adaptive,value,shared-value,lru,greedy-dual.")] = "adaptive"
    alignment: Annotated[
        str, opt.option(opt.GRID, "States can be exported at multiples of that many tokens: 1,512.")
    ] = "1"
    kv_dtype: Annotated[str, opt.option(opt.GRID, "Attention entries: bf16,fp8.")] = "bf16"
    state_dtype: Annotated[str, opt.option(opt.GRID, "Recurrent states: fp32,bf16.")] = "fp32"
    preset: Annotated[
        list[str] | None,
        opt.option(opt.GRID, "A preset of another engine, or `headway` for this cache; repeat the option."),
    ] = None

    def axes(self) -> dict[str, Any]:
        """The values of each field, see `Setting.changed`.

        Raises:
            ConfigError: A list of no values, or values of another kind.
        """
        kinds = ",".join(DEFAULT_PLACEMENT)
        return {
            "dcp": numbers("--dcp", self.dcp),
            "kv_dtype": words("--kv-dtype", self.kv_dtype),
            "state_dtype": words("--state-dtype", self.state_dtype),
            "placement": self.placement or [kinds],
            "eviction": words("--eviction", self.eviction),
            "alignment": numbers("--alignment", self.alignment),
            "preset": [None if name == "headway" else name for name in self.preset or ["headway"]],
        }


@with_records
def sweep(
    grid: GridChoice,
    source: opt.TraceChoice,
    clock: opt.ClockChoice,
    model: opt.ModelChoice,
    hardware: _MemoryGrid,
    where: opt.RunChoice,
    tp: opt.Tp = 1,
    pcp: opt.Pcp = 1,
    clairvoyant: Annotated[
        bool, opt.option(opt.RUNNING, "Compute as well what knowing the future would reach.")
    ] = True,
    as_json: opt.AsJson = False,
) -> None:
    """Replay a trace under every combination of settings, and put the results side by side.

    For example:

        headway sweep trace.jsonl --model kimi-k3 --tp 8 --dcp 1,8 --memory 10GB,20GB,50GB

        headway sweep trace.jsonl --model kimi-k3 --tp 16 --gpu b200 --weights 1560GB --eviction adaptive,lru

        headway sweep trace.jsonl --model kimi-linear --gpu h200 --memory 5GB,20GB --clock trace   # with times

    Runs are spread over all cores, or over a Ray cluster with `--ray` (install headway on its nodes). Each finished run
    is one line of `runs.jsonl` in the folder `--out`: stop the sweep whenever you like; the same command goes on, and a
    larger grid runs only what is new. At the end `report.html` in the folder shows all runs of the grid.

    Without arguments it sweeps a generated workload over four sizes of memory, to show what it does.
    """
    console, ranks = Console(stderr=True), opt.RankChoice(tp=tp, pcp=pcp)
    setting = Setting(model, ranks, hardware, clock=clock, outputs=source.outputs).with_example(source, _EXAMPLE_MEMORY)
    requests, memory = source.load(), setting.hardware.memory
    axes = {"memory": [None] if memory is None else words("--memory", memory)} | _below(setting.hardware)
    axes |= grid.axes()
    points = points_of(setting, axes, requests)
    folder = SweepFolder(where.out)
    work = Workload.of(requests, source.outputs, clairvoyant=clairvoyant)
    runs = finish_points(work, points, folder, console, jobs=where.jobs, ray=where.ray)
    found = compare(runs)
    if as_json:
        typer.echo(json.dumps([with_facts(run) for run in runs], indent=2))
    else:
        show_runs(found, Console())
    if has_report() and not found.sizes:
        runs[found.focus] = with_capacity(runs[found.focus], points[found.focus].config, requests)
    draw(compare(runs), folder, console)


def _below(hardware: opt.Hardware) -> dict[str, list[str]]:
    """The values of each size of lower memory that is given."""
    given = {"host_memory": hardware.host_memory, "disk": hardware.disk, "store": hardware.store}
    return {name: words(f"--{name.replace('_', '-')}", text) for name, text in given.items() if text is not None}


def draw(found: Comparison, folder: SweepFolder, console: Console) -> None:
    """Say how many runs were taken from the folder, and write its report, where the extra for that is installed."""
    tell_counts(folder, console)
    if not has_report():
        console.print("no report: that needs pip install 'headway[report]'; then run this command again", markup=False)
        return
    write_report(found, folder.page)
    console.print(f"the report is {folder.page}", highlight=False)


def finish_points(
    work: Workload,
    points: Sequence[Point],
    folder: SweepFolder,
    console: Console,
    *,
    jobs: int = 0,
    ray: bool = False,
) -> list[RunRecord]:
    """Run what the folder does not have yet, with a progress bar. Returns the runs of all points, in their order."""
    missing = [point for point in points if not _finished(folder, point, work)]
    folder.reused += len(points) - len(missing)
    folder.made += len(missing)
    if len(missing) < len(points):
        console.print(f"{len(points) - len(missing)} of {len(points)} runs are in {folder.path} already")
    with counting("runs", len(missing), console=console) as tell:
        tell(0)
        ended = itertools.count(1)

        def done(point: Point, run: dict[str, Any]) -> None:
            folder.add(point.key, run)
            tell(next(ended))

        try:
            run_points(work, missing, done, jobs=jobs, ray=ray)
        except KeyboardInterrupt:
            left = sum(point.key not in folder.finished for point in points)
            console.print(f"stopped; {left} of {len(points)} runs are left: the same command goes on", highlight=False)
            sys.exit(130)
    return [folder.finished[point.key] for point in points]


def tell_counts(folder: SweepFolder, console: Console) -> None:
    """Say how many runs were taken from the folder and how many were made."""
    text = (
        f"{counted(folder.reused + folder.made, 'run')}: {folder.made} new, {folder.reused} reused from {folder.path}"
    )
    if folder.stale:
        text += f"; {folder.stale} more there were made by another release of Headway, and were not used"
    console.print(text, highlight=False, soft_wrap=True)


def _finished(folder: SweepFolder, point: Point, work: Workload) -> bool:
    run = folder.finished.get(point.key)
    return run is not None and not (work.clairvoyant and run.result.clairvoyant is None)
