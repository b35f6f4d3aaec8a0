"""What a replay shows beyond totals: how the hit rate went over time, and which shared prefixes lose most.

Loss by prefix is exact: every token that an endless memory would have reused lies in one stretch of the tree of all
prompts, and so does every token that was lost. A *stretch* is a run of positions that the same requests pass: it begins
where prompts part or end. What is lost in a stretch is summed over the requests that pass it.

Rejected: naming a prefix by its first block or its system prompt. Conversations that all begin alike would be one line,
and the line would not say at which depth the tokens are lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.replay.endless import Reading, number_prefixes, sequences
from headway.replay.trace import Trace

__all__ = ["LostPrefixes", "SharedStretch", "Span", "lost_by_prefix", "over_time"]

Longs = NDArray[np.int64]
_SPANS = 60
_SHOWN = 20


@dataclass(frozen=True)
class Span:
    """Requests [first, stop), in order of arrival.

    Attributes:
        first: The first request.
        stop: The request after the last.
        time: Seconds of the trace at which the first one arrived.
        prompt_tokens: Their prompt tokens.
        hit_tokens: Of these, reused.
        endless_tokens: Of these, reusable with an endless memory.
    """

    first: int
    stop: int
    time: float
    prompt_tokens: int
    hit_tokens: int
    endless_tokens: int


@dataclass(frozen=True)
class SharedStretch:
    """Tokens [start, stop) of a prefix that several requests share.

    Attributes:
        start: First token.
        stop: Token after the last.
        requests: Requests that pass it with their prompts or answers.
        first_request: The first of them.
        last_request: The last of them.
        lost_tokens: Its tokens that were known and not reused, over all requests.
        hit_tokens: Its tokens that were reused, over all requests.
    """

    start: int
    stop: int
    requests: int
    first_request: int
    last_request: int
    lost_tokens: int
    hit_tokens: int


@dataclass(frozen=True)
class LostPrefixes:
    """What was lost of shared prefixes: tokens that an endless memory would have reused, and this cache did not.

    Attributes:
        stretches: Stretches that lost anything.
        lost_tokens: Tokens lost in all of them.
        worst: Those that lost most, the worst first.
    """

    stretches: int = 0
    lost_tokens: int = 0
    worst: list[SharedStretch] = field(default_factory=list)


def over_time(trace: Trace, hits: Longs, matches: Longs) -> list[Span]:
    """Hits over the trace in up to 60 spans of equally many requests.

    Args:
        trace: The trace.
        hits: int64 [R], tokens reused.
        matches: int64 [R], tokens that an endless memory would reuse.
    """
    edges = np.unique(np.linspace(0, len(trace), _SPANS + 1).astype(np.int64))
    sums = [np.add.reduceat(a, edges[:-1]).tolist() for a in (trace.prompt_tokens, hits, matches)]
    bounds = zip(edges[:-1].tolist(), edges[1:].tolist(), trace.times[edges[:-1]].tolist(), strict=True)
    return [Span(*bound, *tokens) for bound, tokens in zip(bounds, zip(*sums, strict=True), strict=True)]


def lost_by_prefix(trace: Trace, reading: Reading, hits: Longs, matches: Longs) -> LostPrefixes:
    """Which shared prefixes lose most. O(S log S) for S symbols.

    Args:
        trace: The trace.
        reading: How answers are read.
        hits: int64 [R], tokens reused.
        matches: int64 [R], tokens that an endless memory would reuse.
    """
    symbols, offsets, _ = sequences(trace, reading)
    prefixes, width = number_prefixes(symbols, offsets), trace.width
    request = np.repeat(np.arange(len(trace)), np.diff(offsets))
    start = (np.arange(len(symbols)) - offsets[:-1][request]) * width
    stop = np.minimum(start + width, trace.prompt_tokens[request])
    reusable = np.minimum(matches[request], stop)
    lost = np.maximum(reusable - np.maximum(hits[request], start), 0)
    reused = np.maximum(np.minimum(hits[request], reusable) - start, 0)
    stretch = _stretches(prefixes.ids, start)
    lost_in, reused_in = (np.bincount(stretch, weights=a, minlength=len(stretch)) for a in (lost, reused))
    losing = np.flatnonzero(lost_in)
    worst = losing[np.argsort(-lost_in[losing], kind="stable")[:_SHOWN]]
    shown = []
    for head in worst.tolist():
        members = np.flatnonzero(stretch == head)
        passing = request[members[start[members] == start[head]]]
        bounds = (int(start[head]), int(stop[members].max()))
        who = (len(passing), int(passing.min()), int(passing.max()))
        shown.append(SharedStretch(*bounds, *who, int(lost_in[head]), int(reused_in[head])))
    return LostPrefixes(len(losing), int(lost.sum()), shown)


def _stretches(ids: Longs, start: Longs) -> Longs:
    """The stretch of each symbol, int64 [S], named by the place where its first symbol occurs first.

    A prefix goes on the stretch of the one before it if the same requests pass both: as many, because whoever passes
    the longer one passes the shorter.
    """
    first = np.unique(ids, return_index=True)[1]
    passing = np.bincount(ids)
    before = np.where(start[first] > 0, ids[first - 1], -1)
    goes_on = (before >= 0) & (passing == passing[before])
    head = np.where(goes_on, before, np.arange(len(first)))
    while True:
        further = head[head]
        if (further == head).all():
            named: Longs = first[head[ids]]
            return named
        head = further
