"""A request trace in memory: columns, so that a million requests fit, and the symbols that the cache is run on.

A trace of block hashes names each whole block of `width` tokens of a prompt by one id. One block is one *symbol* here.
What follows the last whole block of a prompt (0 to width - 1 tokens) is one more symbol, the *tail*: so every prompt
is its whole blocks and a tail, the end of its whole blocks is a position, and what the trace cannot tell (whether two
prompts share a part of a block) is never counted as shared. Hits are therefore whole blocks: at most one block a
request below what an engine that matches tokens reaches. A trace of tokens has width 1, and nothing is lost.

Rejected: spreading tokens of a block over made-up token ids. It costs 512 times the work and says nothing more.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, TraceError

__all__ = ["Trace", "TraceBuilder"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_PLAIN = 1 << 26
"""Hash ids below this stand for themselves; others are numbered from here on."""
_SYMBOLS = 1 << 27
"""Symbols of blocks lie below this, and those of answers that occur nowhere else above 2**30. Symbols of tails count
down from 2**31."""


@dataclass(frozen=True)
class Trace:
    """A trace, in order of arrival. Not to be changed.

    Attributes:
        name: Where it came from, for reports.
        format: Format it was read from, or "generated".
        width: Tokens in a whole block.
        outputs: How its answers are read unless somebody says otherwise: "never" (no prompt contains one),
            "continuation" (a prompt that goes on from another contains its answer), "recorded" (the trace has them).
        symbols: int32 [S], the symbols of all prompts one after another: whole blocks and a tail each.
        offsets: int64 [R + 1], where each prompt begins in `symbols`.
        prompt_tokens: int64 [R], tokens of each prompt.
        answer_tokens: int64 [R], tokens of each answer.
        times: float64 [R], seconds of arrival, not descending.
        answers: int32 [A], symbols of the answers where the trace has them, else empty. With width above 1 they stand
            in the place of the tail: the whole blocks that the end of the prompt and the answer fill together.
        answer_offsets: int64 [R + 1], where each answer begins in `answers`; all 0 where there are none.
        boundaries: int64 [B], tokens before each message boundary of the prompts, where the trace has them.
        boundary_offsets: int64 [R + 1], where those of each prompt begin in `boundaries`.
        ordinals: int64 [R], the number of each request in what the trace was read from.
        notes: What to know of how it was read.
    """

    name: str
    format: str
    width: int
    outputs: str
    symbols: Ints
    offsets: Longs
    prompt_tokens: Longs
    answer_tokens: Longs
    times: NDArray[np.float64]
    answers: Ints
    answer_offsets: Longs
    boundaries: Longs
    boundary_offsets: Longs
    ordinals: Longs
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Requests."""
        return len(self.prompt_tokens)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.prompt_tokens.sum())

    @property
    def has_answers(self) -> bool:
        """Whether the trace itself says what was answered."""
        return len(self.answers) > 0

    def prompt(self, request: int) -> Ints:
        """Symbols of one prompt, the tail last. A view."""
        return self.symbols[self.offsets[request] : self.offsets[request + 1]]

    def answer(self, request: int) -> Ints:
        """Symbols of one answer, empty where the trace does not have them. A view."""
        return self.answers[self.answer_offsets[request] : self.answer_offsets[request + 1]]

    def marks(self, request: int) -> Longs:
        """Message boundaries of one prompt, in tokens. A view."""
        return self.boundaries[self.boundary_offsets[request] : self.boundary_offsets[request + 1]]

    def head(self, requests: int) -> Trace:
        """The first `requests` requests."""
        n = min(requests, len(self))
        return replace(
            self,
            symbols=self.symbols[: self.offsets[n]],
            offsets=self.offsets[: n + 1],
            prompt_tokens=self.prompt_tokens[:n],
            answer_tokens=self.answer_tokens[:n],
            times=self.times[:n],
            answers=self.answers[: self.answer_offsets[n]],
            answer_offsets=self.answer_offsets[: n + 1],
            boundaries=self.boundaries[: self.boundary_offsets[n]],
            boundary_offsets=self.boundary_offsets[: n + 1],
            ordinals=self.ordinals[:n],
        )

    def take(self, requests: Longs) -> Trace:
        """Some of the requests, int64 [n], in that order."""
        symbols, offsets = _reorder(self.symbols, self.offsets, requests)
        answers, answer_offsets = _reorder(self.answers, self.answer_offsets, requests)
        boundaries, boundary_offsets = _reorder(self.boundaries, self.boundary_offsets, requests)
        return replace(
            self,
            symbols=symbols,
            offsets=offsets,
            prompt_tokens=self.prompt_tokens[requests],
            answer_tokens=self.answer_tokens[requests],
            times=self.times[requests],
            answers=answers,
            answer_offsets=answer_offsets,
            boundaries=boundaries,
            boundary_offsets=boundary_offsets,
            ordinals=self.ordinals[requests],
        )

    def cut_answers(self, tokens: int | None) -> Trace:
        """The same requests with answers of at most `tokens` tokens; None: as they are.

        Raises:
            TraceError: The trace itself says what was answered, so later prompts contain the whole answers.
        """
        if tokens is None:
            return self
        if self.has_answers:
            raise TraceError(
                f"{self.name}: its answers are recorded and come back in later prompts: they cannot be cut"
            )
        return replace(self, answer_tokens=np.minimum(self.answer_tokens, tokens))


_UNKNOWN = object()


class TraceBuilder:
    """Collects requests; `build` sorts them by arrival.

    Hash ids may be any integers or strings. `scope` keeps equal ids of different sessions apart.
    """

    def __init__(self, name: str, format: str, width: int, outputs: str = "never") -> None:
        """Start an empty trace of blocks of `width` tokens whose answers are read as `outputs` says."""
        self._name, self._format, self._outputs_read, self.width = name, format, outputs, width
        self._symbols, self._answers = array("i"), array("i")
        self._ends, self._answer_ends = array("q", [0]), array("q", [0])
        self._boundaries, self._boundary_ends = array("q"), array("q", [0])
        self._prompts, self._outputs, self._times = array("q"), array("q"), array("d")
        self._numbers: dict[Hashable, dict[int | str, int]] = {}
        """Symbols of the ids of each scope."""
        self._tails: dict[Hashable, int] = {}
        self._sessions = array("q")
        self.session = -1
        """Number of the session that the requests are of that are added next; -1: of none."""
        self._last_tail = 1 << 31
        self._next = _PLAIN

    def __len__(self) -> int:
        """Requests so far."""
        return len(self._prompts)

    def add_blocks(
        self,
        ids: Sequence[int | str],
        prompt_tokens: int,
        answer_tokens: int,
        time: float,
        *,
        scope: Hashable = None,
        answer: Sequence[int | str] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        """Add a request given by block ids; an id for a last, partly filled block may be there or not.

        Args:
            ids: Ids of the prompt's blocks.
            prompt_tokens: Tokens of the prompt.
            answer_tokens: Tokens of the answer.
            time: Seconds of arrival.
            scope: Equal ids of different scopes are different.
            answer: Ids of the whole blocks that the end of the prompt and the answer fill together.
            boundaries: Message boundaries of the prompt, in tokens.

        Raises:
            TraceError: Fewer ids than whole blocks, or more than the tokens fill; ids of several types; no tokens; a
                boundary outside.
        """
        whole = prompt_tokens // self.width
        if prompt_tokens < 1:
            raise TraceError(f"a prompt of {prompt_tokens} tokens: it needs at least one")
        if not whole <= len(ids) <= -(-prompt_tokens // self.width):
            raise TraceError(
                f"{len(ids)} block ids do not fit {prompt_tokens} tokens in blocks of {self.width}: "
                f"{whole} whole blocks, and at most one more"
            )
        self._symbols.extend(self._blocks(ids[:whole], scope))
        self._symbols.append(self._tail(ids[-1] if len(ids) > whole else None, scope))
        self._answers.extend(self._blocks(answer, scope))
        self._close(prompt_tokens, answer_tokens, time, boundaries)

    def add_long(
        self,
        ids: Sequence[int | str],
        prompt_tokens: int,
        answer_tokens: int,
        time: float,
        *,
        scope: Hashable,
    ) -> None:
        """Add a request whose ids name whole blocks only and may end early: what they do not cover is its own.

        Raises:
            TraceError: No tokens.
        """
        if prompt_tokens < 1:
            raise TraceError(f"a prompt of {prompt_tokens} tokens: it needs at least one")
        self._symbols.extend(self._blocks(ids[: prompt_tokens // self.width], scope))
        self._symbols.append(self._tail(None, scope))
        self._close(prompt_tokens, answer_tokens, time)

    def add_unknown(self, prompt_tokens: int, answer_tokens: int, time: float) -> None:
        """Add a request of which only the length is known: it shares nothing with any other.

        Raises:
            TraceError: No tokens.
        """
        whole = prompt_tokens // self.width
        first = self._next
        self._next += whole
        self.add_blocks(range(first, first + whole), prompt_tokens, answer_tokens, time, scope=_UNKNOWN)

    def add_tokens(
        self,
        tokens: Sequence[int],
        answer: Sequence[int],
        time: float,
        *,
        answer_tokens: int = 0,
        boundaries: Sequence[int] = (),
        scope: Hashable = None,
    ) -> None:
        """Add a request given by token ids (width 1); `answer_tokens` where the answer's tokens are not known.

        Tokens of different scopes are different.

        Raises:
            TraceError: No tokens, a token id out of range, or a boundary outside.
        """
        if len(tokens) == 0:
            raise TraceError("an empty prompt: it needs at least one token")
        try:
            self._symbols.extend(tokens if scope is None else self._scoped(tokens, scope))
            self._answers.extend(answer if scope is None else self._scoped(answer, scope))
        except (OverflowError, TypeError) as error:
            raise TraceError(f"token ids must be integers that fit 32 bits: {error}") from None
        if min(tokens) < 0 or min(answer, default=0) < 0:
            raise TraceError(f"token ids must not be negative: {min((*tokens, *answer))}")
        self._close(len(tokens), max(len(answer), answer_tokens), time, boundaries)

    def forget_ids(self, scope: Hashable) -> None:
        """Ids of a scope will not come again."""
        self._numbers.pop(scope, None)

    def undo(self) -> None:
        """Leave out what was begun of a request that could not be added."""
        for values, ends in (
            (self._symbols, self._ends),
            (self._answers, self._answer_ends),
            (self._boundaries, self._boundary_ends),
        ):
            del values[ends[len(self._prompts)] :]
            del ends[len(self._prompts) + 1 :]

    def build(self, spread: float | None = None) -> Trace:
        """The trace, in order of arrival (equal times keep their order).

        Args:
            spread: Seconds over which the sessions start, evenly and in their order; None: as the trace says.

        Raises:
            TraceError: No request was added.
            ConfigError: There are no sessions to spread.
        """
        if not self._prompts:
            raise TraceError(f"{self._name}: no request in this trace")
        times, sessions = np.array(self._times), np.frombuffer(self._sessions, dtype=np.int64)
        if spread is not None:
            known = np.unique(sessions[sessions >= 0])
            if not len(known):
                raise ConfigError(f"--spread: {self._name} does not say which requests form a session: leave it out")
            times = times + np.where(sessions >= 0, np.searchsorted(known, sessions) * (spread / len(known)), 0.0)
        late = int((times[1:] < times[:-1]).sum()) if (sessions < 0).all() else 0
        notes = [f"{late:,} requests stood behind later ones: all were sorted by time."] if late else []
        trace = Trace(
            self._name,
            self._format,
            self.width,
            "recorded" if len(self._answers) else self._outputs_read,
            _view(self._symbols, np.int32),
            np.array(self._ends),
            np.array(self._prompts),
            np.array(self._outputs),
            times,
            _view(self._answers, np.int32),
            np.array(self._answer_ends),
            np.array(self._boundaries, dtype=np.int64),
            np.array(self._boundary_ends),
            np.arange(len(times)),
            tuple(notes),
        )
        return trace.take(np.argsort(times, kind="stable")) if (times[1:] < times[:-1]).any() else trace

    def _close(self, prompt_tokens: int, answer_tokens: int, time: float, boundaries: Sequence[int] = ()) -> None:
        if not all(0 < mark <= prompt_tokens for mark in boundaries):
            raise TraceError(f"message boundaries must lie in (0, {prompt_tokens}], the prompt: {list(boundaries)[:9]}")
        self._boundaries.extend(boundaries)
        self._boundary_ends.append(len(self._boundaries))
        self._ends.append(len(self._symbols))
        self._answer_ends.append(len(self._answers))
        self._prompts.append(prompt_tokens)
        self._outputs.append(answer_tokens)
        self._times.append(time)
        self._sessions.append(self.session)

    def _blocks(self, ids: Sequence[int | str], scope: Hashable) -> Iterable[int]:
        """Symbols of whole blocks."""
        if scope is _UNKNOWN:
            return cast("range", ids)
        if len(kinds := set(map(type, ids))) > 1:
            raise TraceError(f"block ids must be of one type, found {' and '.join(sorted(k.__name__ for k in kinds))}")
        if scope is None and kinds == {int}:
            numbers = cast("Sequence[int]", ids)
            if min(numbers) >= 0 and max(numbers) < _PLAIN:
                return numbers
        return self._scoped(ids, scope)

    def _scoped(self, ids: Sequence[int | str], scope: Hashable) -> list[int]:
        """Symbols of ids of a scope: numbered in the order in which they come."""
        known = self._numbers.setdefault(scope, {})
        for id in ids:
            if id not in known:
                if self._next >= _SYMBOLS:
                    raise TraceError(f"more than {_SYMBOLS - _PLAIN:,} different block ids: cut the trace into parts")
                known[id] = self._next
                self._next += 1
        return list(map(known.__getitem__, ids))

    def _tail(self, id: Hashable, scope: Hashable) -> int:
        """Symbol of a tail: equal for prompts that are the same to their ends, as far as ids tell."""
        self._last_tail -= 1
        if id is None:
            return self._last_tail
        return self._tails.setdefault(id if scope is None else (scope, id), self._last_tail)


def _view(values: array[int], kind: type[np.int32]) -> Ints:
    """The same memory as an array of numpy: a copy of a large trace would take as much again."""
    return np.frombuffer(values, dtype=kind) if len(values) else np.zeros(0, dtype=kind)


def _reorder(values: NDArray[Any], offsets: Longs, order: Longs) -> tuple[NDArray[Any], Longs]:
    """Pieces of an array in another order. Piece by piece: places of all values take five times their own memory."""
    ends = np.concatenate(([0], np.cumsum(np.diff(offsets)[order])))
    moved = np.empty(int(ends[-1]), dtype=values.dtype)
    bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), offsets[order].tolist(), strict=True)
    for start, stop, source in bounds:
        moved[start:stop] = values[source : source + stop - start]
    return moved, ends
