"""Commands whose options are the fields of records."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headway.errors import ConfigError
from headway.option_records import Written, _with_flags, with_records
from headway.sizes import parse_bytes


@dataclass(frozen=True)
class Where:
    host: Annotated[str, typer.Option(help="Where to go.")] = "here"
    port: Annotated[int, typer.Option(min=1)] = 7


@dataclass(frozen=True)
class Load:
    weight: Annotated[int | None, typer.Option(help="What it weighs."), Written(parse_bytes)] = None
    parts: Annotated[tuple[str, ...], typer.Option(), Written(lambda text: tuple(text.split("+")), "+".join)] = (
        "head",
        "tail",
    )


@dataclass(frozen=True)
class How:
    fast: Annotated[bool, typer.Option(help="Hurry.")] = False
    load: Load = field(default_factory=Load)
    what: str = "not an option of this record"


@with_records
def go(where: Where, how: How, what: Annotated[str | None, typer.Argument()] = None) -> None:
    """Go somewhere."""
    print(where, how, what)


def run(*arguments: str) -> str:
    app = typer.Typer(add_completion=False)
    app.command()(go)
    result = CliRunner().invoke(app, arguments)
    return result.output.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), f"{Where()} {How()} None"),
        (("--port", "9", "--fast", "it"), f"{Where(port=9)} {How(fast=True)} it"),
        (("--host", "there"), f"{Where(host='there')} {How()} None"),
        (("--weight", "2k", "--parts", "a+b"), f"{Where()} {How(load=Load(2000, ('a', 'b')))} None"),
    ],
)
def test_options_arrive_in_their_records(arguments: tuple[str, ...], said: str) -> None:
    assert run(*arguments) == said


def test_settings_inside_a_preset_keep_their_names() -> None:
    parameters = [*signature(go).parameters.values()]
    assert _with_flags("port=9 is taken", parameters) == "--port 9 is taken"
    assert _with_flags("port=9: preset vllm: port=9 is taken", parameters) == "--port 9: preset vllm: port=9 is taken"


def test_help_is_that_of_the_command_and_of_the_fields() -> None:
    said = run("--help")
    for words in ("Go somewhere.", "Where to go.", "Hurry.", "--port", "--fast"):
        assert words in said


def test_what_is_written_as_text_shows_its_default_so_and_refuses_by_its_own_words() -> None:
    assert "[default: head+tail]" in run("--help")
    app = typer.Typer(add_completion=False)
    app.command()(go)
    refused = CliRunner().invoke(app, ["--weight", "much"])
    assert isinstance(refused.exception, ConfigError)
    assert "'much' is not a size" in str(refused.exception)


def test_limits_of_a_field_hold() -> None:
    assert "--port" in run("--port", "0")
    assert "Where(" not in run("--port", "0")
