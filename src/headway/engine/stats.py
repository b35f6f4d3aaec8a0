"""What an engine counts, and the picture of itself that it shows to others."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from headway.cache import CacheStats, Holdings
from headway.engine.request import RequestResult, RunningRequest, Timings
from headway.tiers import HostCounters, Rates, TiersStats

__all__ = [
    "TOKEN_SECONDS",
    "Distribution",
    "EngineCounters",
    "EngineSnapshot",
    "EngineSurvey",
    "LowerStats",
    "Observer",
    "RequestView",
]

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bounds of times in seconds: those of vLLM, so that its dashboards draw both alike."""


class Distribution:
    """How values are spread. Cheaper than a metric of Prometheus, since one is added with every token of every request.

    Attributes:
        bounds: Upper bounds, ascending.
        counts: Values up to each bound and above the one before; the last count is of those above all bounds.
        total: Sum of the values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start with no values."""
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class EngineCounters:
    """Totals since the start. A request is counted once, at its first admission, however often it is resumed.

    Attributes:
        requests: Requests admitted.
        prompt_tokens: Tokens of their prompts.
        hit_tokens: Of these, tokens that were cached.
        loaded_tokens: Tokens that were read back from lower tiers of memory, at first and later admissions, by tier.
        waits: Requests that waited for another to compute tokens that both need.
        waited_tokens: Of `hit_tokens`, tokens that were cached thanks to that.
        lost_tokens: Prompt tokens that were not cached, by the cache's reason. With `hit_tokens` they add up to
            `prompt_tokens`.
        resumed_tokens: Tokens known at resumptions after a preemption or a failed step.
        resumed_hit_tokens: Of these, tokens that were still cached.
        computed_tokens: Tokens computed, all steps together.
        generated_tokens: Tokens of answers.
        drafted_tokens: Tokens that a drafter proposed and the model verified.
        accepted_tokens: Of these, tokens that became part of answers.
        steps: Steps that the executor did.
        failed_steps: Steps that it failed.
        not_finite: Requests that failed because their numbers were NaN or infinite.
        damaged_prefixes: Of these, requests that had resumed from something kept that was so, and is forgotten.
        rank_losses: How often ranks were lost, during a step or between steps.
        preemptions: Requests that gave way.
        refused: Requests refused at submission, by reason.
        finished: Requests that ended, by finish reason (`stop`, `length`, `abort`, `error`).
        first_token: Seconds from arrival to the first token, of every request that got one.
        token_gap: Seconds from one token of an answer to the next, or from one draft's tokens to the next one's.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    waited_tokens: int = 0
    lost_tokens: Counter[str] = field(default_factory=Counter)
    resumed_tokens: int = 0
    resumed_hit_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    not_finite: int = 0
    damaged_prefixes: int = 0
    rank_losses: int = 0
    preemptions: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    first_token: Distribution = field(default_factory=lambda: Distribution(_FIRST_TOKEN))
    token_gap: Distribution = field(default_factory=lambda: Distribution(TOKEN_SECONDS))

    def count_tokens(self, timings: Timings, tokens: int, now: float) -> None:
        """Count tokens that a step added to an answer, and their time, which `timings` keeps."""
        self.generated_tokens += tokens
        if timings.first_token is None or timings.last_token is None:
            timings.first_token = now
            self.first_token.add(now - timings.arrived)
        else:
            self.token_gap.add(now - timings.last_token)
        timings.last_token = now

    def count_draft(self, request: RunningRequest, proposed: int, accepted: int) -> None:
        """Count a verified draft, here and for its request."""
        request.drafted += proposed
        request.accepted += accepted
        self.drafted_tokens += proposed
        self.accepted_tokens += accepted

    def count_admission(self, request: RunningRequest, first: bool, hit_tokens: int) -> None:
        """Count the admission of a request, at its first or a later one."""
        if not first:
            self.resumed_tokens += request.known
            self.resumed_hit_tokens += hit_tokens
            return
        self.requests += 1
        self.prompt_tokens += request.prompt_length
        self.hit_tokens += hit_tokens
        self.waits += request.waited_from is not None
        self.waited_tokens += request.waited_tokens
        if request.explanation is not None:
            for loss in request.explanation.losses:
                self.lost_tokens[loss.reason.value] += loss.stop - loss.start


@dataclass(frozen=True)
class LowerStats:
    """What lies below, at one moment.

    Attributes:
        host: The cache of host memory, or None.
        host_moves: What was moved to and from it.
        objects: Disks and stores, or None.
        waiting: Checkpoints that wait to be read for them.
        rates: How long computing and moves take, and how wrong that was.
        failures: Copies that failed, by tier.
    """

    host: CacheStats | None
    host_moves: HostCounters
    objects: TiersStats | None
    waiting: int
    rates: Rates
    failures: dict[str, int]


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at one moment.

    Attributes:
        running: Requests that run.
        waiting: Requests that wait.
        held: Of these, requests that wait for another to compute what both need.
        loading: Of these, requests that wait for what disks and shared stores have of their prompts.
        counters: A copy of the totals.
        cache: Memory and events of the cache.
        drafter: Name of the drafter, or None.
        lower: What lies below the device's memory, or None.
    """

    running: int
    waiting: int
    counters: EngineCounters
    cache: CacheStats
    drafter: str | None = None
    held: int = 0
    loading: int = 0
    lower: LowerStats | None = None


@dataclass(frozen=True)
class RequestView:
    """A request that runs.

    Attributes:
        number: Its place in the order of arrival, since the start.
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Of these, tokens that were cached.
        computed_tokens: Tokens of prompt and answer whose entries are in the cache.
        answer_tokens: Tokens of its answer so far.
        max_tokens: Most tokens that its answer may have.
        seconds: Since it arrived.
        preemptions: How often it gave way.
    """

    number: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    answer_tokens: int
    max_tokens: int
    seconds: float
    preemptions: int

    @classmethod
    def of(cls, request: RunningRequest, now: float) -> RequestView:
        """A running request at the time `now`."""
        return cls(
            number=request.order,
            prompt_tokens=request.prompt_length,
            cached_tokens=request.cached_tokens or 0,
            computed_tokens=request.computed,
            answer_tokens=request.known - request.prompt_length,
            max_tokens=request.request.max_tokens,
            seconds=now - request.timings.arrived,
            preemptions=request.preemptions,
        )


@dataclass(frozen=True)
class EngineSurvey:
    """What runs and what the cache holds at one moment. It takes longer than a snapshot.

    Attributes:
        requests: Requests that run, in order of arrival.
        holdings: What the blocks of the cache hold.
        seconds: Time of the engine's thread that it took.
    """

    requests: tuple[RequestView, ...]
    holdings: Holdings
    seconds: float


class Observer(Protocol):
    """Who wants to hear of ends of requests and of steps, in the engine's thread; must be quick and never raise."""

    def request_finished(self, result: RequestResult) -> None:
        """A request ended by itself or was aborted."""

    def step_done(self, seconds: float, tokens: int) -> None:
        """A step took `seconds` for `tokens`."""

    def forgotten(self, salt: str | None) -> None:
        """Prefixes with a salt were forgotten on purpose, or all with None; not to make room for others."""
