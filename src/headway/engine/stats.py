"""What an engine counts, and the picture of itself that it shows to others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from headway.cache import CacheStats
from headway.engine.request import RequestResult, RunningRequest

__all__ = ["EngineCounters", "EngineSnapshot", "Observer"]


@dataclass
class EngineCounters:
    """Totals since the start. A request is counted once, at its first admission, however often it is resumed.

    Attributes:
        requests: Requests admitted.
        prompt_tokens: Tokens of their prompts.
        hit_tokens: Of these, tokens that were cached.
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
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
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
class EngineSnapshot:
    """The engine at one moment.

    Attributes:
        running: Requests that run.
        waiting: Requests that wait.
        counters: A copy of the totals.
        cache: Memory and events of the cache.
        drafter: Name of the drafter, or None.
    """

    running: int
    waiting: int
    counters: EngineCounters
    cache: CacheStats
    drafter: str | None = None


class Observer(Protocol):
    """Who wants to hear of ends of requests and of steps, in the engine's thread; must be quick and never raise."""

    def request_finished(self, result: RequestResult) -> None:
        """A request ended by itself or was aborted."""

    def step_done(self, seconds: float, tokens: int) -> None:
        """A step took `seconds` for `tokens`."""

    def forgotten(self, salt: str | None) -> None:
        """Prefixes with a salt were forgotten on purpose, or all with None; not to make room for others."""
