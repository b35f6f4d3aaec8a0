"""vLLM's engine loop around a scheduler, with a fabricated model runner: what is reused, in how many steps, how fast.

The runner computes nothing: it gives one token for each request whose known tokens are all computed. In the
asynchronous mode the outputs of step n arrive after step n + 1 was planned, as in vLLM's own loop. For a checked run
the emulated worker is the runner: it asserts every read, and accepts a random number of drafts. There answers end at
random, and requests are aborted and the cache is reset while steps are under way.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from tests.vllm.traces.layouts import Built, Options
from tests.vllm.traces.workload import VOCABULARY, Workload
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

__all__ = ["Counts", "Driver", "Faults", "PlainRunner", "Runner"]

STOP = VOCABULARY + (1 << 28)
"""The token that ends an answer early."""
_STUCK = 4
"""Steps without a token after which the oldest request is given up: the pool can never hold it."""

Sample = Callable[[str, int], int]
"""Name of a request and position of a token to the token."""


class Runner(Protocol):
    """What computes steps."""

    def run(self, output: SchedulerOutput) -> Any:
        """The tokens that a step sampled: `req_ids`, `req_id_to_index` and `sampled_token_ids`."""


@dataclass(frozen=True)
class Faults:
    """Chances of what goes another way than planned.

    Attributes:
        stop: That a token ends its answer.
        abort: That a request is aborted, or fails, in a step.
        reset: That the cache is reset in a step, with all running requests preempted.
    """

    stop: float = 0.0
    abort: float = 0.0
    reset: float = 0.0


class PlainRunner:
    """Samples where a request's known tokens are all computed; knows of no drafts and checks nothing."""

    def __init__(self, scheduler: Scheduler, sample: Sample) -> None:
        """`sample` gives the tokens."""
        self._scheduler, self._sample = scheduler, sample
        self._left: dict[str, list[int]] = {}

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The tokens of a step, in its order of requests."""
        for name in output.finished_req_ids:
            self._left.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._begin(name, computed)
        names = list(output.num_scheduled_tokens)
        sampled = [self._step(name, output.num_scheduled_tokens[name]) for name in names]
        places = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)

    def _begin(self, name: str, computed: int) -> None:
        self._left[name] = [self._scheduler.requests[name].num_tokens, computed]

    def _step(self, name: str, count: int) -> list[int]:
        left = self._left[name]
        left[1] += count
        if left[1] < left[0]:
            return []
        assert left[1] == left[0], f"{name}: {left[1]} computed tokens, {left[0]} known"
        left[0] += 1
        return [self._sample(name, left[1])]


@dataclass
class Counts:
    """What a run adds up. Seconds are processor time of the whole process."""

    arriving: float = 0.0
    scheduling: float = 0.0
    updating: float = 0.0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    resets: int = 0
    rejected: int = 0
    aborted: int = 0
    hits: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def time(self, what: str) -> Iterator[None]:
        """Add the processor time of the block to a field."""
        before = time.process_time()
        yield
        setattr(self, what, getattr(self, what) + time.process_time() - before)


class Driver:
    """A closed loop: `options.running` requests are with the scheduler, in the workload's order, until all ended."""

    def __init__(
        self,
        built: Built,
        workload: Workload,
        options: Options,
        *,
        answer: int,
        faults: Faults | None = None,
        seed: int = 0,
        runner: Callable[[Sample, np.random.Generator], Runner] | None = None,
    ) -> None:
        """`answer` is the longest answer in tokens; `runner` makes what computes, by default a `PlainRunner`."""
        self.counts = Counts()
        self._scheduler, self._hasher = built.scheduler, built.hasher
        self._workload, self._options = workload, options
        self._answer, self._faults = answer, faults or Faults()
        self._chances = np.random.default_rng(seed)
        self._answers: dict[str, tuple[int, list[int]]] = {}
        self._fresh = VOCABULARY
        self._threads: dict[str, int | None] = {}
        self._pending = deque(range(len(workload)))
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.runner: Runner = (
            PlainRunner(self._scheduler, self._sample) if runner is None else runner(self._sample, self._chances)
        )

    def run(self, progress: Callable[[int], None] | None = None) -> Counts:
        """Serve all requests. `progress` is told now and then how many were sent."""
        gc.collect()
        gc.freeze()
        idle = 0
        while self._pending or self._threads:
            self._send()
            idle = 0 if self._step() else idle + 1
            if idle > _STUCK and self._threads:
                self.counts.rejected += 1
                self._give_up(min(self._threads, key=int), RequestStatus.FINISHED_ABORTED)
                idle = 0
            if progress is not None and self.counts.steps % 256 == 0:
                progress(len(self._workload) - len(self._pending))
        gc.unfreeze()
        return self.counts

    def _sample(self, name: str, position: int) -> int:
        if self._faults.stop and self._chances.random() < self._faults.stop:
            return STOP
        prompt, answer = self._answers.get(name, (0, []))
        if 0 <= position - prompt < len(answer):
            return answer[position - prompt]
        self._fresh += 1
        return self._fresh

    def _send(self) -> None:
        """Fill up the loop; requests of a thread go one by one."""
        busy = set(self._threads.values()) - {None}
        waiting = []
        while self._pending and len(self._threads) < self._options.running:
            index = self._pending.popleft()
            thread = self._workload.thread(index)
            if thread in busy:
                waiting.append(index)
                continue
            if thread is not None:
                busy.add(thread)
            self._threads[str(index)] = thread
            self._add(index)
        self._pending.extendleft(reversed(waiting))

    def _add(self, index: int) -> None:
        tokens = self._workload.prompt(index)
        most = self._workload.answer_tokens(index, self._answer)
        self._answers[str(index)] = len(tokens), self._workload.answer(index, most)
        sampling = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0, stop_token_ids=[STOP])
        with self.counts.time("arriving"):
            request = Request(
                request_id=str(index),
                prompt_token_ids=tokens,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
                arrival_time=float(index),
            )
            self._scheduler.add_request(request)

    def _step(self) -> bool:
        """Plan a step, compute it, and answer the oldest one under way. Whether anything moved."""
        depth = 2 if self._options.asynchronous else 1
        planned = False
        if self._faults.reset and self._chances.random() < self._faults.reset:
            self.counts.resets += 1
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
        if self._scheduler.has_requests():
            with self.counts.time("scheduling"):
                output = self._scheduler.schedule()
            planned = self._compute(output)
            if planned and len(self._under_way) < depth:
                return True
        if not self._under_way:
            return False
        self._abort()
        output, sampled = self._under_way.popleft()
        with self.counts.time("updating"):
            answered = self._scheduler.update_from_output(output, sampled)
        ended = [one.request_id for part in answered.values() for one in part.outputs if one.finish_reason is not None]
        for name in ended:
            self._end(name)
        if self._options.drafts and not self._options.asynchronous:  # asynchronous runners keep their drafts
            names = [name for name in sampled.req_ids if name not in ended]
            drafts = [[self._sample(name, -1) for _ in range(self._options.drafts)] for name in names]
            self._scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return planned or bool(output.num_scheduled_tokens)

    def _compute(self, output: SchedulerOutput) -> bool:
        for new in output.scheduled_new_reqs:
            self.counts.hits.setdefault(new.req_id, new.num_computed_tokens)
        self.counts.preemptions += len(output.preempted_req_ids or ())
        self.counts.tokens += output.total_num_scheduled_tokens
        self.counts.steps += bool(output.num_scheduled_tokens)
        done = self.runner.run(output)
        sampled = ModelRunnerOutput(done.req_ids, done.req_id_to_index, done.sampled_token_ids)
        self._under_way.append((output, sampled))
        return bool(output.num_scheduled_tokens)

    def _abort(self) -> None:
        """Perhaps abort a request, of which a step may be under way."""
        if self._faults.abort and self._threads and self._chances.random() < self._faults.abort:
            name = str(self._chances.choice(sorted(self._threads)))
            status = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)[int(self._chances.integers(0, 2))]
            self.counts.aborted += 1
            self._give_up(name, status)

    def _give_up(self, name: str, status: RequestStatus) -> None:
        self._scheduler.finish_requests(name, status)
        self._end(name)

    def _end(self, name: str) -> None:
        self._threads.pop(name, None)
        self._answers.pop(name, None)
