"""The command `headway advise`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.errors import ConfigError
from headway.replay import options as opt
from headway.replay.advice.study import Study, study
from headway.replay.advice.text import advice_text
from headway.replay.inputs import EXAMPLE_MODEL, TraceChoice, load_trace
from headway.replay.model_files import is_model_files
from headway.replay.record import RunRecord
from headway.replay.reporting import write_report
from headway.replay.sizing import Hardware, ModelChoice
from headway.replay.sweep.command import finish_points
from headway.replay.sweep.folder import SweepFolder
from headway.replay.sweep.grid import Point
from headway.replay.sweep.workers import Workload

__all__ = ["advise"]

_EXAMPLE_MEMORY = "8GB"


def advise(
    trace: opt.TracePath = None,
    model: opt.ModelName = None,
    gpu: opt.Gpu = None,
    gpus: Annotated[int, typer.Option(help="GPUs for one copy of the model.", rich_help_panel="Memory")] = 0,
    memory: opt.MemorySize = None,
    weights: opt.Weights = None,
    gpu_share: opt.GpuShare = 0.9,
    tp: Annotated[
        int, typer.Option(help="Tensor-parallel size; 0: as many as --gpus.", rich_help_panel="Model and layout")
    ] = 0,
    kv_dtype: opt.KvDtype = "bf16",
    state_dtype: opt.StateDtype = "fp32",
    draft: opt.Draft = None,
    attention_bytes: opt.AttentionBytes = 0,
    state_bytes: opt.StateBytes = 0,
    window: opt.Window = None,
    running: Annotated[
        int, typer.Option(help="Requests that run at once, for SGLang's state slots.", rich_help_panel="Memory")
    ] = 16,
    format: opt.FormatName = "auto",
    workload: opt.Workload = "mixed",
    seed: opt.Seed = 0,
    limit: opt.Limit = None,
    block_tokens: opt.BlockTokens = None,
    tokenizer: opt.Tokenizer = None,
    outputs: opt.Outputs = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, report and advice.")] = Path("headway-advice"),
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a processor.")] = 0,
    ray: Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Say what to set for this traffic and model, what it gains, and what to watch.

        headway advise trace.jsonl --model kimi-k3 --gpu b200 --gpus 8 --weights 800GB

        headway advise trace.jsonl --model qwen3-next --tp 4 --memory 30GB

    It runs the sweep that matters (layouts, then one change at a time), and prints a short text with the command lines
    for Headway, vLLM and SGLang. The runs, `report.html` and `advice.md` stay in the folder `--out`; stopped, it goes
    on with the same command.

    Without arguments it advises on a generated workload, to show what it says.
    """
    console = Console(stderr=True)
    if trace is None and model is None and not (attention_bytes or state_bytes or window):
        model, memory = EXAMPLE_MODEL, memory or (None if gpu else _EXAMPLE_MEMORY)
    if gpus and tp and gpus != tp:
        raise ConfigError(f"--gpus {gpus} and --tp {tp}: one copy of the model takes as many GPUs as --tp")
    if running < 0:
        raise ConfigError(f"--running is {running}: give a number of requests")
    requests = load_trace(TraceChoice(trace, format, workload, seed, limit, block_tokens, tokenizer))
    choice = ModelChoice(model, attention_bytes, state_bytes, window or (), draft, kv_dtype, state_dtype)
    hardware = Hardware(memory, gpu, 0, weights, gpu_share)
    folder, work = SweepFolder(out), Workload.of(requests, outputs)

    def run(points: Sequence[Point]) -> list[RunRecord]:
        return finish_points(work, points, folder, console, jobs=jobs, ray=ray)

    found = study(choice, hardware, tp or gpus or 1, requests, run, outputs, running=running)
    text = advice_text(found, hardware, running=running, checkpoint=_checkpoint(model), draft=draft is not None)
    (out / "advice.md").write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"advice": text, "runs": [one.run.as_dict() for one in found.variants]}, indent=2))
    else:
        Console().print(text, highlight=False, markup=False, soft_wrap=True)
    _draw(found, folder, console)


def _checkpoint(model: str | None) -> str | None:
    """The folder of a model that was given as a path; None for one of the catalogue, or bytes."""
    if model is None or not is_model_files(Path(model)):
        return None
    return model if Path(model).is_dir() else str(Path(model).parent)


def _draw(found: Study, folder: SweepFolder, console: Console) -> None:
    """Write the report, the layout taken in focus."""
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no report: that needs pip install 'headway[report]'; then run this command again", markup=False)
        return
    every = found.variants
    changed = {id(variant) for variant in found.changes}
    names = [f"{found.best.name}, {one.name}" if id(one) in changed else one.name for one in every]
    write_report([one.run for one in every], folder.page, names=names, focus=every.index(found.best))
    console.print(f"figures are in {folder.page}", highlight=False)
