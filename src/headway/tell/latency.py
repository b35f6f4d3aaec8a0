"""What requests waited for, as estimated: percentiles of times, and rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

__all__ = ["Latency", "Percentiles", "TimeSaved", "Wait"]

_WAITS = 40


@dataclass(frozen=True)
class Percentiles:
    """Seconds that half, 90%, 95% and 99% of the requests stay within, and the mean."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Percentiles of some times; all 0 where there are none. Between two times it is interpolated."""
        if not len(seconds):
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = np.percentile(np.asarray(seconds, dtype=np.float64), [50, 90, 95, 99]).tolist()
        return cls(p50, p90, p95, p99, float(np.mean(seconds)))


@dataclass(frozen=True)
class Wait:
    """Times to the first token of requests that arrived one after another.

    Attributes:
        time: Seconds from the first arrival of the trace to theirs.
        requests: How many they are.
        p50: Seconds that half of them stay within.
        p95: Seconds that 95% of them stay within.
    """

    time: float
    requests: int
    p50: float
    p95: float

    @classmethod
    def over(cls, arrivals: Sequence[float], seconds: Sequence[float]) -> list[Wait]:
        """The waits of up to 40 ranges of equally many requests.

        Args:
            arrivals: Seconds from the first arrival, one a request, in any order.
            seconds: To the first token, in the same order.
        """
        order = np.argsort(np.asarray(arrivals, dtype=np.float64), kind="stable")
        when, waited = np.asarray(arrivals, dtype=np.float64)[order], np.asarray(seconds, dtype=np.float64)[order]
        edges = np.unique(np.linspace(0, len(order), _WAITS + 1).astype(np.int64)).tolist()
        found = []
        for first, stop in pairwise(edges):
            p50, p95 = np.percentile(waited[first:stop], [50, 95]).tolist()
            found.append(cls(float(when[first]), stop - first, p50, p95))
        return found


@dataclass(frozen=True)
class TimeSaved:
    """What reuse saves in time. All of it is estimated, each prompt alone on the ranks.

    Attributes:
        prefill: Seconds that all prompts would take without reuse.
        saved: Of these, seconds that reuse saves.
        decoding: Seconds that all answers take.
        at_once: Answers that are decoded together.
        first_token: Seconds of prefill of each request.
        first_token_before: The same without reuse.
        estimate: What the times were computed from, for people.
    """

    prefill: float
    saved: float
    decoding: float
    at_once: int
    first_token: Percentiles
    first_token_before: Percentiles
    estimate: str

    @property
    def throughput_gain(self) -> float:
        """By which share more requests are done in the same time."""
        before = self.prefill + self.decoding
        return before / max(1e-12, before - self.saved) - 1


@dataclass(frozen=True)
class Latency:
    """Times and rates of a replay with the clock `trace`. All of them are estimates.

    Attributes:
        requests: Requests that ended with an answer.
        first_token: From arrival to the first token.
        queue: From arrival to admission.
        each_token: Mean time between the tokens of an answer, over the answers of two tokens and more.
        total: From arrival to the last token.
        seconds: From the first arrival to the last end.
        busy: Share of it in which a step was running.
        steps: Steps.
        preemptions: Requests that gave way to others when memory ran out.
        waits: Requests that waited for another to compute tokens that both need.
        waited_tokens: Tokens that they reused thanks to that.
        computed_tokens: Tokens computed a second, of prompts and answers.
        answer_tokens: Tokens of answers a second.
        estimate: What the times were computed from, for people.
        over_time: Times to the first token in order of arrival.
    """

    requests: int
    first_token: Percentiles
    queue: Percentiles
    each_token: Percentiles
    total: Percentiles
    seconds: float
    busy: float
    steps: int
    preemptions: int
    computed_tokens: float
    answer_tokens: float
    estimate: str
    over_time: list[Wait] = field(default_factory=list)
    waits: int = 0
    waited_tokens: int = 0
