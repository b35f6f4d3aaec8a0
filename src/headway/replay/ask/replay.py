"""The command `headway replay`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console

from headway.errors import ConfigError
from headway.formats.chat import ChatEntry
from headway.option_records import with_records
from headway.progress import counting
from headway.replay.ask import options as opt
from headway.replay.ask.lint import faults_of
from headway.replay.ask.record import record_of, with_capacity
from headway.replay.ask.setting import Setting
from headway.replay.replay import replay_trace
from headway.sizes import counted, format_bytes
from headway.tell import compare, with_facts
from headway.tell.measured import on_measured, read_measured
from headway.tell.page import require_report, write_report
from headway.tell.terminal import show

__all__ = ["replay"]

_EXAMPLE_MEMORY = "8GB"


@with_records
def replay(
    source: opt.TraceChoice,
    clock: opt.ClockChoice,
    model: opt.ModelChoice,
    ranks: opt.RankChoice,
    hardware: opt.Hardware,
    policy: opt.PolicyChoice,
    max_answer: opt.MaxAnswer = None,
    preset: opt.Preset = None,
    against: Annotated[
        list[str] | None,
        opt.option(
            None,
            "Counters to hold the prediction against: a server's address or a file of its /metrics, since its start; "
            "given twice, what lies between.",
        ),
    ] = None,
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

        headway replay trace.jsonl --model ./model --memory 20GB --against http://127.0.0.1:8000   # and was it so?

    Three lines frame the answer: **this cache**; the same memory **knowing the future**, which says how much a better
    choice of checkpoints could still win; and an **endless memory**, which says what the trace has to give. Lost tokens
    that say *evicted* ask for memory (or a larger `--dcp`); *state_never_taken* asks for other `--placement`; *parted*
    and *nothing_matched* lie in the prompts themselves.

    The HTML report also draws what other sizes of memory reuse, from a sixteenth to sixteen times as much.

    Hits are counted in whole blocks of the trace. Sizes are those of one rank.
    """
    if html is not None:
        require_report(html)
    measured = read_measured(against) if against else None
    setting = Setting(model, ranks, hardware, policy, clock, preset, source.outputs).with_example(
        source, _EXAMPLE_MEMORY
    )
    config, sized = setting.configure()
    entries: list[ChatEntry] = []
    read = source.load(entries)
    requests = read.cut_answers(max_answer)
    with counting("replaying", len(requests), "requests") as tell:
        result = replay_trace(requests, config, clairvoyant=True, progress=lambda done, _: tell(done))
    if not result.whole.requests:
        raise ConfigError(
            f"none of the {counted(result.refused, 'request')} can be served in "
            f"{format_bytes(config.memory or 0, 1000)}, the memory of one rank for the cache: the largest needs "
            f"{format_bytes(result.needed, 1000, up=True)}. Give more with --memory, or split the model over more "
            f"ranks (--tp, --dcp)"
        )
    run = replace(record_of(result, config, sized, requests), faults=faults_of(read, entries, source.tokenizer, config))
    if html is not None:
        run = with_capacity(run, config, requests)
        write_report(compare([run]), html)
        Console(stderr=True).print(f"the report is in {html}", highlight=False)
    if as_json:
        told = with_facts(run) | ({} if measured is None else {"measured": asdict(measured)})
        typer.echo(json.dumps(told, indent=2))
        return
    console = Console()
    if measured is not None:
        console.print(on_measured(result.whole, measured), "", sep="\n", markup=False, highlight=False)
    show(run, console)
