"""The command `headway bench`."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headway.bench.measure import Figure, measure
from headway.bench.moves import measure_moves
from headway.bench.workloads import all_cases

__all__ = ["bench"]

_ROUNDS = 6


def bench(
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    quick: Annotated[
        bool,
        typer.Option(help="Only 1K and 128K tokens, 800 branch points, 10,000 checkpoints; 64 MiB with --tiers."),
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help='Only the cases whose name has TEXT in it, such as "1K/request".')
    ] = None,
    tiers: Annotated[
        bool,
        typer.Option("--tiers", help="Instead, how fast host memory, --disk and --store of this machine are."),
    ] = False,
    disk: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --tiers: a folder on the drive to measure.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="With --tiers: a store to measure, as for headway serve.")
    ] = None,
) -> None:
    """Measure what the cache's bookkeeping costs on this machine. No model runs.

    Every figure is the processor time of one operation in microseconds, which other work on the machine disturbs
    little. The cases take turns, in six rounds. Printed are the median, the quartiles (half of all samples lie between
    them) and the mean, which lies above the median where some operations do more than most. To compare two versions,
    run them in turn and see whether their quartiles overlap.

    A *lookup* finds where a prompt can resume. A *request* is all calls for one prompt: lookup, lease, extend, commit,
    finish. A *branch point* is a position of its path where other prompts parted. A *step* extends and commits so many
    decoding requests at once. *full* is full attention alone, *kimi-k3* a hybrid with states under TP 8 DCP 8.

        headway bench --quick

        headway bench --only "branch points" --json > before.json

    With *--tiers* it measures bytes per second, by the clock, and prints them as options of `headway replay`:

        headway bench --tiers --disk /var/cache --store valkey://localhost
    """
    if tiers:
        if only is not None:
            raise typer.BadParameter("--tiers has no cases to choose from", param_hint="--only")
        _tiers(disk, store, as_json, quick)
        return
    if disk is not None or store is not None:
        raise typer.BadParameter("--disk and --store are measured with --tiers", param_hint="--disk, --store")
    sizes = (1024, 131072) if quick else (1024, 8192, 32768, 131072, 524288)
    branches = (800,) if quick else (100, 200, 400, 800)
    crowds = (10_000,) if quick else (1_000, 10_000, 100_000)
    cases = [case for case in all_cases(sizes, branches, crowds) if only is None or only in case.name]
    if not cases:
        raise typer.BadParameter(f"no case has {only!r} in its name", param_hint="--only")
    with Console(stderr=True).status(f"measuring {len(cases)} cases"):
        figures = measure(cases, _ROUNDS)
    if as_json:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()}
        values = {name: asdict(figure) for name, figure in figures.items()}
        print(json.dumps({"unit": "microseconds of processor time", "machine": machine, "figures": values}, indent=2))
        return
    Console().print(_table(figures))


def _tiers(disk: Path | None, store: str | None, as_json: bool, quick: bool) -> None:
    """Measure and print lower tiers."""
    with Console(stderr=True).status("moving bytes"):
        figures = measure_moves(disk, store, (64 if quick else 512) << 20)
    if as_json:
        print(json.dumps([figure.as_data() for figure in figures], indent=2))
        return
    table = Table("tier", title="lower tiers, by the clock")
    for column in ("read", "write", "latency"):
        table.add_column(column, justify="right")
    for figure in figures:
        rates = (f"{rate / 1e9:.2f} GB/s" for rate in (figure.read, figure.write))
        table.add_row(figure.tier, *rates, f"{1e3 * figure.latency:.2f} ms" if figure.latency else "")
    Console().print(table)
    print("headway replay takes them as the rates of one rank; divide those of a drive or store by the ranks on it:")
    print("  " + " ".join(figure.option for figure in figures))


def _table(figures: dict[str, Figure]) -> Table:
    table = Table("case", title="cache bookkeeping, microseconds of processor time")
    for column in ("median", "quartiles", "mean"):
        table.add_column(column, justify="right")
    for name, figure in figures.items():
        spread = f"{figure.low:,.1f} - {figure.high:,.1f}"
        table.add_row(name, f"{figure.median:,.1f}", spread, f"{figure.mean:,.1f}")
    return table
