"""An engine without a model: drives the cache as a scheduler would, and computes nothing.

It does each step in the order that the cache asks for (`extend`, the ranks' work, `commit`), in chunks that stop
at `Lease.next_stop`, and answers tokens from a stream named after the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache import CacheConfig, Explanation, Hit, Lease, Media, PrefixCache, Prompt, Step, Symbols
from headway.conformance.form import Image, RequestForm, Segment

__all__ = ["Clock", "Exhausted", "Request", "ToyEngine"]

Tokens = NDArray[np.int32]


class Exhausted(Exception):  # noqa: N818
    """The pool had no blocks for a step that the scenario wanted to be done."""


class Clock:
    """A clock that moves only when it is told to.

    Attributes:
        now: Seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now


@dataclass
class Request:
    """A request of the scenario, running or done.

    Attributes:
        form: What the client asked for.
        prompt: Its prompt as the cache sees it.
        hit: Where its last lease resumed.
        ids: Block ids under that hit, one count a block table.
        explanation: What the cache said about that.
        lease: The running lease, or None.
        answered: How many tokens it has answered.
    """

    form: RequestForm
    prompt: Prompt
    hit: Hit | None = None
    ids: list[int] = field(default_factory=list)
    explanation: Explanation | None = None
    lease: Lease | None = None
    answered: int = 0

    @property
    def running(self) -> Lease:
        """The running lease (an assertion where there is none: the scenario is read in order)."""
        assert self.lease is not None, f"request {self.form.name} is not running"
        return self.lease


@dataclass
class _Flight:
    """A step that was begun and is not yet committed."""

    step: Step
    asked: tuple[str, ...]
    names: tuple[str, ...]
    drafts: int


@dataclass
class ToyEngine:
    """The engine of one scenario.

    Attributes:
        cache: The cache under test.
        clock: The cache's clock.
        budget: Most tokens of one step.
        requests: Every request so far by name.
        granted: Tokens granted in the last step.
        copies: Blocks that the ranks had to copy in the last step.
    """

    cache: PrefixCache
    clock: Clock
    budget: int
    requests: dict[str, Request] = field(default_factory=dict)
    granted: int = 0
    copies: int = 0
    _ids: dict[tuple[str, int], int] = field(default_factory=dict)
    _flights: list[_Flight] = field(default_factory=list)

    @classmethod
    def build(cls, config: CacheConfig, budget: int) -> ToyEngine:
        """An engine with an empty cache.

        Raises:
            ConfigError: The configuration contradicts itself.
        """
        clock = Clock()
        return cls(PrefixCache(config, clock=clock), clock, budget)

    def start(self, form: RequestForm) -> Request:
        """Look up and lease.

        Raises:
            UnservableError: The pool could never hold the prompt. The request is known and not running.
        """
        space = self.cache.namespace(form.model, form.adapter, form.salt)
        request = Request(form, self._prompt(form, self._symbols(form.prompt), space))
        self.requests[form.name] = request
        self._lease(request)
        return request

    def resume(self, name: str) -> Request:
        """Come back after `preempt`, with the tokens answered so far as part of the prompt."""
        request = self.requests[name]
        answer = [self._id(f"{name}:out", i) for i in range(request.answered)]
        symbols = self._symbols(request.form.prompt).followed_by(answer)
        request.prompt = self._prompt(request.form, symbols, request.prompt.namespace)
        self._lease(request)
        return request

    def begin(self, names: Sequence[str], tokens: int | None = None, drafts: int = 0) -> Step:
        """Ask for the blocks of a step: for each request a chunk of its prompt, or one token and `drafts` more.

        Requests for which nothing of the budget is left take no part.
        """
        left = self.budget if tokens is None else tokens
        rows, counts, part = [], [], []
        for name in names:
            lease = self.requests[name].running
            decoding = lease.tokens - lease.computed <= 1
            count = min(left, max(0, lease.next_stop - lease.computed))
            if count:
                rows.append(lease.row)
                counts.append(count + drafts if decoding else count)
                part.append(name)
                left -= count
        step = self.cache.extend(np.array(rows, dtype=np.int64), np.array(counts, dtype=np.int64))
        self.granted, self.copies = int(np.sum(step.counts)), len(step.copies)
        if self.granted:
            self._flights.append(_Flight(step, tuple(names), tuple(part), drafts))
        return step

    def under_way(self, names: Sequence[str]) -> bool:
        """Whether a step of just these requests was begun and is not yet committed."""
        return any(flight.asked == tuple(names) for flight in self._flights)

    def commit(self, names: Sequence[str], accepted: int = 0) -> None:
        """The ranks have done the step of `names`; `accepted` of its draft tokens were right."""
        flight = self._land(names)
        step, m = flight.step, flight.drafts + 1
        counts = np.array(step.counts, dtype=np.int64)
        sampled = np.zeros((len(counts), m), dtype=np.int32)
        real = np.zeros(len(counts), dtype=np.int64)
        for i, name in enumerate(flight.names):
            request = self.requests[name]
            if not counts[i] or step.starts[i] + counts[i] < request.running.tokens:
                continue
            counts[i] -= max(0, flight.drafts - accepted)
            real[i] = min(accepted + 1 if flight.drafts else 1, request.form.output - request.answered)
            for k in range(real[i]):
                sampled[i, k] = self._id(f"{name}:out", request.answered + k)
            request.answered += int(real[i])
        self.cache.commit(step, counts, sampled, real)

    def fail(self, names: Sequence[str]) -> None:
        """The ranks failed in the step of `names` (begun now if it was not)."""
        if not self.under_way(names):
            self.begin(names)
        self.cache.fail(self._land(names).step)

    def finish(self, name: str) -> None:
        """Compute what is left, answer, end.

        Raises:
            Exhausted: The pool had no blocks; the request has been aborted.
        """
        request = self.requests[name]
        while request.answered < request.form.output:
            step = self.begin([name])
            if not step.counts[0]:
                self.abort(name)
                raise Exhausted(f"no blocks for the next tokens of {name}; it was aborted")
            self.commit([name])
        self._end(name, self.cache.finish)

    def preempt(self, name: str) -> None:
        """Take its memory away; what it computed becomes a checkpoint."""
        self._end(name, self.cache.preempt)

    def abort(self, name: str) -> None:
        """End it with nothing to donate."""
        self._end(name, self.cache.abort)

    def _end(self, name: str, how: Callable[[Tokens], object]) -> None:
        request = self.requests[name]
        how(np.array([request.running.row], dtype=np.int32))
        request.lease = None

    def _land(self, names: Sequence[str]) -> _Flight:
        flight = next(flight for flight in self._flights if flight.asked == tuple(names))
        self._flights.remove(flight)
        return flight

    def _lease(self, request: Request) -> None:
        hit = self.cache.lookup(request.prompt)
        request.ids = [len(hit.blocks(table.index)) for table in self.cache.geometry.tables]
        request.lease = self.cache.lease(request.prompt, hit)
        request.hit, request.explanation = request.lease.hit, request.lease.explanation

    def _prompt(self, form: RequestForm, tokens: Symbols, space: int) -> Prompt:
        return Prompt(
            tokens,
            namespace=space,
            boundaries=form.boundaries,
            breakpoints=form.breakpoints,
            pin=form.pin,
            no_store=form.no_store,
        )

    def _symbols(self, segments: Sequence[Segment]) -> Symbols:
        tokens: list[int] = []
        media: list[Media] = []
        for segment in segments:
            if isinstance(segment, Image):
                media.append(Media(len(tokens), segment.tokens, segment.key))
                tokens += [self._id("image placeholder", 0)] * segment.tokens
            else:
                tokens += [self._id(segment.stream, i) for i in range(segment.start, segment.stop)]
        return self.cache.symbols(tokens, media=media)

    def _id(self, stream: str, index: int) -> int:
        return self._ids.setdefault((stream, index), len(self._ids))
