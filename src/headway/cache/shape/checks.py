"""Checks of numbers that callers hand in: right type and range, or a typed error that says so."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.errors import ConfigError, LeaseError

__all__ = ["MOST_BLOCKS", "TokenIds", "check_float", "check_whole", "longs", "positions", "token_ids", "tokens"]

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids as callers have them: a list, a tuple, an `array.array`, a buffer (`memoryview`), an array of any width."""
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_smallest = np.minimum.reduce
_SMALL = 64
"""Numbers up to which lists are compared faster than arrays."""

MOST_BLOCKS = 2**31 - 1
"""Block ids are int32."""


def check_whole(name: str, value: object, low: int = 1, high: int = 2**62) -> None:
    """Refuse a setting that is not a whole number of [low, high].

    Raises:
        ConfigError: Names the setting.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, it must be a whole number")
    if value < low:
        least = f"at least {low}" if low else "zero or more: it must not be negative"
        raise ConfigError(f"{name} is {value}, it must be {least}")
    if value > high:
        raise ConfigError(f"{name} is {value}, it must be at most {high}")


def check_float(name: str, value: object, low: float, high: float) -> None:
    """Refuse a setting that is not a number of [low, high].

    Raises:
        ConfigError: Names the setting.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, it must be a number between {low:g} and {high:g}")


def _integers(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise LeaseError(f"{name} must be whole numbers: {error}") from None
    if array.dtype.kind not in "iu" and array.size:
        whole = array.ndim == 0  # numpy takes what it cannot go through (None, a set, a generator) as one object
        what = f"a sequence or an array of whole numbers, not a {type(values).__name__}"
        raise LeaseError(f"{name} must be {what if whole else f'whole numbers, not {array.dtype}'}")
    return array


def longs(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """`values` as int64.

    Raises:
        LeaseError: Anything but whole numbers.
    """
    array = _integers(name, values)
    if array.dtype is _INT64:
        return array
    if array.dtype.kind == "u" and array.size and array.max() > 2**62:
        raise LeaseError(f"{name} are too large: {array.max()}")
    return array.astype(np.int64, copy=False)


def tokens(name: str, values: ArrayLike) -> NDArray[np.int32]:
    """`values` as int32.

    Raises:
        LeaseError: Anything but whole numbers that fit.
    """
    array = _integers(name, values)
    ids = array.astype(np.int32, copy=False)
    same = ids is array or (ids.tolist() == array.tolist() if ids.size < _SMALL else bool((ids == array).all()))
    if not same:
        raise LeaseError(f"{name} must fit into 32 bits: [{array.min()}, {array.max()}]")
    return ids


def token_ids(name: str, values: TokenIds) -> tuple[bytes, NDArray[np.int32]]:
    """Token ids as the bytes of int32 [n] in the machine's order, the only copy that is made of them, and a view.

    Raises:
        LeaseError: Anything but whole numbers of [0, 2**31) in one dimension.
    """
    if isinstance(values, (list, tuple, range)):  # numpy would find out the type of every element first
        try:
            data = array("I", values).tobytes()  # "i" takes more than twice as long
        except TypeError as error:
            raise LeaseError(f"{name} must be whole numbers, in one dimension: {error}") from None
        except OverflowError:
            raise LeaseError(_outside(name, values)) from None
    else:
        ids = tokens(name, memoryview(values) if isinstance(values, bytes) else values)
        if ids.ndim != 1:
            raise LeaseError(f"{name} must have one dimension, not {ids.ndim}")
        data = ids.tobytes()
    view = np.frombuffer(data, _INT32)
    if data and _smallest(view) < 0:
        raise LeaseError(_outside(name, values))
    return data, view


def _outside(name: str, values: TokenIds) -> str:
    if min(values) < 0:
        return f"{name} must not be negative: only `PrefixCache.symbols` gives negative symbols, to media"
    return f"{name} must fit into 32 bits: [{min(values)}, {max(values)}]"


def positions(name: str, values: Iterable[int], high: int) -> tuple[int, ...]:
    """`values` as positions of [1, high].

    Raises:
        LeaseError: Names the first that is not one.
    """
    if isinstance(values, tuple) and not values:
        return ()
    try:
        marks = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise LeaseError(f"{name} must be a sequence of whole numbers: {error}") from None
    for mark in marks:
        if not 0 < mark <= high:
            raise LeaseError(f"{name} must lie in (0, {high}], the prompt: {mark}")
    return marks
