"""The facts of a run, derived here once, as data (those of several side by side: `comparison`).

The terminal, the page, JSON and advice only render what stands here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.cache import Reason
from headway.tell.latency import Latency
from headway.tell.reasons import MEANING, REFUSED, REMEDIES, UNSAVABLE
from headway.tell.run import RunRecord, SharedStretch, Span

__all__ = [
    "CheckpointFacts",
    "MemoryFacts",
    "PrefixFacts",
    "RunFacts",
    "Share",
    "Trend",
    "WaterfallLine",
    "facts_of",
    "hit_rates",
    "waterfall_lines",
    "with_facts",
]

_FLAT = 0.02
"""Change of a share below which it is called steady."""
_PART = 5
"""A trend compares the first and the last of that many parts."""
_WORST = 10
"""Stretches of shared prefixes that are looked at."""
_RARE = 20
"""Checkpoints of a kind below which nothing is said about whether it pays."""


@dataclass(frozen=True)
class WaterfallLine:
    """Where prompt tokens went.

    Attributes:
        name: Name of the line, or "reused".
        tokens: How many.
        share: Share of all prompt tokens.
        kind: "refused", "new" (no memory could save them), "lost" or "reused".
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
    """A figure in the first part of the trace and in the last: shares of tokens, or seconds.

    Attributes:
        early: In the first part.
        late: In the last part.
        direction: "rises", "falls" or "steady".
    """

    early: float
    late: float
    direction: str


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
        few: Whether that is most of it.
    """

    lost_tokens: int
    stretches: int
    worst: list[SharedStretch]
    share: float
    few: bool


@dataclass(frozen=True)
class RunFacts:
    """What there is to say about one run.

    Attributes:
        cache: Whose figures they are: "this cache", or the preset with its version.
        requests: Requests.
        reused: Share of the prompt tokens that was reused.
        compute_saved: Share of the prefill compute that was not needed.
        endless: Share of the prompt tokens that an endless memory would reuse.
        future: Share that a cache of the same size that knows the future reaches; None if nobody asked.
        taken: Share of what an endless memory would reuse that was reused.
        waterfall: Where the prompt tokens went: refused, new, lost (the largest first), reused.
        new: Share of the prompt tokens that no memory could save.
        refused_requests: Requests that the memory could never hold.
        refused: Share of the prompt tokens that is theirs.
        loss: The largest line that a cache could have saved.
        hit_rate: Whether the hit rate still rises; None for a short trace.
        memory: What the memory holds.
        checkpoints: Whether checkpoints pay.
        prefixes: Which shared prefixes lose most.
        wait: Half of the requests' time to the first token, where it grows without end; else None.
    """

    cache: str
    requests: int
    reused: float
    compute_saved: float
    endless: float
    future: float | None
    taken: float
    waterfall: list[WaterfallLine]
    new: float
    refused_requests: int
    refused: float
    loss: WaterfallLine | None
    hit_rate: Trend | None
    memory: MemoryFacts
    checkpoints: CheckpointFacts
    prefixes: PrefixFacts
    wait: Trend | None

    @property
    def lost(self) -> list[WaterfallLine]:
        """The lines that a cache could have saved, the largest first."""
        return [line for line in self.waterfall if line.kind == "lost"]


def facts_of(run: RunRecord) -> RunFacts:
    """Derive the facts of a run. O(what the record holds)."""
    result, whole = run.result, run.result.whole
    future = result.clairvoyant
    imitated = bool(run.policy.get("preset"))
    waterfall = waterfall_lines(whole.prompt_tokens, whole.hit_tokens, whole.lost, imitated=imitated)
    return RunFacts(
        cache=run.policy.get("preset") or "this cache",
        requests=whole.requests,
        reused=whole.token_hit_rate,
        compute_saved=whole.compute_saved,
        endless=whole.endless_hit_rate,
        future=None if future is None else future.token_hit_rate,
        taken=whole.hit_tokens / max(1, whole.endless_tokens),
        waterfall=waterfall,
        new=sum(line.share for line in waterfall if line.kind == "new"),
        refused_requests=result.refused,
        refused=sum(line.share for line in waterfall if line.kind == "refused"),
        loss=next((line for line in waterfall if line.kind == "lost"), None),
        hit_rate=_hit_rate_trend(result.over_time),
        memory=_memory(run),
        checkpoints=_checkpoints(run),
        prefixes=_prefixes(run),
        wait=None if result.latency is None else _wait_trend(result.latency),
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
    points = []
    for pool in (spans[i : i + each] for i in range(0, len(spans), each)):
        endless = sum(span.endless_tokens for span in pool) / max(1, sum(span.prompt_tokens for span in pool))
        points.append((pool[-1].stop, _hit_rate(pool), endless))
    return points


def _hit_rate(spans: Sequence[Span]) -> float:
    return sum(span.hit_tokens for span in spans) / max(1, sum(span.prompt_tokens for span in spans))


def waterfall_lines(
    prompt_tokens: int, hit_tokens: int, lost_tokens: Mapping[str, int], *, imitated: bool = False
) -> list[WaterfallLine]:
    """Where prompt tokens went: refused, new, lost (the largest first), reused. Lines of no tokens are left out.

    Args:
        prompt_tokens: All of them.
        hit_tokens: Of these, tokens that were reused.
        lost_tokens: The others, by the name of their line.
        imitated: By a preset of another engine, which has no --placement.
    """
    total = max(1, prompt_tokens)

    def line(name: str, kind: str) -> WaterfallLine:
        fixed = imitated and name == Reason.STATE_NEVER_TAKEN.value
        remedy = "" if fixed or kind == "new" else REMEDIES.get(name, "")
        return WaterfallLine(name, lost_tokens[name], lost_tokens[name] / total, kind, MEANING.get(name, ""), remedy)

    present = [name for name in lost_tokens if lost_tokens[name]]
    lost = sorted((n for n in present if n not in (REFUSED, *UNSAVABLE)), key=lambda name: -lost_tokens[name])
    return [
        *(line(name, "refused") for name in present if name == REFUSED),
        *(line(name, "new") for name in UNSAVABLE if name in present),
        *(line(name, "lost") for name in lost),
        WaterfallLine("reused", hit_tokens, hit_tokens / total, "reused"),
    ]


def _hit_rate_trend(spans: Sequence[Span]) -> Trend | None:
    if len(spans) < 2 * _PART:
        return None
    part = len(spans) // _PART
    early, late = _hit_rate(spans[:part]), _hit_rate(spans[-part:])
    return Trend(early, late, "rises" if late > early + _FLAT else "falls" if late < early - _FLAT else "steady")


def _wait_trend(latency: Latency) -> Trend | None:
    """That requests come faster than they are computed, if they do."""
    waits, part = latency.over_time, len(latency.over_time) // 4
    if part < 2:
        return None
    early, late = (
        sum(wait.p50 * wait.requests for wait in some) / sum(wait.requests for wait in some)
        for some in (waits[:part], waits[-part:])
    )
    if late <= 2 * early or 2 * latency.queue.p50 < latency.first_token.p50:
        return None
    return Trend(early, late, "rises")


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
    return PrefixFacts(found.lost_tokens, found.stretches, worst, share, share > 0.5)
