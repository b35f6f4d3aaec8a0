"""How the bench measures: processor time of this thread, the cases in turn, the spread beside the median.

Wall-clock time says how busy the machine is, and cases measured one after another meet different minutes of it. Here
every case is measured a little in every round, so that what disturbs the machine for a while disturbs all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Case", "Figure", "Work", "measure"]


@dataclass(frozen=True)
class Work:
    """What a case does again and again.

    Attributes:
        operation: What is timed.
        prepare: What brings everything back to where it was before, not timed.
        calls: Calls of it that are timed together, where one is too short for the clock.
        each: Operations in one call, by which the time is divided.
    """

    operation: Callable[[], object]
    prepare: Callable[[], object] | None = None
    calls: int = 1
    each: int = 1


@dataclass(frozen=True)
class Case:
    """One line of the bench.

    Attributes:
        name: Its name.
        start: Makes its cache.
        samples: How often it is timed, over all rounds.
    """

    name: str
    start: Callable[[], Work]
    samples: int = 30


@dataclass(frozen=True)
class Figure:
    """Microseconds of one operation, over all samples.

    Attributes:
        median: Half took less.
        low: A quarter took less.
        high: A quarter took more.
        mean: Of all: above the median where some operations do more than most.
        least: The fastest.
        most: The slowest.
    """

    median: float
    low: float
    high: float
    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figure:
        """The figure of some samples, at least two."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        values = (median, low, high, statistics.fmean(samples), min(samples), max(samples))
        return cls(*(round(value, 2) for value in values))


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is collected meanwhile, and what there is already is not looked at by later collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(cases: Iterable[Case], rounds: int, clock: Callable[[], int] = time.thread_time_ns) -> dict[str, Figure]:
    """Measure all cases in `rounds` rounds: in each, every case once untimed and then some of its samples.

    Args:
        cases: The cases; all their caches are alive until the end.
        rounds: How often they take turns.
        clock: Nanoseconds.
    """
    running = [(case, case.start(), list[float]()) for case in cases]
    with _quiet():
        for i in range(rounds):
            for case, work, samples in running:
                wanted = case.samples * (i + 1) // rounds - case.samples * i // rounds
                taken = [_time(work, clock) for _ in range(wanted + 1)]
                samples += taken[1:]
            gc.collect()
    return {case.name: Figure.of(samples) for case, _, samples in running}


def _time(work: Work, clock: Callable[[], int]) -> float:
    """Microseconds of one operation."""
    operation = work.operation
    if work.prepare is not None:
        work.prepare()
    calls = range(work.calls)
    start = clock()
    for _ in calls:
        operation()
    return (clock() - start) / (work.calls * work.each) / 1e3
