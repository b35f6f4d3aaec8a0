"""The command `headway explain`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from headway.option_records import with_records
from headway.replay import options as opt
from headway.replay.asked import asked_run
from headway.replay.explain.story import Mark, Story, Stretch, tell
from headway.replay.findings import REMEDIES
from headway.replay.progress import replaying
from headway.replay.run import replay_trace
from headway.replay.scaling import ReplayConfig
from headway.replay.show import MEANING, UNSAVABLE
from headway.replay.trace import Trace

__all__ = ["explain", "story_lines"]

_EXAMPLE_MEMORY = "2GB"
_MOST_MARKS, _MOST_STRETCHES = 40, 16


@with_records
def explain(
    source: opt.TraceFlags,
    model: opt.ModelFlags,
    layout: opt.LayoutFlags,
    memory: opt.MemoryFlags,
    policy: opt.PolicyFlags,
    request: Annotated[
        int | None,
        typer.Option(
            "--request",
            "-n",
            help="Number of the request, from 0.",
            show_default="the last one to pass the stretch of prefixes that loses most",
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Follow one request of a trace through the cache, position by position, and say why it reused no more.

    For example:

        headway explain trace.jsonl --request 812 --model kimi-k3 --tp 8 --dcp 8 --memory 20GB

    Give the options that you gave to `headway replay`. The trace is replayed up to the request, so what you see is what
    it finds: which earlier requests share each stretch of its prompt, which checkpoints are on its path and which were
    there, where it resumes, and what it leaves behind.

    The report of a replay names requests worth a look; without --request, one of these is taken. Without a trace, a
    generated workload is used.
    """
    config, _ = asked_run(source, model, layout, memory, policy, _EXAMPLE_MEMORY)
    requests = source.load()
    if request is None:
        request = _telling_request(requests, config)
    with replaying(max(1, request)) as progress:
        story = tell(requests, config, request, progress)
    if as_json:
        typer.echo(json.dumps(asdict(story), indent=2))
        return
    console = Console()
    for line in story_lines(story, requests.name):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _telling_request(requests: Trace, config: ReplayConfig) -> int:
    """A request with something to say: the last one to pass the stretch of shared prefixes that loses most."""
    with replaying(len(requests)) as progress:
        worst = replay_trace(requests, config, progress=progress).prefixes.worst
    return worst[0].last_request if worst else 0


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
    yield from _shortened([_stretch_line(stretch) for stretch in story.stretches], _MOST_STRETCHES)
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
    yield from _shortened([f"  {mark.position:>9,}  {_what(mark, story)}" for mark in story.marks], _MOST_MARKS)


def _stretch_line(stretch: Stretch) -> str:
    place = f"[{stretch.start:,}, {stretch.stop:,})"
    return f"  {place:<22}{_who(stretch.requests, stretch.first, stretch.last)}"


def _shortened(lines: Sequence[str], most: int) -> Iterator[str]:
    """All lines, or the first and the last of them."""
    if len(lines) <= most:
        yield from lines
        return
    yield from lines[: most // 2]
    yield f"             ... {len(lines) - 2 * (most // 2):,} more ..."
    yield from lines[-(most // 2) :]


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
