"""Which requests compute which tokens in the next step, and who gives way when memory runs out.

A step is made in four moves: rows that decode, then rows in prefill, then admissions, then one `extend` for all of
them. Whoever the cache grants nothing stays as it was; before the next step the youngest running request gives way to
it (`preempt`: what it computed becomes a checkpoint, so coming back is a hit). After a preemption nobody is admitted
until a running request ends, because the memory that one admission takes would be taken back from it at the next step.

A failed step leaves its requests without a state that could be trusted. They go back to the queue with all tokens they
have and run *alone* until they are past the place of the failure, so that a request that fails every time can be told
from those that were with it: only a failure alone counts against a request.

With a drafter, a decoding row's step is its pending tokens and a draft (`headway.engine.scheduling.drafts`). An answer
may then end while its last tokens are still pending. The client has it at once; the request stays one step longer to
compute them, so that what is kept of the answer is the same as without drafts.

Rejected: reserving a request's whole answer at admission (most answers are far shorter than their limit, and memory
would lie idle), and preempting in the middle of a step (undoing part of a step is where such engines leak).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import PrefixCache, Prompt, Step
from headway.engine.config import EngineConfig
from headway.engine.errors import RequestFailedError
from headway.engine.executor import StepWork
from headway.engine.request import Delta, RunningRequest, Update
from headway.engine.scheduling.admission import fits_beside
from headway.engine.scheduling.drafts import DraftPlanner
from headway.engine.scheduling.queue import WaitingRequests
from headway.engine.stats import EngineCounters
from headway.errors import HeadwayError, UnservableError
from headway.runtime.interface import GREEDY, RowAnswer, SampleRow

__all__ = ["ScheduledStep", "Scheduler", "scheduled_step"]


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


class Scheduler:
    """Requests that wait and run on one prefix cache. One thread drives it: `schedule`, run, `complete` or `fail`.

    Attributes:
        cache: The prefix cache; no other object changes it.
        running: Requests that hold a lease, in order of arrival.
        counters: Totals.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        planner: DraftPlanner | None = None,
    ) -> None:
        self.cache = cache
        self.running: list[RunningRequest] = []
        self.counters = EngineCounters()
        self._config = config
        self._clock = clock
        self._planner = planner
        self._waiting = WaitingRequests()
        self._queue = self._waiting.queue
        self._starved: list[RunningRequest] = []
        self._closed_for_admission = False
        self._epoch = 0
        """Grows with what may let in a request that was found not to fit: prompts computed, requests gone."""
        self._news: list[Update] = []

    @property
    def waiting(self) -> int:
        """Requests that wait, those behind a leader included."""
        return len(self._waiting)

    @property
    def drafter(self) -> str | None:
        """Name of the drafter, or None."""
        return None if self._planner is None else self._planner.name

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def add(self, request: RunningRequest, followers: Sequence[RunningRequest] = ()) -> None:
        """Queue a request. `followers` have the same prompt: they are queued once its prefill can be reused."""
        self._waiting.add(request, followers)

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step and take its blocks. Returns None where no request can compute anything now.

        Requests may fail here (`take_news`): those that could not run even with the whole pool.
        """
        if self._starved and not self._finish_draining():
            self._preempt_youngest()
        while picks := self._pick():
            rows = np.array([request.lease.row for request, _ in picks if request.lease is not None])
            step = self.cache.extend(rows, np.array([count for _, count in picks], dtype=np.int64))
            self._starved = [request for (request, _), out in zip(picks, step.exhausted, strict=True) if out]
            if np.any(step.counts > 0):
                return scheduled_step(self.cache, step, [request for request, _ in picks])
            if self._finish_draining():
                continue
            if len(self.running) > 1:
                self._preempt_youngest()
            else:
                self._fail_stalled(picks[0][0])
        return None

    def complete(self, scheduled: ScheduledStep, answers: Sequence[RowAnswer]) -> list[Update]:
        """Take what a step did for each row. Returns the news of every request that got a token, ended or failed."""
        step, rows = scheduled.work.step, len(scheduled.requests)
        self.counters.steps += 1
        self.counters.computed_tokens += scheduled.tokens
        kept, told = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        sampled = np.zeros((rows, max(1, *(len(answer.tokens) for answer in answers))), dtype=np.int32)
        for i, (request, answer) in enumerate(zip(scheduled.requests, answers, strict=True)):
            if step.counts[i] > 0:
                kept[i], told[i] = self._take_row(request, int(step.starts[i]), len(scheduled.work.tokens[i]), answer)
                sampled[i, : told[i]] = answer.tokens[: told[i]]
        self.cache.commit(step, kept, sampled, told)
        self._queue.charge_each((r.user, tokens) for r, tokens in zip(scheduled.requests, told.tolist(), strict=True))
        self._finish([request for request in scheduled.requests if self._over(request)])
        return self.take_news()

    def _over(self, request: RunningRequest) -> bool:
        """Whether a request can be let go of: it has been answered, and its state has caught up if it is to be kept."""
        kept = "answer_end" in self._config.placement and not request.request.no_store
        return request.finish_reason is not None and (request.pending == 0 or not kept)

    def _finish(self, requests: Sequence[RunningRequest]) -> None:
        if requests:
            self.cache.finish(self._rows(requests))
            for request in requests:
                self._leave(request)

    def _take_row(self, request: RunningRequest, start: int, pending: int, answer: RowAnswer) -> tuple[int, int]:
        """Take what a request got out of a step: its tokens that count, and how many tokens were added to it."""
        kept, told = answer.kept, 0
        request.observed = start + pending
        if pending > 1 or start < request.prompt_length:
            self._epoch += 1
        if answer.tokens:
            told = self._take_tokens(request, answer)
            kept = min(kept, pending + told - 1)
            request.observed = request.known - 1
        request.computed += kept
        if request.failures and not request.alone:
            request.failures = 0
        return kept, told

    def fail(self, scheduled: ScheduledStep, error: BaseException) -> list[Update]:
        """Take the failure of a step: its requests run again, alone, or fail. Returns the news."""
        step = scheduled.work.step
        self.cache.fail(step)
        self.counters.failed_steps += 1
        took_part = [r for r, count in zip(scheduled.requests, step.counts, strict=True) if count > 0]
        self.cache.abort(self._rows(took_part))
        reached = {id(r): int(s + c) for r, s, c in zip(scheduled.requests, step.starts, step.counts, strict=True)}
        for request in took_part:
            self._stop_running(request)
            if request.finish_reason is not None:  # it has been answered, only its state was to catch up
                self._leave(request)
                continue
            if len(took_part) == 1:
                request.failures += 1
            if request.failures > self._config.max_retries:
                why = (
                    f"computing it failed {request.failures} times, the last time with {type(error).__name__}: {error}"
                )
                self._fail_request(request, RequestFailedError(f"request {request.request_id}: {why}"))
                continue
            request.alone_until = max(request.alone_until, reached[id(request)])
            self._queue.push_returned(request)
        return self.take_news()

    def abort(self, request: RunningRequest) -> None:
        """End a request wherever it is; its blocks are free when this returns."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request.lease is not None:
            self.cache.abort(self._rows([request]))
        else:
            self._waiting.remove(request)
        self._leave(request)
        self._news.append(Update(request, Delta("", result=request.result())))

    def reject_all(self, error: HeadwayError, waiting: bool = True) -> list[Update]:
        """Fail every request that runs and, if `waiting`, all that wait. Returns the news."""
        self.cache.abort(self._rows(self.running))
        for request in [*self.running, *(self._waiting.clear() if waiting else [])]:
            if request.finish_reason is None:
                self._fail_request(request, error)
            else:  # its answer was complete, only its state had to catch up
                self._leave(request)
        return self.take_news()

    def take_news(self) -> list[Update]:
        """What has happened to requests since the last call."""
        news, self._news = self._news, []
        return news

    # -- choosing ---------------------------------------------------------------------------------------------------

    def _pick(self) -> list[tuple[RunningRequest, int]]:
        """Requests for the next step and how many tokens each; decoding ones first, then by arrival."""
        alone = self._pick_alone()
        if alone is not None:
            return [(alone, min(self._wanted(alone), self._config.max_batched_tokens))]
        answering = [request for request in self.running if self._answering(request)]
        counts = [request.pending for request in answering]
        if self._planner is not None:
            counts = self._planner.plan(answering, self._config.max_batched_tokens)
        picks = list(zip(answering, counts, strict=True))
        decoding, budget = len(picks), self._config.max_batched_tokens - sum(count for _, count in picks)
        prefills = deque(request for request in self.running if not self._answering(request))
        while budget > 0:
            request = prefills.popleft() if prefills else self._admit_next()
            if request is None:
                break
            # The first takes at most three quarters while others wait, so that a short prompt passes a long one.
            crowded = len(picks) == decoding and (len(prefills) > 0 or len(self._queue) > 0)
            share = budget - budget // 4 if crowded and self._config.chunked_prefill else budget
            count = min(self._wanted(request), share)
            if count < self._wanted(request) and not self._config.chunked_prefill:
                break
            picks.append((request, count))
            budget -= count
        if budget > 0 and len(picks) > decoding:
            request, count = picks[decoding]
            picks[decoding] = (request, min(self._wanted(request), count + budget))
        return picks

    def _answering(self, request: RunningRequest) -> bool:
        """Whether a request only decodes: it has one token to compute, or with drafts some that were accepted."""
        return request.pending == 1 or (self._planner is not None and self._planner.answering(request))

    def _pick_alone(self) -> RunningRequest | None:
        """A request that must run by itself, admitted if it has to be."""
        for request in self.running:
            if request.alone:
                return request
        while (head := self._queue.peek()) is not None and head.alone and self._fits(head):
            admitted = self._admit()
            if admitted is not None and admitted.alone:
                return admitted
        return None

    def _wanted(self, request: RunningRequest) -> int:
        """Tokens up to where its next chunk should stop."""
        assert request.lease is not None
        stop = min(int(request.lease.next_stop), request.computed + request.pending)
        return max(1, stop - request.computed)

    def _admit_next(self) -> RunningRequest | None:
        """Admit the next request that may run beside others, or None if there is none now."""
        while (head := self._queue.peek()) is not None and not head.alone and self._fits(head):
            if (admitted := self._admit()) is not None:
                return admitted
        return None

    def _fits(self, request: RunningRequest) -> bool:
        """Whether to admit it now: a place is free, and the known tokens of all that run then fit into the pool."""
        if not self.running:
            return True
        if self._closed_for_admission or len(self.running) >= self._config.max_running:
            return False
        if request.refused_epoch == self._epoch:
            return False
        hit = self.cache.lookup(self._prompt(request))
        held = [(r.known, r.lease.hit.tokens) for r in self.running if r.lease is not None]
        fits = fits_beside(self.cache, held, request.known, hit.tokens)
        request.hit, request.refused_epoch = (hit, None) if fits else (None, self._epoch)
        return fits

    def _prompt(self, request: RunningRequest) -> Prompt:
        return request.cache_prompt(self.cache.namespace(salt=request.request.salt))

    # -- moving requests --------------------------------------------------------------------------------------------

    def _admit(self) -> RunningRequest | None:
        """Lease memory for the head of the queue. Returns it, or None if it failed."""
        request = self._queue.pop()
        asked = request.request.explain and request.cached_tokens is None
        displaced = self.cache.explain(self._prompt(request)).displaced if asked else None
        try:
            lease = self.cache.lease(self._prompt(request), request.hit)
        except UnservableError as error:
            self._fail_request(request, error)
            return None
        first = request.cached_tokens is None
        request.lease, request.computed, request.observed, request.hit = lease, lease.computed, 0, None
        request.wishes = lease.wishes
        if self._planner is not None and not len(request.survival):
            request.survival = self._planner.new_estimate()
        if first:
            request.cached_tokens, request.resumed_from = lease.hit.tokens, lease.hit.kind
            request.explanation = lease.explanation
            request.timings.admitted = self._clock()
        if displaced is not None:
            request.explanation = replace(lease.explanation, displaced=displaced)
        self.counters.count_admission(request, first, lease.hit.tokens)
        self._queue.charge(request.user, request.known - lease.hit.tokens)
        self.running.append(request)
        self.running.sort(key=lambda r: r.order)
        return request

    def _preempt_youngest(self) -> None:
        """Preempt the youngest running request, unless it is the only one."""
        starved = [request for request in self._starved if request.lease is not None]
        self._starved = []
        if not starved or len(self.running) < 2:
            return
        victim = self.running[-1]
        self.cache.preempt(self._rows([victim]))
        victim.preemptions += 1
        self.counters.preemptions += 1
        self._stop_running(victim)
        self._queue.push_returned(victim)
        self._closed_for_admission = True

    def _finish_draining(self) -> bool:
        """Let go of requests that have been answered, as far as they have come. Returns whether there were any."""
        ended = [request for request in self.running if request.draining]
        self._finish(ended)
        return bool(ended)

    def _fail_stalled(self, request: RunningRequest) -> None:
        """Fail a request that nobody runs beside, and that still gets no room for a single token.

        Its own hit, or the pins of others, can be the reason. What the cache holds is left to those who use it.
        """
        self.cache.abort(self._rows([request]))
        self._stop_running(request)
        tokens = f"{request.known} tokens ({request.prompt_length} of them prompt)"
        pinned = self.cache.stats().pinned
        pins = f", {pinned} of them pinned" if pinned else ""
        self._fail_request(
            request,
            RequestFailedError(
                f"request {request.request_id}: {tokens} do not fit into the {self.cache.config.blocks} blocks of the "
                f"cache{pins}; give the server more --memory or send less"
            ),
        )

    def _stop_running(self, request: RunningRequest) -> None:
        self.running.remove(request)
        request.lease, request.computed = None, 0
        self._epoch += 1

    def _leave(self, request: RunningRequest) -> None:
        """Bookkeeping of an end: the request is in no list afterwards."""
        if request.lease is not None:
            self._stop_running(request)
        self._closed_for_admission, self._starved = False, []
        if request.timings.finished is None:
            request.timings.finished = self._clock()
        self.counters.finished[request.finish_reason or "error"] += 1
        self._waiting.release(request)

    def _fail_request(self, request: RunningRequest, error: HeadwayError) -> None:
        request.finish_reason = "error"
        self._leave(request)
        self._news.append(Update(request, error=error))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _take_tokens(self, request: RunningRequest, answer: RowAnswer) -> int:
        """Append what a row answered, up to its end. Returns how many tokens that is."""
        delta = request.accept(answer)
        told = len(delta.tokens)
        self.counters.generated_tokens += told
        if answer.proposed and self._planner is not None:
            self.counters.count_draft(request, answer.proposed, min(answer.accepted, told))
            self._planner.learn(request, answer.proposed, answer.accepted, answer.confidence)
        if request.timings.first_token is None:
            request.timings.first_token = self._clock()
            self._waiting.release(request)
        if request.finish_reason is not None:
            request.timings.finished = self._clock()
            delta = replace(delta, result=request.result())
        self._news.append(Update(request, delta))
        return told

    def _rows(self, requests: Sequence[RunningRequest]) -> NDArray[np.int64]:
        return np.array([request.lease.row for request in requests if request.lease is not None], dtype=np.int64)


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
        wanted = count > 0 and stop == request.known and not request.draining
        samples.append(_sample_row(request) if wanted else None)
    return ScheduledStep(StepWork(step, cache.tables, tokens, samples, following), requests)


def _sample_row(request: RunningRequest) -> SampleRow:
    asked, params = request.request, request.request.sampling or GREEDY
    return SampleRow(params, request.seed, asked.tokens, request.answer, request.end_tokens, bool(asked.stop))
