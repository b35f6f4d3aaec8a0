"""What keeps one cache to one thread, and its time apart from its process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from headway.errors import ThreadError

__all__ = ["Clock", "Guarded", "guarded"]

Given = ParamSpec("Given")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="Guarded")


class Guarded:
    """Something whose guarded methods run one at a time; a second one that is called meanwhile is refused."""

    def __init__(self) -> None:
        """Nothing runs, and nobody watches."""
        self._lock = threading.Lock()
        self._watched = False

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock.

        Raises:
            ThreadError: A call is under way.
        """
        if self._lock.locked():
            raise ThreadError(_TWO_AT_ONCE)
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was written, and a lock of its own."""
        vars(self).update(state, _lock=threading.Lock())

    def _verify(self) -> None:
        """A guarded method of something that is watched has done its work, and no other runs yet."""

    def _deliver(self) -> None:
        """A guarded method of something that is watched has ended, and the next may run."""


def guarded(method: Callable[Concatenate[Self, Given], Result]) -> Callable[Concatenate[Self, Given], Result]:
    """Refuse `method` while another one of the same object is under way (ThreadError)."""

    @functools.wraps(method)
    def alone(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not self._lock.acquire(False):
            raise ThreadError(_TWO_AT_ONCE)
        try:
            result = method(self, *args, **kwargs)
            if self._watched:
                self._verify()
            return result
        finally:
            self._lock.release()
            if self._watched:
                self._deliver()

    return alone


class Clock:
    """Seconds that go on where they were when the cache is written and read again, perhaps in another process."""

    def __init__(self, read: Callable[[], float] = time.monotonic, now: float | None = None) -> None:
        """Read seconds with `read`, counted so that it is `now` now (as `read` says if not given)."""
        self.read = read
        self._offset = 0.0 if now is None else now - read()

    def __call__(self) -> float:
        """The time in seconds."""
        return self.read() + self._offset

    def restart(self, read: Callable[[], float]) -> None:
        """Go on from the present time with another way to read seconds."""
        self._offset, self.read = self() - read(), read

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        """A copy in the same process reads the same clock."""
        return Clock(self.read, self())

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the time is written: how it was read is a matter of the process."""
        return Clock, (time.monotonic, self())


_TWO_AT_ONCE = (
    "a call of this cache is under way in another thread: a cache belongs to one thread, so give each its own, or take "
    "a lock around every call"
)
