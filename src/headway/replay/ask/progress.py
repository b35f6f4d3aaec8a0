"""Progress bars, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["finishing", "replaying"]


@contextmanager
def replaying(requests: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while `requests` requests are replayed.

    Returns:
        What a replay calls with the requests done and the requests in all.
    """
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("replay", total=requests)
        yield lambda done, _: bar.update(task, completed=done)


@contextmanager
def finishing(runs: int, console: Console) -> Iterator[Callable[[], None]]:
    """Show a bar while `runs` runs are done.

    Returns:
        What is called after each of them.
    """
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("sweep", total=runs)
        yield lambda: bar.advance(task)
