"""The command `headway report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.tell.comparison import compare
from headway.tell.page import write_report
from headway.tell.run import read_runs

__all__ = ["report"]


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
    write_report(compare(runs), html)
    Console(stderr=True).print(f"{len(runs)} runs are side by side in {html}", highlight=False)
