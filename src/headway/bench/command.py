"""The command `headway bench`."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.bench import workloads
from headway.bench.workloads import CONFIGURATIONS, FOUR_GROUPS

__all__ = ["bench"]

_MEAN = ", mean"
_SIZES = (1024, 8192, 32768, 131072, 524288)


def bench(
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    quick: Annotated[bool, typer.Option(help="Only 1K and 128K tokens, and 10,000 checkpoints.")] = False,
) -> None:
    """Measure what the cache's bookkeeping costs on this machine.

    Medians in microseconds: lookups, whole requests, decoding steps (with their mean, as some do more than most),
    evictions. Nothing is computed by a model.
    """
    sizes = (1024, 131072) if quick else _SIZES
    crowds = (10_000,) if quick else (1_000, 10_000, 100_000)
    figures: dict[str, float] = {}
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(
            "measuring", total=len(CONFIGURATIONS) * len(sizes) * 6 + 6 * (len(CONFIGURATIONS) + 1) + len(crowds)
        )
        for name, value in _measure(sizes, crowds):
            figures[name] = round(value, 2)
            progress.advance(task)
    machine = {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()}
    if as_json:
        print(json.dumps({"unit": "microseconds, median", "machine": machine, "figures": figures}, indent=2))
        return
    Console().print(_table(figures))


def _table(figures: dict[str, float]) -> Table:
    """Medians, and beside them the mean where one was taken."""
    table = Table("figure", title="cache bookkeeping, microseconds")
    for column in ("median", "mean"):
        table.add_column(column, justify="right")
    for name, value in figures.items():
        if not name.endswith(_MEAN):
            mean = figures.get(name + _MEAN)
            table.add_row(name, f"{value:,.1f}", "" if mean is None else f"{mean:,.1f}")
    return table


def _measure(sizes: tuple[int, ...], crowds: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """Names and figures, one after another."""
    for configuration in CONFIGURATIONS:
        for size in sizes:
            label = f"{configuration.name}/{size // 1024}K"
            yield f"{label}/lookup, cached", workloads.lookup(configuration, size, 1.0)
            yield f"{label}/lookup parting at 3/4", workloads.lookup(configuration, size, 0.75)
            yield f"{label}/lookup, came as 256 turns", workloads.lookup_turns(configuration, size, 256)
            yield f"{label}/request, cold, one step", workloads.request(configuration, size, resent=False)
            yield f"{label}/request, sent again", workloads.request(configuration, size, resent=True)
            yield (
                f"{label}/request, cold, steps of 8,192 tokens",
                workloads.request(configuration, size, resent=False, chunk=8192),
            )
    for configuration in (*CONFIGURATIONS, FOUR_GROUPS):
        for leases in (1, 64, 1024):
            median, mean = workloads.step(configuration, leases)
            yield f"{configuration.name}/step of {leases}", median
            yield f"{configuration.name}/step of {leases}{_MEAN}", mean
    for crowd in crowds:
        yield f"evict one of {crowd}", workloads.evict(crowd)
