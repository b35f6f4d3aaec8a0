"""The command `headway sweep`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headway.cache import DEFAULT_PLACEMENT
from headway.option_records import with_records
from headway.replay import options as opt
from headway.replay.findings import best_run, losses
from headway.replay.labels import run_labels
from headway.replay.record import RunRecord
from headway.replay.reporting import write_report
from headway.replay.show import format_seconds
from headway.replay.sizing import Hardware, refuse_gpu_words
from headway.replay.sweep.folder import SweepFolder
from headway.replay.sweep.grid import Grid, Point, numbers, points_of, words
from headway.replay.sweep.workers import Workload, run_points

__all__ = ["GridFlags", "finish_points", "sweep", "tell_counts"]

_GRID = "Grid"
_EXAMPLE_MEMORY = "1GB,2GB,4GB,8GB"


@dataclass(frozen=True)
class GridFlags:
    """Values of each setting."""

    memory: Annotated[str | None, opt.option(_GRID, "Memory of one rank: 5GB,20GB,80GB,endless.")] = None
    dcp: Annotated[str, opt.option(_GRID, "Decode-context-parallel sizes: 1,2,8.")] = "1"
    placement: Annotated[
        list[str] | None,
        opt.option(_GRID, "Kinds of position with commas, as in `headway replay`; repeat the option."),
    ] = None
    eviction: Annotated[str, opt.option(_GRID, "value,lru,greedy-dual.")] = "value"
    alignment: Annotated[str, opt.option(_GRID, "States can be exported at multiples of that many tokens: 1,512.")] = (
        "1"
    )
    kv_dtype: Annotated[str, opt.option(_GRID, "Attention entries: bf16,fp8.")] = "bf16"
    state_dtype: Annotated[str, opt.option(_GRID, "Recurrent states: fp32,bf16.")] = "fp32"
    preset: Annotated[
        list[str] | None,
        opt.option(_GRID, "A preset of another engine, or `headway` for this cache; repeat the option."),
    ] = None

    def axes(self) -> dict[str, Any]:
        """The axes of the grid, as `Grid` takes them.

        Raises:
            ConfigError: A list of no values, or values of another kind.
        """
        kinds = ",".join(DEFAULT_PLACEMENT)
        return {
            "memory": words("--memory", self.memory) if self.memory else (None,),
            "dcp": numbers("--dcp", self.dcp),
            "kv_dtype": words("--kv-dtype", self.kv_dtype),
            "state_dtype": words("--state-dtype", self.state_dtype),
            "placement": [words("--placement", one) for one in self.placement or [kinds]],
            "eviction": words("--eviction", self.eviction),
            "alignment": numbers("--alignment", self.alignment),
            "preset": [None if name == "headway" else name for name in self.preset or ["headway"]],
        }


@with_records
def sweep(
    grid: GridFlags,
    source: opt.TraceFlags,
    clock: opt.ClockFlags,
    model: opt.ModelFlags,
    cards: opt.GpuFlags,
    where: opt.RunFlags,
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

        headway sweep trace.jsonl --model kimi-k3 --tp 16 --gpu b200 --weights 1560GB --eviction value,lru

        headway sweep trace.jsonl --model kimi-linear --gpu h200 --memory 5GB,20GB --clock trace   # with times

    Runs are spread over all cores, or over a Ray cluster with `--ray` (install headway on its nodes). Each finished run
    is one line of `runs.jsonl` in the folder `--out`: stop the sweep whenever you like; the same command goes on, and a
    larger grid runs only what is new. At the end `report.html` in the folder shows all runs of the grid.

    Without arguments it sweeps a generated workload over four sizes of memory, to show what it does.
    """
    console = Console(stderr=True)
    model, memory = opt.example_memory(source, model, grid.memory, cards.gpu, _EXAMPLE_MEMORY)
    hardware = Hardware(None, cards.gpu, cards.gpus, cards.weights, cards.gpu_share)
    if memory:
        refuse_gpu_words(hardware, timed=clock.choice().timed)
    requests = source.load()
    axes = replace(grid, memory=memory).axes()
    wanted = Grid(**axes, tp=(tp,), pcp=(pcp,), outputs=source.outputs, clock=clock.choice())
    points = points_of(wanted, model.choice(), hardware, requests)
    folder = SweepFolder(where.out)
    work = Workload.of(requests, source.outputs, clairvoyant=clairvoyant)
    runs = finish_points(work, points, folder, console, jobs=where.jobs, ray=where.ray)
    _present(runs, folder, console, as_json=as_json)


def _present(runs: Sequence[RunRecord], folder: SweepFolder, console: Console, *, as_json: bool) -> None:
    """Print the results and write the report."""
    if as_json:
        typer.echo(json.dumps([run.as_dict() for run in runs], indent=2))
    else:
        Console().print(_table(runs))
    tell_counts(folder, console)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no report: that needs pip install 'headway[report]'; then run this command again", markup=False)
        return
    write_report(runs, folder.page)
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
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("sweep", total=len(missing))

        def done(point: Point, run: dict[str, Any]) -> None:
            folder.add(point.key, run)
            bar.advance(task)

        try:
            run_points(work, missing, done, jobs=jobs, ray=ray)
        except KeyboardInterrupt:
            left = sum(point.key not in folder.finished for point in points)
            console.print(f"stopped; {left} of {len(points)} runs are left: the same command goes on", highlight=False)
            sys.exit(130)
    return [folder.finished[point.key] for point in points]


def tell_counts(folder: SweepFolder, console: Console) -> None:
    """Say how many runs were taken from the folder and how many were made."""
    text = f"{folder.reused + folder.made} runs: {folder.made} new, {folder.reused} reused from {folder.path}"
    if folder.stale:
        text += f"; {folder.stale} more there were made by another release of Headway, and were not used"
    console.print(text, highlight=False, soft_wrap=True)


def _finished(folder: SweepFolder, point: Point, work: Workload) -> bool:
    run = folder.finished.get(point.key)
    return run is not None and not (work.clairvoyant and run.result.clairvoyant is None)


def _table(runs: Sequence[RunRecord]) -> Table:
    table = Table(title=f"{runs[0].result.trace}: {len(runs)} runs", title_justify="left", box=None, pad_edge=False)
    table.add_column("run")
    timed = any(run.result.latency for run in runs)
    times = ("first token: half", "95%", "answer tokens a second") if timed else ()
    for name in ("tokens reused", "compute saved", "knowing the future", "endless", *times):
        table.add_column(name, justify="right")
    table.add_column("largest loss", overflow="fold")
    best = best_run(runs)
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True)):
        whole, future = run.result.whole, run.result.clairvoyant
        table.add_row(
            label,
            f"{whole.token_hit_rate:.1%}",
            f"{whole.compute_saved:.1%}",
            f"{future.token_hit_rate:.1%}" if future else "",
            f"{whole.endless_hit_rate:.1%}",
            *(_time_cells(run) if timed else ()),
            _largest_loss(run),
            style="bold" if number == best else "",
        )
    if timed:
        table.caption = f"times are estimates: {next(r.result.latency.estimate for r in runs if r.result.latency)}"
    return table


def _time_cells(run: RunRecord) -> tuple[str, ...]:
    latency = run.result.latency
    if latency is None:
        return "", "", ""
    first = latency.first_token
    return format_seconds(first.p50), format_seconds(first.p95), f"{latency.answer_tokens:,.0f}"


def _largest_loss(run: RunRecord) -> str:
    lost, total = losses(run), max(1, run.result.whole.prompt_tokens)
    told = [f"{lost[0][0]} {lost[0][1] / total:.1%}"] if lost else []
    told += [f"{run.result.refused:,} requests refused"] if run.result.refused else []
    return "; ".join(told)
