"""Prompts as the cache sees them: symbols, and what the caller wants of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache.shape import checks
from headway.cache.shape.checks import TokenIds
from headway.cache.shape.symbols import Symbols
from headway.errors import LeaseError

__all__ = ["Prompt"]


@dataclass(frozen=True, eq=False, init=False, slots=True)
class Prompt:
    """A prompt and what is wanted of it. It owns its tokens: what the caller does with theirs later is no matter.

    Attributes:
        tokens: int32 [n], n >= 1, read-only: token ids, negative where a medium is (see `PrefixCache.symbols`).
        namespace: From `PrefixCache.namespace`.
        boundaries: Positions where a message ends, as hints for checkpoints.
        breakpoints: Positions that must get a checkpoint.
        pin: Protect that many first tokens from eviction for a while; 0 for none.
        no_store: Reuse what is there, leave nothing behind.
        pin_seconds: For how long to pin; None for what the cache's configuration says.
        data: The bytes of `tokens`.
        owner: Whose symbols are among the tokens, None if there are none.
    """

    tokens: NDArray[np.int32]
    namespace: int
    boundaries: tuple[int, ...]
    breakpoints: tuple[int, ...]
    pin: int
    no_store: bool
    pin_seconds: float | None
    data: bytes = field(repr=False)
    owner: object | None = field(repr=False)

    def __init__(
        self,
        tokens: TokenIds | Symbols,
        namespace: int = 0,
        boundaries: Sequence[int] = (),
        breakpoints: Sequence[int] = (),
        pin: int = 0,
        no_store: bool = False,
        pin_seconds: float | None = None,
    ) -> None:
        """Convert and check.

        `tokens` are token ids, not negative and below 2**31: a sequence of ints, a buffer or an array of one dimension,
        copied once; or what `PrefixCache.symbols` made of them. The rest is described above.

        Raises:
            LeaseError: No tokens, what is no token id, marks outside of the prompt, a time to live out of range.
        """
        owner = None
        if isinstance(tokens, Symbols):
            data, view, owner = tokens.data, tokens.tokens, tokens.owner
        else:
            data, view = checks.token_ids("tokens", tokens)
        if not data:
            raise LeaseError("a prompt needs at least one token")
        _check_natural("namespace", namespace)
        _check_natural("pin", pin)
        if pin_seconds is not None:
            _check_seconds("pin_seconds", pin_seconds)
        ends = checks.positions("boundaries", boundaries, len(view))
        marks = checks.positions("breakpoints", breakpoints, len(view))
        values = (view, namespace, ends, marks, pin, no_store, pin_seconds, data, owner)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)


def _check_natural(name: str, value: object) -> None:
    """Refuse what is not a whole number of zero or more.

    Raises:
        LeaseError: Names it.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LeaseError(f"{name} is {value!r}, it must be a whole number and not negative")


def _check_seconds(name: str, value: object) -> None:
    """Refuse what is no time span of more than nothing and less than for ever.

    Raises:
        LeaseError: Names it.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e12:
        raise LeaseError(f"{name} is {value!r}, it must be a number of seconds above zero, or None")
