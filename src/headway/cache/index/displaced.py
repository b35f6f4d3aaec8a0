"""Text that is known and stands behind another text than before: a clock, a counter, a request id in front of it.

Such tokens match nothing, because a prefix ends where it first differs; yet the same prompt with the changing text
behind them would reuse them. Only an explanation asks for this, never a lookup or a lease: known sequences that part
from the prompt near the place where it parts are laid beside it. The tree has their tokens, so nothing more is kept,
and every token that is claimed to be the same has been compared.

Rejected: digests of content-defined chunks beside the tree. They would find text that moved any distance, at the price
of a pass over every prompt, of memory, and of a claim that must be verified against the tree anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headway.cache.index.edge import Edge, Match
from headway.cache.index.tree import PrefixTree, common_prefix
from headway.sizes import counted

__all__ = ["Displaced", "find_displaced"]

_BACK = 64
"""Tokens before the place where a prompt parts from the last known sequence, in which it may have left another one."""
_REACH = 512
"""Tokens of the prompt and of known sequences, from there on, among which the same text is looked for."""
_GRAM = 16
"""Tokens that are looked up at once: any `2 * _GRAM - 1` tokens in common within reach are found."""
_EDGES = 128
"""Edges that are looked at, the latest branches first."""


class Displaced(NamedTuple):
    """Known tokens that a small change in front of them keeps from being reused.

    The prompt's tokens [stop, stop + tokens) stand in a known sequence which begins with the same `start` tokens and
    goes on with `before` other tokens, where the prompt has [start, stop).

    Attributes:
        start: First token of the change.
        stop: Token after its last; `start` where the prompt lacks something.
        before: Tokens that the known sequence has instead.
        tokens: Tokens behind the change that are the same.
    """

    start: int
    stop: int
    before: int
    tokens: int

    def __str__(self) -> str:
        """As a sentence."""
        change = f"changed in [{self.start:,}, {self.stop:,})" if self.stop > self.start else f"cut at {self.start:,}"
        return f"{change}; {counted(self.tokens, 'token')} behind are the same as before"


def find_displaced(tree: PrefixTree, at: Match, data: bytes) -> Displaced | None:
    """Known text that follows a change near `at`, where the prompt `data` parts from what is known. Pure.

    Of several changes the one without which most of the prompt would match. None where there is none, where the text
    is shorter than the change, or where less than `2 * _GRAM` tokens of it lie beyond what matches as it is. O(edges
    looked at), at most `_EDGES` and their first `_REACH` tokens.
    """
    base = max(0, at.position - _BACK)
    rest = data[4 * base :]
    head = rest[: 4 * (_REACH + _GRAM)]
    places = {head[4 * i : 4 * (i + _GRAM)]: i for i in range(len(head) // 4 - _GRAM, -1, -1)}
    best: Displaced | None = None
    for edge, known, j in _sequences(at, base) if places else ():
        while j + _GRAM <= len(known) // 4:
            gram = known[4 * j : 4 * (j + _GRAM)]
            i = j if head[4 * j : 4 * (j + _GRAM)] == gram else places.get(gram)
            j += _GRAM
            if i is not None:
                ours, theirs = _first(head, i, known, j - _GRAM)
                same = _follow(tree, edge, base + theirs, rest[4 * ours :])
                if base + ours + same >= at.position + 2 * _GRAM:
                    best = _better(best, base, head[: 4 * ours], known[: 4 * theirs], same)
                j = max(j, -(-(theirs + same) // _GRAM) * _GRAM)
    return best


def _better(best: Displaced | None, base: int, ours: bytes, theirs: bytes, same: int) -> Displaced | None:
    """The better of `best` and what is found where `same` known tokens follow `ours`, as they did `theirs`."""
    if same < 2 * _GRAM or (best and base + len(ours) // 4 + same < best.start + best.tokens):
        return best
    start = common_prefix(np.frombuffer(ours, np.int32), np.frombuffer(theirs, np.int32))
    found = Displaced(base + start, base + len(ours) // 4, len(theirs) // 4 - start, same)
    change = max(found.stop - found.start, found.before)
    if not 0 < change <= same:
        return best
    return found if best is None else max(best, found, key=lambda one: (one.start + one.tokens, one.start))


def _sequences(at: Match, base: int) -> Iterator[tuple[Edge, bytes, int]]:
    """Known sequences from position `base` of the path to `at` on, edge by edge, the latest branches first.

    Yields:
        An edge, the tokens of its path from `base` to its end (not beyond reach), and where among these its own grams
        begin: those of the edges above have been told.
    """
    top = at.edge.edge_at(base) if base else at.edge.root()
    stack, limit = [(top, b"")], _REACH + _GRAM
    for _ in range(_EDGES):
        if not stack:
            return
        edge, above = stack.pop()
        length = len(above) // 4
        skip = base + length - edge.start
        known = above + edge.text[skip : skip + limit - length].tobytes()
        yield edge, known, length // _GRAM * _GRAM
        if len(known) < 4 * limit:
            stack += [(child, known) for child in edge.children.values()]


def _first(head: bytes, i: int, known: bytes, j: int) -> tuple[int, int]:
    """Where the text that stands at token `i` of `head` and at `j` of `known` begins in both."""
    while i and j and head[4 * i - 4 : 4 * i] == known[4 * j - 4 : 4 * j]:
        i, j = i - 1, j - 1
    return i, j


def _follow(tree: PrefixTree, edge: Edge, position: int, data: bytes) -> int:
    """How many tokens of `data` are known from `position` of the path through `edge` on."""
    if position > edge.end:
        return 0
    place = Match(edge.edge_at(position) if position else edge.root(), position)
    return tree.follow(place, data).position - position
