"""What there is to say about one request.

The run stops just before the request, so the cache is as the request finds it. Who passed a position before is counted
from the trace itself; what is kept there is read off the cache's tree; what was lost, and why, is what the request's
own run writes down, so the figures are those of `headway replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headway.cache import CheckpointRemoved, CheckpointStored, Event, Hit
from headway.errors import ConfigError
from headway.replay.endless import number_prefixes, read_outputs, sequences
from headway.replay.run import Stopped
from headway.replay.scaling import ReplayConfig
from headway.replay.trace import Trace

__all__ = ["Mark", "Story", "Stretch", "tell"]


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, stop) of the prompt, which the same earlier requests have passed.

    Attributes:
        start: First token.
        stop: Token after the last.
        requests: Earlier requests that passed it; 0: it is new.
        first: The first of them, -1 for none.
        last: The last of them, -1 for none.
    """

    start: int
    stop: int
    requests: int
    first: int
    last: int


@dataclass(frozen=True)
class Mark:
    """Something at a position of the prompt's path.

    Attributes:
        position: Tokens before it.
        what: "checkpoint", "gone" (a checkpoint was here), "resident" (attention is kept up to here), "known" (the
            tree knows the path up to here), or "taken" (this request leaves a checkpoint).
        kind: Kind of placement, where it is about a checkpoint.
        hits: Requests that resumed from it so far.
        ago: Seconds since it went, where it is gone.
        cause: Why it went.
    """

    position: int
    what: str
    kind: str = ""
    hits: int = 0
    ago: float = 0.0
    cause: str = ""


@dataclass(frozen=True)
class Story:
    """One request.

    Attributes:
        request: Its number.
        time: Seconds of the trace at which it arrives.
        prompt_tokens: Tokens of its prompt.
        answer_tokens: Tokens of its answer.
        hit_tokens: Tokens reused.
        endless_tokens: Tokens that an endless memory would reuse.
        resumed_from: Kind of the checkpoint that it resumes from, "path" where none is needed, "" for no hit.
        stretches: The prompt, by who passed before.
        marks: What lies on its path, by position.
        lost: Tokens lost, by line of the waterfall.
        details: What the cache adds to its reasons.
        evicted: Checkpoints that had to make room for it, by kind.
    """

    request: int
    time: float
    prompt_tokens: int
    answer_tokens: int
    hit_tokens: int
    endless_tokens: int
    resumed_from: str
    stretches: list[Stretch]
    marks: list[Mark]
    lost: dict[str, int]
    details: list[str]
    evicted: dict[str, int]


def tell(trace: Trace, config: ReplayConfig, request: int, progress: Callable[[int, int], None] | None = None) -> Story:
    """Run a trace up to a request, and tell what becomes of it.

    Args:
        trace: The trace.
        config: What it is replayed against.
        request: Number of the request, from 0.
        progress: Called now and then with the requests done and the requests to do.

    Raises:
        ConfigError: No such request, a preset of another engine, or a configuration that cannot work.
    """
    if getattr(config, "preset", None) is not None:
        raise ConfigError("only this cache can be explained position by position: leave --preset out")
    stopped = Stopped(trace, config, request, progress)
    total, length = int(trace.prompt_tokens[request]), len(stopped.prompt.tokens)

    def tokens(position: int) -> int:
        return total if position >= length else min(total, position * stopped.symbol)

    hit = stopped.cache.lookup(stopped.prompt)
    found = stopped.cache.explain(stopped.prompt)
    marks = list(_marks(hit, float(trace.times[request]), tokens))
    events: list[Event] = []
    stopped.cache.subscribe(events.append)
    reused, lost = stopped.go_on()
    taken = sorted({(event.position, event.kind) for event in events if isinstance(event, CheckpointStored)})
    end = total + int(trace.answer_tokens[request])
    marks += [Mark(end if kind == "answer_end" else tokens(place), "taken", kind) for place, kind in taken]
    evicted = [e.kind for e in events if isinstance(e, CheckpointRemoved) and e.cause == "evicted"]
    return Story(
        request=request,
        time=float(trace.times[request]),
        prompt_tokens=total,
        answer_tokens=int(trace.answer_tokens[request]),
        hit_tokens=reused,
        endless_tokens=stopped.endless,
        resumed_from=hit.kind if reused else "",
        stretches=_stretches(trace, config, request),
        marks=sorted(marks, key=lambda mark: (mark.position, mark.what == "taken")),
        lost=lost,
        details=[
            f"[{tokens(loss.start):,}, {tokens(loss.stop):,}) {loss.reason.value}: "
            + _scaled(str(loss.detail), stopped.symbol)
            for loss in found.losses
            if loss.detail
        ],
        evicted={kind: evicted.count(kind) for kind in sorted(set(evicted))},
    )


def _marks(hit: Hit, now: float, tokens: Callable[[int], int]) -> Iterator[Mark]:
    """What the tree has on the path that the prompt follows, up to where it leaves it."""
    end = hit.at.position
    if not end:
        return
    nodes = list(hit.at.edge.path())
    for node in nodes:
        for checkpoint in node.checkpoints:
            if checkpoint.position <= end:
                yield Mark(tokens(checkpoint.position), "checkpoint", checkpoint.kind, checkpoint.hits)
        for lost in node.lost:
            if lost.position <= end and lost.position not in node.marks:
                yield Mark(tokens(lost.position), "gone", lost.kind, 0, now - lost.when, lost.cause)
    resident = max((min(node.resident, end) for node in nodes if node.resident > node.start), default=0)
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


def _scaled(detail: str, symbol: int) -> str:
    """The cache's words about positions of symbols, in tokens."""
    words = detail.split()
    for i, word in enumerate(words[:-1]):
        if word == "at" and words[i + 1].isdigit():
            words[i + 1] = f"{int(words[i + 1]) * symbol:,}"
    return " ".join(words)
