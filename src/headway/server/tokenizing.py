"""Tokenising on several threads, so that one client's long text does not hold up the others.

Tokenizers work outside of Python's lock, so threads help. Texts are short or long. One thread takes short ones only, so
a short one never waits for a long one; the others take what has waited, fairly among clients. A text that cannot fit
into the model's length is refused by its characters, before any of it is tokenised, where the tokenizer says how many
characters a token stands for at most.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headway.engine.scheduling.queue import FairQueue

__all__ = ["TokenizingThreads"]

T = TypeVar("T")

_LONG = 32768
"""Characters from which on a text is long: a few hundredths of a second of work."""
_THREADS = min(4, max(2, os.cpu_count() or 1))


@dataclass(frozen=True)
class _Task:
    user: str
    order: int
    size: int
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


class TokenizingThreads:
    """Threads that tokenise. The first of them takes only short texts."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._short: FairQueue[_Task] = FairQueue()
        self._long: FairQueue[_Task] = FairQueue()
        self._open = True
        self._threads = [
            threading.Thread(target=self._run, args=(i > 0,), name=f"headway-tokenizer-{i}") for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], T], size: int, client: str) -> T:
        """What `work` returns or raises, run in one of the threads.

        Args:
            work: What to do; it is left undone if nobody waits for it any more.
            size: Characters that it tokenises.
            client: Whose turn it takes.
        """
        task = _Task(client, next(self._order), size, work)
        with self._changed:
            (self._long if size >= _LONG else self._short).push(task)
            self._changed.notify_all()
        result: T = await asyncio.wrap_future(task.done)
        return result

    def close(self) -> None:
        """Stop the threads, when what they do is done; what waits is given up."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, takes_long: bool) -> None:
        while (task := self._next(takes_long)) is not None:
            if not task.done.set_running_or_notify_cancel():
                continue
            try:
                task.done.set_result(task.work())
            except BaseException as error:
                task.done.set_exception(error)

    def _next(self, takes_long: bool) -> _Task | None:
        def queue() -> FairQueue[_Task] | None:
            lanes = [self._long, self._short] if takes_long else [self._short]
            return next((lane for lane in lanes if lane), None)

        with self._changed:
            self._changed.wait_for(lambda: not self._open or queue() is not None)
            lane = queue()
            if not self._open or lane is None:
                return None
            task = lane.pop()
            lane.charge(task.user, task.size)
            return task
