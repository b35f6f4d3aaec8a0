"""Which requests compute which tokens in the next step, and who gives way when memory runs out.

A step is made in four moves: rows that decode, then rows in prefill, then admissions, then one `extend` for all of
them. Whoever the cache grants nothing stays as it was; before the next step the youngest running request gives way to
it (`preempt`: what it computed becomes a checkpoint, so coming back is a hit). After a preemption nobody is admitted
until a running request ends, because the memory that one admission takes would be taken back from it at the next step.

A failed step leaves its requests without a state that could be trusted. They go back to the queue with all tokens they
have and run *alone* until they are past the place of the failure, so that a request that fails every time can be told
from those that were with it: only a failure alone counts against a request.

A request that would compute what a running prefill is about to compute waits behind that one instead, and others pass
(`headway.engine.scheduling.gate`). It waits for a position at which it can resume; where the two part far behind a
planned checkpoint, the one that runs takes the junction that the other would have taken. Only a prefill that has come
at least as far as the request's own hit is waited for, so that waiting takes no longer than computing. Whoever waits is
let go when the position is computed, and when the one it waits for gives way, fails or ends. Rejected: reading in a
step what another row of the same step writes, which needs rows to be computed in turn, and states exported between
them.

Who gives up leaves what its steps have committed, as who gives way does: clients come back. An answer that ends inside
its last tokens (a stop string, an unfinished character) leaves the state before them: a request whose next step will
compute a token that is not settled text yet has the state bookmarked first. With drafts that is early enough, because
no state takes in a draft while stop strings are set (`SampleRow.revocable`).

With a drafter, a decoding row's step is its pending tokens and a draft (`headway.engine.scheduling.drafts`). An answer
may then end while its last tokens are still pending. The client has it at once; the request stays one step longer to
compute them, so that what is kept of the answer is the same as without drafts.

Prompts are computed in the order of their arrival, a few per step, and each step of prompts is followed by a short one
that gives those which are done their first token (`_begins_answer`).

Rejected: reserving a request's whole answer at admission (most answers are far shorter than their limit, and memory
would lie idle), and preempting in the middle of a step (undoing part of a step is where such engines leak).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import PrefixCache, Prompt
from headway.engine.config import EngineConfig
from headway.engine.errors import NotFiniteError, RanksLostError, RequestFailedError
from headway.engine.request import Delta, RunningRequest, Update
from headway.engine.scheduling.drafts import DraftPlanner
from headway.engine.scheduling.gate import Gate
from headway.engine.scheduling.lower import LowerTiers
from headway.engine.scheduling.queue import WaitingRequests
from headway.engine.scheduling.step import ScheduledStep, scheduled_step
from headway.engine.stats import EngineCounters
from headway.errors import HeadwayError, UnservableError
from headway.runtime.interface import LongRope, RowAnswer, RowFault

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

_SCORED_TOKENS = 256
"""Tokens of a prompt whose log probabilities one step finds: the logits of each take as much as a vocabulary."""


class Scheduler:
    """Requests that wait and run on one prefix cache. One thread drives it: `schedule`, run, `complete` or `fail`.

    Attributes:
        cache: The prefix cache; no other object changes it.
        lower: The tiers below its memory, or None.
        running: Requests that hold a lease, in order of arrival.
        counters: Totals.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        planner: DraftPlanner | None = None,
        long_rope: LongRope | None = None,
        lower: LowerTiers | None = None,
    ) -> None:
        self.cache = cache
        self.lower = lower
        self.running: list[RunningRequest] = []
        self.counters = EngineCounters()
        self._config = config
        self._clock = clock
        self._planner = planner
        self._long_rope = long_rope
        self._waiting = WaitingRequests()
        self._queue = self._waiting.queue
        self._starved: list[RunningRequest] = []
        self._gate = Gate(cache, config, self._waiting, self.running, self._answering, lower, long_rope)
        self._news: list[Update] = []
        self._forgotten: list[str] = []

    @property
    def waiting(self) -> int:
        """Requests that wait, those behind a leader included."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Of these, requests behind a leader."""
        return len(self._waiting) - len(self._queue) - self.loading

    @property
    def loading(self) -> int:
        """Of those that wait, requests that wait for what disks and stores have."""
        return self._waiting.loading

    @property
    def drafter(self) -> str | None:
        """Name of the drafter, or None."""
        return None if self._planner is None else self._planner.name

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do now: nobody runs, and who waits waits for a load."""
        return not self.running and not self._queue

    def add(self, request: RunningRequest, followers: Sequence[RunningRequest] = ()) -> None:
        """Queue a request. `followers` have the same prompt: they are queued once its prefill can be reused."""
        self._queue.push(request)
        for follower in followers:
            self._waiting.hold(follower, request, request.prompt_length - 1)

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step and take its blocks. Returns None where no request can compute anything now.

        Requests may fail here (`take_news`): those that could not run even with the whole pool.

        Raises:
            RanksLostError: Blocks were to be moved between tiers, and the ranks are gone.
        """
        if self._starved and not self._finish_draining():
            self._preempt_youngest()
        while picks := self._pick():
            rows = self._rows([request for request, _ in picks])
            self._mark(request for request, _ in picks if request.finish_reason is None)
            step = self.cache.extend(rows, np.array([count for _, count in picks], dtype=np.int64))
            self._starved = [request for (request, _), out in zip(picks, step.exhausted, strict=True) if out]
            if np.any(step.counts > 0):
                return scheduled_step(self.cache, step, [request for request, _ in picks], self._long_rope)
            if self._finish_draining():
                continue
            if len(self.running) > 1:
                self._preempt_youngest()
            else:
                self._fail_stalled(picks[0][0])
        return None

    def _mark(self, requests: Iterable[RunningRequest]) -> None:
        """Bookmark those whose next step computes a token that is no settled text, until all text is settled again."""
        for request in requests:
            unsettled = request.reachable < request.known
            if unsettled and request.computed <= request.reachable:
                self.cache.bookmark(self._rows([request]))
            elif request.marked and not unsettled:
                self.cache.unmark(self._rows([request]))
            request.marked = unsettled

    def complete(self, scheduled: ScheduledStep, answers: Sequence[RowAnswer]) -> list[Update]:
        """Take what a step did for each row. Returns the news of every request that got a token, ended or failed."""
        step, rows = scheduled.work.step, len(scheduled.requests)
        self.counters.steps += 1
        self.counters.computed_tokens += scheduled.tokens
        failed = [(r, a.fault) for r, a in zip(scheduled.requests, answers, strict=True) if a.fault is not None]
        if failed:
            self.cache.fail(step, self._rows([request for request, _ in failed]))
        kept, told = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        sampled = np.zeros((rows, max(1, *(len(answer.tokens) for answer in answers))), dtype=np.int32)
        for i, (request, answer) in enumerate(zip(scheduled.requests, answers, strict=True)):
            if step.counts[i] > 0:
                kept[i], told[i] = self._take_row(request, int(step.starts[i]), len(scheduled.work.tokens[i]), answer)
                sampled[i, : told[i]] = answer.tokens[: told[i]]
        self.cache.commit(step, kept, sampled, told)
        self._tell_kept()
        self._queue.charge_each((r.user, tokens) for r, tokens in zip(scheduled.requests, told.tolist(), strict=True))
        for request, fault in failed:
            self._fail_row(request, fault)
        self._waiting.release_reached(scheduled.requests)
        running = [request for request in scheduled.requests if request.lease is not None]
        self._finish([request for request in running if self._over(request)])
        self._begin_long([request for request in running if request.lease is not None])
        return self.take_news()

    def _fail_row(self, request: RunningRequest, fault: RowFault) -> None:
        """End a request that cannot be computed any further, and forget the damaged prefix that it had that from."""
        assert request.lease is not None
        namespace, place = request.lease.prompt.namespace, request.computed
        answered = request.finish_reason is not None
        self.cache.abort(self._rows([request]))
        self._stop_running(request)
        self.counters.not_finite += fault.form is None
        if fault.damaged is not None:
            self.counters.damaged_prefixes += 1
            damaged = Prompt(request.tokens[: fault.damaged], namespace=namespace)
            self.cache.forget(damaged)
            if self.lower is not None:
                self.lower.forget(damaged)
            self._forgotten.append(request.request.salt)
        kind = NotFiniteError if fault.form is None else RequestFailedError
        error = kind(f"request {request.request_id}: {fault.told(place)}")
        logger.error("%s", error)
        if answered:  # only its state was to catch up
            self._leave(request)
        else:
            self._fail_request(request, error)

    def _over(self, request: RunningRequest) -> bool:
        """Whether a request can be let go of: it has been answered, and its state has caught up if it is to be kept."""
        kept = "answer_end" in self._config.placement and not request.request.no_store
        return request.finish_reason is not None and (request.pending == 0 or not kept)

    def _finish(self, requests: Sequence[RunningRequest]) -> None:
        if requests:
            self.cache.finish(self._rows(requests), self._reach(requests))
            for request in requests:
                self._leave(request)

    def _take_row(self, request: RunningRequest, start: int, pending: int, answer: RowAnswer) -> tuple[int, int]:
        """Take what a request got out of a step: its tokens that count, and how many tokens were added to it."""
        kept, told = answer.kept, 0
        request.take_scores(start, answer.scored)
        request.observed = start + pending
        if pending > 1 or start < request.prompt_length:
            self._gate.epoch += 1
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
                why = f"computing it failed {request.failures} times, last with {type(error).__name__}: {error}"
                self._fail_request(request, RequestFailedError(f"request {request.request_id}: {why}"))
                continue
            request.alone_until = max(request.alone_until, reached[id(request)])
            self._queue.push_returned(request)
        return self.take_news()

    def abort(self, request: RunningRequest) -> None:
        """End a request wherever it is; its blocks can be had by others when this returns."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request.lease is not None:
            self.cache.abort(self._rows([request]), self._reach([request]))
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

    def take_forgotten(self) -> list[str]:
        """Salts of damaged prefixes that were forgotten since the last call."""
        salts, self._forgotten = self._forgotten, []
        return salts

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
        counts = [min(count, self._one_set(request)) for request, count in zip(answering, counts, strict=True)]
        picks = list(zip(answering, counts, strict=True))
        if any(self._begins_answer(request) for request in answering):
            return picks
        decoding, budget = len(picks), self._config.max_batched_tokens - sum(count for _, count in picks)
        prefills = deque(request for request in self.running if not self._answering(request))
        while budget > 0:
            request = prefills.popleft() if prefills else self._admit_next()
            if request is None:
                break
            # The first takes at most three quarters while others wait, so that a short prompt passes a long one.
            crowded = len(picks) == decoding and (len(prefills) > 0 or len(self._queue) > 0)
            share = budget - budget // 4 if crowded and not self._single_steps else budget
            count = min(self._wanted(request), share)
            if count < self._wanted(request) and self._single_steps:
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

    def _begins_answer(self, request: RunningRequest) -> bool:
        """Whether the next step computes the last token of a prompt, and so the first one of its answer.

        A prompt stops before its last token, where its checkpoint lies. That token takes as long as one of an answer,
        and is not to wait for the prompts of others: a step that begins answers has no chunks of prompts beside them.
        """
        return request.known == request.prompt_length and request.pending == 1 and not self._single_steps

    def _pick_alone(self) -> RunningRequest | None:
        """A request that must run by itself, admitted if it has to be."""
        for request in self.running:
            if request.alone:
                return request
        return self._admit_next(alone=True)

    def _wanted(self, request: RunningRequest) -> int:
        """Tokens up to where its next chunk should stop: one, if it is a chunk that its model cannot continue by.

        Such single steps run in one forward with those of requests that decode.
        """
        assert request.lease is not None
        if self._single_steps and request.computed:
            return 1
        stop = min(int(request.lease.next_stop), request.computed + min(request.pending, self._one_set(request)))
        if request.unscored(request.computed):
            stop = min(stop, request.computed + _SCORED_TOKENS)
        return max(1, stop - request.computed)

    @property
    def _single_steps(self) -> bool:
        """Whether the model continues token by token only."""
        return self._config.step_price is not None

    # -- two sets of rotary frequencies -----------------------------------------------------------------------------

    def _one_set(self, request: RunningRequest) -> int:
        """Most tokens of a request that one step may compute, since they use one set of frequencies."""
        room = None if self._long_rope is None else self._long_rope.room(request.computed, request.long)
        return len(request.tokens) if room is None else room

    def _begin_long(self, requests: Sequence[RunningRequest]) -> None:
        """Send requests back to be computed anew whose entries no longer go with what follows them."""
        grown = [r for r in requests if r.finish_reason is None and self._gate.begins_long(r) != r.long]
        if grown:
            self.cache.preempt(self._rows(grown))
        for request in grown:
            self._stop_running(request)
            self._queue.push_returned(request)

    # -- moving requests --------------------------------------------------------------------------------------------

    def _admit_next(self, *, alone: bool = False) -> RunningRequest | None:
        """Admit the next request that may begin, of those that run `alone` or of the others. None if there is none."""
        while self._gate.opens(alone=alone):
            if (admitted := self._admit()) is not None and admitted.alone == alone:
                return admitted
        return None

    def _admit(self) -> RunningRequest | None:
        """Lease memory for the head of the queue. Returns it, or None if it failed."""
        request = self._queue.pop()
        asked = request.request.find_displaced and request.cached_tokens is None
        displaced = self.cache.explain(self._gate.prompt(request)).displaced if asked else None
        try:
            begun = self._gate.begin(request)
        except UnservableError as error:
            self._fail_request(request, error)
            return None
        except RanksLostError:
            self._queue.push_returned(request)
            raise
        lease, reused = begun.lease, begun.lease.computed
        first = request.cached_tokens is None
        request.lease, request.computed, request.observed, request.hit = lease, lease.computed, 0, None
        request.wishes = lease.wishes
        request.long = self._gate.begins_long(request)
        if self._planner is not None and not len(request.survival):
            request.survival = self._planner.new_estimate()
        if first:
            request.cached_tokens, request.resumed_from = reused, begun.resumed_from
            request.loaded = {begun.tier: begun.tokens} if begun.tier else {}
            waited_from = lease.hit.tokens if request.waited_from is None else request.waited_from
            request.waited_tokens = max(0, lease.hit.tokens - waited_from)
            request.explanation = replace(lease.explanation, displaced=displaced) if displaced else lease.explanation
            request.timings.admitted = self._clock()
        self.counters.count_admission(request, first, reused)
        if begun.tier:
            self.counters.loaded_tokens[begun.tier] += begun.tokens
        self._queue.charge(request.user, request.known - reused)
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
        self._gate.closed = True

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
        error = RequestFailedError(
            f"request {request.request_id}: {tokens} do not fit into the {self.cache.config.blocks} blocks of the "
            f"cache{pins}; give the server more --memory or send less"
        )
        self._fail_request(request, error)

    def _stop_running(self, request: RunningRequest) -> None:
        self.running.remove(request)
        request.lease, request.computed = None, 0
        self._waiting.release(request)
        self._gate.epoch += 1

    def _leave(self, request: RunningRequest) -> None:
        """Bookkeeping of an end: the request is in no list afterwards."""
        if request.fetched is not None:
            request.fetched.release()
        if request.lease is not None:
            self._stop_running(request)
        self._gate.closed, self._starved = False, []
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
        told, now = len(delta.tokens), self._clock()
        self.counters.count_tokens(request.timings, told, now)
        if answer.proposed and self._planner is not None:
            self.counters.count_draft(request, answer.proposed, min(answer.accepted, told))
            self._planner.learn(request, answer.proposed, answer.accepted, answer.confidence)
        if request.finish_reason is not None:
            request.timings.finished = now
            delta = replace(delta, result=request.result())
        self._news.append(Update(request, delta))
        return told

    def _tell_kept(self) -> None:
        """Add to first deltas how much of the prompt is kept, where that was asked for."""
        for i, update in enumerate(self._news):
            if update.asks_what_is_kept and update.request.lease is not None:
                namespace = update.request.lease.prompt.namespace
                prompt = Prompt(update.request.request.tokens, namespace=namespace)
                self._news[i] = update.telling(self.cache.lookup(prompt).tokens)

    def _rows(self, requests: Sequence[RunningRequest]) -> NDArray[np.int64]:
        return np.array([request.lease.row for request in requests if request.lease is not None], dtype=np.int64)

    def _reach(self, requests: Sequence[RunningRequest]) -> NDArray[np.int64]:
        return np.array([request.reachable for request in requests], dtype=np.int64)
