"""The command `headway replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer
from rich.console import Console

from headway.errors import ConfigError
from headway.option_records import with_records
from headway.replay import options as opt
from headway.replay.asked import asked_run
from headway.replay.catalogue import Model
from headway.replay.findings import on_waterfall
from headway.replay.progress import replaying
from headway.replay.record import RunRecord, record_of
from headway.replay.reporting import require_report, write_report
from headway.replay.result import ReplayResult
from headway.replay.run import replay_trace
from headway.replay.scaling import ReplayConfig
from headway.replay.show import show
from headway.replay.sizing import format_size
from headway.replay.specs import size_of
from headway.replay.trace import Trace

__all__ = ["replay"]

_EXAMPLE_MEMORY = "8GB"
_READ = {
    "never": "answers: no prompt contains an earlier answer (--outputs continuation reads the trace the other way)",
    "continuation": "answers: a prompt that goes on from the end of an earlier one is taken to contain its answer",
    "recorded": "answers: as the trace has them",
}


@with_records
def replay(
    source: opt.TraceFlags,
    clock: opt.ClockFlags,
    model: opt.ModelFlags,
    layout: opt.LayoutFlags,
    memory: opt.MemoryFlags,
    policy: opt.PolicyFlags,
    max_answer: opt.MaxAnswer = None,
    preset: opt.Preset = None,
    html: opt.Html = None,
    as_json: opt.AsJson = False,
    models: opt.ListModels = False,
) -> None:
    """Replay a request trace through the cache that serves: what hit rate to expect, and where every lost token went.

    No accelerator and no weights are needed. Without arguments it replays a generated workload, to show what it says:
    3,000 requests of the workload `mixed`, Kimi-Linear, and 8 GB for the cache on one rank.

        headway replay

        headway replay trace.jsonl.gz --model kimi-k3 --tp 8 --dcp 8 --memory 20GB

        headway replay log.jsonl --tokenizer ./model --model qwen3-next --gpu h200 --tp 2 --weights 163GB

        headway replay trace.jsonl --model kimi-k3 --tp 8 --memory 58GB --preset vllm      # what vLLM would do

        headway replay trace.jsonl --model kimi-linear --gpu h200 --clock trace --speed 2  # and how long it takes

    Three lines frame the answer: **this cache**; the same memory **knowing the future**, which says how much a better
    choice of checkpoints could still win; and an **endless memory**, which says what the trace has to give. Lost tokens
    that say *evicted* ask for memory (or a larger `--dcp`); *state_never_taken* asks for other `--placement`; *parted*
    and *nothing_matched* lie in the prompts themselves.

    Hits are counted in whole blocks of the trace. Sizes are those of one rank.
    """
    if html is not None:
        require_report(html)
    config, sized = asked_run(source, model, layout, memory, policy, _EXAMPLE_MEMORY, clock=clock, preset=preset)
    requests = source.load().cut_answers(max_answer)
    result = _run(requests, config)
    record = record_of(result, config, sized, requests)
    if html is not None:
        write_report([record], html)
    _tell(record, result, _notes(result, config, sized, requests), as_json)


def _tell(record: RunRecord, result: ReplayResult, notes: Sequence[str], as_json: bool) -> None:
    """Print the result; first of all, requests that no memory of this size could serve."""
    if as_json:
        typer.echo(json.dumps(record.as_dict(), indent=2))
        return
    console, requests = Console(), result.whole.requests
    if result.refused:
        console.print(f"[bold red]{result.refused:,} of {requests:,} requests are larger than the memory[/]\n")
    show(result, console, notes, on_waterfall(record))


def _require_some(result: ReplayResult, requests: int, room: int | None) -> None:
    """Refuse to show a table of zeros.

    Raises:
        ConfigError: No request fits into the memory.
    """
    if room is not None and result.refused == requests > 0:
        raise ConfigError(
            f"none of the {requests:,} requests fits into {format_size(room)}, the memory of one rank for the cache: "
            f"give more with --memory, or split the model over more ranks (--tp, --dcp)"
        )


def _run(requests: Trace, config: ReplayConfig) -> ReplayResult:
    with replaying(len(requests)) as progress:
        result = replay_trace(requests, config, clairvoyant=True, progress=progress)
    _require_some(result, len(requests), config.memory)
    return result


def _notes(result: ReplayResult, config: ReplayConfig, model: Model, requests: Trace) -> list[str]:
    parts = [f"{group.name} {format_size(size_of(group))}" for group in config.groups]
    layout = config.layout
    notes = [
        f"{model.name}, tp {layout.tp}, dcp {layout.dcp}, pcp {layout.pcp}; bytes of one token or state on one rank, "
        f"before context parallelism: {', '.join(parts)} (source: {model.source})",
        *model.notes,
        _READ[result.outputs],
        f"hits are whole blocks of {requests.width} tokens ({requests.format})",
        *_clock_notes(result, config),
    ]
    if not model.cost_source:
        notes.append("compute: not known for this model; attention is taken to cost as much as the rest at 100k tokens")
    notes.append(
        f"the replay itself went through {result.requests_per_second:,.0f} requests a second of processor time; that "
        f"says nothing about the model"
    )
    return notes


def _clock_notes(result: ReplayResult, config: ReplayConfig) -> list[str]:
    if result.preset:
        return [f"imitates {result.preset}; what is modelled and what is not: docs/replay.md"]
    if result.latency is None or config.timing is None:
        return ["requests end before the next begins"]
    return [
        f"times are estimates: {result.latency.estimate}; communication and the host's work take no time",
        f"arrivals at {config.timing.speed:g} x the recorded rate, at most {config.timing.max_running} at once",
    ]
