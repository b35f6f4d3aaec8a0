"""The command line: `headway serve`, `check`, `bench`, `inspect`, `replay` and more.

A command is a plain function with typer annotations in the package it belongs to. The table `COMMANDS` names
it, and its module is imported when the command runs or shows its own help, not before: importing torch takes
seconds, and `headway --version` must not wait for it, nor fail where the extra `serve` is not installed.

Exit codes: 0 it worked; 1 it failed; 2 what was asked for cannot work as it was asked (an unknown option, a
layout that contradicts itself, a file or a model that is not there or cannot be read, an extra that is not installed).
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from headway import __version__
from headway.errors import ConfigError, HeadwayError, ModelError, ScenarioError, TraceError

__all__ = ["COMMANDS", "LazyCommand", "LazyGroup", "app", "main"]


@dataclass(frozen=True)
class LazyCommand:
    """Where a command's function is, and the line about it that `headway --help` shows.

    Attributes:
        target: `module:function`. The function's docstring is the help text of the command. Or `module:app`, a typer
            application with commands of its own.
        summary: one line; it must not need the module.
    """

    target: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function, or the application."""
        module, _, function = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return loaded


COMMANDS: dict[str, LazyCommand] = {
    "serve": LazyCommand(
        "headway.server.command:serve",
        "Serve a model over the APIs of OpenAI and Anthropic, reusing all that it has computed.",
    ),
    "check": LazyCommand(
        "headway.conformance.command:check", "Run scenarios that say what the cache must answer, and compare."
    ),
    "bench": LazyCommand("headway.bench.command:bench", "Measure what each operation of the cache costs here."),
    "inspect": LazyCommand(
        "headway.runtime.command:inspect", "Show a model's layer kinds, groups, geometry, bytes and capacity."
    ),
    "tiers": LazyCommand(
        "headway.tiers.command:app", "Look into a disk tier or a shared store, check it, and empty it."
    ),
    "replay": LazyCommand(
        "headway.replay.ask.replay:replay", "Replay a request trace: what hit rate to expect, and where the tokens go."
    ),
    "sweep": LazyCommand(
        "headway.replay.ask.sweep:sweep", "Replay a trace under every combination of settings, side by side."
    ),
    "advise": LazyCommand(
        "headway.replay.ask.advise:advise", "Say what to set for a trace and a model, and what it gains."
    ),
    "lint": LazyCommand(
        "headway.replay.ask.lint:lint", "Find what in prompts keeps known text from being reused, and what it costs."
    ),
    "explain": LazyCommand(
        "headway.replay.ask.explain:explain", "Follow one request of a trace through the cache, and say why."
    ),
    "incident": LazyCommand(
        "headway.incident.command:incident", "Re-enact how a prefix cache lost its hits, and what brings them back."
    ),
    "report": LazyCommand(
        "headway.tell.command:report", "Make one page with figures from the results of several replays."
    ),
}
"""Every command by name. Adding a line here is all that registering a command takes."""

_EXTRAS = {
    "serve": (
        "fastapi",
        "huggingface_hub",
        "jinja2",
        "prometheus_client",
        "pythonjsonlogger",
        "safetensors",
        "torch",
        "transformers",
        "uvicorn",
    ),
    "report": ("matplotlib",),
    "ray": ("ray",),
}


class LazyGroup(TyperGroup):
    """A group that lists summaries, and imports a command only to run it or to show its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command as usual, then put the loaded one in the place of its stand-in."""
        name, found, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            loader = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            loaded = COMMANDS[name].load()
            if isinstance(loaded, typer.Typer):
                return name, typer.main.get_command(loaded), rest
            loader.command(name)(loaded)
            return name, typer.main.get_command(loader), rest
        return name, found, rest


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Keep what a hybrid language model has computed, and start every request as far along as that allows.

    - `headway serve` runs the small built-in model on http://127.0.0.1:8000, with no download

    - `headway serve PATH_OR_HUB_ID` runs yours

    - `headway inspect PATH_OR_HUB_ID` says beforehand how much memory its cache needs, and how many tokens a
      prefix must have to be reused

    - `headway COMMAND --help` explains a command and its options

    An error is one line. Set `HEADWAY_DEBUG=1` to see where it came from. The exit status is 1 if the work failed, and
    2 if it cannot be done as it was asked for: a wrong option, or a file or a model that cannot be read.
    """


def _build_app() -> typer.Typer:
    built = typer.Typer(
        cls=LazyGroup, add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", callback=_root
    )
    for name, command in COMMANDS.items():
        built.command(name, help=command.summary)(_stand_in)
    return built


def _stand_in() -> NoReturn:
    raise AssertionError("LazyGroup runs the loaded command, not its stand-in")


app = _build_app()
"""The typer application. Run it through `main`, which turns errors into lines."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: what follows `headway`; the process's own arguments by default.

    Raises:
        SystemExit: always, with the exit code.
        Exception: a fault of our own, as it is; with `HEADWAY_DEBUG=1` every error, as it is.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        typer.main.get_command(app).main(args=given, prog_name="headway")
    except (HeadwayError, ModuleNotFoundError) as error:
        told = None if _debugging() else _explain(error, given)
        if told is None:
            raise
        line, code = told
        typer.secho(line, fg=typer.colors.RED, err=True)
        sys.exit(code)
    sys.exit(0)


_ASKED_WRONGLY = (ConfigError, ScenarioError, TraceError, ModelError)


def _debugging() -> bool:
    return os.environ.get("HEADWAY_DEBUG", "0") not in ("", "0")


def _explain(error: HeadwayError | ModuleNotFoundError, given: Sequence[str]) -> tuple[str, int] | None:
    """Return the line and the exit code that tell a user about an error, or None for a fault of our own."""
    if isinstance(error, HeadwayError):
        return f"headway: {error}", 2 if isinstance(error, _ASKED_WRONGLY) else 1
    missing = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if missing in modules), None)
    if extra is None:
        return None
    command = next((f"headway {word}" for word in given if word in COMMANDS), "headway")
    return f"{command} needs the {extra} extra: pip install 'headway[{extra}]'", 2
