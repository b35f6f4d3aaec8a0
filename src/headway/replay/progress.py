"""The progress bar of a replay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["replaying"]


@contextmanager
def replaying(requests: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while `requests` requests are replayed.

    Returns:
        What a replay calls with the requests done and the requests in all.
    """
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("replay", total=requests)
        yield lambda done, _: bar.update(task, completed=done)
