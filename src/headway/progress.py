"""What long work says of itself on stderr: a bar on a terminal; elsewhere, in the file of a job, a line now and then.

The lines come from a thread of their own, so they come also where nothing is counted for a while.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Pulse", "counting", "lasting"]

_SECONDS = 10.0
"""From one line to the next."""


class Pulse:
    """Says every few seconds what is going on, and since when; a context.

    Attributes:
        text: What is going on; "" for nothing.
    """

    def __init__(self, say: Callable[[str], None], text: str = "", detail: Callable[[], str] = lambda: "") -> None:
        """`say` is called with each line, and `detail` for what it ends with, both in another thread."""
        self.text = text
        self._say, self._detail = say, detail
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-pulse", daemon=True)

    def begin(self, text: str) -> None:
        """Something else begins."""
        self._since, self.text = time.monotonic(), text

    def __enter__(self) -> Pulse:
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Say nothing more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            if self.text:
                self._say(f"{self.text}, {_duration(time.monotonic() - self._since)} so far{self._detail()} ...")


@contextmanager
def lasting(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show that something goes on whose end is not known: "reading FILE"."""
    console = Console(file=stream or sys.stderr)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        with Pulse(_printer(console), what):
            yield


@contextmanager
def counting(what: str, total: int, noun: str = "", console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done: "replaying".

    Returns:
        What is called with the number that is done.
    """
    console = console or Console(file=sys.stderr)
    if console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    noun = f"{noun} " if noun else ""
    with Pulse(_printer(console), what) as pulse:
        started = time.monotonic()

        def tell(done: int) -> None:
            share = done / max(1, total)
            left = (time.monotonic() - started) * (1 - share) / share if share else 0.0
            ends = f", about {_duration(left)} left" if 0 < share < 1 else ""
            pulse.text = f"{what}: {done:,} of {total:,} {noun}({share:.0%}){ends}"

        yield tell


def _printer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
