"""Threads that take turns on a clock of their own, so that what happens on threads is the same in every run.

Inside `standing_in()`, the modules that start threads or wait find stand-ins for `threading`, `queue` and `time`.
Behind these a thread is a greenlet: one runs at a time, until it waits, or until a seed says that it is another one's
turn, which may be whenever a lock is taken or something is put into a queue. When all wait, the clock jumps to the
first of the times that they wait for. So a stall of a minute costs nothing, and who comes first is drawn anew in each
example and can be drawn again. When all wait and there is no such time, that is a deadlock, and an error.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Turns", "standing_in"]

_MODULES = ("headway.tiers.", "headway.engine.scheduling.", "tests.engine.bench", "tests.tiers.world")
_EPOCH = time.time()


class _Wait:
    """Somebody waits for something, or for a time."""

    __slots__ = ("over", "thread", "told")

    def __init__(self, thread: greenlet) -> None:
        self.thread, self.told, self.over = thread, False, False


class Turns:
    """The threads of one example.

    Attributes:
        now: Seconds on their clock.
        alive: Threads that have not ended, but for the main one.
        errors: What ended a thread.
    """

    def __init__(self, seed: int, haste: float = 0.1) -> None:
        """From now on these threads are meant. `haste`: how probably somebody else goes on where it could be."""
        global _turns
        _turns = self
        self.now = 0.0
        self.alive: dict[Thread, greenlet] = {}
        self.errors: list[BaseException] = []
        self._random = random.Random(seed).random
        self._haste = haste
        self._main = self.current = getcurrent()
        self._hub = greenlet(self._run)
        self._ready: list[greenlet] = []
        self._timers: list[tuple[float, int, _Wait]] = []
        self._serial = itertools.count()
        self._closed = False

    def perhaps(self) -> None:
        """Others may go first."""
        if self._ready and self._random() < self._haste:
            self._ready.append(self.current)
            self._switch()

    def block(self, waiting: deque[_Wait] | None, seconds: float | None = None) -> bool:
        """Wait until told, or for some seconds; True if told."""
        wait = _Wait(self.current)
        if waiting is not None:
            waiting.append(wait)
        if seconds is not None:
            heapq.heappush(self._timers, (self.now + max(0.0, seconds), next(self._serial), wait))
        self._switch()
        if not wait.told and waiting is not None:
            waiting.remove(wait)
        return wait.told

    def wake(self, waiting: deque[_Wait], most: int = 1) -> None:
        """Tell those who have waited longest."""
        while waiting and most:
            wait = waiting.popleft()
            if not wait.over:
                wait.told = wait.over = True
                self._ready.append(wait.thread)
                most -= 1

    def start(self, thread: Thread) -> None:
        """Let a thread begin when it is its turn."""
        one = self.alive[thread] = greenlet(thread.run, self._hub)
        self._ready.append(one)

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.block(None, seconds)

    def close(self) -> None:
        """End all threads where they are."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        for one in [*self.alive.values(), self._hub]:
            one.parent = self._main
            one.throw()
        self.alive.clear()

    def _switch(self) -> None:
        if self._closed:
            raise GreenletExit
        following = self._next()
        if following is not self.current:
            self.current = following
            following.switch()
            if self._closed and getcurrent() is not self._main:
                raise GreenletExit

    def _next(self) -> greenlet:
        ready = self._ready
        while not ready:
            if not self._timers:
                self.current = self._main
                error = AssertionError("all threads wait for each other")
                if getcurrent() is self._main:
                    raise error
                self._main.throw(error)
            self.now, _, wait = heapq.heappop(self._timers) if not self._timers[0][2].over else self._skip()
            if not wait.over:
                wait.over = True
                ready.append(wait.thread)
        place = int(self._random() * len(ready)) if len(ready) > 1 else 0
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def _skip(self) -> tuple[float, int, _Wait]:
        return self.now, 0, heapq.heappop(self._timers)[2]

    def _run(self, *_: object) -> None:
        """Whenever a thread ends: the next one."""
        while True:
            self.current = self._next()
            self.current.switch()


_turns: Turns = None  # type: ignore[assignment]


class Lock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._owner: greenlet | None = None
        self._waiting: deque[_Wait] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        turns = _turns
        turns.perhaps()
        while self._owner is not None:
            if not blocking or not turns.block(self._waiting, None if timeout < 0 else timeout):
                return False
        self._owner = turns.current
        return True

    def release(self) -> None:
        self._owner = None
        if self._waiting:
            _turns.wake(self._waiting)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """As `threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not _turns.current and not super().acquire(blocking, timeout):
            return False
        self._times += 1
        return True

    def release(self) -> None:
        self._times -= 1
        if not self._times:
            super().release()


class Condition(RLock):
    """As `threading.Condition` with a lock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._told: deque[_Wait] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        times, self._times = self._times, 1
        self.release()
        told = _turns.block(self._told, timeout)
        self.acquire()
        self._times = times
        return told

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else _turns.now + timeout
        while not predicate():
            if not self.wait(None if until is None else until - _turns.now) and until is not None:
                return predicate()
        return True

    def notify(self, n: int = 1) -> None:
        _turns.wake(self._told, n)

    def notify_all(self) -> None:
        _turns.wake(self._told, len(self._told))


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[_Wait] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        _turns.wake(self._waiting, len(self._waiting))

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            _turns.block(self._waiting, timeout)
        return self._set


class Semaphore:
    """As `threading.Semaphore`, without a bound."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiting: deque[_Wait] = deque()

    def acquire(self) -> bool:
        while not self._value:
            _turns.block(self._waiting)
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        _turns.wake(self._waiting)


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[_Wait] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            _turns.wake(self._waiting)
        _turns.perhaps()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            if not block or not _turns.block(self._waiting, timeout):
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Thread:
    """As `threading.Thread`."""

    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = False) -> None:
        self.name, self._target, self._ended = name, target, Event()

    def start(self) -> None:
        _turns.start(self)
        _turns.perhaps()

    def run(self) -> None:
        turns = _turns
        _threads[getcurrent()] = self
        try:
            self._target()
        except GreenletExit:
            pass
        except BaseException as error:
            turns.errors.append(error)
        finally:
            del _threads[getcurrent()]
            turns.alive.pop(self, None)
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()


_threads: dict[greenlet, Thread] = {}

_THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    Thread=Thread,
    current_thread=lambda: _threads.get(getcurrent()),
)
_QUEUE = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
_TIME = SimpleNamespace(monotonic=lambda: _turns.now, time=lambda: _EPOCH + _turns.now)
_STAND_INS = {"threading": _THREADING, "queue": _QUEUE, "time": _TIME}


@contextmanager
def standing_in() -> Iterator[None]:
    """Put the stand-ins where the tiers, and what drives them, look."""
    with ExitStack() as patches:
        for place, module in list(sys.modules.items()):
            for name, stand_in in _STAND_INS.items():
                if place.startswith(_MODULES) and getattr(module, name, None) is sys.modules[name]:
                    patches.enter_context(mock.patch.object(module, name, stand_in))
        yield
