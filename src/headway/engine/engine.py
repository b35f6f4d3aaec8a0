"""The engine: one thread that owns the cache and the executor, and a face that any thread or event loop may use.

The cache, the scheduler and the executor are not thread-safe and need no locks, because only the engine's thread
touches them. Others leave commands in an inbox, which is emptied between two steps. So a command waits for one step at
most, an abort frees its blocks before the next step is planned, and what answers health checks never waits for a step
at all. While there is nothing to compute, the thread looks now and then whether the ranks are still there: whoever asks
for the engine's health is told before a request has to find out.
"""

from __future__ import annotations

import copy
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.cache import PrefixCache, Prompt, ResetReport
from headway.engine.config import EngineConfig
from headway.engine.errors import EngineStoppedError, QueueFullError, RanksLostError, RequestFailedError
from headway.engine.executor import Executor
from headway.engine.handle import RequestHandle, wake_readers
from headway.engine.request import GenerationRequest, RunningRequest, Update
from headway.engine.scheduling.admission import length_limit, require_servable
from headway.engine.scheduling.drafts import DraftPlanner
from headway.engine.scheduling.lower import LowerTiers
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.scheduling.step import ScheduledStep
from headway.engine.stats import EngineSnapshot, EngineSurvey, Observer, RequestView
from headway.engine.text import Decode
from headway.errors import HeadwayError, RequestError
from headway.runtime.interface import Constraint, LongRope

__all__ = ["Engine", "ModelFacts"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_SECONDS = 0.5
"""How often an engine without work looks after its ranks."""
_TOLD_WHILE_IDLE = 16
"""Ended requests of which the compared policies hear each time that an engine without work looks."""
_NOT_STARTED = "the engine has not been started"
_SHUTTING_DOWN = "the server is shutting down: it finishes what it has begun, send new requests to another one"


@dataclass(frozen=True)
class ModelFacts:
    """What the engine needs to know of a model.

    Attributes:
        vocab_size: Token ids are below it.
        decode: Token ids to text.
        eos: Tokens with which the model ends an answer.
        max_model_len: Most tokens that the model was made for; None if it has no limit.
        long_rope: The model's two sets of rotary frequencies, or None for a model with one.
        compile: Makes a constraint ready for requests, in the caller's thread, or raises `RequestError`; at once where
            it is ready. None where answers cannot be constrained.
        decode_all: Token ids to text, special tokens included; None where none are.
    """

    vocab_size: int
    decode: Decode
    eos: tuple[int, ...] = ()
    max_model_len: int | None = None
    long_rope: LongRope | None = None
    compile: Callable[[Constraint], None] | None = None
    decode_all: Decode | None = None


class Engine:
    """Generates answers, many at a time, on one prefix cache.

    Attributes:
        config: The options.
        max_model_len: Most tokens of prompt and answer together; no more than the pool can hold.
        model: What it knows of the model.
        observer: Who hears of ends of requests and of steps, or None; may be set at any time.
    """

    def __init__(
        self,
        cache: PrefixCache,
        executor: Executor,
        config: EngineConfig,
        model: ModelFacts,
        observer: Observer | None = None,
        planner: DraftPlanner | None = None,
        lower: LowerTiers | None = None,
    ) -> None:
        """Prepare an engine; `start` makes it run.

        Raises:
            ConfigError: The pool cannot hold a single short request.
        """
        self.config = config
        self.max_model_len = length_limit(cache, config, model.max_model_len)
        self.model = model
        self.observer = observer
        self._scheduler = Scheduler(cache, config, planner=planner, long_rope=model.long_rope, lower=lower)
        self._executor = executor
        self._handles: dict[str, tuple[RunningRequest, RequestHandle]] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Condition()
        self._order = itertools.count()
        self._accepting = False
        self._listening = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._interruption: str | None = None
        self._thread = threading.Thread(target=self._run, name="headway-engine", daemon=True)
        if lower is not None:
            lower.post_to(self._post)
        self._last_snapshot = self._take_snapshot()

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache. Its geometry and configuration may be read by anyone, the rest by the engine's thread."""
        return self._scheduler.cache

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, if it did not end as it was told to."""
        return self._failure

    def join(self) -> None:
        """Wait until the engine, which was started, works no more: it was closed, or it failed."""
        self._thread.join()

    @property
    def unavailable(self) -> str | None:
        """Why no request can be computed now; None while they can. Requests that are sent while ranks start wait."""
        if self._failure is not None:
            return f"the engine has failed: {self._failure}"
        if not (self._accepting and self._thread.is_alive()):
            return _NOT_STARTED if self._thread.ident is None else _SHUTTING_DOWN
        return self._interruption

    @property
    def stopping(self) -> bool:
        """Whether it takes no more requests, and never will."""
        return self._failure is not None or not self._accepting

    @property
    def not_finite(self) -> int:
        """Requests that failed since the start because the model's numbers for them were NaN or infinite."""
        return self._scheduler.counters.not_finite

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and can be computed."""
        return self.unavailable is None

    # -- for any thread ---------------------------------------------------------------------------------------------

    def compile(self, constraint: Constraint) -> None:
        """Make a constraint ready for requests. It may take seconds, in the calling thread; at once if it is ready.

        Raises:
            RequestError: It cannot be understood, no text fits it, it is too large, or answers cannot be constrained.
        """
        if self.model.compile is None:
            raise RequestError("the answers of this model cannot be constrained", None, "unsupported_parameter")
        self.model.compile(constraint)

    def start(self) -> Engine:
        """Begin to work. Returns the engine itself."""
        self._accepting = self._listening = True
        self._thread.start()
        return self

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request. Its constraint is compiled first if it was not before (`compile`).

        Raises:
            RequestError: It cannot be served as it stands.
            UnservableError: It would not fit into the whole pool.
            QueueFullError: Too many requests wait.
            EngineStoppedError: The engine is shutting down or has failed.
        """
        return self.submit_group([request])[0]

    def submit_group(self, requests: Sequence[GenerationRequest]) -> list[RequestHandle]:
        """Queue requests that share one prompt: the first computes it, the others start once they can reuse it.

        Raises:
            RequestError, UnservableError, QueueFullError, EngineStoppedError: As `submit`; then none was queued.
        """
        for request in requests:
            require_servable(request, self.cache, self.model.vocab_size, self.max_model_len)
            if request.constraint is not None:
                self.compile(request.constraint)
        with self._wakeup:
            self._check_open(len(requests))
            entries = [self._enter(request) for request in requests]
            running = [entry for entry, _ in entries]
            self._inbox.append(lambda: self._scheduler.add(running[0], running[1:]))
            self._wakeup.notify_all()
        return [handle for _, handle in entries]

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks before the next step. Unknown and ended requests are ignored."""
        self._post(lambda: self._abort_now(request_id))

    def reset(self, timeout: float | None = 60.0) -> ResetReport:
        """Empty the prefix cache. Running requests go on and publish nothing more.

        Raises:
            EngineStoppedError: The engine has stopped.
            TimeoutError: A step took longer than `timeout` seconds, or a lower tier.
            IncompleteError: A lower tier did not say that all is gone. Requests of this server do not get it any more.
        """

        def reset() -> tuple[ResetReport, Future[None] | None]:
            lower = self._scheduler.lower
            report = self._scheduler.cache.reset()
            below = None if lower is None else lower.reset()
            if self.observer is not None:
                self.observer.forgotten(None)
            return report, below

        report, below = self._call(reset, timeout)
        if below is not None:
            below.result(timeout)
        return report

    def unpin(self, tokens: NDArray[np.int32], salt: str, timeout: float | None = 60.0) -> bool:
        """End the pin at the end of a prefix. Returns whether there was one.

        Raises:
            EngineStoppedError: The engine has stopped.
            TimeoutError: A step took longer than `timeout` seconds.
        """
        cache = self._scheduler.cache
        return (
            self._call(lambda: cache.unpin(Prompt(tokens, namespace=cache.namespace(salt=salt)), exactly=True), timeout)
            > 0
        )

    def snapshot(self, timeout: float = 0.5) -> EngineSnapshot:
        """The engine as it is now; during a step longer than `timeout` seconds, as it was before that step."""
        try:
            return self._call(self._take_snapshot, timeout)
        except (TimeoutError, EngineStoppedError):
            return self._last_snapshot

    def survey(self, timeout: float = 0.5) -> EngineSurvey | None:
        """What runs and what the cache holds now. It holds up the engine for a few milliseconds per 10,000 prefixes.

        None during a step longer than `timeout` seconds, and after the end.
        """
        try:
            return self._call(self._take_survey, timeout)
        except (TimeoutError, EngineStoppedError):
            return None

    def drain(self, timeout: float) -> bool:
        """Accept nothing more and wait until all requests have ended. Returns whether they did in time."""
        with self._wakeup:
            self._accepting = False
            self._wakeup.notify_all()
            return self._wakeup.wait_for(lambda: not self._handles, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Stop after the present step, fail what is left, release the device. May be called twice.

        Returns:
            Whether it has stopped; False if the present step takes longer than `timeout` seconds. It does not keep the
            process from ending.
        """
        self._accepting = False
        with self._wakeup:
            again, self._stopping = self._stopping, True
            self._wakeup.notify_all()
        if self._thread.ident is None:
            if not again:
                self._release(0.0)
        elif self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_open(self, count: int) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self._failure}")
        if not self._accepting or self._stopping:
            raise EngineStoppedError(_SHUTTING_DOWN)
        waiting = len(self._handles) - len(self._scheduler.running)
        if waiting + count > self.config.max_waiting:
            self._scheduler.counters.refused["queue_full"] += count
            raise QueueFullError(f"{waiting} requests are waiting, {self.config.max_waiting} may; try again later")

    def _enter(self, request: GenerationRequest) -> tuple[RunningRequest, RequestHandle]:
        order = next(self._order)
        request_id = f"{order}-{secrets.token_hex(8)}"
        if not self.config.prefix_reuse:
            request = replace(request, no_store=True, pin=0)
        if least := self.config.least_hit(len(request.tokens)):
            boundaries, breakpoints = (
                tuple(cut for cut in cuts if cut >= least) for cuts in (request.boundaries, request.breakpoints)
            )
            request = replace(request, boundaries=boundaries, breakpoints=breakpoints)
        given = getattr(request.sampling, "seed", None)
        known = self.model
        decode = known.decode_all if request.special_shown and known.decode_all is not None else known.decode
        running = RunningRequest.start(request, request_id, order, time.monotonic(), decode, known.eos)
        running.seed = secrets.randbits(63) if given is None else given
        entry = (running, RequestHandle(request_id, self.abort))
        self._handles[request_id] = entry
        return entry

    # -- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._scheduler.idle:
                    self._write_below()
                    self._look_after_ranks()
                    self._scheduler.cache.catch_up(_TOLD_WHILE_IDLE)
                    continue
                scheduled = self._schedule()
                self._publish(self._scheduler.take_news())
                if scheduled is not None:
                    self._publish(self._step(scheduled))
                self._write_below()
        except BaseException as error:
            told = isinstance(error, HeadwayError)  # the message says all: where it was raised helps nobody
            logger.error("the engine has failed: %s", error, exc_info=None if told else error)
            self._failure = error
        finally:
            self._shut_down()

    def _take_commands(self) -> bool:
        """Do what others asked for, waiting a little if there is nothing else to do. Returns whether to go on."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._inbox or self._stopping or self._has_work, _LOOK_SECONDS)
            commands, stopping = list(self._inbox), self._stopping
            self._inbox.clear()
        for command in commands:
            command()
        return not stopping

    @property
    def _has_work(self) -> bool:
        lower = self._scheduler.lower
        return not self._scheduler.idle or (lower is not None and lower.busy)

    def _schedule(self) -> ScheduledStep | None:
        try:
            return self._scheduler.schedule()
        except RanksLostError as error:
            self._lose_ranks(error)
            return None

    def _write_below(self) -> None:
        """Read some of what is to be written to lower tiers."""
        if (lower := self._scheduler.lower) is not None:
            try:
                lower.work()
            except RanksLostError as error:
                self._lose_ranks(error)

    def _step(self, scheduled: ScheduledStep) -> list[Update]:
        started = time.monotonic()
        try:
            output = self._executor.run(scheduled.work)
        except RanksLostError as error:
            self._scheduler.counters.failed_steps += 1
            self._scheduler.cache.fail(scheduled.work.step)
            self._lose_ranks(error)
            return []
        except Exception as error:
            logger.exception("a step of %d requests failed", len(scheduled.requests))
            return self._scheduler.fail(scheduled, error)
        seconds = time.monotonic() - started
        if self._scheduler.lower is not None:
            self._scheduler.lower.measure(scheduled.work.step, seconds)
        news = self._scheduler.complete(scheduled, output)
        if self.observer is not None:
            self.observer.step_done(time.monotonic() - started, scheduled.tokens)
            for salt in self._scheduler.take_forgotten():
                self.observer.forgotten(salt)
        return news

    def _look_after_ranks(self) -> None:
        try:
            self._executor.check()
        except RanksLostError as error:
            self._lose_ranks(error)

    def _lose_ranks(self, error: RanksLostError) -> None:
        """End all that runs and forget all that was computed; then start the ranks anew, unless the engine is to end.

        Raises:
            RanksLostError: `on_rank_failure` is `exit`.
            Exception: The ranks could not be started.
        """
        scheduler, policy = self._scheduler, self.config.parallel.on_rank_failure
        logger.error("ranks are lost, %d running requests end: %s", len(scheduler.running), error)
        self._interruption = f"ranks are lost, new ones start: {error}"
        scheduler.counters.rank_losses += 1
        ended = RequestFailedError(f"the computation was lost, send the request again: {error}")
        self._publish(scheduler.reject_all(ended, waiting=False))
        scheduler.cache.reset()
        if scheduler.lower is not None:
            scheduler.lower.ranks_lost()
        if policy == "exit":
            raise error
        if self._stopping:
            return
        self._take_snapshot()  # what is shown until the engine answers again
        started = time.monotonic()
        self._executor.restart()
        logger.warning("new ranks run after %.0f s, with an empty cache", time.monotonic() - started)
        self._interruption = None

    def _publish(self, news: Sequence[Update]) -> None:
        told: list[RequestHandle] = []
        try:
            for update in news:
                told.append(self._handles[update.request.request_id][1])
                self._tell(told[-1], update)
        finally:  # also if an observer raised, which ends the engine: whoever was told is woken
            wake_readers(told)

    def _tell(self, handle: RequestHandle, update: Update) -> None:
        error, delta = update.error, update.delta
        if error is not None or (delta is not None and delta.result is not None):
            self._forget(update.request)
        if error is not None:
            handle.fail(error)
        elif delta is not None:
            handle.put(delta)

    def _forget(self, request: RunningRequest) -> None:
        if self.observer is not None:
            self.observer.request_finished(request.result())
        with self._wakeup:
            del self._handles[request.request_id]
            self._wakeup.notify_all()

    def _abort_now(self, request_id: str) -> None:
        entry = self._handles.get(request_id)
        if entry is not None:
            self._scheduler.abort(entry[0])
            self._publish(self._scheduler.take_news())

    def _take_snapshot(self) -> EngineSnapshot:
        scheduler = self._scheduler
        self._last_snapshot = EngineSnapshot(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            counters=copy.deepcopy(scheduler.counters),
            cache=copy.deepcopy(self._scheduler.cache.stats()),
            drafter=scheduler.drafter,
            held=scheduler.held,
            loading=scheduler.loading,
            lower=None if scheduler.lower is None else copy.deepcopy(scheduler.lower.stats()),
        )
        return self._last_snapshot

    def _take_survey(self) -> EngineSurvey:
        started = time.monotonic()
        requests = tuple(RequestView.of(request, started) for request in self._scheduler.running)
        holdings = self._scheduler.cache.holdings()
        return EngineSurvey(requests, holdings, time.monotonic() - started)

    def _shut_down(self) -> None:
        error: HeadwayError = EngineStoppedError(
            "the server shut down before the answer was complete"
            if self._failure is None
            else f"the engine has failed: {self._failure}"
        )
        with self._wakeup:
            self._accepting, self._listening = False, False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands if self._failure is None else ():
            command()
        if self._failure is None:
            self._publish(self._scheduler.reject_all(error))
        with self._wakeup:
            left = list(self._handles.values())
            self._handles.clear()
            self._wakeup.notify_all()
        for _, handle in left:
            handle.fail(error)
        wake_readers(handle for _, handle in left)
        self._release(self.config.tiers.tier_grace if self._failure is None else 0.0)

    def _release(self, grace: float) -> None:
        """Let go of lower tiers, with `grace` seconds to write what is worth it, and of the device."""
        if self._scheduler.lower is not None:
            self._scheduler.lower.close(grace)
        self._executor.close()

    def _post(self, command: Callable[[], None]) -> bool:
        with self._wakeup:
            if not self._listening:
                return False
            self._inbox.append(command)
            self._wakeup.notify_all()
        return True

    def _call(self, function: Callable[[], T], timeout: float | None) -> T:
        """Run `function` in the engine's thread and return what it returns."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if not self._post(command):
            raise EngineStoppedError("the engine is not running")
        return future.result(timeout)
