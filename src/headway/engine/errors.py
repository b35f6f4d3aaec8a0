"""What can go wrong with a request after it was understood: further branches of the tree in `headway.errors`."""

from __future__ import annotations

from headway.errors import HeadwayError

__all__ = [
    "EngineBusyError",
    "EngineStoppedError",
    "NotFiniteError",
    "QueueFullError",
    "RanksLostError",
    "RequestFailedError",
]


class QueueFullError(HeadwayError):
    """Too many requests are waiting. Nothing was changed; the same request can be sent again later."""


class EngineBusyError(HeadwayError):
    """A step takes long, so the engine did not answer in time. What was asked for is done when the step has ended."""


class EngineStoppedError(HeadwayError):
    """The engine takes no new requests: it is shutting down, or its thread has failed."""


class RequestFailedError(HeadwayError):
    """A request that was running could not be completed. The message says why; other requests are not affected."""


class NotFiniteError(RequestFailedError):
    """The model's numbers for a request became NaN or infinite, which are no answer. Nothing of that step was kept."""


class RanksLostError(HeadwayError):
    """A rank has ended, or has not answered in time. What the ranks held in memory is gone or cannot be trusted."""
