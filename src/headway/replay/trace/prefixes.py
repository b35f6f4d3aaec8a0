"""What the trace alone says: which prefixes occur again, what an endless memory would reuse, who continues whom.

Every position of every prompt gets the number of its prefix: two positions have the same number exactly if the same
symbols lie before them. The numbers come from a 64-bit hash over all positions at once (a sort, not a tree of a million
Python objects) and are then *proved*: equal numbers must have equal last symbols and equal numbers one position before,
all the way to the start, or the hash is taken anew with another key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.formats import Trace

__all__ = [
    "Continuations",
    "PrefixKeys",
    "Prefixes",
    "Reading",
    "answer_blocks",
    "continuations",
    "endless_matches",
    "number_prefixes",
    "read_outputs",
    "sequences",
]

Longs = NDArray[np.int64]
Words = NDArray[np.uint64]

_OWN_BITS = 32
"""Keys of a request's own positions are minus (request, position) in one number."""


@dataclass(frozen=True)
class Prefixes:
    """Numbers of the prefixes of a set of sequences.

    Attributes:
        ids: int64 [S], number of the prefix that ends behind each symbol; numbers are 0 to count - 1.
        offsets: int64 [R + 1], where each sequence begins.
        first: int64 [count], request in which each prefix occurs first.
        count: Different prefixes.
    """

    ids: Longs
    offsets: Longs
    first: Longs
    count: int


@dataclass(frozen=True)
class Continuations:
    """Which prompts go on with an earlier prompt's answer.

    Attributes:
        child: int64 [R], the first later request whose prompt goes on from the whole blocks of this one, -1 for none.
        stop: int64 [R], whole blocks of the child's prompt that prompt and answer of this one fill.
    """

    child: Longs
    stop: Longs


def number_prefixes(symbols: NDArray[np.int32], offsets: Longs) -> Prefixes:
    """Number the prefixes of the sequences `symbols[offsets[i]:offsets[i + 1]]`. O(S log S)."""
    lengths = np.diff(offsets)
    request = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(symbols)) - offsets[:-1][request]
    for key in range(1, 8):
        ids, first, count = _number(symbols, position, key)
        if _proved(symbols, position, ids, first):
            return Prefixes(ids, offsets, request[first], count)
    raise AssertionError("seven 64-bit hashes in a row collided")


@dataclass(frozen=True)
class Reading:
    """How the answers of a trace are read.

    Attributes:
        outputs: "never", "continuation" or "recorded".
        linked: Who continues whom, for "continuation".
    """

    outputs: str
    linked: Continuations | None = None


def read_outputs(trace: Trace, outputs: str | None = None) -> Reading:
    """Decide how answers are read: as asked, else as the trace's format suggests.

    Raises:
        ConfigError: Asked for continuations of a trace that says itself what was answered.
    """
    if outputs == "continuation" and trace.has_answers:
        raise ConfigError(
            f"--outputs continuation: {trace.name} says itself what was answered: leave it out, or say never"
        )
    chosen = outputs or trace.outputs
    if chosen == "continuation" and not trace.has_answers:
        return Reading("continuation", continuations(trace))
    return Reading("recorded" if trace.has_answers and chosen != "never" else "never")


def endless_matches(trace: Trace, reading: Reading | None = None) -> Longs:
    """Tokens of each prompt that an endless memory that keeps every position would reuse, int64 [R].

    Args:
        trace: The trace.
        reading: How answers are read; as the trace's format suggests if not given.
    """
    symbols, offsets, prompts = sequences(trace, reading or read_outputs(trace))
    prefixes = number_prefixes(symbols, offsets)
    lengths = np.diff(offsets)
    known = prefixes.first[prefixes.ids] < np.repeat(np.arange(len(trace)), lengths)
    inside = np.arange(len(symbols)) - np.repeat(offsets[:-1], lengths) < np.repeat(prompts, lengths)
    counts = np.add.reduceat(known & inside, offsets[:-1], dtype=np.int64)
    matches: Longs = np.minimum(counts * trace.width, trace.prompt_tokens - 1)
    return matches


def continuations(trace: Trace) -> Continuations:
    """Read every prompt that goes on from all whole blocks of an earlier one as a continuation of its answer.

    A trace of block hashes does not say whether such a prompt contains the answer or forks from the prompt; this takes
    the first one that goes on for the one that contains it.
    """
    requests, width = len(trace), trace.width
    whole = np.diff(trace.offsets) - 1
    child, stop = np.full(requests, -1), whole.copy()
    prefixes = number_prefixes(trace.symbols, trace.offsets)
    has = whole > 0
    ends = prefixes.ids[trace.offsets[:-1][has] + whole[has] - 1]
    wanted = np.zeros(prefixes.count, dtype=np.bool_)
    wanted[ends] = True
    end_of = np.full(requests, -1)
    end_of[has] = ends
    waiting: dict[int, list[int]] = {}
    places = np.flatnonzero(wanted[prefixes.ids])
    owner = np.searchsorted(trace.offsets, places, side="right") - 1
    inner = places - trace.offsets[owner] < whole[owner] - 1
    bounds = np.searchsorted(owner[inner], np.arange(requests + 1))
    passed = prefixes.ids[places[inner]].tolist()
    filled = ((trace.prompt_tokens + trace.answer_tokens) // width).tolist()
    for i in range(requests):
        for prefix in passed[bounds[i] : bounds[i + 1]]:
            for earlier in waiting.pop(prefix, ()):
                child[earlier] = i
                stop[earlier] = min(filled[earlier], int(whole[i]))
        if end_of[i] >= 0:
            waiting.setdefault(int(end_of[i]), []).append(i)
    return Continuations(child, stop)


def sequences(trace: Trace, reading: Reading) -> tuple[NDArray[np.int32], Longs, Longs]:
    """What each request leaves behind: its prompt, then its answer as far as it is known.

    Returns:
        int32 symbols, int64 [R + 1] where each request begins, int64 [R] symbols of the prompts. Where an answer is
        known in whole blocks, the first of them stands in the place of the tail.
    """
    prompts = np.diff(trace.offsets)
    if reading.outputs == "never":
        return trace.symbols, trace.offsets, prompts
    parts = []
    for i in range(len(trace)):
        more = answer_blocks(trace, reading, i)
        prompt = trace.prompt(i)
        parts += [prompt if trace.width == 1 or not len(more) else prompt[:-1], more]
    lengths = np.array([len(part) for part in parts]).reshape(-1, 2).sum(axis=1)
    return np.concatenate(parts), np.concatenate(([0], np.cumsum(lengths))), prompts


def answer_blocks(trace: Trace, reading: Reading, request: int) -> NDArray[np.int32]:
    """Symbols of an answer that some prompt may contain: its tokens, or the whole blocks that follow the prompt's."""
    if reading.outputs == "recorded":
        return trace.answer(request)
    if reading.linked is None or reading.linked.child[request] < 0:
        return trace.answers[:0]
    whole = int(trace.offsets[request + 1] - trace.offsets[request]) - 1
    return trace.prompt(int(reading.linked.child[request]))[whole : int(reading.linked.stop[request])]


class PrefixKeys:
    """Keys of the prefixes of a trace's requests, prompt and answer, for models that look prefixes up by hash.

    Two positions of two requests have the same key exactly if the trace says that the same tokens lie before them.
    Inside a block of the trace that two requests share, every position is shared. What only its own request knows (an
    answer that no later prompt contains) gets a key of its own.
    """

    def __init__(self, trace: Trace, reading: Reading) -> None:
        """Number the prefixes. O(S log S) for S symbols."""
        symbols, self._offsets, _ = sequences(trace, reading)
        self._ids = number_prefixes(symbols, self._offsets).ids
        self._width = trace.width
        self._known = trace.prompt_tokens
        if reading.outputs != "never":
            self._known = np.array([_known(trace, reading, i) for i in range(len(trace))])

    def at(self, request: int, positions: NDArray[np.int64]) -> list[int]:
        """Keys of the prefixes that end at `positions` (int64, at least 1, ascending) of a request."""
        width, first = self._width, int(self._offsets[request])
        inside = positions[: int(np.searchsorted(positions, self._known[request], side="right"))]
        index = (inside - 1) // width
        keys: list[int] = (self._ids[first + index] * width + (inside - 1 - index * width)).tolist()
        return keys + [-1 - (request << _OWN_BITS) - int(p) for p in positions[len(inside) :]]

    def multiples(self, request: int, step: int, stop: int) -> list[int]:
        """Keys at step, 2 x step, ... up to and including `stop`."""
        return self.at(request, np.arange(step, stop + 1, step, dtype=np.int64))


def _known(trace: Trace, reading: Reading, request: int) -> int:
    """Tokens of a request from its start that the trace can tell apart from those of others."""
    prompt, answer = len(trace.prompt(request)), len(answer_blocks(trace, reading, request))
    if trace.width == 1:
        return prompt + answer
    return (prompt - 1 + answer) * trace.width if answer else int(trace.prompt_tokens[request])


def _number(symbols: NDArray[np.int32], position: Longs, key: int) -> tuple[Longs, Longs, int]:
    terms = _mixed(symbols.astype(np.int64).view(np.uint64), key) * (_mixed(position.view(np.uint64), key + 64) | 1)
    sums = np.cumsum(terms, dtype=np.uint64)
    starts = np.flatnonzero(position == 0)
    before = np.concatenate((np.zeros(1, dtype=np.uint64), sums))[starts]
    sums -= np.repeat(before, np.diff(np.append(starts, len(symbols))))
    sums = _mixed(sums, key) ^ _mixed(position.view(np.uint64), key + 128)
    unique, first, ids = np.unique(sums, return_index=True, return_inverse=True)
    return ids.astype(np.int64), first.astype(np.int64), len(unique)


def _proved(symbols: NDArray[np.int32], position: Longs, ids: Longs, first: Longs) -> bool:
    """Whether equal numbers mean equal prefixes: by induction, same position, last symbol and number before it."""
    model = first[ids]
    before = np.where(position > 0, np.concatenate(([-1], ids[:-1])), -1)
    return bool(
        (position == position[model]).all() and (symbols == symbols[model]).all() and (before == before[model]).all()
    )


def _mixed(words: Words, key: int) -> Words:
    """Each word scrambled (the finaliser of splitmix64)."""
    x = words + np.uint64(key * 0x9E3779B97F4A7C15 % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: Words = x ^ (x >> np.uint64(31))
    return scrambled
