"""Known text that is not reused because something in front of it changed: found in a whole trace at once.

Every stretch of `_GRAM` tokens gets a hash, and the first request that has it. Where a prompt leaves what is known, the
next stretch that an earlier request has, at whatever place, is laid beside that request: between the common beginning
and the common text lies the change. So text that moved any distance is found, as when old messages were cut, which an
explanation of a live cache (`headway.cache.index.displaced`) does not look for. Every token that is called the same has
been compared. O(S log S) for S tokens.

Rejected: a tree of all prompts, as the live cache has it. It sees only what parts nearby, and takes ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.formats import Trace
from headway.replay.trace.prefixes import endless_matches

__all__ = ["Change", "find_changes"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_GRAM = 32
"""Tokens that are looked up at once."""
_LEAST = 2 * _GRAM
"""Tokens behind a change that are worth a word."""
_TRIES = 8
"""Stretches of known text that are looked at in a prompt, until one follows a change."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Change:
    """A change, behind which a prompt goes on as an earlier one did.

    Attributes:
        request: The request.
        source: The earlier request.
        start: Tokens with which both begin.
        stop: Where the same text begins in the prompt.
        before: Where it begins in the earlier one.
        same: Tokens that are the same from there on.
        known: Tokens of the prompt behind the change that any earlier request has.
    """

    request: int
    source: int
    start: int
    stop: int
    before: int
    same: int
    known: int


def find_changes(trace: Trace) -> list[Change]:
    """The changes in front of known text, at most one a request, the first that is worth a word.

    Args:
        trace: A trace of tokens; one of blocks has none, because the hash of a block covers all before it.
    """
    if trace.width > 1 or len(trace.symbols) < _GRAM:
        return []
    lengths = np.diff(trace.offsets)
    owner = np.repeat(np.arange(len(trace)), lengths)
    first = _first_places(trace.symbols, owner, trace.offsets)
    known = (first >= 0) & (owner[first] < owner)
    found = (_change(trace, i, match, first, known, owner) for i, match in enumerate(endless_matches(trace).tolist()))
    return [change for change in found if change is not None]


def _first_places(symbols: Ints, owner: Longs, offsets: Longs) -> Longs:
    """For each token the first place of the stretch that begins there, int64 [S]; -1 where its prompt is too short."""
    words = symbols.astype(np.int64).view(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(words) - _GRAM + 1, dtype=np.uint64)
    for k in range(_GRAM):
        hashes = hashes * _FACTOR + words[k : k + len(hashes)]
    inside = np.flatnonzero(owner[: len(hashes)] == owner[_GRAM - 1 :])
    _, places, number = np.unique(hashes[inside], return_index=True, return_inverse=True)
    first: Longs = np.full(len(symbols), -1, dtype=np.int64)
    first[inside] = inside[places][number]
    return first


def _change(trace: Trace, i: int, match: int, first: Longs, known: NDArray[np.bool_], owner: Longs) -> Change | None:
    offset, length = int(trace.offsets[i]), int(trace.prompt_tokens[i])
    behind = known[offset + match : offset + length]
    covered = _covered(behind)
    if covered < _LEAST:
        return None
    starts = np.flatnonzero(behind & ~np.concatenate(([False], behind[:-1])))[:_TRIES]
    prompt = trace.prompt(i)
    for begin in starts.tolist():
        deeper = begin + _GRAM  # who was the first to have it is told by what stands well behind the change
        at = match + (deeper if deeper < len(behind) and behind[deeper] else begin)
        place = int(first[offset + at])
        source = int(owner[place])
        other, j = trace.prompt(source), place - int(trace.offsets[source])
        start = _common(prompt, other)
        back = _common(prompt[start:at][::-1], other[start:j][::-1]) if j > start else 0
        stop, before = at - back, max(j - back, start)
        same = _common(prompt[stop:], other[before:]) if j >= start else 0
        if same >= max(_LEAST, stop - start) and (stop > start or before > start):
            return Change(i, source, start, stop, before, same, covered)
    return None


def _covered(begins: NDArray[np.bool_]) -> int:
    """Tokens in stretches that begin at the places marked."""
    places = np.flatnonzero(begins)
    return int(np.minimum(np.diff(places, append=places[-1:] + _GRAM), _GRAM).sum()) if len(places) else 0


def _common(left: Ints, right: Ints) -> int:
    """With how many tokens both begin."""
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0]) if len(differ) else n
