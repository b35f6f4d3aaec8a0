"""What a replay found: figures, and how they are counted from what the run recorded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import ComputeCost, Counters, Reason
from headway.replay.clock.latency import Latency
from headway.replay.details import LostPrefixes, Span
from headway.replay.trace import Trace

__all__ = [
    "FORGOTTEN",
    "LINES",
    "REFUSED",
    "Figures",
    "Kind",
    "Memory",
    "Recording",
    "ReplayResult",
    "figures",
    "kinds",
]

Longs = NDArray[np.int64]

FORGOTTEN = "forgotten"
"""Known to an endless memory, and so long gone here that not even its tokens were remembered."""
REFUSED = "refused"
"""Tokens of prompts that the memory could never hold."""
LINES = (*(reason.value for reason in Reason), FORGOTTEN, REFUSED)
"""Lines of the waterfall. Every prompt token is reused or on exactly one of them."""


@dataclass(frozen=True)
class Figures:
    """What became of a range of requests.

    Attributes:
        requests: Requests.
        prompt_tokens: Their prompt tokens.
        hit_tokens: Tokens reused.
        hit_requests: Requests that reused any.
        compute_saved: Share of the prefill compute of all prompts that was not needed (quadratic attention included).
        endless_tokens: Tokens that an endless memory that keeps every position would reuse.
        endless_compute: Share of the compute that it would save.
        lost: Tokens not reused, by line.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_requests: int
    compute_saved: float
    endless_tokens: int
    endless_compute: float
    lost: dict[str, int]

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens that were reused."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def request_hit_rate(self) -> float:
        """Share of the requests that reused anything."""
        return self.hit_requests / max(1, self.requests)

    @property
    def endless_hit_rate(self) -> float:
        """Share of the prompt tokens that an endless memory would reuse."""
        return self.endless_tokens / max(1, self.prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = ("token_hit_rate", "request_hit_rate", "endless_hit_rate")
        return asdict(self) | {name: getattr(self, name) for name in rates}


@dataclass(frozen=True)
class Kind:
    """What became of the checkpoints of one kind of placement.

    Attributes:
        taken: Checkpoints taken.
        reused: Of these, resumed from at least once.
        resumed: Requests that resumed from one.
        evicted: Checkpoints evicted.
        evicted_unused: Of these, never resumed from.
    """

    taken: int
    reused: int
    resumed: int
    evicted: int
    evicted_unused: int


@dataclass(frozen=True)
class Memory:
    """Memory at one moment.

    Attributes:
        request: Requests that have ended.
        time: Seconds of the trace.
        used: Bytes held, on one rank.
        checkpoints: Of these, bytes of states and windows.
        count: Checkpoints kept.
    """

    request: int
    time: float
    used: int
    checkpoints: int
    count: int


@dataclass
class Recording:
    """What the run writes down for each request.

    Attributes:
        hits: int64 [R], tokens reused.
        lost: int64 [lines, R], tokens lost, in the order of `LINES`.
        memory: Memory over time.
        half: Counters when half of the requests had ended.
        counters: Counters at the end.
        refused: Requests that the memory could never hold.
        starved: Requests that ended early: their prompt fitted into the memory and their answer did not.
    """

    hits: Longs
    lost: Longs
    memory: list[Memory] = field(default_factory=list)
    half: Counters = field(default_factory=Counters)
    counters: Counters = field(default_factory=Counters)
    refused: int = 0
    starved: int = 0

    @classmethod
    def of(cls, requests: int) -> Recording:
        """An empty one for that many requests."""
        return cls(np.zeros(requests, dtype=np.int64), np.zeros((len(LINES), requests), dtype=np.int64))


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        trace: Name of the trace.
        outputs: How answers were read: "never", "continuation" or "recorded".
        symbol: Tokens in a symbol of the run.
        block_bytes: Bytes of a pool block on one rank.
        blocks: Blocks of the pool; 0 for an endless memory.
        whole: The whole trace.
        second_half: The second half of the requests: the memory is warm.
        kinds: Checkpoints by kind of placement, whole trace.
        second_half_kinds: The same, of the second half.
        memory: Memory over time.
        refused: Requests that the memory could never hold.
        starved: Requests that ended early: their prompt fitted into the memory and their answer did not.
        seconds: Processor time that the run took.
        clairvoyant: What a cache that knows the future reaches, whole trace; None if nobody asked.
        second_half_clairvoyant: The same, second half.
        over_time: Hits over the trace.
        prefixes: Which shared prefixes lose most.
        latency: What requests waited for, with the clock `trace`; else None.
        preset: The engine that was imitated, with its settings; empty for the cache as it is.
    """

    trace: str
    outputs: str
    symbol: int
    block_bytes: int
    blocks: int
    whole: Figures
    second_half: Figures
    kinds: dict[str, Kind]
    second_half_kinds: dict[str, Kind]
    memory: list[Memory]
    refused: int
    starved: int
    seconds: float
    clairvoyant: Figures | None = None
    second_half_clairvoyant: Figures | None = None
    over_time: list[Span] = field(default_factory=list)
    prefixes: LostPrefixes = field(default_factory=LostPrefixes)
    latency: Latency | None = None
    preset: str = ""

    @property
    def requests_per_second(self) -> float:
        """Requests that the run handled in a second."""
        return self.whole.requests / max(1e-9, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        flat = asdict(self) | {"requests_per_second": self.requests_per_second}
        for name in ("whole", "second_half", "clairvoyant", "second_half_clairvoyant"):
            found: Figures | None = getattr(self, name)
            flat[name] = None if found is None else found.as_dict()
        return flat


def figures(trace: Trace, cost: ComputeCost, hits: Longs, matches: Longs, lost: Longs | None, first: int) -> Figures:
    """Count the requests from number `first` on.

    Args:
        trace: The trace.
        cost: Compute, for the shares saved.
        hits: int64 [R], tokens reused.
        matches: int64 [R], tokens that an endless memory would reuse.
        lost: int64 [lines, R], or None where nobody asked why.
        first: First request that counts.
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


def _computed(cost: ComputeCost, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    computed: NDArray[np.float64] = tokens * (cost.linear + 0.5 * cost.quadratic * tokens)
    return computed
