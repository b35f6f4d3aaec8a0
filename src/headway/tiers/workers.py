"""Threads for calls that may never return, and the clock that gives up on them.

A read from a stalled mount cannot be interrupted: its thread is lost until the mount answers. So a call has a
deadline that is kept by another thread, the clock. It tells whoever waits that the call is late, and the pool starts
a thread in the place of the lost one, up to a bound. When a late call does return, `ended` is called: only then may
the memory that it was writing into be used again. (Rejected: timeouts of sockets and clients alone, since files have
none; processes, which could be killed, since every byte would then be copied once more.)
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.tiers.store import LateError

__all__ = ["Alarm", "Clock", "Operation", "Pool"]


@dataclass(eq=False, slots=True)
class Alarm:
    """A call that the clock is going to make, unless it is cancelled.

    Attributes:
        call: What is called; None once it is cancelled or done.
    """

    call: Callable[[], None] | None

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class Clock:
    """One daemon thread that makes calls later. They must be short."""

    def __init__(self) -> None:
        """The thread starts with the first alarm."""
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._serial = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, call: Callable[[], None]) -> Alarm:
        """Make a call in some seconds, on the clock's thread."""
        alarm = Alarm(call)
        with self._changed:
            if self._closed:
                return alarm
            item = (time.monotonic() + seconds, next(self._serial), alarm)
            heapq.heappush(self._alarms, item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headway-tiers-clock", daemon=True)
                self._thread.start()
            elif self._alarms[0] is item:
                self._changed.notify()
        return alarm

    def close(self) -> None:
        """Make no more calls, and end the thread."""
        with self._changed:
            self._closed = True
            self._alarms.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._alarms or self._alarms[0][0] > time.monotonic()):
                    self._changed.wait(self._alarms[0][0] - time.monotonic() if self._alarms else None)
                if self._closed:
                    return
                alarm = heapq.heappop(self._alarms)[2]
            call, alarm.call = alarm.call, None
            if call is not None:
                call()


@dataclass(eq=False, slots=True)
class Operation:
    """A call for a pool.

    Attributes:
        call: What is called, on a thread of the pool.
        seconds: How long it may take from when it starts.
        done: Called once, with the result and None, or None and the error; a LateError when it is late.
        ended: Called once, when nothing of the call runs any more.
        state: `waiting`, `running`, `late` or `over`.
        started: When it started (seconds, monotonic).
    """

    call: Callable[[], Any]
    seconds: float
    done: Callable[[Any, BaseException | None], None]
    ended: Callable[[], None] = lambda: None
    state: str = "waiting"
    started: float = 0.0


class Pool:
    """Daemon threads that make calls with deadlines.

    Attributes:
        lost: Threads in calls that are late.
    """

    def __init__(self, name: str, threads: int, clock: Clock) -> None:
        """`threads` calls at once, and as many more may be late. Threads start when they are needed."""
        self.lost = 0
        self._name, self._threads, self._clock = name, threads, clock
        self._waiting: deque[Operation] = deque()
        self._changed = threading.Condition()
        self._running = self._idle = 0
        self._closed = False
        self._refusal: BaseException | None = None

    def submit(self, operation: Operation) -> None:
        """Make a call as soon as a thread is free; in the order of submission."""
        with self._changed:
            refusal = self._refusal
            if refusal is None:
                self._waiting.append(operation)
                self._staff()
        if refusal is not None:
            self._refuse([operation], refusal)

    def withdraw(self, operation: Operation) -> bool:
        """Take a call back. Returns whether it had not begun: then it is not made, and `ended` alone is called."""
        with self._changed:
            if operation not in self._waiting:
                return False
            self._waiting.remove(operation)
            operation.state = "over"
        operation.ended()
        return True

    def refuse(self, error: BaseException | None) -> None:
        """Refuse what waits and what comes with an error, until called with None."""
        with self._changed:
            self._refusal = error
            waiting = list(self._waiting)
            self._waiting.clear()
        if error is not None:
            self._refuse(waiting, error)

    def close(self, error: BaseException) -> None:
        """Refuse what waits and what comes; threads end when their call does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.refuse(error)

    def join(self, seconds: float) -> bool:
        """Wait until no thread is left after `close`; False if some are still in a call then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _staff(self) -> None:
        if self._idle >= len(self._waiting):
            self._changed.notify()
        elif self._running - self.lost < self._threads and self.lost <= self._threads:
            self._running += 1
            threading.Thread(target=self._run, name=f"headway-tiers-{self._name}", daemon=True).start()

    def _refuse(self, operations: list[Operation], error: BaseException) -> None:
        for operation in operations:
            operation.state = "over"
            operation.done(None, error)
            operation.ended()

    def _run(self) -> None:
        while (operation := self._next()) is not None:
            alarm = self._clock.after(operation.seconds, partial(self._late, operation))
            result, failure = None, None
            try:
                result = operation.call()
            except BaseException as error:
                failure = error
            alarm.cancel()
            with self._changed:
                late, operation.state = operation.state == "late", "over"
                self.lost -= late
            if not late:
                operation.done(result, failure)
            operation.ended()
            del operation, result, failure  # an idle thread keeps nothing alive

    def _next(self) -> Operation | None:
        with self._changed:
            while not self._waiting:
                if self._closed or self._running - self.lost > self._threads:
                    self._running -= 1
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            operation = self._waiting.popleft()
            operation.state, operation.started = "running", time.monotonic()
            return operation

    def _late(self, operation: Operation) -> None:
        with self._changed:
            if operation.state != "running":
                return
            operation.state = "late"
            self.lost += 1
            if self._waiting:
                self._staff()
        operation.done(None, LateError(f"no answer within {operation.seconds:.3g} s"))
