"""A replay with arrival times: the engine's scheduler and the cache as they are, on a simulated clock and executor.

The executor computes nothing: it lets the clock advance by what the roofline says of the step, and answers with the
tokens that the trace has. Everything else (who is admitted, how prompts are cut, who gives way when memory runs out) is
`headway.engine.scheduling.scheduler.Scheduler`, which counts in tokens. So here a block of the trace is not one symbol
but as many tokens as it has, all with its number: two prompts part exactly where their blocks differ. That costs about
a hundred times what the clock `order` does, most of it for steps that decode.

What the trace knows ends with a whole block, so states are exported at multiples of the block, and a request whose
answer comes back ends with its last whole block: as in the clock `order`, its state then lies where the next prompt
comes back to. A prompt that is sent again as it was is hit up to its last whole block, not up to its last token.

Rejected: running the scheduler on symbols of many tokens (an answer would be shorter than one symbol, and decoding is
what requests wait for); skipping over steps that only decode (it would be a second scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from headway.cache import PrefixCache, Reason
from headway.engine import (
    EngineConfig,
    GenerationRequest,
    RowAnswer,
    RunningRequest,
    ScheduledStep,
    Scheduler,
    Update,
)
from headway.formats import Trace
from headway.replay.config import ReplayConfig, Timing
from headway.replay.config.groups import checkpoint_blocks
from headway.replay.config.scale import Scale, scale
from headway.replay.run.ledger import Ledger, Progress
from headway.replay.run.lower import LowerRun
from headway.replay.trace.prefixes import Reading, answer_blocks
from headway.tell.latency import Latency, Percentiles, Wait
from headway.tell.reasons import FORGOTTEN

__all__ = ["TimedRun"]

Ints = NDArray[np.int32]
_FRESH = 1 << 30
"""Tokens of answers that occur nowhere else: this plus the request's number."""


@dataclass
class _Times:
    """Seconds, one entry a request that ended."""

    arrival: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    each_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    last_end: float = 0.0


class TimedRun:
    """One replay with arrival times.

    Attributes:
        ledger: Hits and losses so far, as of each request's first admission.
        scale: How the cache was sized.
        lower: What lies below its memory, or None.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        timing: Timing,
        reading: Reading,
        matches: NDArray[np.int64],
        progress: Progress | None,
    ) -> None:
        self.scale = _token_scale(trace, config)
        self._trace, self._timing, self._reading = trace, timing, reading
        self._arrivals: list[float] = ((trace.times - trace.times[0]) / timing.speed).tolist()
        self._now = 0.0
        cache = PrefixCache(self.scale.cache, clock=lambda: self._now)
        engine = EngineConfig(
            max_batched_tokens=timing.step_tokens, max_running=timing.max_running, wait_tokens=timing.wait_tokens
        )
        tiers, size = config.tiers, self.scale.block_bytes
        self.lower = LowerRun(cache, tiers, size, timing.roofline, lambda: self._now, timed=True) if tiers else None
        self._scheduler = Scheduler(cache, engine, clock=lambda: self._now, lower=self.lower)
        self.ledger = Ledger(trace, matches, progress, cache.counters)
        self._held = checkpoint_blocks(cache.geometry)
        self._answers: dict[int, Ints] = {}
        self._overlap: set[int] = set()
        """Requests that arrived while others had not ended: what these were to answer was not known yet."""
        self._times = _Times()
        self._next = self._ended = 0
        self._busy = 0.0

    def all(self) -> Latency:
        """Run every request. Returns what they waited for."""
        scheduler = self._scheduler
        self._sample()
        while self._coming() < float("inf") or not scheduler.idle:
            self._arrive()
            scheduled = scheduler.schedule()
            self._take(scheduler.take_news())
            self._wait_for_moves()
            if scheduled is not None:
                self._compute(scheduled)
            elif (coming := self._coming()) < float("inf"):
                self._now = max(self._now, coming)
            else:
                assert scheduler.idle, "requests are left, and none can run"
        self._sample()
        return self._latency()

    def _arrive(self) -> None:
        if self.lower is not None:
            self.lower.deliver()
        while self._next < len(self._trace) and self._arrivals[self._next] <= self._now:
            i = self._next
            tokens, answer = _tokens(self._trace, self._reading, i)
            self._next += 1
            needed = self._scheduler.cache.geometry.peak_blocks(len(tokens) + len(answer))
            if needed > self.scale.cache.blocks:
                self.ledger.refuse(i, self.scale.bytes_of(needed))
                self._tick()
                continue
            self._answers[i] = answer
            if not self._scheduler.idle and self._reading.outputs != "never":
                self._overlap.add(i)
            boundaries = self.scale.boundaries(self._trace.marks(i).tolist(), len(tokens), len(tokens))
            request = GenerationRequest(tokens, len(answer), boundaries=boundaries)
            self._scheduler.add(RunningRequest.start(request, str(i), i, self._arrivals[i]))

    def _coming(self) -> float:
        """When a request arrives next, or what one waits for; infinite if nothing comes any more."""
        arrival = self._arrivals[self._next] if self._next < len(self._trace) else float("inf")
        return arrival if self.lower is None else min(arrival, self.lower.next_arrival)

    def _wait_for_moves(self) -> None:
        """Moves that stop the step take their time."""
        if self.lower is not None:
            self._now += self.lower.stopped
            self.lower.stopped = 0.0

    def _compute(self, scheduled: ScheduledStep) -> None:
        step = scheduled.work.step
        seconds = self._timing.roofline.seconds(step.starts, step.counts)
        self._now += seconds
        self._busy += seconds
        rows = scheduled.requests
        next_tokens = (
            () if wanted is None else (int(self._answers[row.order][row.known - row.prompt_length]),)
            for row, wanted in zip(rows, scheduled.work.samples, strict=True)
        )
        answers = [RowAnswer(*answer) for answer in zip(next_tokens, step.counts.tolist(), strict=True)]
        self._take(self._scheduler.complete(scheduled, answers))

    def _take(self, news: Iterable[Update]) -> None:
        """Write down who has ended."""
        for update in news:
            if update.error is not None:
                raise AssertionError(f"a request that fits failed: {update.error}")
            if update.delta is not None and update.delta.result is not None:
                self._end(update.request)

    def _end(self, request: RunningRequest) -> None:
        i = request.order
        del self._answers[i]
        assert request.explanation is not None, "a request that fits was refused"
        unknown = Reason.STILL_COMPUTING.value if i in self._overlap else FORGOTTEN
        self.ledger.explain(i, request.explanation, request.prompt_length, 1, unknown=unknown)
        self._time(request)
        self._tick()

    def _tick(self) -> None:
        self._ended += 1
        if self.ledger.sample_is_due(self._ended):
            self._sample()

    def _time(self, request: RunningRequest) -> None:
        timings, times = request.timings, self._times
        first, queue, total = timings.to_first_token, timings.queue, timings.total
        if first is None or queue is None or total is None:
            raise AssertionError("a request ended before it began")
        times.arrival.append(self._arrivals[request.order])
        times.first_token.append(first)
        times.queue.append(queue)
        times.total.append(total)
        if len(request.answer) > 1:
            times.each_token.append((total - first) / (len(request.answer) - 1))
        times.last_end = self._now

    def _sample(self) -> None:
        cache, size, ledger = self._scheduler.cache, self.scale.block_bytes, self.ledger
        used = (cache.config.blocks - cache.free_blocks) * size
        ledger.sample(self._ended, self._now, used, ledger.kept * self._held * size)

    def _latency(self) -> Latency:
        times, counters = self._times, self._scheduler.counters
        seconds = max(times.last_end, 1e-9)
        return Latency(
            requests=len(times.total),
            first_token=Percentiles.of(times.first_token),
            queue=Percentiles.of(times.queue),
            each_token=Percentiles.of(times.each_token),
            total=Percentiles.of(times.total),
            seconds=times.last_end,
            busy=min(1.0, self._busy / seconds),
            steps=counters.steps,
            preemptions=counters.preemptions,
            waits=counters.waits,
            waited_tokens=counters.waited_tokens,
            computed_tokens=counters.computed_tokens / seconds,
            answer_tokens=counters.generated_tokens / seconds,
            estimate=self._timing.roofline.source,
            over_time=Wait.over(times.arrival, times.first_token),
        )


def _token_scale(trace: Trace, config: ReplayConfig) -> Scale:
    """The cache in tokens. Prompts stop at checkpoints, as they do in the engine, and states lie between blocks."""
    tokens = int(trace.prompt_tokens.sum() + trace.answer_tokens.sum()) if config.memory is None else 0
    sized = scale(config, 1, tokens, len(trace))
    alignment = lcm(config.alignment, trace.width)
    return replace(sized, cache=replace(sized.cache, exports_inside=False, checkpoint_alignment=alignment))


def _tokens(trace: Trace, reading: Reading, request: int) -> tuple[Ints, Ints]:
    """Tokens of a prompt and of its answer (at least one)."""
    prompt, answered = int(trace.prompt_tokens[request]), max(1, int(trace.answer_tokens[request]))
    symbols, more = trace.prompt(request), answer_blocks(trace, reading, request)
    own = np.full(answered, _FRESH + request, dtype=np.int32)
    if trace.width == 1:
        sequence = np.concatenate((symbols, more if len(more) else own))
    elif len(more):
        sequence = np.append(np.repeat(np.concatenate((symbols[:-1], more)), trace.width), own[:1])
    else:
        whole = np.repeat(symbols[:-1], trace.width)
        sequence = np.concatenate((whole, np.repeat(symbols[-1:], prompt - len(whole)), own))
    return np.ascontiguousarray(sequence[:prompt], dtype=np.int32), sequence[prompt:]
