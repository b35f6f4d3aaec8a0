"""Reading JSON with care: every value is asked for by name and kind, and what nobody asked for is an error.

Rejected: a schema library. The form is small, its errors must name scenario, step and key in the words of the form,
and `headway.conformance` should need nothing that `headway.cache` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ScenarioError

__all__ = ["Fields", "kind_of"]


def kind_of(value: object) -> str:
    """What JSON calls the kind of `value`."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int | float):
        return "a number"
    return "null" if value is None else "an object" if isinstance(value, Mapping) else "a list"


class Fields:
    """One JSON object that is being read.

    Attributes:
        where: The place in words, such as `scenario 'window-resume': step 3`; every message begins with it.
        left: Keys that nobody has asked for yet.
    """

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, Mapping):
            raise self.error(f"expected an object, got {kind_of(value)}")
        self._values: Mapping[str, Any] = value
        self.left = dict.fromkeys(str(key) for key in value)

    def error(self, message: str) -> ScenarioError:
        """An error at this place, for the caller to raise."""
        return ScenarioError(f"{self.where}: {message}")

    def has(self, key: str) -> bool:
        """Whether `key` is given."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value of `key` as it is; counts as asked for.

        Raises:
            ScenarioError: It is not given.
        """
        if key not in self._values:
            raise self.error(f"{key!r} is missing")
        self.left.pop(key, None)
        return self._values[key]

    def integer(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`; `default` (None: the key is required) where it is not given."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key!r} must be a whole number, got {kind_of(value)}")
        if value < least:
            raise self.error(f"{key!r} is {value}, it must be at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.raw(key) if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key!r} must be a number, got {kind_of(value)}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be a string, got {kind_of(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(key) if self.has(key) else default
        if not isinstance(value, bool):
            raise self.error(f"{key!r} must be true or false, got {kind_of(value)}")
        return value

    def items(self, key: str, required: bool = False) -> list[Any]:
        """A list, empty where it is not given and not required."""
        if not required and not self.has(key):
            return []
        value = self.raw(key)
        if not isinstance(value, list):
            raise self.error(f"{key!r} must be a list, got {kind_of(value)}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, none negative."""
        values = self.items(key)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.error(f"{key!r} must hold whole numbers that are not negative, got {value!r}")
        return tuple(values)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.items(key)
        for value in values:
            if not isinstance(value, str):
                raise self.error(f"{key!r} must hold strings, got {kind_of(value)}")
        return tuple(values)

    def child(self, key: str) -> Fields:
        """The object under `key`."""
        return Fields(self.raw(key), f"{self.where}: {key}")

    def done(self) -> None:
        """Refuse whatever nobody asked for.

        Raises:
            ScenarioError: Naming the unknown keys.
        """
        if self.left:
            names = ", ".join(repr(key) for key in self.left)
            raise self.error(f"unknown key{'s' if len(self.left) > 1 else ''} {names}")
