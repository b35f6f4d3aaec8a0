"""The command `headway explain`: what there is to say about one request.

The run stops just before the request, so the cache is as the request finds it. Who passed a position before is counted
from the trace itself; what is kept there is what the cache knows of its path; what was lost, and why, is what the
request's own run writes down, so the figures are those of `headway replay`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from headway.cache import CheckpointRemoved, CheckpointStored, Displaced, Event, Evicted, Path
from headway.errors import ConfigError
from headway.formats import Trace
from headway.formats.chat import ChatEntry
from headway.option_records import with_records
from headway.progress import counting
from headway.replay.ask import options as opt
from headway.replay.ask.rendering import renderer_of
from headway.replay.ask.setting import Setting
from headway.replay.config import ReplayConfig
from headway.replay.replay import replay_trace
from headway.replay.run.ledger import Progress
from headway.replay.run.order import PausedRun
from headway.replay.trace.prefixes import number_prefixes, read_outputs, sequences
from headway.tell.prompt_text import Change, Place, PromptText
from headway.tell.run import Stretch
from headway.tell.story import Eviction, Mark, PlacedLoss, Story, story_lines

__all__ = ["explain", "story_of"]

_EXAMPLE_MEMORY = "2GB"


@with_records
def explain(
    source: opt.TraceChoice,
    model: opt.ModelChoice,
    ranks: opt.RankChoice,
    hardware: opt.Hardware,
    policy: opt.PolicyChoice,
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
    setting = Setting(model, ranks, hardware, policy, outputs=source.outputs).with_example(source, _EXAMPLE_MEMORY)
    if hardware.lower:
        raise ConfigError("lower tiers of memory are not followed request by request: leave out their options")
    config, _ = setting.configure()
    entries: list[ChatEntry] = []
    requests = source.load(entries)
    if request is None:
        request = _telling_request(requests, config)
    text = _text_of(requests, entries, source.tokenizer, request)
    with counting("replaying", max(1, request), "requests") as tell:
        story = story_of(requests, config, request, lambda done, _: tell(done), text)
    if as_json:
        typer.echo(json.dumps(asdict(story), indent=2))
        return
    console = Console()
    for line in story_lines(story, requests.name):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _telling_request(requests: Trace, config: ReplayConfig) -> int:
    """A request with something to say: the last one to pass the stretch of shared prefixes that loses most."""
    with counting("replaying", len(requests), "requests") as tell:
        worst = replay_trace(requests, config, progress=lambda done, _: tell(done)).prefixes.worst
    return worst[0].last_request if worst else 0


def _text_of(trace: Trace, entries: Sequence[ChatEntry], tokenizer: str | None, request: int) -> PromptText | None:
    """The prompt of a request as its client knows it, where the trace is a log of chats."""
    if trace.format != "chat" or not 0 <= request < len(trace):
        return None
    body = entries[int(trace.ordinals[request])].body
    words, messages, tools = renderer_of(tokenizer or ""), body.get("messages") or [], body.get("tools")
    tokens = words.prompt(body).tokens
    if not messages:
        return PromptText(tokens, words.piece)
    return PromptText(tokens, words.piece, words.text(messages, tools), messages, lambda now: words.text(now, tools))


def story_of(
    trace: Trace,
    config: ReplayConfig,
    request: int,
    progress: Progress | None = None,
    text: PromptText | None = None,
) -> Story:
    """Run a trace up to a request, and tell what becomes of it.

    Args:
        trace: The trace.
        config: What it is replayed against.
        request: Number of the request, from 0.
        progress: Called now and then with the requests done and the requests to do.
        text: The prompt's text, where it is known.

    Raises:
        ConfigError: No such request, a preset of another engine, or a configuration that cannot work.
    """
    if getattr(config, "preset", None) is not None:
        raise ConfigError("only this cache can be explained position by position: leave --preset out")
    paused = PausedRun(trace, config, request, progress)
    total, length = int(trace.prompt_tokens[request]), len(paused.prompt.tokens)

    def tokens(position: int) -> int:
        return total if position >= length else min(total, position * paused.symbol)

    hit, found = paused.cache.lookup(paused.prompt), paused.cache.explain(paused.prompt)
    marks = list(_marks(paused.cache.path(paused.prompt), tokens))
    events: list[Event] = []
    paused.cache.subscribe(events.append)
    reused, lost = paused.resume()
    answer = int(trace.answer_tokens[request])
    for place, kind in sorted({(e.position, e.kind) for e in events if isinstance(e, CheckpointStored)}):
        marks.append(Mark(total + answer if kind == "answer_end" else tokens(place), "taken", kind))
    evicted = Counter(e.kind for e in events if isinstance(e, CheckpointRemoved) and e.cause == "evicted")
    return Story(
        request=request,
        time=float(trace.times[request]),
        prompt_tokens=total,
        answer_tokens=answer,
        hit_tokens=reused,
        endless_tokens=paused.endless,
        resumed_from=hit.kind if reused else "",
        stretches=_stretches(trace, config, request),
        marks=sorted(marks, key=lambda mark: (mark.position, mark.what == "taken")),
        lost=lost,
        evictions=[
            Eviction(tokens(loss.start), tokens(loss.stop), tokens(went.position), went.kind, went.cause, went.age)
            for loss in found.losses
            if isinstance(went := loss.detail, Evicted)
        ],
        evicted=dict(sorted(evicted.items())),
        losses=[
            PlacedLoss(loss.reason.value, start, tokens(loss.stop), text.place(start) if text else Place())
            for loss in found.losses
            for start in [tokens(loss.start)]
        ],
        changed=_change(found.displaced, trace, text),
        needed=paused.needed,
    )


def _change(found: Displaced | None, trace: Trace, text: PromptText | None) -> Change | None:
    """What changed in front of known text. A trace of blocks cannot tell: what follows a change has other hashes."""
    if found is None or trace.width > 1:
        return None
    return text.change(found) if text else Change(found.start, found.stop, found.tokens, Place(), "")


def _marks(path: Path, tokens: Callable[[int], int]) -> Iterator[Mark]:
    """What the cache knows on the path that the prompt follows, up to where it leaves it."""
    end = path.matched
    if not end:
        return
    for part in path.parts:
        for kept in (checkpoint for checkpoint in part.checkpoints if checkpoint.position <= end):
            yield Mark(tokens(kept.position), "checkpoint", kept.kind, kept.uses)
        for lost in (checkpoint for checkpoint in part.lost if checkpoint.position <= end):
            yield Mark(tokens(lost.position), "gone", lost.kind, 0, lost.age, lost.cause)
    resident = max((min(part.resident, end) for part in path.parts if part.resident > part.start), default=0)
    yield Mark(tokens(resident), "resident")
    yield Mark(tokens(end), "known")


def _stretches(trace: Trace, config: ReplayConfig, request: int) -> list[Stretch]:
    """The prompt, cut where the set of earlier requests that passed changes."""
    symbols, offsets, prompts = sequences(trace, read_outputs(trace, config.outputs))
    before, stop = int(offsets[request]), int(offsets[request + 1])
    ids = number_prefixes(symbols[:stop], offsets[: request + 2]).ids
    own = ids[before : before + int(prompts[request])]
    owner = np.repeat(np.arange(request), np.diff(offsets[: request + 1]))
    passed = np.bincount(ids[:before], minlength=int(ids.max()) + 1)[own]
    first, last = np.full(int(ids.max()) + 1, -1), np.full(int(ids.max()) + 1, -1)
    last[ids[:before]] = owner
    first[ids[:before][::-1]] = owner[::-1]
    cuts = [0, *(np.flatnonzero(np.diff(passed)) + 1).tolist(), len(own)]
    total, width = int(trace.prompt_tokens[request]), trace.width
    return [
        Stretch(a * width, min(total, b * width), int(passed[a]), int(first[own[a]]), int(last[own[a]]))
        for a, b in pairwise(cuts)
        if a * width < total
    ]
