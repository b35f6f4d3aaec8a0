"""The caller's end of a request: the answer as a stream, from a thread or from asyncio.

The engine's thread puts deltas in; whoever holds the handle takes them out. Either side may be slow: deltas that were
not taken yet are kept in order, so a slow reader costs memory in the size of its answer and never holds up the engine.

Waking an event loop from another thread costs a system call there and here. So a step puts its deltas into all handles
first and wakes each loop once (`wake_readers`), however many streams it feeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

from headway.engine.request import Delta, RequestResult

__all__ = ["RequestHandle", "wake_readers"]


class RequestHandle:
    """One submitted request.

    Iterate over it (`for` or `async for`) to get every `Delta` once, in order; the last one carries the result. A
    request that fails raises its error there. Only one reader is supported.

    Attributes:
        request_id: The engine's name for the request.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._deltas: deque[Delta] = deque()
        self._changed = threading.Condition()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._result: RequestResult | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._result is not None or self._error is not None

    def abort(self) -> None:
        """Ask the engine to end the request and free its blocks. Returns at once; may be called at any time."""
        if not self.done:
            self._abort(self.request_id)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end of the request, from a thread.

        Raises:
            TimeoutError: It did not end within `timeout` seconds.
            HeadwayError: The request failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.request_id} has not ended after {timeout} s")
        return self._outcome()

    def __iter__(self) -> Iterator[Delta]:
        """Yield every delta, waiting for it in this thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._deltas) or self.done)
                delta = self._deltas.popleft() if self._deltas else None
            if delta is None:
                self._outcome()
                return
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield every delta, waiting for it in the running event loop."""
        ready = asyncio.Event()
        with self._changed:
            self._reader = asyncio.get_running_loop(), ready
        while True:
            ready.clear()
            with self._changed:
                delta = self._deltas.popleft() if self._deltas else None
                ended = self.done
            if delta is not None:
                yield delta
            elif ended:
                self._outcome()
                return
            else:
                await ready.wait()

    def put(self, delta: Delta) -> None:
        """Append a delta, which `wake_readers` announces. The one that carries a result ends the request.

        For the engine's thread.
        """
        with self._changed:
            self._deltas.append(delta)
            if delta.result is not None:
                self._result = delta.result
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the request with an error, after what was put before; `wake_readers` announces it.

        For the engine's thread.
        """
        with self._changed:
            if self._result is None and self._error is None:
                self._error = error
            self._changed.notify_all()

    def _outcome(self) -> RequestResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def wake_readers(handles: Iterable[RequestHandle]) -> None:
    """Tell those who read `handles` in event loops that something was put there: one call per loop."""
    ready: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
    for handle in handles:
        with handle._changed:
            reader = handle._reader
        if reader is not None:
            ready[reader[0]].append(reader[1])
    for loop, events in ready.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()
