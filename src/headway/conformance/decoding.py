"""JSON values as records, by msgspec, and what is wrong with them in the words of the form.

What nobody asked for is an error: a misspelt key must not become an expectation that is silently not tested.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from headway.errors import ScenarioError

__all__ = ["Form", "Natural", "Positive", "convert", "made"]

T = TypeVar("T")
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object whose keys are the fields."""


def convert(value: object, kind: type[T], where: str) -> T:
    """The record that `value` is.

    Args:
        value: What JSON says.
        kind: The record.
        where: The place in words, such as `scenario 'window-resume': step 3`; the message begins with it.

    Raises:
        ScenarioError: It is not of that form.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{where}: {_in_words(str(error), value, kind)}") from None


def made(value: object, kind: Callable[..., T], where: str, **other: Any) -> T:
    """An instance of a dataclass from a JSON object of its fields; those of `other` are of another type there.

    Raises:
        ScenarioError: It is not of that form.
        Exception: Whatever the dataclass says of its values.
    """
    hints = get_type_hints(kind)
    known: list[Any] = [
        (
            field.name,
            other.get(field.name, hints[field.name]),
            msgspec.field() if field.default is field.default_factory is MISSING else msgspec.UNSET,
        )
        for field in fields(kind)  # type: ignore[arg-type]
    ]
    form = msgspec.defstruct(kind.__name__, known, kw_only=True, forbid_unknown_fields=True)
    given = msgspec.structs.asdict(convert(value, form, where))
    return kind(**{key: item for key, item in given.items() if item is not msgspec.UNSET})


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""What msgspec calls a kind of value that is expected, and what the form calls it."""


def _in_words(fault: str, value: object, kind: Any) -> str:
    what, _, path = fault.partition(" - at `$")
    path, inside = path.removesuffix("`"), value
    key = path.lstrip(".")
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        inside = inside[name or int(index)]  # type: ignore[index]
    if (unknown := re.match(r"Object contains unknown field `(.*)`", what)) is not None:
        if key:
            return f"{key}: unknown key {unknown[1]!r}"
        required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
        missing = [f"; {name!r} is missing" for name in sorted(required) if name not in value]  # type: ignore[operator]
        return f"unknown key {unknown[1]!r}{''.join(missing)}"
    if (lacking := re.match(r"Object missing required field `(.*)`", what)) is not None:
        return f"{key}: {lacking[1]!r} is missing" if key else f"{lacking[1]!r} is missing"
    subject = f"{key!r} " if key else ""
    if (least := re.match(r"Expected `int` >= (\d+)", what)) is not None:
        return f"{subject}is {inside}, it must be at least {least[1]}"
    if (kinds := re.match(r"Expected `(\w+)(?: \| null)?`, got `(\w+)`", what)) is not None:
        got = "a boolean" if isinstance(inside, bool) else _KINDS.get(kinds[2], kinds[2])
        right = _KINDS.get(kinds[1], kinds[1])
        return f"{key!r} must be {right}, got {got}" if key else f"expected {right}, got {got}"
    return f"{subject}{what[:1].lower()}{what[1:]}"
