"""A step between the scheduler and an executor: what it is asked to do, and what each row got out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import PrefixCache, Step
from headway.engine.executor import StepOutput, StepWork
from headway.engine.request import RunningRequest
from headway.runtime.sampling_records import GREEDY, SampleRow, TokenLogprob

__all__ = ["RowAnswer", "ScheduledStep", "row_answers", "scheduled_step"]


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


@dataclass(frozen=True)
class RowAnswer:
    """What a row got out of a step.

    Attributes:
        tokens: Tokens that follow what is known.
        logprobs: One a token, None where it was not asked for.
        kept: Tokens of the row, from its start on, that count.
        proposed: Tokens that were drafted for it.
        accepted: How many of `tokens` were drafted.
        confidence: The drafter's opinion of each place of the draft, or None.
    """

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]
    kept: int
    proposed: int = 0
    accepted: int = 0
    confidence: NDArray[np.float32] | None = None


def scheduled_step(cache: PrefixCache, step: Step, requests: Sequence[RunningRequest]) -> ScheduledStep:
    """Put together what an executor needs for a step that the cache has granted.

    A row is asked for tokens where the step reaches the last known one, unless its answer has ended.
    """
    tokens, samples = [], []
    following = np.full(len(requests), -1, dtype=np.int64)
    for i, (request, start, count) in enumerate(zip(requests, step.starts.tolist(), step.counts.tolist(), strict=True)):
        stop = min(start + count, request.known)
        tokens.append(request.tokens[start:stop])
        if stop < request.known:
            following[i] = request.tokens[stop]
        wanted = count > 0 and stop == request.known and not request.settling
        samples.append(_sample_row(request) if wanted else None)
    return ScheduledStep(StepWork(step, cache.tables, tokens, samples, following), requests)


def _sample_row(request: RunningRequest) -> SampleRow:
    asked, params = request.request, request.request.sampling or GREEDY
    return SampleRow(params, request.seed, asked.tokens, request.answer, request.end_tokens, bool(asked.stop))


def row_answers(work: StepWork, output: StepOutput) -> list[RowAnswer]:
    """What each row of a step got."""
    counts, drafts = work.step.counts.tolist(), output.drafts
    if drafts is None:
        sampled = output.sampled.tolist()
        return [
            RowAnswer((), (), count) if spec is None else RowAnswer((token,), (record,), count)
            for spec, token, record, count in zip(work.samples, sampled, output.logprobs, counts, strict=True)
        ]
    answers = []
    for i, told in enumerate(drafts.counts.tolist()):
        records = drafts.logprobs[i]
        answers.append(
            RowAnswer(
                tokens=drafts.tokens[i, :told].tolist(),
                logprobs=records if len(records) == told else (None,) * told,
                kept=int(drafts.kept[i]),
                proposed=int(drafts.proposed[i]),
                accepted=int(drafts.accepted[i]),
                confidence=drafts.confidence[i],
            )
        )
    return answers
