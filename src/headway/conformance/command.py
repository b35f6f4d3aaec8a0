"""`headway check`: run scenario files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.conformance.form import load
from headway.conformance.report import summary
from headway.conformance.runner import run

__all__ = ["check"]


def check(
    files: Annotated[
        list[Path],
        typer.Argument(help="Scenario files, or directories of them.", metavar="FILE", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per scenario.")] = False,
) -> None:
    """Run scenario files against the cache and compare its answers with theirs.

    Exits 1 where an answer is wrong, naming scenario, step, expected and actual; 2 where a file cannot be read.

    `headway check tests/conformance` runs every scenario of this project.
    """
    scenarios = [scenario for file in files for scenario in load(file)]
    reports = []
    for scenario in scenarios:
        report = run(scenario)
        reports.append(report)
        typer.echo(json.dumps(report.as_json()) if as_json else "\n".join(report.lines()))
    if not as_json:
        typer.echo(summary(reports))
    if not all(report.ok for report in reports):
        raise typer.Exit(1)
