"""What can go wrong with a request after it was understood: further branches of the tree in `headway.errors`."""

from __future__ import annotations

from headway.errors import HeadwayError

__all__ = ["EngineStoppedError", "QueueFullError", "RequestFailedError"]


class QueueFullError(HeadwayError):
    """Too many requests are waiting. Nothing was changed; the same request can be sent again later."""


class EngineStoppedError(HeadwayError):
    """The engine takes no new requests: it is shutting down, or its thread has failed."""


class RequestFailedError(HeadwayError):
    """A request that was running could not be completed. The message says why; other requests are not affected."""
