"""Commands whose options are the fields of records.

A command with thirty options is a function with thirty parameters, which nobody reads. Here the options that belong
together are a frozen dataclass, whose fields carry typer's annotations, and the command takes a few of these records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["with_records"]


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function that takes records into a command that takes their fields.

    Args:
        command: Its parameters are annotated with typer's types, or with dataclasses whose fields are so annotated and
            all have plain defaults. No name may occur twice.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    records: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            records[name] = hints[name]
            parameters += _parameters(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def spread(**given: Any) -> None:
        made = {name: record(**_taken(record, given)) for name, record in records.items()}
        inside = {field.name for record in records.values() for field in fields(record)}
        command(**{name: value for name, value in given.items() if name not in inside}, **made)

    spread.__name__, spread.__doc__, spread.__module__ = command.__name__, command.__doc__, command.__module__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread


def _parameters(record: type) -> list[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, keyword, default=_default(f), annotation=hints[f.name]) for f in fields(record)]


def _default(field: Field[Any]) -> Any:
    assert field.default is not MISSING, f"{field.name} is an option, it needs a default"
    return field.default


def _taken(record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in fields(record)}
