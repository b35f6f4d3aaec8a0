"""From what a run wrote down to figures: totals, kinds of checkpoint, hits over time, prefixes that lose most.

Loss by prefix is exact: every token that an endless memory would have reused lies in one stretch of the tree of all
prompts, and so does every token that was lost. A *stretch* is a run of positions that the same requests pass: it begins
where prompts part or end. What is lost in a stretch is summed over the requests that pass it.

Rejected: naming a prefix by its first block or its system prompt. Conversations that all begin alike would be one line,
and the line would not say at which depth the tokens are lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.cache import ComputeCost, Counters
from headway.formats import Trace
from headway.replay.trace.prefixes import Reading, number_prefixes, sequences
from headway.tell.reasons import LINES
from headway.tell.run import Figures, Kind, LostPrefixes, SharedStretch, Span

__all__ = ["figures", "kinds", "lost_by_prefix", "over_time"]

Longs = NDArray[np.int64]
_SPANS = 60
_SHOWN = 20


def figures(
    trace: Trace,
    cost: ComputeCost,
    hits: Longs,
    matches: Longs,
    lost: Longs | None,
    first: int,
    loaded: Longs | None = None,
) -> Figures:
    """Count the requests from number `first` on.

    Args:
        trace: The trace.
        cost: Compute, for the shares saved.
        hits: int64 [R], tokens reused.
        matches: int64 [R], tokens that an endless memory would reuse.
        lost: int64 [lines, R], or None where nobody asked why.
        first: First request that counts.
        loaded: int64 [R], of the tokens reused those that were read back from lower tiers; None for none.
    """
    prompts, reused, endless = (a[first:].astype(np.float64) for a in (trace.prompt_tokens, hits, matches))
    total = max(1e-300, float(_computed(cost, prompts).sum()))
    lines = {} if lost is None else dict(zip(LINES, lost[:, first:].sum(axis=1).tolist(), strict=True))
    return Figures(
        requests=len(prompts),
        prompt_tokens=int(prompts.sum()),
        hit_tokens=int(reused.sum()),
        hit_requests=int((reused > 0).sum()),
        compute_saved=float(_computed(cost, reused).sum()) / total,
        endless_tokens=int(endless.sum()),
        endless_compute=float(_computed(cost, endless).sum()) / total,
        lost={line: tokens for line, tokens in lines.items() if tokens},
        loaded_tokens=0 if loaded is None else int(loaded[first:].sum()),
    )


def kinds(counters: Counters, before: Counters | None = None) -> dict[str, Kind]:
    """Counters by kind of placement, less those of an earlier moment."""
    names = ("taken", "reused", "resumed", "evicted", "evicted_unused")
    found = {}
    for kind in sorted(set(counters.taken) | set(counters.resumed)):
        now = [getattr(counters, name).get(kind, 0) for name in names]
        then = [getattr(before, name).get(kind, 0) if before else 0 for name in names]
        found[kind] = Kind(*(a - b for a, b in zip(now, then, strict=True)))
    return found


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


def _computed(cost: ComputeCost, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    computed: NDArray[np.float64] = tokens * (cost.linear + 0.5 * cost.quadratic * tokens)
    return computed
