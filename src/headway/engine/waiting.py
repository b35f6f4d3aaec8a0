"""Requests that have no lease: those in the queue, and those that let another compute their common prompt first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.engine.queue import FairQueue
from headway.engine.request import RunningRequest

__all__ = ["WaitingRequests"]


class WaitingRequests:
    """The queue, and behind some requests followers with the same prompt.

    Attributes:
        queue: Requests that can be admitted, in a fair order.
    """

    def __init__(self) -> None:
        self.queue: FairQueue[RunningRequest] = FairQueue()
        self._followers: dict[str, list[RunningRequest]] = {}

    def __len__(self) -> int:
        return len(self.queue) + sum(len(held) for held in self._followers.values())

    def __iter__(self) -> Iterator[RunningRequest]:
        """Every request that waits, in no particular order."""
        yield from self.queue
        for held in self._followers.values():
            yield from held

    def add(self, request: RunningRequest, followers: Sequence[RunningRequest] = ()) -> None:
        """Queue a request. `followers` stay behind it until `release`."""
        self.queue.push(request)
        if followers:
            self._followers[request.request_id] = list(followers)

    def release(self, leader: RunningRequest) -> None:
        """Queue the followers of a request: what it has computed can be reused, or never will be."""
        for request in self._followers.pop(leader.request_id, ()):
            self.queue.push(request)

    def remove(self, request: RunningRequest) -> None:
        """Take a request out wherever it waits; its own followers stay. One that does not wait is ignored."""
        if self.queue.remove(request):
            return
        for held in self._followers.values():
            if request in held:
                held.remove(request)

    def clear(self) -> list[RunningRequest]:
        """Take all out. Returns them, in no particular order."""
        held = list(self)
        for request in list(self.queue):
            self.queue.remove(request)
        self._followers.clear()
        return held
