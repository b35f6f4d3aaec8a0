"""The command `headway sweep`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headway.cache import DEFAULT_PLACEMENT
from headway.errors import ConfigError
from headway.replay import options as opt
from headway.replay.findings import best_run, losses
from headway.replay.inputs import EXAMPLE_MODEL, TraceChoice, load_trace
from headway.replay.labels import run_labels
from headway.replay.record import RunRecord
from headway.replay.reporting import write_report
from headway.replay.sizing import Hardware, ModelChoice, refuse_gpu_words
from headway.replay.sweep.folder import SweepFolder
from headway.replay.sweep.grid import Grid, Point, numbers, points_of, words
from headway.replay.sweep.workers import Workload, run_points

__all__ = ["finish_points", "sweep"]

_GRID, _RUN = "Grid", "Running"
_KINDS = ",".join(DEFAULT_PLACEMENT)


def _values(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_GRID)


def _running(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_RUN)


def sweep(
    trace: opt.TracePath = None,
    memory: Annotated[str | None, _values("Memory of one rank: 5GB,20GB,80GB,endless.")] = None,
    dcp: Annotated[str, _values("Decode-context-parallel sizes: 1,2,8.")] = "1",
    placement: Annotated[
        list[str] | None, _values("Kinds of position with commas, as in `headway replay`; repeat the option.")
    ] = None,
    eviction: Annotated[str, _values("value,lru.")] = "value",
    alignment: Annotated[str, _values("States can be exported at multiples of that many tokens: 1,512.")] = "1",
    kv_dtype: Annotated[str, _values("Attention entries: bf16,fp8.")] = "bf16",
    state_dtype: Annotated[str, _values("Recurrent states: fp32,bf16.")] = "fp32",
    preset: Annotated[
        list[str] | None, _values("A preset of another engine, or `headway` for this cache; repeat the option.")
    ] = None,
    format: opt.FormatName = "auto",
    workload: opt.Workload = "mixed",
    seed: opt.Seed = 0,
    limit: opt.Limit = None,
    block_tokens: opt.BlockTokens = None,
    tokenizer: opt.Tokenizer = None,
    outputs: opt.Outputs = None,
    model: opt.ModelName = None,
    attention_bytes: opt.AttentionBytes = 0,
    state_bytes: opt.StateBytes = 0,
    window: opt.Window = None,
    tp: opt.Tp = 1,
    pcp: opt.Pcp = 1,
    draft: opt.Draft = None,
    gpu: opt.Gpu = None,
    gpus: opt.Gpus = 0,
    weights: opt.Weights = None,
    gpu_share: opt.GpuShare = 0.9,
    out: Annotated[Path, _running("Folder for finished runs and the report.")] = Path("headway-sweep"),
    jobs: Annotated[int, _running("Processes; 0: one a processor.")] = 0,
    ray: Annotated[bool, _running("Run on a Ray cluster (RAY_ADDRESS, or the one here).", "--ray")] = False,
    clairvoyant: Annotated[bool, _running("Compute as well what knowing the future would reach.")] = True,
    as_json: opt.AsJson = False,
) -> None:
    """Replay a trace under every combination of settings, and put the results side by side.

        headway sweep trace.jsonl --model kimi-k3 --tp 8 --dcp 1,8 --memory 10GB,20GB,50GB

        headway sweep trace.jsonl --model kimi-k3 --tp 8 --gpu h200 --weights 800GB --eviction value,lru

    Runs are spread over all cores, or over a Ray cluster with `--ray` (install headway on its nodes). Each finished run
    is one line of `runs.jsonl` in the folder `--out`: stop the sweep whenever you like; the same command goes on, and a
    larger grid runs only what is new. At the end `report.html` in the folder shows all runs of the grid.

    Without arguments it sweeps a generated workload over four sizes of memory, to show what it does.
    """
    console = Console(stderr=True)
    if trace is None and model is None and not (attention_bytes or state_bytes or window):
        model, memory = EXAMPLE_MODEL, memory or (None if gpu else "1GB,2GB,4GB,8GB")
    requests = load_trace(TraceChoice(trace, format, workload, seed, limit, block_tokens, tokenizer))
    grid = Grid(
        **_cache_axes(memory, dcp, kv_dtype, state_dtype),
        **_policy_axes(placement, eviction, alignment, preset),
        tp=(tp,),
        pcp=(pcp,),
        outputs=outputs,
    )
    if memory and gpu:
        raise ConfigError("give --memory or --gpu, not both")
    choice = ModelChoice(model, attention_bytes, state_bytes, window or (), draft)
    hardware = Hardware(None, gpu, gpus, weights, gpu_share)
    if memory:
        refuse_gpu_words(hardware)
    points = points_of(grid, choice, hardware, requests)
    folder = SweepFolder(out)
    work = Workload.of(requests, outputs, clairvoyant=clairvoyant)
    runs = finish_points(work, points, folder, console, jobs=jobs, ray=ray)
    _present(runs, folder, console, as_json=as_json)


def _cache_axes(memory: str | None, dcp: str, kv_dtype: str, state_dtype: str) -> dict[str, Any]:
    return {
        "memory": words("--memory", memory) if memory else (None,),
        "dcp": numbers("--dcp", dcp),
        "kv_dtype": words("--kv-dtype", kv_dtype),
        "state_dtype": words("--state-dtype", state_dtype),
    }


def _policy_axes(
    placement: Sequence[str] | None, eviction: str, alignment: str, preset: Sequence[str] | None
) -> dict[str, Any]:
    return {
        "placement": [words("--placement", kinds) for kinds in placement or [_KINDS]],
        "eviction": words("--eviction", eviction),
        "alignment": numbers("--alignment", alignment),
        "preset": [None if name == "headway" else name for name in preset or ["headway"]],
    }


def _present(runs: Sequence[RunRecord], folder: SweepFolder, console: Console, *, as_json: bool) -> None:
    """Print the results and write the report."""
    if as_json:
        typer.echo(json.dumps([run.as_dict() for run in runs], indent=2))
    else:
        Console().print(_table(runs))
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


def _finished(folder: SweepFolder, point: Point, work: Workload) -> bool:
    run = folder.finished.get(point.key)
    return run is not None and not (work.clairvoyant and run.result.clairvoyant is None)


def _table(runs: Sequence[RunRecord]) -> Table:
    table = Table(title=f"{runs[0].result.trace}: {len(runs)} runs", title_justify="left", box=None, pad_edge=False)
    table.add_column("run")
    for name in ("tokens reused", "compute saved", "knowing the future", "endless"):
        table.add_column(name, justify="right")
    table.add_column("largest loss")
    best = best_run(runs)
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True)):
        whole, future = run.result.whole, run.result.clairvoyant
        lost = losses(run)
        share = lost[0][1] / max(1, whole.prompt_tokens) if lost else 0.0
        table.add_row(
            label,
            f"{whole.token_hit_rate:.1%}",
            f"{whole.compute_saved:.1%}",
            f"{future.token_hit_rate:.1%}" if future else "",
            f"{whole.endless_hit_rate:.1%}",
            f"{lost[0][0]} {share:.1%}" if lost else "",
            style="bold" if number == best else "",
        )
    return table
