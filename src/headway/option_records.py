"""Commands whose options are the fields of records.

A command with thirty options is a function with thirty parameters, which nobody reads. Here the options that belong
together are a frozen dataclass, whose fields carry typer's annotations, and the command takes a few of these records.
Where the record is the one that the code behind the command takes anyway, each option is told once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from headway.errors import ConfigError

__all__ = ["Written", "option", "with_records"]


@dataclass(frozen=True)
class Written:
    """Annotation of a field whose value is written as text on a command line.

    Attributes:
        read: From the text to the value; may raise `ConfigError`.
        write: From the default value to the text that stands for it.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """A typer option with its help text, in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function that takes records into a command that takes their fields.

    Args:
        command: Its parameters are annotated with typer's types, or with dataclasses. Of these, fields with a typer
            annotation are options and have plain defaults, fields that are dataclasses are taken apart likewise, and
            all others keep their defaults. No name may occur twice. A `ConfigError` names flags instead of fields.
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
        try:
            made = {name: _made(record, given) for name, record in records.items()}
            inside = {parameter.name for record in records.values() for parameter in _parameters(record)}
            command(**{name: value for name, value in given.items() if name not in inside}, **made)
        except ConfigError as error:
            raise ConfigError(_with_flags(str(error), parameters)) from error

    spread.__name__, spread.__doc__, spread.__module__ = command.__name__, command.__doc__, command.__module__
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread


def _with_flags(message: str, parameters: Sequence[inspect.Parameter]) -> str:
    """A message about fields, in the words of a command line: `block_tokens=3` is `--block-tokens 3` there.

    Settings of a preset stay: they are written inside `--preset` by their names.
    """
    message, *preset = re.split(r"(?=\bpreset [a-z])", message, maxsplit=1)
    for parameter in parameters:
        info, name = _note(parameter.annotation, ParameterInfo), parameter.name
        if isinstance(info, OptionInfo):
            flag = next(iter(info.param_decls or ()), f"--{name.replace('_', '-')}")
            message = re.sub(rf"(?<![\w.-]){name}=(?=\S)", f"{flag} ", message)
            message = re.sub(rf"^{name}(?= is )" if "_" not in name else rf"(?<![\w.-]){name}\b", flag, message)
    return message + "".join(preset)


def _parameters(record: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _parameters(hint)  # type: ignore[arg-type]
        elif (info := _note(hint, ParameterInfo)) is not None:
            default = _default(field)
            if (written := _note(hint, Written)) is not None:
                hint = Annotated[str | None, info]
                default = None if default is None else written.write(default)
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _note(hint: Any, kind: type) -> Any:
    """The annotation of a type hint that is of a kind, or None."""
    return next((note for note in get_args(hint)[1:] if isinstance(note, kind)), None)


def _default(field: Field[Any]) -> Any:
    assert field.default is not MISSING, f"{field.name} is an option, it needs a default"
    return field.default


def _made(record: type, given: Mapping[str, Any]) -> Any:
    hints, values = get_type_hints(record, include_extras=True), {}
    for name in (field.name for field in fields(record)):
        if is_dataclass(hints[name]):
            values[name] = _made(hints[name], given)
        elif _note(hints[name], ParameterInfo) is not None:
            written, value = _note(hints[name], Written), given[name]
            values[name] = value if written is None or value is None else written.read(value)
    return record(**values)
