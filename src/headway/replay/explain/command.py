"""The command `headway explain`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headway.cache import DEFAULT_PLACEMENT, ParallelLayout
from headway.replay import options as opt
from headway.replay.explain.story import Mark, Story, tell
from headway.replay.findings import REMEDIES
from headway.replay.inputs import EXAMPLE_MODEL, TraceChoice, load_trace
from headway.replay.scaling import ReplayConfig
from headway.replay.show import MEANING, UNSAVABLE
from headway.replay.sizing import Hardware, ModelChoice, memory_of, sized_model
from headway.replay.trace import Trace

__all__ = ["explain", "story_lines"]

_EXAMPLE_MEMORY = "2GB"
_KINDS = ",".join(DEFAULT_PLACEMENT)
_MOST_MARKS = 40


def explain(
    trace: opt.TracePath = None,
    request: Annotated[int, typer.Option("--request", "-n", help="Number of the request, from 0.")] = 0,
    model: opt.ModelName = None,
    memory: opt.MemorySize = None,
    tp: opt.Tp = 1,
    dcp: opt.Dcp = 1,
    pcp: opt.Pcp = 1,
    draft: opt.Draft = None,
    kv_dtype: opt.KvDtype = "bf16",
    state_dtype: opt.StateDtype = "fp32",
    attention_bytes: opt.AttentionBytes = 0,
    state_bytes: opt.StateBytes = 0,
    window: opt.Window = None,
    gpu: opt.Gpu = None,
    gpus: opt.Gpus = 0,
    weights: opt.Weights = None,
    gpu_share: opt.GpuShare = 0.9,
    placement: opt.PlacementKinds = _KINDS,
    eviction: opt.Eviction = "value",
    alignment: opt.Alignment = 1,
    format: opt.FormatName = "auto",
    workload: opt.Workload = "mixed",
    seed: opt.Seed = 0,
    limit: opt.Limit = None,
    block_tokens: opt.BlockTokens = None,
    tokenizer: opt.Tokenizer = None,
    outputs: opt.Outputs = None,
    as_json: opt.AsJson = False,
) -> None:
    """Follow one request of a trace through the cache, position by position, and say why it reused no more.

        headway explain trace.jsonl --request 812 --model kimi-k3 --tp 8 --dcp 8 --memory 20GB

    Give the options that you gave to `headway replay`. The trace is replayed up to the request, so what you see is what
    it finds: which earlier requests share each stretch of its prompt, which checkpoints are on its path and which were
    there, where it resumes, and what it leaves behind.

    The report of a replay names requests worth a look. Without a trace, a generated workload is used.
    """
    if trace is None and model is None and not (attention_bytes or state_bytes or window):
        model, memory = EXAMPLE_MODEL, memory or (None if gpu else _EXAMPLE_MEMORY)
    requests = load_trace(TraceChoice(trace, format, workload, seed, limit, block_tokens, tokenizer))
    layout = ParallelLayout(tp=tp, dcp=dcp, pcp=pcp)
    sized = sized_model(
        ModelChoice(model, attention_bytes, state_bytes, window or (), draft, kv_dtype, state_dtype), layout
    )
    room = memory_of(Hardware(memory, gpu, gpus, weights, gpu_share), sized, layout)
    kinds = [kind.strip() for kind in placement.split(",") if kind.strip()]
    config = ReplayConfig(sized.groups, room, layout, sized.cost, kinds, eviction, alignment, outputs)
    story = _told(requests, config, request)
    if as_json:
        typer.echo(json.dumps(asdict(story), indent=2))
        return
    console = Console()
    for line in story_lines(story, requests.name):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _told(requests: Trace, config: ReplayConfig, request: int) -> Story:
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("replay", total=max(1, request))
        return tell(requests, config, request, lambda done, _: bar.update(task, completed=done))


def story_lines(story: Story, name: str) -> Iterator[str]:
    """A story as lines of text."""
    share = story.hit_tokens / story.prompt_tokens
    yield (
        f"Request {story.request:,} of {name}: {story.prompt_tokens:,} prompt tokens, {story.answer_tokens:,} of "
        f"answer, arrives at {story.time:,.1f} s"
    )
    source = f" from a {story.resumed_from} checkpoint" if story.resumed_from not in ("", "path") else ""
    yield (
        f"{story.hit_tokens:,} tokens are reused ({share:.0%}){source}; an endless memory would reuse "
        f"{story.endless_tokens:,}"
    )
    yield ""
    yield "Who was here before"
    for stretch in story.stretches:
        place = f"[{stretch.start:,}, {stretch.stop:,})"
        yield f"  {place:<22}{_who(stretch.requests, stretch.first, stretch.last)}"
    yield ""
    yield "What is on its path"
    yield from _path(story)
    yield ""
    yield "What is lost"
    for line, tokens in sorted(story.lost.items(), key=lambda item: (item[0] in UNSAVABLE, -item[1])):
        remedy = f"; {REMEDIES[line]}" if line in REMEDIES else ""
        yield f"  {tokens:>9,}  {line}: {MEANING.get(line, '')}{remedy}"
    yield from (f"             {detail}" for detail in story.details)
    if story.evicted:
        gone = ", ".join(f"{count:,} {kind}" for kind, count in story.evicted.items())
        yield ""
        yield f"To make room for it, these checkpoints were evicted elsewhere or here: {gone}"


def _who(requests: int, first: int, last: int) -> str:
    if not requests:
        return "new: nobody"
    if requests == 1:
        return f"request {first:,}"
    return f"{requests:,} requests, from {first:,} to {last:,}"


def _path(story: Story) -> Iterator[str]:
    if not story.marks:
        yield "  nothing: the cache knows no prompt that begins like this"
        return
    shown = story.marks if len(story.marks) <= _MOST_MARKS else story.marks[: _MOST_MARKS // 2]
    rest = story.marks[len(shown) :][-(_MOST_MARKS // 2) :]
    for mark in shown:
        yield f"  {mark.position:>9,}  {_what(mark, story)}"
    if rest:
        yield f"             ... {len(story.marks) - len(shown) - len(rest):,} more ..."
    for mark in rest:
        yield f"  {mark.position:>9,}  {_what(mark, story)}"


def _what(mark: Mark, story: Story) -> str:
    if mark.what == "checkpoint":
        times = f"resumed from {mark.hits:,} times" if mark.hits != 1 else "resumed from once"
        here = "  <- it resumes here" if story.hit_tokens and mark.position == story.hit_tokens else ""
        return f"checkpoint ({mark.kind}), {times} so far{here}"
    if mark.what == "gone":
        return f"a checkpoint ({mark.kind}) was here; {mark.cause} {mark.ago:,.1f} s before"
    if mark.what == "taken":
        return f"this request leaves a checkpoint ({mark.kind})"
    return "attention is kept up to here" if mark.what == "resident" else "the cache knows the path up to here"
