"""Commands whose options are the fields of records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headway.option_records import with_records


@dataclass(frozen=True)
class Where:
    host: Annotated[str, typer.Option(help="Where to go.")] = "here"
    port: Annotated[int, typer.Option(min=1)] = 7


@dataclass(frozen=True)
class How:
    fast: Annotated[bool, typer.Option(help="Hurry.")] = False


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
    ],
)
def test_options_arrive_in_their_records(arguments: tuple[str, ...], said: str) -> None:
    assert run(*arguments) == said


def test_help_is_that_of_the_command_and_of_the_fields() -> None:
    said = run("--help")
    for words in ("Go somewhere.", "Where to go.", "Hurry.", "--port", "--fast"):
        assert words in said


def test_limits_of_a_field_hold() -> None:
    assert "--port" in run("--port", "0")
    assert "Where(" not in run("--port", "0")
