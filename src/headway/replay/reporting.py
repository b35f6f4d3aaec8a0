"""The command `headway report`, and writing a report for other commands."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.errors import ConfigError
from headway.replay.readers.lines import records
from headway.replay.record import RunRecord

__all__ = ["read_runs", "report", "require_report", "write_report"]


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files that `headway replay --json` printed, or runs.jsonl of a sweep.")
    ],
    html: Annotated[Path, typer.Option("--html", help="The page to write.")] = Path("headway-report.html"),
) -> None:
    """Make one page with figures from the results of several replays, side by side.

    For example:

        headway replay trace.jsonl --model kimi-k3 --tp 8 --memory 20GB --json > before.json

        headway replay trace.jsonl --model kimi-k3 --tp 8 --dcp 8 --memory 20GB --json > after.json

        headway report before.json after.json --html report.html

    The page is one file without scripts. It needs the extra `report`: pip install 'headway[report]'.
    """
    runs = [run for path in results for run in read_runs(path)]
    write_report(runs, html)
    Console(stderr=True).print(f"{len(runs)} runs are side by side in {html}", highlight=False)


def read_runs(path: Path) -> list[RunRecord]:
    """The runs of a file: one JSON object, or one a line.

    Raises:
        TraceError: Something else; names the file and the field.
    """
    found = []
    for line in records(path):
        fields: dict[str, Any] = line.fields
        found.append(RunRecord.from_dict(fields.get("run", fields), line.where))
    return found


def require_report(path: Path) -> None:
    """Notice before a long run that its report could not be written.

    Raises:
        ConfigError: There is no such folder, or the path is one.
        ModuleNotFoundError: Without the extra `report`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a report needs matplotlib", name="matplotlib")
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"cannot write {path}: {wrong}")


def write_report(
    runs: Sequence[RunRecord], path: Path, *, names: Sequence[str] | None = None, focus: int | None = None
) -> None:
    """Write a page about `runs`, whole or not at all; `names` and `focus` as for `report_page`.

    Raises:
        ConfigError: The file cannot be written.
        ModuleNotFoundError: Without the extra `report`.
    """
    from headway.replay.report import report_page  # it imports matplotlib, which only reports need

    text = report_page(runs, names=names, focus=focus)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
