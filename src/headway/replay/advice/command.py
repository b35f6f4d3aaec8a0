"""The command `headway advise`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.errors import ConfigError
from headway.option_records import with_records
from headway.replay import options as opt
from headway.replay.advice.study import Question, Study, study
from headway.replay.advice.text import advice_text
from headway.replay.model_files import is_model_files
from headway.replay.record import RunRecord
from headway.replay.reporting import write_report
from headway.replay.sizing import ModelChoice
from headway.replay.sweep.command import finish_points, tell_counts
from headway.replay.sweep.folder import SweepFolder
from headway.replay.sweep.grid import Point
from headway.replay.sweep.workers import Workload

__all__ = ["advise"]

_EXAMPLE_MEMORY = "8GB"


@dataclass(frozen=True)
class _MemoryFlags(opt.MemoryFlags):
    """The memory; the number of GPUs is also the default of --tp."""

    gpus: Annotated[int, opt.option("Memory", "GPUs for one copy of the model.")] = 0


@dataclass(frozen=True)
class _RunFlags(opt.RunFlags):
    """Where runs are done; the folder gets the advice as well."""

    out: Annotated[Path, opt.option(opt.RUNNING, "Folder for runs, report and advice.")] = Path("headway-advice")


@with_records
def advise(
    source: opt.TraceFlags,
    clock: opt.ClockFlags,
    model: opt.ModelFlags,
    memory: _MemoryFlags,
    where: _RunFlags,
    tp: Annotated[int, opt.option("Model and layout", "Tensor-parallel size; 0: as many as --gpus.")] = 0,
    kv_dtype: opt.KvDtype = ModelChoice.kv_dtype,
    state_dtype: opt.StateDtype = ModelChoice.state_dtype,
    running: Annotated[int, opt.option("Memory", "Requests that run at once, for SGLang's state slots.")] = 16,
    as_json: opt.AsJson = False,
) -> None:
    """Say what to set for this traffic and model, what it gains, and what to watch.

    For example:

        headway advise trace.jsonl --model kimi-k3 --gpu b200 --gpus 16 --weights 1560GB

        headway advise trace.jsonl --model qwen3-next --tp 4 --memory 30GB

        headway advise trace.jsonl --model kimi-linear --gpu h200 --clock trace   # with times, as estimates

    It runs the sweep that matters (layouts, then one change at a time), and prints a short text with the command lines
    for Headway, vLLM and SGLang. The runs, `report.html` and `advice.md` stay in the folder `--out`; stopped, it goes
    on with the same command.

    Without arguments it advises on a generated workload, to show what it says.
    """
    console, gpus = Console(stderr=True), memory.gpus
    model, size = opt.example_memory(source, model, memory.memory, memory.gpu, _EXAMPLE_MEMORY)
    if gpus and tp and gpus != tp:
        raise ConfigError(f"--gpus {gpus} and --tp {tp}: one copy of the model takes as many GPUs as --tp")
    if running < 0:
        raise ConfigError(f"--running is {running}: give a number of requests")
    requests = source.load()
    hardware = replace(memory, memory=size, gpus=0).hardware()
    folder, work = SweepFolder(where.out), Workload.of(requests, source.outputs)

    def run(points: Sequence[Point]) -> list[RunRecord]:
        return finish_points(work, points, folder, console, jobs=where.jobs, ray=where.ray)

    question = Question(
        model.choice(kv_dtype, state_dtype),
        hardware,
        tp or gpus or 1,
        requests,
        source.outputs,
        clock.choice(),
        running,
    )
    found = study(question, run)
    checkpoint = _checkpoint(model.model)
    text = advice_text(found, hardware, running=running, checkpoint=checkpoint, draft=model.draft is not None)
    (where.out / "advice.md").write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"advice": text, "runs": [one.run.as_dict() for one in found.variants]}, indent=2))
    else:
        Console().print(text, highlight=False, markup=False, soft_wrap=True)
    tell_counts(folder, console)
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
