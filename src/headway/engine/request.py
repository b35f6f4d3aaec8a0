"""A request as the engine sees it: what was asked, how far it is, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import Explanation, Hit, Lease, Prompt, Wish
from headway.engine.fetched import Fetched
from headway.engine.text import CONTEXT_TOKENS, Decode, TextStream
from headway.errors import HeadwayError
from headway.runtime.interface import GREEDY, Constraint, RowAnswer, SamplingParams, TokenLogprob

__all__ = ["Delta", "GenerationRequest", "RequestResult", "RunningRequest", "Timings", "Update"]

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate.

    Attributes:
        tokens: int32 [n], the prompt; not copied, do not change it.
        max_tokens: Most tokens of the answer.
        sampling: How tokens are chosen; None takes the most likely one.
        stop: Strings that end the answer and are not part of it.
        stop_token_ids: Tokens that end the answer, besides the model's own end tokens.
        ignore_eos: Go on after the model's own end tokens.
        find_displaced: Look for known text that a change in front of it keeps from being reused: the explanation then
            has `displaced`.
        user: Whose share of the machine this uses; the queue is fair among users.
        salt: Prefixes are only shared among requests of the same salt.
        boundaries: Positions at which messages end.
        breakpoints: Positions at which the client asks for a checkpoint.
        pin: Protect this many first tokens from eviction.
        no_store: Read the cache, keep nothing in it.
        text: The prompt as text, for observers; empty where it came as tokens.
        pin_seconds: For how long; None for the longest time of the server.
        constraint: The form that the answer must have; None for any. It holds to the answer's end: an end token of the
            model is only chosen where the form is complete, and with `ignore_eos` nothing else is chosen from there on.
            Stop strings, stop tokens and `max_tokens` may end the answer before.
        prompt_logprobs: Report log probabilities of the prompt's tokens, with so many of the most likely ones; such a
            prompt is computed from its first token on. None for no report.
        stop_shown: A stop string that ends the answer is part of its text.
        special_shown: Special tokens of the answer are part of its text.
        tell_kept: Say with the first token how much of the prompt is kept now.
        answers: How many answers the prompt gets, each by a request of its own with the same `tokens`; for observers.
    """

    tokens: Int32s
    max_tokens: int
    sampling: SamplingParams | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    find_displaced: bool = False
    user: str = ""
    salt: str = ""
    boundaries: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()
    pin: int = 0
    no_store: bool = False
    text: str = ""
    pin_seconds: float | None = None
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    stop_shown: bool = False
    special_shown: bool = False
    tell_kept: bool = False
    answers: int = 1


@dataclass
class Timings:
    """When things happened, in seconds of one monotonic clock; None where they did not."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    @property
    def queue(self) -> float | None:
        """Seconds from arrival to admission."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def prefill(self) -> float | None:
        """Seconds from admission to the first token."""
        return None if self.admitted is None or self.first_token is None else self.first_token - self.admitted

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last."""
        return None if self.first_token is None or self.last_token is None else self.last_token - self.first_token

    @property
    def total(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished is None else self.finished - self.arrived


@dataclass(frozen=True)
class RequestResult:
    """How a request ended.

    Attributes:
        finish_reason: `stop`, `length` or `abort`.
        stop_reason: The stop string or stop token that ended it, or None.
        prompt_tokens: Tokens of the prompt.
        tokens: The answer's tokens.
        text: The answer.
        cached_tokens: Tokens of the prompt that were not computed because they were cached.
        waited_tokens: Of these, tokens that another request computed while this one waited for it.
        resumed_from: Kind of checkpoint that it resumed from at first, `path` where none is needed, or "".
        explanation: What the cache said at admission; None if it was never admitted.
        timings: When things happened.
        preemptions: How often it gave way to others.
        request: What was asked.
        drafted: Tokens that were drafted for it.
        accepted: Of these, tokens that are part of the answer.
        settled: How many first tokens are all text that could be shown, and how many characters that is.
        pin: The pin that was asked for and what became of it; None if none was, or nothing is kept at all.
        kept_tokens: Tokens of the prompt that the same prompt would have reused right behind the first token of this
            answer; `cached_tokens` where that was not asked for.
        loaded: Of the cached tokens those that were read back from lower tiers of memory, by tier.
    """

    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    cached_tokens: int
    resumed_from: str
    explanation: Explanation | None
    timings: Timings
    preemptions: int
    request: GenerationRequest
    drafted: int = 0
    accepted: int = 0
    waited_tokens: int = 0
    settled: tuple[int, int] = (0, 0)
    pin: Wish | None = None
    kept_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer.

    Attributes:
        text: Text that can be shown now; empty while a character or a possible stop string is unfinished.
        tokens: The tokens of the step.
        logprobs: One per token where they were asked for.
        result: How the request ended, in the last delta only.
        prompt_logprobs: One per token of the prompt but the first, in the first delta, where they were asked for.
        prompt: In the first delta, where that was asked for (`tell_kept`): `prompt_tokens`, `cached_tokens` and
            `kept_tokens`, as in the result.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    result: RequestResult | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt: tuple[int, int, int] | None = None


@dataclass(eq=False)
class RunningRequest:
    """A request and how far it is. Once it is queued, it is changed by the scheduler alone.

    Attributes:
        request: What was asked.
        request_id: The engine's name for it.
        order: Place in the order of arrival.
        timings: When things happened.
        tokens: int32 [n + max_tokens], of which `known` are told.
        known: Tokens of prompt and answer so far.
        computed: Tokens whose entries are in the cache.
        text: The answer's text so far.
        end_tokens: Tokens that end it.
        seed: Seed of its random numbers.
        lease: Its hold on memory while it runs.
        long: Whether that lease began with the long set of rotary frequencies (`headway.runtime.interface.LongRope`).
        cached_tokens: Prompt tokens found at first admission, or None before.
        loaded: Of these, tokens that were read back from lower tiers of memory, by tier.
        waited_from: Prompt tokens that were cached when it began to wait for another to compute more, or None.
        waited_tokens: Tokens that were cached beyond that at first admission.
        resumed_from: Kind of checkpoint that they came from.
        explanation: What the cache said at first admission.
        preemptions: How often it gave way.
        failures: How often a step failed in which it ran alone.
        alone_until: It runs by itself until so many tokens are computed (after a failed step).
        finish_reason: Why it ended, or None.
        stop_reason: The stop string or token that ended it.
        observed: Tokens that the drafter has seen the target compute; more than `computed` while accepted tokens are
            pending.
        survival: float32 [most drafts], chance that so many tokens of a draft are accepted, as of earlier steps.
        drafted: Tokens that were drafted for it.
        accepted: Of these, tokens that are part of the answer.
        hit: What the cache knows of its prompt, from when it was last looked up until its lease begins.
        wishes: What became of its pin and breakpoints, in its present or last lease.
        refused_epoch: The scheduler's epoch in which it was last found not to fit, or None.
        marked: Whether its lease was told to remember a place before a text that was not settled.
        scored: Log probabilities of the prompt's tokens from the second on, as far as they are known.
        kept_tokens: See `RequestResult`.
        fetched: What disks and stores gave it for its next lease; None before they were asked.
    """

    request: GenerationRequest
    request_id: str
    order: int
    timings: Timings
    text: TextStream
    end_tokens: frozenset[int] = frozenset()
    seed: int = 0
    tokens: Int32s = field(init=False)
    known: int = field(init=False)
    computed: int = 0
    lease: Lease | None = None
    long: bool = False
    cached_tokens: int | None = None
    loaded: dict[str, int] = field(default_factory=dict)
    waited_from: int | None = None
    waited_tokens: int = 0
    resumed_from: str = ""
    explanation: Explanation | None = None
    preemptions: int = 0
    failures: int = 0
    alone_until: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    observed: int = 0
    survival: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    drafted: int = 0
    accepted: int = 0
    hit: Hit | None = None
    refused_epoch: int | None = None
    wishes: tuple[Wish, ...] = ()
    marked: bool = False
    scored: list[TokenLogprob] = field(default_factory=list)
    kept_tokens: int = 0
    fetched: Fetched | None = None
    _prompt: Prompt | None = None

    def __post_init__(self) -> None:
        """Copy the prompt into a buffer with room for the answer."""
        self.known = self.prompt_length
        self.tokens = np.empty(self.known + self.request.max_tokens, dtype=np.int32)
        self.tokens[: self.known] = self.request.tokens

    @classmethod
    def start(
        cls,
        request: GenerationRequest,
        request_id: str,
        order: int,
        now: float,
        decode: Decode | None = None,
        eos: Sequence[int] = (),
    ) -> RunningRequest:
        """A request that has just arrived; without `decode` its text stays empty."""
        text = TextStream(
            decode or (lambda _: ""),
            request.tokens[-CONTEXT_TOKENS:].tolist(),
            request.stop,
            shown=request.stop_shown,
            least=(request.sampling or GREEDY).min_tokens,
        )
        ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(eos))
        return cls(request, request_id, order, Timings(now), text, ends)

    @property
    def user(self) -> str:
        """Whose account pays for it."""
        return self.request.user

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def answer(self) -> Int32s:
        """The answer's tokens so far."""
        return self.tokens[self.prompt_length : self.known]

    @property
    def alone(self) -> bool:
        """Whether it must run by itself for now."""
        return self.computed < self.alone_until

    def unscored(self, start: int) -> bool:
        """Whether computing from `start` on tells log probabilities of the prompt that are wanted and not known yet."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and start <= len(self.scored) < self.prompt_length - 1

    def take_scores(self, start: int, records: Sequence[TokenLogprob]) -> None:
        """Take the log probabilities of the tokens behind `start`, as far as they are those of the prompt, and new."""
        first, most = len(self.scored), self.prompt_length - 1
        if records and start <= first:
            self.scored += records[first - start : most - start]

    @property
    def draining(self) -> bool:
        """Whether its answer has ended and its state is yet to catch up with it, for those who go on from there."""
        return self.finish_reason is not None and self.lease is not None

    @property
    def reachable(self) -> int:
        """Position that a client can come back to with the text it has got.

        It lies before an unfinished character, and before what a stop string, or its beginning, holds back.
        """
        return self.prompt_length + self.text.settled[0]

    @property
    def pending(self) -> int:
        """Tokens to compute: all that are known, of an ended answer those that are reachable, all but the last."""
        if self.finish_reason is None:
            return self.known - self.computed
        return max(0, min(self.known - 1, self.reachable) - self.computed)

    def cache_prompt(self, namespace: int) -> Prompt:
        """What the cache is asked for: the prompt, and after a preemption the answer so far as well. Made once each."""
        made, asked = self._prompt, self.request
        if made is None or made.namespace != namespace or len(made.tokens) != self.known:
            made = self._prompt = Prompt(
                self.tokens[: self.known],
                namespace=namespace,
                boundaries=asked.boundaries,
                breakpoints=asked.breakpoints,
                pin=asked.pin,
                no_store=asked.no_store,
                pin_seconds=asked.pin_seconds,
            )
        return made

    def accept(self, answer: RowAnswer) -> Delta:
        """Append tokens of an answer, up to one that ends it (`finish_reason` is set then). Returns what to show."""
        shown, taken = "", 0
        for token in answer.tokens:
            shown += self._accept_one(token)
            taken += 1
            if self.finish_reason is not None:
                shown += self.text.finish()
                break
        tokens, first = answer.tokens[:taken], self.known - taken == self.prompt_length
        written = taken - (taken > 0 and tokens[-1] in self.end_tokens)  # an end token is no part of the answer's text
        return Delta(shown, tokens, answer.logprobs[:written], prompt_logprobs=tuple(self.scored) if first else ())

    def _accept_one(self, token: int) -> str:
        """Append one token. Returns the text that can be shown now."""
        self.tokens[self.known] = token
        self.known += 1
        if token in self.end_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.request.stop_token_ids else None
            return ""
        shown = self.text.push(token)
        if self.text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        elif self.known == len(self.tokens):
            self.finish_reason = "length"
        return shown

    def result(self) -> RequestResult:
        """How it ended."""
        return RequestResult(
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            prompt_tokens=self.prompt_length,
            tokens=tuple(self.answer.tolist()),
            text=self.text.text,
            cached_tokens=self.cached_tokens or 0,
            resumed_from=self.resumed_from,
            explanation=self.explanation,
            timings=self.timings,
            preemptions=self.preemptions,
            request=self.request,
            drafted=self.drafted,
            accepted=self.accepted,
            waited_tokens=self.waited_tokens,
            settled=self.text.settled,
            pin=next((wish for wish in self.wishes if wish.kind == "pin"), None),
            kept_tokens=max(self.kept_tokens, self.cached_tokens or 0),
            loaded=dict(self.loaded),
        )


@dataclass(frozen=True)
class Update:
    """News of a request.

    Attributes:
        request: The request.
        delta: What was added to its answer, or None.
        error: Why it failed, or None.
    """

    request: RunningRequest
    delta: Delta | None = None
    error: HeadwayError | None = None

    @property
    def asks_what_is_kept(self) -> bool:
        """Whether it brings the first tokens of an answer that is to say how much of its prompt is kept."""
        request, tokens = self.request, () if self.delta is None else self.delta.tokens
        return request.request.tell_kept and bool(tokens) and request.known - len(tokens) == request.prompt_length

    def telling(self, kept: int) -> Update:
        """The same, saying that so many tokens of the prompt are kept."""
        assert self.delta is not None
        request, cached = self.request, self.request.cached_tokens or 0
        request.kept_tokens = max(kept, cached)
        result = self.delta.result and replace(self.delta.result, kept_tokens=request.kept_tokens)
        told = (request.prompt_length, cached, request.kept_tokens)
        return replace(self, delta=replace(self.delta, result=result, prompt=told))
