"""Doing the runs: one after another, on all cores of this machine, or on a Ray cluster.

A run is a pure function of trace and configuration, so it may be done anywhere and in any order. Results come back as
plain values. A worker process is started anew (`spawn`), not forked: threads of numpy or Ray do not survive a fork.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError, HeadwayError
from headway.formats import Trace
from headway.replay.ask.grid import Point
from headway.replay.ask.record import record_of
from headway.replay.replay import replay_trace
from headway.replay.trace.prefixes import endless_matches, read_outputs

__all__ = ["Workload", "run_points"]

Done = Callable[[Point, dict[str, Any]], None]
"""Called with each finished run, in this process."""


@dataclass(frozen=True)
class Workload:
    """What every run shares.

    Attributes:
        trace: The trace.
        matches: int64 [R], what `endless_matches` gives for it.
        clairvoyant: Compute what knowing the future would reach.
    """

    trace: Trace
    matches: NDArray[np.int64]
    clairvoyant: bool = True

    @classmethod
    def of(cls, trace: Trace, outputs: str | None = None, *, clairvoyant: bool = True) -> Workload:
        """Prepare a trace, with its answers read as `outputs` says."""
        return cls(trace, endless_matches(trace, read_outputs(trace, outputs)), clairvoyant)

    def run(self, point: Point) -> dict[str, Any]:
        """One run, as plain values."""
        found = replay_trace(self.trace, point.config, matches=self.matches, clairvoyant=self.clairvoyant)
        return record_of(found, point.config, point.model, self.trace).as_dict()


def run_points(work: Workload, points: Sequence[Point], done: Done, *, jobs: int = 0, ray: bool = False) -> None:
    """Run all points. What has been handed to `done` stays, whatever happens later.

    Args:
        work: What every run shares.
        points: The runs to do.
        done: Called with each finished one.
        jobs: Processes; 0: as many as there are processors. Each holds the trace once.
        ray: Run on the Ray cluster that `RAY_ADDRESS` names, or that runs here, or on a new one on this machine.

    Raises:
        ConfigError: A negative number of jobs.
        HeadwayError: A worker was killed.
        ModuleNotFoundError: `ray` without the extra `ray`.
    """
    if jobs < 0:
        raise ConfigError(f"--jobs is {jobs}: give the number of processes, or 0 for one per processor")
    count = min(len(points), jobs or _processors())
    if ray:
        finished = _on_ray(work, points)
    elif count <= 1:
        finished = ((point, work.run(point)) for point in points)
    else:
        finished = _on_processes(work, points, count)
    for point, run in finished:
        done(point, run)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_work: Workload | None = None
"""In a worker process: what its runs share."""


def _begin(work: Workload) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what there is to say
    _work = work


def _run(point: Point) -> dict[str, Any]:
    assert _work is not None
    return _work.run(point)


def _on_processes(work: Workload, points: Sequence[Point], count: int) -> Iterator[tuple[Point, dict[str, Any]]]:
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (work,))
    try:
        futures = {pool.submit(_run, point): point for point in points}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise HeadwayError(
            "a worker of the sweep was killed, most likely for want of memory: finished runs are kept; go on with the "
            "same command and fewer --jobs"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _on_ray(work: Workload, points: Sequence[Point]) -> Iterator[tuple[Point, dict[str, Any]]]:
    ray: Any = import_module("ray")  # the extra of that name

    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        shared = ray.put(work)
        task = ray.remote(num_cpus=1)(Workload.run)
        waiting = {task.remote(shared, point): point for point in points}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for reference in ready:
                yield waiting.pop(reference), ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        raise HeadwayError(
            f"a run on the Ray cluster failed: {cause}. Finished runs are kept; headway must be installed on every "
            f"node, in this version"
        ) from error
    finally:
        if started:
            ray.shutdown()
