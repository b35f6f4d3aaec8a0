"""What callers of the runtime choose and are told, as records without torch.

The engine's scheduler and a command line use them, and must not wait for torch to be imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, RequestError

__all__ = [
    "AS_COMPUTED",
    "COMMUNICATIONS",
    "GREEDY",
    "MAX_TOP_LOGPROBS",
    "MOST_DRAFT_TOKENS",
    "AcceptanceRule",
    "BlockRange",
    "CanonicalGroup",
    "Constraint",
    "LongRope",
    "RowAnswer",
    "RowFault",
    "SampleRow",
    "SamplingParams",
    "StoredTypes",
    "TokenLogprob",
    "require_ranks",
    "require_stripes",
]

Int32s = NDArray[np.int32]

COMMUNICATIONS = ("ag_rs", "a2a")
"""How context-parallel ranks merge their attention; see `headway.runtime.parallel.context_parallel`."""

MOST_DRAFT_TOKENS = 16
"""Most tokens of one draft; the cache takes a bounded number of tokens from one step."""

MAX_TOP_LOGPROBS = 20
"""Most likely tokens that can be reported with one, as in the OpenAI API."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "between 0 (greedy) and 100"),
    "top_p": (0.0, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
    "repetition_penalty": (0.01, 100.0, "between 0.01 and 100 (1: none)"),
    "presence_penalty": (-2.0, 2.0, "between -2 and 2"),
    "frequency_penalty": (-2.0, 2.0, "between -2 and 2"),
}


@dataclass(frozen=True)
class StoredTypes:
    """Types that the cache stores as, by the names that options use; `auto` is what the model computes with.

    Attributes:
        entries: Of attention entries: `auto`, `fp32`, `bf16` or `fp8_e4m3`.
        states: Of recurrent states: `auto`, `fp32` or `bf16`.
    """

    entries: str = "auto"
    states: str = "auto"

    @classmethod
    def read(cls, kv_dtype: str, state_dtype: str) -> StoredTypes:
        """Read two options; `fp8` is short for `fp8_e4m3`.

        Raises:
            ConfigError: Other types.
        """
        entries = {"fp8": "fp8_e4m3"}.get(kv_dtype, kv_dtype)
        if entries not in ("auto", "fp32", "bf16", "fp8_e4m3"):
            raise ConfigError(f"--kv-dtype is {kv_dtype!r}, it must be auto, fp32, bf16 or fp8_e4m3")
        if state_dtype not in ("auto", "fp32", "bf16"):
            more = ": a state gathers up what rounding loses, so none is stored as fp8" if "fp8" in state_dtype else ""
            raise ConfigError(f"--state-dtype is {state_dtype!r}, it must be auto, fp32 or bf16{more}")
        return cls(entries, state_dtype)


AS_COMPUTED = StoredTypes()
"""Everything is stored as the model computes with it."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one answer are chosen.

    Attributes:
        temperature: 0 for greedy decoding; else logits are divided by it.
        top_p: Keep the most likely tokens whose probabilities reach this sum.
        top_k: Keep this many of the most likely tokens; 0 for all.
        min_p: Keep tokens at least this likely relative to the most likely one.
        seed: Seed of the random numbers; None lets the engine choose one.
        repetition_penalty: Logits of tokens in the prompt or the answer are divided (positive ones) or multiplied
            (negative ones) by it.
        presence_penalty: Taken off the logits of tokens in the answer.
        frequency_penalty: Taken off for each time that a token is in the answer.
        logit_bias: Added to the logits of single tokens.
        logprobs: Report log-probabilities: the chosen token's and those of this many of the most likely ones.
        min_tokens: No token that ends the answer is chosen before it has so many.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges.

        Raises:
            RequestError: With the name of the parameter.
        """
        for name, (low, high, text) in _RANGES.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high) or (name == "top_p" and value == 0):
                raise RequestError(f"{name} is {value}, it must be {text}", param=name)
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}, it must be 0 (no limit) or more", param="top_k")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}, it must fit in 64 bits", param="seed")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"{self.logprobs} log-probabilities a token asked for, it must be between 0 and {MAX_TOP_LOGPROBS}",
                param="top_logprobs",
            )
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias of token {token} is {bias}: it must be between -100 and 100",
                    param="logit_bias",
                )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def shapes_logits(self) -> bool:
        """Whether penalties, biases or a least length change the logits."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0)
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0


GREEDY = SamplingParams(temperature=0.0)
"""The most likely token every time."""


@dataclass(frozen=True)
class Constraint:
    """A form that an answer must have, from its first token to its last.

    Attributes:
        kind: `json`: JSON that fits a schema. `regex`: the whole answer matches. `choice`: one of some texts.
            `grammar`: a context-free grammar.
        text: The JSON schema, the regular expression, a JSON list of the texts, or the grammar in Lark's notation
            (with llguidance's additions, such as `%json {...}` for a schema inside) or in GBNF.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str


@dataclass(frozen=True)
class SampleRow:
    """One sequence that needs a token, or with a draft some tokens.

    Attributes:
        params: How to choose it.
        seed: Seed of the request: its own, or one that the engine gave it. Together with the length of `output` it
            fixes the random numbers, so that a preempted or repeated request goes on as it would have.
        prompt: int32, the prompt's tokens.
        output: int32, the answer's tokens so far.
        ends: Tokens that end the answer; of a draft nothing counts behind one.
        revocable: Whoever asks may yet take back some of the tokens (stop strings), so a state that has absorbed a
            draft must not replace the one before.
        constraint: The form that the answer must have; None for any.
        request: A number that the request keeps from step to step, and no other has; for what is remembered of it.
    """

    params: SamplingParams
    seed: int
    prompt: Int32s
    output: Int32s
    ends: frozenset[int] = frozenset()
    revocable: bool = False
    constraint: Constraint | None = None
    request: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution (before temperature, penalties and cuts).

    Attributes:
        token: The token.
        logprob: Its natural log-probability.
        top: The most likely tokens and theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why nothing of a row's step counts: a logit or a state that is NaN or infinite, or a form that has no next token.

    Attributes:
        damaged: Tokens of the shortest beginning of the row whose stored entries or state are themselves not finite, so
            that whoever resumes there fails too; None where all that the step started from is sound.
        form: Why the answer's constraint cannot be followed any further; None where the numbers are the reason.
    """

    damaged: int | None = None
    form: str | None = None

    def told(self, place: int) -> str:
        """The fault in words, for a row that had computed its first `place` tokens before."""
        if self.form is not None:
            return f"the form that was asked for cannot be followed any further: {self.form}"
        what = f"behind token {place} the model's numbers are NaN or infinite, which is no answer"
        if self.damaged is None:
            why = "so the weights are damaged or the dtype is too narrow for them"
            return f"{what}; what it continued from is sound, {why}"
        return (
            f"{what}: what was kept of its first {self.damaged} tokens is damaged and has been forgotten; send the "
            "request again, it will be computed anew"
        )


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What a step did for one of its rows: the one record of it, from the logits to the scheduler.

    Attributes:
        tokens: Tokens that follow what is known, up to one that ends the answer; none where none was wanted.
        kept: Tokens of the row, from its first one on, whose entries and state count: what to commit.
        logprobs: One per token where they were asked for, else none.
        proposed: Tokens that were drafted for it and verified.
        accepted: How many of `tokens` were drafted.
        confidence: float32, the drafter's own opinion of each place of a draft: the chance that it holds if all before
            it do. None where the drafter has none.
        fault: Why the row failed, with all else left empty; None if it did not.
        scored: Log probabilities of known tokens, from the one behind the row's first on, where they were asked for.
    """

    tokens: tuple[int, ...] = ()
    kept: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    proposed: int = 0
    accepted: int = 0
    confidence: NDArray[np.float32] | None = None
    fault: RowFault | None = None
    scored: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class LongRope:
    """Rotary frequencies in two sets: a short one for sequences of up to `original` tokens, a long one for longer ones.

    Entries of the two sets do not go together. A request whose sequence grows past `original` is computed again with
    the long set where transformers' `generate()` does so; where it does not, the short entries stay and tokens behind
    them are computed with the long set, so that entries depend on the length of the prompt.

    Attributes:
        original: Most tokens of a sequence that uses the short set.
        recomputed: Whether `generate()` computes a sequence again when it grows past `original`.
    """

    original: int
    recomputed: bool

    def begins_long(self, prompt: int, known: int) -> bool:
        """Whether a request begins with the long set: of `prompt` tokens, `known` ones with its answer so far."""
        return (known if self.recomputed else prompt) > self.original

    def room(self, start: int, long: bool) -> int | None:
        """Tokens from `start` on that use one set, of a request that began `long` or not; None for no limit."""
        return None if long or start >= self.original else self.original - start


class AcceptanceRule(StrEnum):
    """How drafted tokens of a sampled answer are judged; a greedy answer is the same under each.

    See `headway.runtime.drafting.acceptance`.
    """

    MATCH = "match"
    TOKEN = "token"
    BLOCK = "block"


@dataclass(frozen=True)
class BlockRange:
    """Where the content of an object lies: entries of a run of tokens, or one state, of one cache group.

    Attributes:
        group: Name of the group.
        first: First token; of a state its position.
        stop: Behind the last token; of a state its position as well.
        blocks: int32, block ids of the block indices [first // span, ceil(stop / span)) of the group's table; of a
            state its blocks, in order. Where -1 stands for one, what it would hold is not written.
        host: Whether they are blocks of host memory, and not of the device.
    """

    group: str
    first: int
    stop: int
    blocks: Int32s
    host: bool = False

    @property
    def tokens(self) -> int:
        """Tokens whose entries it holds; 1 for a state."""
        return max(1, self.stop - self.first)


@dataclass(frozen=True)
class CanonicalGroup:
    """What the objects of a cache group are, whatever ranks compute it (`headway.runtime.forward.canonical`).

    Attributes:
        name: The group's name.
        kind: `prefix`, `window`, `chunk` or `state`.
        bytes: Bytes of one token, or of one state, over all ranks.
        window: Tokens that a query sees, of windows; else 0.
        chunk: Tokens of a chunk, of chunks; else 0.
        lookahead: Later tokens that an entry also depends on.
        certified: Whether ranks in any number read the same bytes. If not, only the same layout of ranks can.
        family: Two groups with the same text here hold the same fields in the same order: it belongs into the keys of
            objects. It names the layout of ranks where the form is not certified.
    """

    name: str
    kind: str
    bytes: int
    window: int
    chunk: int
    lookahead: int
    certified: bool
    family: str


def require_ranks(tp: int, dcp: int, interleave: int, pcp: int = 1) -> None:
    """Refuse sizes of ranks that are not served together.

    Raises:
        ConfigError: The message names the option and what to change.
    """
    for name, value in (("dcp", dcp), ("interleave", interleave), ("tp", tp), ("pcp", pcp)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    if tp > 1 and tp % dcp:
        raise ConfigError(
            f"dcp={dcp} does not divide tp={tp}: decode context parallelism reuses the ranks that share the weights, "
            f"so choose --dcp among the divisors of --tp, or leave --tp out"
        )
    if interleave > 1 and dcp * pcp == 1:
        raise ConfigError(
            f"interleave={interleave} says how --dcp and --pcp split tokens, and dcp=1, pcp=1: leave --interleave out"
        )


def require_stripes(interleave: int, block_tokens: int) -> None:
    """Refuse blocks that do not consist of whole stripes of `interleave` tokens.

    Raises:
        ConfigError: The message names the options and what to change.
    """
    if block_tokens % interleave:
        raise ConfigError(
            f"interleave={interleave} does not divide block_tokens={block_tokens}: choose an --interleave that does, "
            f"or other --block-tokens"
        )
