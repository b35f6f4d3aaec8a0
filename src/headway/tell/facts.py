"""The facts of a run, derived here once, as data (those of several side by side: `comparison`).

The terminal, the page, JSON and advice only render what stands here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from headway.cache import Reason
from headway.tell.latency import Latency
from headway.tell.prompt_faults import PromptFault
from headway.tell.reasons import FORGOTTEN, LOADED, MEANING, REMEDIES, UNSAVABLE
from headway.tell.run import ReplayResult, RunRecord, SharedStretch, Span, TierUse

__all__ = [
    "CheckpointFacts",
    "MemoryFacts",
    "PrefixFacts",
    "Refused",
    "RunFacts",
    "Share",
    "TierFacts",
    "Trend",
    "WaterfallLine",
    "facts_of",
    "hit_rates",
    "trend_of",
    "waterfall_lines",
    "with_facts",
]

_FLAT = 0.02
"""Range of a share within which it is called steady."""
_PARTS = 10
"""A trend looks at that many parts of a trace."""
_BACK = 0.25
"""What rises never falls back by more than this share of its range, and what falls never rises by more."""
_FULL = 0.9
"""Share of the memory in use from which on it is called full."""
_WORST = 10
"""Stretches of shared prefixes that are looked at."""
_RARE = 20
"""Checkpoints of a kind below which nothing is said about whether it pays."""
_MANY = 5
"""Requests that pass a stretch of prefixes, from which on it is worth a pin."""
_MATERIAL = 0.01
"""Share of all prompt tokens below which a loss is not worth a remedy."""


@dataclass(frozen=True)
class WaterfallLine:
    """Where prompt tokens went.

    Attributes:
        name: Name of the line, "loaded" or "reused".
        tokens: How many.
        share: Share of all prompt tokens.
        kind: "new" (no memory could save them), "lost", "loaded" (reused, from lower tiers) or "reused".
        meaning: What the line means; empty for "reused".
        remedy: What an operator can do about it; empty where there is nothing to do.
    """

    name: str
    tokens: int
    share: float
    kind: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Trend:
    """How a figure goes over a trace, by tenths of its requests: shares of tokens, or seconds.

    Attributes:
        early: In the first tenth.
        late: In the last tenth.
        low: The lowest of any tenth.
        high: The highest of any tenth.
        direction: "rises" or "falls", if it goes that way all along; "steady"; or "varies".
        cause: Why, where that can be told: "filling" (the memory was not full for most of it), "traffic" (an endless
            memory goes the same way) or "memory" (the memory is full, and most of what is lost was evicted).
    """

    early: float
    late: float
    low: float
    high: float
    direction: str
    cause: str = ""


@dataclass(frozen=True)
class Share:
    """A share, and whose it is."""

    name: str
    share: float


@dataclass(frozen=True)
class MemoryFacts:
    """What the memory of a rank holds at the end.

    Attributes:
        checkpoint_bytes: Bytes of one checkpoint; 0 for a model that needs none.
        checkpoint_tokens: Tokens whose attention entries weigh as much; 0 where that is not known.
        used: Bytes in use.
        limit: Bytes there are; None for endless.
        checkpoint_share: Share of the bytes in use that is checkpoints.
        checkpoints: Checkpoints kept.
    """

    checkpoint_bytes: int
    checkpoint_tokens: float
    used: int
    limit: int | None
    checkpoint_share: float
    checkpoints: int


@dataclass(frozen=True)
class CheckpointFacts:
    """Whether checkpoints pay.

    Attributes:
        taken: Checkpoints taken.
        unused_share: Share of them that was evicted before anybody resumed from them.
        best: The kind of which the largest share was reused; None where fewer than two kinds are frequent.
        worst: The kind of which the smallest share was.
    """

    taken: int
    unused_share: float
    best: Share | None
    worst: Share | None


@dataclass(frozen=True)
class PrefixFacts:
    """Which shared prefixes lose most.

    Attributes:
        lost_tokens: Tokens of shared prefixes that were computed again.
        stretches: Stretches that lost any.
        worst: The up to ten that lost most, the worst first.
        share: Share of the loss that is theirs.
        few: Whether pins pay: stretches among them that many requests pass are most of a loss worth a remedy, and a
            quarter of the memory holds them.
    """

    lost_tokens: int
    stretches: int
    worst: list[SharedStretch]
    share: float
    few: bool


@dataclass(frozen=True)
class TierFacts:
    """What a tier of lower memory gave.

    Attributes:
        name: "host", "disk" or "store".
        memory: Bytes that it has for one rank.
        share: Share of the prompt tokens that was read back from it.
        minutes: Minutes of prefill that it saved per hour of the trace, after paying for its moves; None where that is
            not known.
        writing: Share of the trace's time in which its link was writing; None for a trace without times.
        skipped: Share of the checkpoints for it that were not written.
    """

    name: str
    memory: int
    share: float
    minutes: float | None
    writing: float | None
    skipped: float


@dataclass(frozen=True)
class Refused:
    """Requests that the memory could never hold.

    Attributes:
        requests: How many.
        of: Of how many.
        share: Their share of all prompt tokens.
        needed: Bytes of one rank for the cache with which none would have been refused.
    """

    requests: int
    of: int
    share: float
    needed: int


@dataclass(frozen=True)
class RunFacts:
    """What there is to say about one run. Requests that were refused are in `refused` alone.

    Attributes:
        cache: Whose figures they are: "this cache", or the preset with its version.
        requests: Requests that were served.
        refused: Requests that the memory could never hold; None where there were none.
        reused: Share of the prompt tokens that was reused.
        compute_saved: Share of the prefill compute that was not needed.
        endless: Share of the prompt tokens that an endless memory would reuse.
        future: Share that a cache of the same size that knows the future reaches; None if nobody asked.
        taken: Share of what an endless memory would reuse that was reused.
        waterfall: Where the prompt tokens went: new, lost (the largest first), loaded, reused.
        new: Share of the prompt tokens that no memory could save.
        faults: What in the prompts keeps known text from being reused, where the trace shows it.
        loss: The largest line that a cache could have saved; None where none is worth a remedy.
        hit_rate: How the hit rate goes over the trace; None for a short trace.
        memory: What the memory holds.
        checkpoints: Whether checkpoints pay.
        prefixes: Which shared prefixes lose most.
        filled: Whether the memory was full for at least the second half of the trace.
        wait: Half of the requests' time to the first token, where it grows without end; else None.
        tiers: What lower tiers of memory gave, the fastest first.
    """

    cache: str
    requests: int
    refused: Refused | None
    reused: float
    compute_saved: float
    endless: float
    future: float | None
    taken: float
    waterfall: list[WaterfallLine]
    new: float
    faults: list[PromptFault]
    loss: WaterfallLine | None
    hit_rate: Trend | None
    memory: MemoryFacts
    checkpoints: CheckpointFacts
    prefixes: PrefixFacts
    filled: bool
    wait: Trend | None
    tiers: list[TierFacts]

    @property
    def lost(self) -> list[WaterfallLine]:
        """The lines that a cache could have saved, the largest first."""
        return [line for line in self.waterfall if line.kind == "lost"]


def facts_of(run: RunRecord) -> RunFacts:
    """Derive the facts of a run. O(what the record holds)."""
    result, whole = run.result, run.result.whole
    future = result.clairvoyant
    tokens = whole.prompt_tokens, whole.hit_tokens, whole.lost
    waterfall = waterfall_lines(*tokens, _remedies(run), loaded=whole.loaded_tokens)
    return RunFacts(
        cache=run.policy.get("preset") or "this cache",
        requests=whole.requests,
        refused=_refused(result) if result.refused else None,
        reused=whole.token_hit_rate,
        compute_saved=whole.compute_saved,
        endless=whole.endless_hit_rate,
        future=None if future is None else future.token_hit_rate,
        taken=whole.hit_tokens / max(1, whole.endless_tokens),
        waterfall=waterfall,
        new=sum(line.share for line in waterfall if line.kind == "new"),
        faults=run.faults,
        loss=next((line for line in waterfall if line.kind == "lost" and line.share >= _MATERIAL), None),
        hit_rate=_hit_rate_trend(result),
        memory=_memory(run),
        checkpoints=_checkpoints(run),
        prefixes=_prefixes(run),
        filled=_filled_at(result) <= 0.5,
        wait=None if result.latency is None else _wait_trend(result.latency),
        tiers=[_tier(tier, result) for tier in result.tiers],
    )


def with_facts(run: RunRecord) -> dict[str, Any]:
    """A run and its facts as plain values, for JSON. `RunRecord.from_dict` reads it."""
    return run.as_dict() | {"facts": asdict(facts_of(run))}


def hit_rates(spans: Sequence[Span], most: int) -> list[tuple[int, float, float]]:
    """The hit rate over time in at most `most` points.

    Returns:
        For each the request after its last, the share reused, and the share that an endless memory would reuse.
    """
    each = max(1, -(-len(spans) // most))
    pools = [spans[i : i + each] for i in range(0, len(spans), each)]
    return [(pool[-1].stop, _hit_rate(pool), _endless_rate(pool)) for pool in pools]


def _hit_rate(spans: Sequence[Span]) -> float:
    return sum(span.hit_tokens for span in spans) / max(1, sum(span.prompt_tokens for span in spans))


def _endless_rate(spans: Sequence[Span]) -> float:
    return sum(span.endless_tokens for span in spans) / max(1, sum(span.prompt_tokens for span in spans))


def waterfall_lines(
    prompt_tokens: int,
    hit_tokens: int,
    lost_tokens: Mapping[str, int],
    remedies: Mapping[str, str] = REMEDIES,
    *,
    loaded: int = 0,
) -> list[WaterfallLine]:
    """Where prompt tokens went: new, lost (the largest first), loaded, reused. Lines of no tokens are left out.

    Args:
        prompt_tokens: All of them.
        hit_tokens: Of these, tokens that were reused.
        lost_tokens: The others, by the name of their line.
        remedies: What can be done about each line.
        loaded: Of the tokens reused, those that were read back from lower tiers of memory.
    """
    total = max(1, prompt_tokens)

    def line(name: str, kind: str) -> WaterfallLine:
        remedy = "" if kind == "new" else remedies.get(name, "")
        return WaterfallLine(name, lost_tokens[name], lost_tokens[name] / total, kind, MEANING.get(name, ""), remedy)

    present = [name for name in lost_tokens if lost_tokens[name]]
    lost = sorted((n for n in present if n not in UNSAVABLE), key=lambda name: -lost_tokens[name])
    return [
        *(line(name, "new") for name in UNSAVABLE if name in present),
        *(line(name, "lost") for name in lost),
        *(
            [WaterfallLine(LOADED, loaded, loaded / total, LOADED, "read back from lower tiers of memory")]
            if loaded
            else []
        ),
        WaterfallLine("reused", hit_tokens - loaded, (hit_tokens - loaded) / total, "reused"),
    ]


def _tier(tier: TierUse, result: ReplayResult) -> TierFacts:
    seconds, saved = result.seconds_of_trace, tier.saved_seconds
    return TierFacts(
        name=tier.name,
        memory=tier.memory,
        share=tier.tokens / max(1, result.whole.prompt_tokens),
        minutes=60 * saved / seconds if saved is not None and seconds else None,
        writing=tier.seconds_out / seconds if seconds else None,
        skipped=tier.skipped / max(1, tier.skipped + tier.checkpoints),
    )


def _refused(result: ReplayResult) -> Refused:
    share = result.refused_tokens / max(1, result.refused_tokens + result.whole.prompt_tokens)
    return Refused(result.refused, result.refused + result.whole.requests, share, result.needed)


def _remedies(run: RunRecord) -> dict[str, str]:
    """What can be done in a run: only what its layout, its model and its engine leave open."""
    remedies, smaller = dict(REMEDIES), []
    if run.layout["dcp"] < run.layout["tp"] and any(g.kind == "FullAttention" and g.sharded for g in run.groups):
        smaller.append("split the attention over more ranks (--dcp)")
    if run.state_bytes and run.result.memory and _memory(run).checkpoint_share >= 0.1:
        smaller.append("make states smaller (--state-dtype)")
    more = ["give more memory", *smaller]
    remedies[Reason.EVICTED.value] = ", ".join([*more[:-1], ("or " if smaller else "") + more[-1]])
    if run.policy.get("preset"):  # another engine has no --placement
        del remedies[Reason.STATE_NEVER_TAKEN.value]
    return remedies


def trend_of(values: Sequence[float], flat: float = 0.0) -> Trend:
    """How a figure goes from its first value to its last; within a range of `flat` it is steady."""
    low, high = min(values), max(values)
    peaks, floors = list(accumulate(values, max)), list(accumulate(values, min))
    slack = _BACK * (high - low)
    climbs = all(peak - value <= slack for peak, value in zip(peaks, values, strict=True))
    sinks = all(value - floor <= slack for floor, value in zip(floors, values, strict=True))
    if high - low <= flat:
        direction = "steady"
    elif values[-1] - values[0] > flat and climbs:
        direction = "rises"
    elif values[0] - values[-1] > flat and sinks:
        direction = "falls"
    else:
        direction = "varies"
    return Trend(values[0], values[-1], low, high, direction)


def _filled_at(result: ReplayResult) -> float:
    """Share of the requests that had ended when the memory was full for the first time; 1 if it never was."""
    limit, served = result.blocks * result.block_bytes, max(1, result.whole.requests)
    full = (moment.request for moment in result.memory if limit and moment.used >= _FULL * limit)
    return min(1.0, next(full, served) / served)


def _hit_rate_trend(result: ReplayResult) -> Trend | None:
    spans = result.over_time
    if len(spans) < _PARTS:
        return None
    edges = [len(spans) * i // _PARTS for i in range(_PARTS + 1)]
    parts = [spans[a:b] for a, b in pairwise(edges)]
    found = trend_of([_hit_rate(part) for part in parts], _FLAT)
    endless = trend_of([_endless_rate(part) for part in parts], _FLAT)
    change, whole = found.late - found.early, endless.late - endless.early
    cause = ""
    if found.direction in ("rises", "falls") and endless.direction == found.direction and 2 * whole / change >= 1:
        cause = "traffic"
    elif found.direction == "rises" and _filled_at(result) > 1 / _PARTS:
        cause = "filling"
    elif found.direction == "falls" and _filled_at(result) <= 1 / 2:
        lost = result.whole.lost
        gone = lost.get(Reason.EVICTED.value, 0) + lost.get(FORGOTTEN, 0)
        savable = sum(tokens for name, tokens in lost.items() if name not in UNSAVABLE)
        cause = "memory" if 2 * gone > savable else ""
    return replace(found, cause=cause)


def _wait_trend(latency: Latency) -> Trend | None:
    """That requests come faster than they are computed, if they do."""
    waits = latency.over_time
    if len(waits) < 8:
        return None
    parts = [waits[a:b] for a, b in pairwise(len(waits) * i // 8 for i in range(9))]
    found = trend_of([sum(w.p50 * w.requests for w in part) / sum(w.requests for w in part) for part in parts])
    if found.direction != "rises" or found.late <= 2 * found.early or 2 * latency.queue.p50 < latency.first_token.p50:
        return None
    return found


def _memory(run: RunRecord) -> MemoryFacts:
    last = run.result.memory[-1] if run.result.memory else None
    weight = run.checkpoint_bytes / run.token_bytes if run.token_bytes else 0.0
    limit = run.result.blocks * run.result.block_bytes or None
    if last is None:
        return MemoryFacts(run.checkpoint_bytes, weight, 0, limit, 0.0, 0)
    return MemoryFacts(run.checkpoint_bytes, weight, last.used, limit, last.checkpoints / max(1, last.used), last.count)


def _checkpoints(run: RunRecord) -> CheckpointFacts:
    kinds = run.result.kinds
    taken = sum(kind.taken for kind in kinds.values())
    unused = sum(kind.evicted_unused for kind in kinds.values())
    rates = [Share(name, kind.reused / kind.taken) for name, kind in kinds.items() if kind.taken >= _RARE]
    ranked = sorted(rates, key=lambda one: -one.share) if len(rates) > 1 else [None]
    return CheckpointFacts(taken, unused / max(1, taken), ranked[0], ranked[-1])


def _prefixes(run: RunRecord) -> PrefixFacts:
    found, worst = run.result.prefixes, run.result.prefixes.worst[:_WORST]
    share = sum(stretch.lost_tokens for stretch in worst) / max(1, found.lost_tokens)
    many = [stretch for stretch in worst if stretch.requests >= _MANY]
    size = sum((one.stop - one.start) * run.token_bytes + run.checkpoint_bytes for one in many)
    few = 2 * sum(stretch.lost_tokens for stretch in many) > found.lost_tokens
    few = few and found.lost_tokens >= _MATERIAL * run.result.whole.prompt_tokens
    fits = run.memory is not None and size <= run.memory / 4
    return PrefixFacts(found.lost_tokens, found.stretches, worst, share, few and fits)
