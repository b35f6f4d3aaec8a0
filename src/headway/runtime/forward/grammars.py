"""Answers of a form that the client asks for: which tokens may come next, as masks on logits.

Where an answer stands in its form is a function of the form and of the answer's tokens, and of nothing else. So a
request carries its `Constraint` as text, every `SampleRow` brings the answer so far, and what is kept here, a matcher
per request and where it stands, is only a memory of that function: it goes back to what matcher and answer have in
common and reads the rest. Rejected drafts, preemptions, failed steps, lost ranks and steps that are planned ahead need
no word to it, and it can be forgotten at any time. It lives where tokens are chosen, on rank 0, because the tokens of a
draft are known nowhere else.

The work is that of llguidance, which compiles a form in about a millisecond, finds a mask in some microseconds, and
needs nothing but itself. Rejected: xgrammar, which brings packages of its own for GPUs, and outlines, which enumerates
an automaton before the first token. llguidance is never told of end tokens: going back over one is not what it does
well, and it is known here when an answer has ended.

Compiling is done in threads of its own; who asks waits for them, and the engine's thread finds it done.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property

import llguidance
import llguidance.gbnf_to_lark
import llguidance.numpy
import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from headway.errors import RequestError
from headway.runtime.interface import Constraint, RowAnswer, RowFault, SampleRow

__all__ = ["JSON_SPACE", "MAX_CONSTRAINT_BYTES", "Grammars"]

logger = logging.getLogger(__name__)

Int32s = NDArray[np.int32]

MAX_CONSTRAINT_BYTES = 128 * 1024
"""Longest text of a constraint."""
_COMPILE_SECONDS = 10.0
"""How long who asks waits for a constraint to be compiled; large schemas take time that grows with their square."""
_COMPILING = threading.BoundedSemaphore(2)
"""As many are compiled at a time: others wait, and tokens are still chosen."""
_MOST_COMPILED = 128
"""Compiled constraints that are remembered; what was used longest ago is compiled again."""
_LIMITS = llguidance.LLParserLimits(
    max_grammar_size=100_000, max_lexer_states=50_000, initial_lexer_fuel=100_000, verbose_errors=False
)
"""What one constraint may take: about 100 MB for states of its lexer, and milliseconds for each mask."""
_MOST_REPEATS = 1000
"""Repetitions in one regular expression: compiling takes time that grows with their square, and cannot be stopped."""
_REPEAT = re.compile(r"[*+?{]")
_PATTERN = re.compile(r'"pattern"\s*:\s*"((?:[^"\\]|\\.)*)"')
"""A regular expression in a JSON schema."""
JSON_SPACE = r"(?:\x20|\n[\x20\t]{0,20})"
"""What may stand between the tokens of JSON: enough to indent it. Small models find more and more space likely."""
_NO_TOKENS = np.empty(0, dtype=np.int32)


class Grammars:
    """Compiled constraints, and where requests stand in theirs.

    `compile` and `begin` may be called by any thread; the rest by the one that chooses tokens.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: Tokens that the model's logits speak of, at least as many as the tokenizer's.
        ends: Tokens with which the model ends an answer.
        most: Requests whose place is remembered. It should be more than may run at once.
        patience: Seconds that `compile` waits.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        ends: Sequence[int],
        most: int,
        patience: float = _COMPILE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = np.array(sorted(ends), dtype=np.int32)
        self._most = most
        self._patience = patience
        self._words: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, Future[LLMatcher | RequestError]] = OrderedDict()
        self._places: OrderedDict[int, _Place] = OrderedDict()

    # -- compiling --------------------------------------------------------------------------------------------------

    def compile(self, constraint: Constraint) -> None:
        """Make a constraint ready, or wait until it is; at once if it was compiled before.

        Raises:
            RequestError: It cannot be understood, no text fits it, it takes too long or is too large, or it cannot be
                followed with this tokenizer. The message says why.
        """
        self._wait_for(constraint)

    def begin(self, constraint: Constraint) -> Future[LLMatcher | RequestError]:
        """Begin to compile a constraint. Returns what will be known, its matcher at the start or a `RequestError`."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None and not found.cancelled():
                self._compiled.move_to_end(constraint)
                return found
            found = self._compiled[constraint] = Future()
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        threading.Thread(target=self._run, args=(constraint, found), name="headway-grammar", daemon=True).start()
        return found

    def _run(self, constraint: Constraint, found: Future[LLMatcher | RequestError]) -> None:
        with _COMPILING:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(self._matcher(constraint))
            except RequestError as error:
                found.set_result(error)
            except BaseException as error:  # a panic of llguidance is no Exception
                logger.exception("a %s cannot be compiled", _NAMES[constraint.kind])
                found.set_result(RequestError(f"the {_NAMES[constraint.kind]} cannot be compiled: {_told(str(error))}"))

    def _wait_for(self, constraint: Constraint) -> LLMatcher:
        compiling = self.begin(constraint)
        try:
            found = compiling.result(self._patience)
        except TimeoutError:
            compiling.cancel()  # what has not begun is left undone
            raise RequestError(
                f"the {_NAMES[constraint.kind]} takes more than {self._patience:g} seconds to compile: make it "
                "smaller, above all the number of its optional properties"
            ) from None
        if isinstance(found, RequestError):
            raise RequestError(*found.args)  # a new one, so that none grows by the traces of all who were refused
        return found

    def _matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher that has seen nothing.

        Raises:
            RequestError: See `compile`.
        """
        name, size = _NAMES[constraint.kind], len(constraint.text.encode("utf-8", "surrogatepass"))
        if size > MAX_CONSTRAINT_BYTES:
            raise RequestError(f"the {name} has {size} bytes, {MAX_CONSTRAINT_BYTES} may be")
        regexes = [constraint.text] if constraint.kind == "regex" else _PATTERN.findall(constraint.text)
        if (repeats := max((len(_REPEAT.findall(one)) for one in regexes), default=0)) > _MOST_REPEATS:
            raise RequestError(
                f"the {name} cannot be used: {repeats} repetitions in one regular expression, such as *, "
                f"+, ? or {{3}}; {_MOST_REPEATS} may be"
            )
        matcher = LLMatcher(self._known_words(), _written(constraint), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise RequestError(f"the {name} cannot be used: {_told(matcher.get_error())}")
        first = matcher.deep_copy()
        possible = np.frombuffer(first.compute_bitmask(), dtype=np.uint8).any() and not first.is_error()
        if not possible or (first.is_stopped() and not first.is_accepting()):
            raise RequestError(f"the {name} cannot be used: no text of this model's tokens fits it")
        self._refuse_dead_end(first, name)
        return matcher

    def _refuse_dead_end(self, first: LLMatcher, name: str) -> None:
        """Refuse a form that allows first tokens and is too large to be followed behind any of them."""
        mask: Int32s = np.zeros((1, len(self._ending)), dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask(first, mask)
        bits = np.unpackbits((mask[0] & ~self._ending).view(np.uint8), bitorder="little")
        begun = first.deep_copy()
        if not first.is_stopped() and bits.any() and not begun.try_consume_tokens([int(bits.argmax())]):
            raise RequestError(f"the {name} cannot be used: {_told(begun.get_error()) or 'nothing fits it'}")

    def _known_words(self) -> llguidance.LLTokenizer:
        """The tokenizer as llguidance knows it: made at first use, which takes up to a second."""
        if self._words is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise RequestError(
                    "answers cannot be constrained with this model's tokenizer, which has no tokenizer.json; ask for "
                    "the form in the prompt",
                    None,
                    "unsupported_parameter",
                )
            size = max(self._vocabulary, len(self._tokenizer))
            self._words = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._ends.tolist() or None)
        return self._words

    # -- choosing tokens --------------------------------------------------------------------------------------------

    def restrict(self, logits: torch.Tensor, rows: Sequence[SampleRow], *, again: bool = False) -> torch.Tensor:
        """Logits with -inf for tokens that the form of a row's answer does not allow next.

        Args:
            logits: float32 [n, vocab]. Not changed.
            rows: One record per row.
            again: The same places will be asked for once more: those of a draft, when it is verified.
        """
        index = [i for i, row in enumerate(rows) if row.constraint is not None]
        if not index:
            return logits
        bits = torch.from_numpy(self._masks([rows[i] for i in index], again)).to(logits.device)
        allowed = (bits[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
        allowed = allowed.view(len(index), -1)[:, : logits.shape[-1]].bool()
        restricted = logits.clone()
        restricted[index] = logits[index].masked_fill(~allowed, -torch.inf)
        return restricted

    def allowed(self, row: SampleRow, draft: Int32s) -> int:
        """How many first tokens of a draft the row's form allows, up to the first end token."""
        if row.constraint is None:
            return len(draft)
        return self._place(row).allows(row.output, draft)

    def faults(self, rows: Sequence[SampleRow | None], answers: Sequence[RowAnswer]) -> dict[int, RowFault]:
        """Rows of a step whose answers have met a place at which their form could not be followed."""
        found = {}
        for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            place = None if row is None or row.constraint is None else self._places.get(row.request)
            if row is not None and place is not None and place.fault is not None:
                read, why = place.fault
                if read < len(row.output) + len(answer.tokens):
                    found[i] = RowFault(form=why)
        return found

    def _masks(self, rows: Sequence[SampleRow], again: bool) -> Int32s:
        """Bits of allowed tokens, int32 [n, words]; places of one request are looked at in turn, requests together."""
        found: Int32s = np.zeros((len(rows), len(self._ending)), dtype=np.int32)
        left = list(enumerate(rows))
        while left:
            turn = {row.request: (i, row) for i, row in reversed(left)}  # the first of each
            places = [(i, self._place(row), row.output) for i, row in turn.values()]
            wanted = [(i, place) for i, place, answer in places if not place.recall(found[i], answer, again)]
            pairs = [(place.matcher, i) for i, place in wanted if not place.ended]
            if pairs:
                llguidance.numpy.fill_next_token_bitmask_par(self._pool, pairs, found)
            for i, place in wanted:
                place.check(found[i], again)
            left = [(i, row) for i, row in left if turn[row.request][0] != i]
        return found

    @cached_property
    def _ending(self) -> Int32s:
        """The mask that allows end tokens alone, int32 [words]."""
        bits = np.zeros((self._known_words().vocab_size + 31) // 32, dtype=np.uint32)
        np.bitwise_or.at(bits, self._ends >> 5, np.uint32(1) << (self._ends & 31).astype(np.uint32))
        return bits.view(np.int32)

    @cached_property
    def _pool(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor()

    def _place(self, row: SampleRow) -> _Place:
        assert row.constraint is not None
        place = self._places.get(row.request)
        if place is None or place.constraint != row.constraint or place.broken_for(row.output):
            matcher = self._wait_for(row.constraint).deep_copy()
            place = _Place(row.constraint, matcher, self._ends, self._ending)
        self._places[row.request] = place
        self._places.move_to_end(row.request)
        while len(self._places) > self._most:
            self._places.popitem(last=False)
        return place


class _Place:
    """Where one answer stands in its form.

    Attributes:
        constraint: The form.
        matcher: Has read the answer up to its first end token.
        fault: How many tokens can be read, and why nothing can follow them; None where something can.
    """

    def __init__(self, constraint: Constraint, matcher: LLMatcher, ends: Int32s, ending: Int32s) -> None:
        self.constraint = constraint
        self.matcher = matcher
        self.fault: tuple[int, str] | None = None
        self._ends = ends
        self._ending = ending
        self._read = _NO_TOKENS
        self._fed = 0
        self._known: dict[int, Int32s] = {}
        """Masks behind so many of the tokens that were read, of places that will be asked for again."""

    @property
    def ended(self) -> bool:
        """Whether the answer has an end token, or nothing can follow it."""
        return self._fed < len(self._read) or self.fault is not None

    def broken_for(self, answer: Int32s) -> bool:
        """Whether a fault stands in the way of another answer than the one that met it: a matcher does not recover."""
        if self.fault is None:
            return False
        return _common(self._read, answer) < self.fault[0] or len(answer) <= self.fault[0]

    def recall(self, mask: Int32s, answer: Int32s, again: bool) -> bool:
        """Copy the mask behind `answer` into `mask`, if it is known; else read the answer. Returns whether it was."""
        common = _common(self._read, answer)
        known = self._known.get(common) if common == len(answer) else None
        if known is not None:
            mask[:] = known
        else:
            self._read_to(answer, common)
        if not again:  # of a draft that is verified, from its first place on
            self._known = {at: kept for at, kept in self._known.items() if at > len(answer)}
        return known is not None

    def check(self, mask: Int32s, again: bool) -> None:
        """Look at a mask that the matcher has made: behind an end only end tokens may follow, and something must."""
        if not self.ended:
            mask[:] = mask | self._ending if self.matcher.is_accepting() else mask & ~self._ending
            said = _told(self.matcher.get_error())
            if said and not said.startswith("NoExtension"):
                self.fault = len(self._read), said
            elif said or not mask.any():
                self.fault = len(self._read), "no token of this model can go on from here"
        if self.ended:
            mask[:] = self._ending
        if again:
            self._known[len(self._read)] = mask.copy()

    def allows(self, answer: Int32s, draft: Int32s) -> int:
        """How many first tokens of a draft behind `answer` may be, up to the first end token."""
        ends = np.flatnonzero(np.isin(draft, self._ends))
        draft = draft[: int(ends[0]) + 1] if len(ends) else draft
        whole = np.concatenate([answer, draft])
        common, last = _common(self._read, whole), len(whole) - 1
        if len(draft) and common >= last and (known := self._known.get(last)) is not None:
            return len(draft) - 1 + (int(known[whole[last] >> 5]) >> int(whole[last] & 31) & 1)
        self._read_to(answer, min(common, len(answer)))
        if self.ended:
            return 0
        ending = len(ends) > 0
        count = self.matcher.validate_tokens(draft[: len(draft) - ending].tolist())
        if ending and count == len(draft) - 1:
            self._read_to(whole[:-1], len(answer))
            count += self.matcher.is_accepting()
        return count

    def _read_to(self, answer: Int32s, common: int) -> None:
        """Go back to the `common` first tokens and read the rest of `answer`."""
        if common < self._fed:
            self.matcher.rollback(self._fed - common)
            self._fed = common
        self._known = {at: kept for at, kept in self._known.items() if at <= common}
        self._read = np.array(answer, dtype=np.int32)
        if self.fault is not None or self._fed < common:  # what is common has an end token
            return
        fresh = self._read[common:]
        ends = np.flatnonzero(np.isin(fresh, self._ends))
        fresh = fresh[: int(ends[0])] if len(ends) else fresh
        taken = self.matcher.try_consume_tokens(fresh.tolist())
        self._fed += taken
        if taken < len(fresh):
            said = _told(self.matcher.get_error())  # such as a limit that was met
            self.fault = self._fed, said or f"token {int(fresh[taken])} of the answer is not what its form allows"


def _common(left: Int32s, right: Int32s) -> int:
    """Tokens that two sequences begin with alike."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


# -- forms as llguidance writes them ----------------------------------------------------------------------------------

_NAMES = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}


def _written(constraint: Constraint) -> str:
    """A constraint as llguidance takes it.

    Raises:
        RequestError: It is none.
    """
    text = constraint.text
    try:
        if constraint.kind == "json":
            schema = json.loads(text)
            if not isinstance(schema, dict) and schema is not True:
                raise ValueError("it must be an object, or true")
            if schema is True:
                schema = {}
            return LLMatcher.grammar_from_json_schema(
                schema, defaults=None if "x-guidance" in schema else {"whitespace_pattern": JSON_SPACE}
            )
        if constraint.kind == "regex":
            return LLMatcher.grammar_from_regex(llguidance.regex_to_lark(_whole(text), "d"))
        if constraint.kind == "choice":
            return LLMatcher.grammar_from_lark(_alternatives(json.loads(text)))
        return LLMatcher.grammar_from_lark(llguidance.gbnf_to_lark.gbnf_to_lark(text) if "::=" in text else text)
    except Exception as error:
        raise RequestError(f"the {_NAMES[constraint.kind]} cannot be used: {_told(str(error))}") from None


def _whole(regex: str) -> str:
    """A regular expression without the anchors at its ends: it is the whole answer that matches in any case."""
    regex = regex.removeprefix("^")
    escapes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and escapes % 2 == 0 else regex


def _alternatives(choices: Sequence[str]) -> str:
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("it must be a list of at least one text")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return f"start: CHOICE\nCHOICE: {texts}"  # one lexeme: as a rule, more than 2,000 would be too many


def _told(error: str) -> str:
    """An error of llguidance in one line."""
    said = " ".join(error.replace("<non-verbose/>", "").split())
    return said if len(said) <= 300 else f"{said[:300]}..."
