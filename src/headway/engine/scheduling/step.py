"""A step that was scheduled: what the cache has granted, as an executor needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.cache import PrefixCache, Step
from headway.engine.executor import StepWork
from headway.engine.request import RunningRequest
from headway.runtime.interface import GREEDY, LongRope, SampleRow

__all__ = ["ScheduledStep", "scheduled_step"]


@dataclass(frozen=True)
class ScheduledStep:
    """A step that an executor should do now.

    Attributes:
        work: What the executor gets.
        requests: The request of each row of the step.
    """

    work: StepWork
    requests: Sequence[RunningRequest]

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return int(np.sum(self.work.step.counts))


def scheduled_step(
    cache: PrefixCache, step: Step, requests: Sequence[RunningRequest], rope: LongRope | None = None
) -> ScheduledStep:
    """Put together what an executor needs for a step that the cache has granted.

    A row is asked for tokens where the step reaches the last known one, unless its answer has ended. `rope` are the
    model's two sets of rotary frequencies, if it has two.
    """
    tokens, samples = [], []
    following = np.full(len(requests), -1, dtype=np.int64)
    for i, (request, start, count) in enumerate(zip(requests, step.starts.tolist(), step.counts.tolist(), strict=True)):
        stop = min(start + count, request.known)
        tokens.append(request.tokens[start:stop])
        if stop < request.known:
            following[i] = request.tokens[stop]
        wanted = count > 0 and stop == request.known and not request.draining
        samples.append(_sample_row(request) if wanted else None)
    long = None
    if rope is not None:
        begun = np.array([request.long for request in requests], dtype=np.bool_)
        long = begun | (step.starts >= rope.original)
    scored = None
    if any(request.request.prompt_logprobs is not None for request in requests):
        starts = step.starts.tolist()
        scored = [r.request.prompt_logprobs if r.unscored(at) else None for r, at in zip(requests, starts, strict=True)]
    return ScheduledStep(StepWork(step, cache.tables, tokens, samples, following, long=long, scored=scored), requests)


def _sample_row(request: RunningRequest) -> SampleRow:
    asked, params = request.request, request.request.sampling or GREEDY
    return SampleRow(
        params,
        request.seed,
        asked.tokens,
        request.answer,
        request.end_tokens,
        bool(asked.stop),
        asked.constraint,
        request.order,
    )
