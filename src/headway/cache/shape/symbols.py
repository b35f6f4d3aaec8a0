"""Symbols: token ids, and negative numbers in the place of what ids do not tell apart.

The placeholders of all images have one token id. Every content gets a symbol of its own, so that equal contents share
and different ones part. A symbol means a content to one cache only, and is never given to another content: so symbols
come from that cache alone (`PrefixCache.symbols`), carry whose they are, and a plain sequence with a negative id is
refused. Rejected: a hash of the content as the symbol, which needs no table, but two contents can collide in 31 bits.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache.shape import checks
from headway.cache.shape.checks import TokenIds
from headway.errors import LeaseError
from headway.sizes import counted

__all__ = ["Media", "SymbolTable", "Symbols"]

_MOST_CONTENTS = 65_536
_BYTES_EACH = 400
"""Of a content known, apart from the object that the caller gave: a dictionary entry, a link, two tuples, two ints."""


@dataclass(frozen=True)
class Media:
    """A run of placeholder tokens that stand for an image, a sound or another content.

    Attributes:
        start: Position of the first placeholder.
        length: How many.
        content: Identity of the content, a digest for example; equal contents share, different ones never do.
    """

    start: int
    length: int
    content: Hashable


class Symbols:
    """Token ids with symbols of media among them. Immutable; made by `PrefixCache.symbols`.

    Attributes:
        data: The symbols as bytes, int32 in the machine's order.
        owner: Whose symbols they are, None if there are none among them.
    """

    __slots__ = ("data", "owner")

    def __init__(self, data: bytes, owner: object | None) -> None:
        """For a cache's own use."""
        self.data = data
        self.owner = owner

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n], read-only; negative where a medium is."""
        return np.frombuffer(self.data, dtype=np.int32)

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.data) // 4

    def __getitem__(self, part: slice) -> Symbols:
        """A stretch of them."""
        return Symbols(self.tokens[part].tobytes(), self.owner)

    def followed_by(self, tokens: TokenIds | Symbols) -> Symbols:
        """These and then `tokens`, such as an answer.

        Raises:
            LeaseError: No token ids, or another cache's symbols.
        """
        more = tokens if isinstance(tokens, Symbols) else Symbols(checks.token_ids("tokens", tokens)[0], None)
        if self.owner and more.owner and self.owner is not more.owner:
            raise LeaseError("symbols of two caches do not mix: ask one cache for both")
        return Symbols(self.data + more.data, self.owner or more.owner)

    def __repr__(self) -> str:
        """The numbers."""
        return f"Symbols({self.tokens})"


class SymbolTable:
    """Gives every media content its own negative symbol.

    The contents used least recently are forgotten beyond a bound: they get a new symbol when they come again, which is
    a miss and never a wrong hit.

    Attributes:
        owner: Marks the symbols of this table.
        nbytes: Bytes that it takes, estimated.
    """

    def __init__(self, most: int = _MOST_CONTENTS) -> None:
        """Know no content yet, and never more than `most`."""
        self.owner = object()
        self.nbytes = 0
        self._most = most
        self._known: OrderedDict[tuple[Hashable, int], int] = OrderedDict()
        self._next = -1

    @property
    def limit(self) -> int:
        """Bytes that it can take at most, if contents are no larger than those of now."""
        return max(self.nbytes, self._most * _BYTES_EACH)

    def apply(self, tokens: TokenIds, media: Sequence[Media]) -> Symbols:
        """`tokens` with the placeholders of `media` replaced by their contents' symbols.

        Raises:
            LeaseError: No token ids, or media that overlap, lie outside the tokens or are not hashable.
        """
        data, ids = checks.token_ids("tokens", tokens)
        if not media:
            return Symbols(data, None)
        symbols, end = ids.copy(), 0
        for item in sorted(media, key=lambda medium: getattr(medium, "start", 0)):
            given: object = item
            if not isinstance(given, Media) or not type(item.start) is type(item.length) is int:
                raise LeaseError(f"media must be Media(start, length, content) with whole numbers, not {item!r}")
            stop = item.start + item.length
            if item.start < 0 or item.length < 1 or stop > len(symbols):
                raise LeaseError(f"media at [{item.start}, {stop}) lies outside {counted(len(symbols), 'token')}")
            if item.start < end:
                raise LeaseError(f"media at [{item.start}, {stop}) overlaps another that ends at {end}")
            symbols[item.start : stop] = self._symbol(item.content, item.length)
            end = stop
        return Symbols(symbols.tobytes(), self.owner)

    def _symbol(self, content: Hashable, length: int) -> int:
        key = (content, length)
        try:
            symbol = self._known.get(key)
        except TypeError as error:
            raise LeaseError(f"the content of a medium must be hashable, such as a digest: {error}") from None
        if symbol is None:
            symbol = self._known[key] = self._next
            self._next -= 1
            self.nbytes += _BYTES_EACH + sys.getsizeof(content)
            if len(self._known) > self._most:
                (forgotten, _), _ = self._known.popitem(last=False)
                self.nbytes -= _BYTES_EACH + sys.getsizeof(forgotten)
        else:
            self._known.move_to_end(key)
        return symbol

    def forget(self) -> None:
        """Forget all contents. Their symbols are never given out again, so what was made with them stays right."""
        self._known.clear()
        self.nbytes = 0
