"""Prompts as the cache sees them: symbols, and what the caller wants of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache.shape import checks
from headway.errors import LeaseError

__all__ = ["Media", "Prompt", "Symbols"]

Ids = NDArray[np.int32]


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
    """Gives every media content its own negative symbol, so that equal placeholder ids are told apart."""

    def __init__(self) -> None:
        """Start with no content known."""
        self._known: dict[tuple[Hashable, int], int] = {}
        self._next = -1

    def apply(self, tokens: ArrayLike, media: Sequence[Media]) -> Ids:
        """A copy of `tokens` (int32 [n]) in which the placeholders of `media` are their contents' symbols.

        Raises:
            LeaseError: A negative token id, or a medium outside the tokens.
        """
        symbols = checks.tokens("tokens", tokens).copy()
        if len(symbols) and symbols.min() < 0:
            raise LeaseError(f"token ids must not be negative: {int(symbols.min())}")
        for item in media:
            if item.start < 0 or item.length < 1 or item.start + item.length > len(symbols):
                raise LeaseError(
                    f"media at [{item.start}, {item.start + item.length}) lies outside {len(symbols)} tokens"
                )
            key = (item.content, item.length)
            if key not in self._known:
                self._known[key], self._next = self._next, self._next - 1
            symbols[item.start : item.start + item.length] = self._known[key]
        return symbols

    def forget(self) -> None:
        """Forget all contents. Their symbols are never given out again, so what was made with them stays right."""
        self._known.clear()


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt and what is wanted of it.

    Attributes:
        tokens: int32 [n], n >= 1: token ids (not negative), or what `PrefixCache.symbols` made of them. Not copied: do
            not change it.
        namespace: From `PrefixCache.namespace`.
        boundaries: Positions where a message ends, as hints for checkpoints.
        breakpoints: Positions that must get a checkpoint.
        pin: Protect that many first tokens from eviction for a while; 0 for none.
        no_store: Reuse what is there, leave nothing behind.
    """

    tokens: Ids
    namespace: int = 0
    boundaries: Sequence[int] = ()
    breakpoints: Sequence[int] = ()
    pin: int = 0
    no_store: bool = False
    pin_seconds: float | None = None

    @cached_property
    def data(self) -> bytes:
        """The tokens as bytes."""
        return self.tokens.tobytes()

    def __post_init__(self) -> None:
        """Convert and check.

        Raises:
            LeaseError: An empty prompt, or marks outside of it.
        """
        tokens = checks.tokens("tokens", self.tokens)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise LeaseError("a prompt needs at least one token, as a one-dimensional array")
        object.__setattr__(self, "tokens", np.ascontiguousarray(tokens))
        for name in ("boundaries", "breakpoints"):
            if not isinstance(getattr(self, name), tuple) or getattr(self, name):
                object.__setattr__(self, name, checks.positions(name, getattr(self, name), len(tokens)))
        for name in ("pin", "namespace"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise LeaseError(f"{name} is {value!r}, it must be a whole number and not negative")
