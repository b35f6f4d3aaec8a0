"""What bodies of requests are made of: records that keep the fields that they do not know, so that these can be told.

A field that cannot change the answer is no reason to refuse a request: many clients send some with every request, and
cannot be told not to. So what a record does not know is taken, left alone, and told in the answer and once in the log;
with `--strict` only what is known to change nothing is taken, and a misspelt field is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator

__all__ = ["Record", "ignored_fields", "type_discriminator", "unknown_field"]

_MOST_TOLD = 32
"""Ignored fields that an answer names."""


class Record(BaseModel):
    """A part of a body.

    Attributes:
        HINTS: Fields that cannot change an answer: taken, and told as ignored.
        SILENT: Fields that clients send back with what servers gave them: taken without a word.
        CLOSED: Whether every field that it does not know is refused.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    HINTS: ClassVar[Collection[str]] = ()
    SILENT: ClassVar[frozenset[str]] = frozenset()
    CLOSED: ClassVar[bool] = False


def type_discriminator(kinds: Collection[str], default: str) -> Discriminator:
    """By `type`, with the tags `<KIND>` of a union; records of other types are of the `default` kind."""

    def tag(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"<{kind if kind in kinds else default}>"

    return Discriminator(tag)


def ignored_fields(record: Record) -> list[str]:
    """Paths of the fields that a body has and that are ignored, such as `messages[].mood`; each once."""
    found = dict.fromkeys(re.sub(r"\[\d+\]", "[]", path) for path, _, _ in _extras(record, ""))
    told = list(found)[:_MOST_TOLD]
    return told if len(found) <= _MOST_TOLD else [*told, f"and {len(found) - _MOST_TOLD} more"]


def unknown_field(record: Record, *, strict: bool) -> tuple[str, type[Record]] | None:
    """The first field that must be refused: its path, and the record that it is not a field of."""
    return next(
        ((path, type(at)) for path, name, at in _extras(record, "") if at.CLOSED or (strict and name not in at.HINTS)),
        None,
    )


def _extras(record: Record, path: str) -> Iterator[tuple[str, str, Record]]:
    """What `record` and its parts do not know: path, name, and the record; what holds nothing asks for nothing."""
    for name, value in (record.model_extra or {}).items():
        if name not in record.SILENT and (record.CLOSED or value not in (None, False, "", [], {})):
            yield f"{path}.{name}" if path else name, name, record
    for name, value in record.__dict__.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(value, Record):
            yield from _extras(value, inner)
        elif isinstance(value, list):
            yield from _extras_of_list(value, inner)


def _extras_of_list(values: Iterable[Any], path: str) -> Iterator[tuple[str, str, Record]]:
    for i, value in enumerate(values):
        if not isinstance(value, Record):
            return  # token ids, or texts
        yield from _extras(value, f"{path}[{i}]")
