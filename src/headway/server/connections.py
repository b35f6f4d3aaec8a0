"""Connections: how long a client may keep one waiting, and what becomes of them when the server ends.

uvicorn closes idle connections between two requests, and waits for ever for the rest of a request or for a client that
takes no more of its answer. Here both have a time. When the server is told to end, it goes on listening while requests
run, so that whoever asks for its health is told and sends new requests elsewhere. What still runs after the grace fails
in the engine, so that clients get an error as the end of their stream; no task is cancelled.
"""

from __future__ import annotations

import asyncio
import re
import socket
import uuid

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from headway.engine import Engine
from headway.server.logs import request_id

__all__ = ["DrainingServer", "HeadAsGet", "RequestIds", "make_server", "notice_lost_peers"]

_LAST_STEP_SECONDS = 60.0
"""How long a shutdown waits for a step to end. A device that hangs must not keep the process."""
_LINGER_SECONDS = 5.0
"""How long clients may take for the end of their answers when the engine has ended."""
_DRAIN_LOOK_SECONDS = 0.2
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Gives every request a name: that of its `x-request-id`, or a new one. Logs and the response have it too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its name."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"").decode("latin-1")
        name = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(name)  # every request is a task of its own, with its own context

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name.encode())]}
            await send(message)

        await self._app(scope, receive, send_named)


class HeadAsGet:
    """Answers HEAD as GET, and uvicorn leaves the body out. The scope says so: its `head` is true then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        head = scope.get("method") == "HEAD"
        await self._app({**scope, "method": "GET", "head": True} if head else scope, receive, send)


class _PatientProtocol(H11Protocol):
    """One connection, which is closed when its client keeps it waiting for too long.

    The body of a request is no matter of this class: whoever reads it has a time for it.
    """

    patience: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` says that something is left to be taken
        self._head: asyncio.TimerHandle | None = self.loop.call_later(self.patience, transport.close)
        self._taking: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Read on, and wait for the rest of a request's head if there is one."""
        super().data_received(data)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting(head=True)
        elif self._head is None:
            self._head = self.loop.call_later(self.patience, self.transport.close)

    def pause_writing(self) -> None:
        """Begin to wait for the client to take what was sent."""
        super().pause_writing()
        self._await_taking(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """All was taken."""
        self._stop_waiting(taking=True)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_waiting(head=True, taking=True)
        super().connection_lost(exc)

    def _await_taking(self, left: int) -> None:
        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now >= left:
                self.transport.abort()
            else:
                self._await_taking(now)

        self._taking = self.loop.call_later(self.patience, look)

    def _stop_waiting(self, *, head: bool = False, taking: bool = False) -> None:
        if head and self._head is not None:
            self._head.cancel()
            self._head = None
        if taking and self._taking is not None:
            self._taking.cancel()
            self._taking = None


class DrainingServer(uvicorn.Server):
    """A server that listens until its engine has nothing left to do, or the grace is over."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float) -> None:
        super().__init__(config)
        self._engine, self._grace = engine, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let those that run end, fail what is left after the grace, and close the port."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace
        while not await asyncio.to_thread(self._engine.drain, min(_DRAIN_LOOK_SECONDS, self._grace)):
            if self.force_exit or loop.time() >= deadline:
                break
        patience = _LAST_STEP_SECONDS + self._engine.config.tiers.tier_grace
        await asyncio.to_thread(self._engine.close, 0.0 if self.force_exit else patience)
        hang_up = loop.call_later(_LINGER_SECONDS, self._hang_up)
        await super().shutdown(sockets)
        hang_up.cancel()

    def _hang_up(self) -> None:
        """Leave the clients that do not take the end of their answers: their requests see them go, and end."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


def make_server(
    app: ASGIApp, engine: Engine, *, patience: float = 60.0, grace: float = 30.0, log_level: str | None = None
) -> DrainingServer:
    """A server for an application.

    Args:
        app: The application.
        engine: Its engine, which is drained and closed when the server is told to end.
        patience: Seconds that a client may take to send the head of a request, or to take a piece of an answer.
        grace: Seconds that running requests get at shutdown.
        log_level: Of uvicorn; None leaves it as it is.
    """
    config = uvicorn.Config(
        app,
        http=type("PatientProtocol", (_PatientProtocol,), {"patience": patience}),
        ws="none",
        log_config=None,
        log_level=log_level,
        lifespan="on",
        timeout_graceful_shutdown=int(2 * _LINGER_SECONDS),
        server_header=False,
    )
    return DrainingServer(config, engine, grace)


def notice_lost_peers(listener: socket.socket, patience: float) -> None:
    """Let the system end connections of `listener` whose other side is gone without a word, where it can do that."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(patience))
    wanted = {"TCP_KEEPIDLE": seconds, "TCP_KEEPINTVL": -(-seconds // 4), "TCP_KEEPCNT": 4}
    wanted["TCP_USER_TIMEOUT"] = 2000 * seconds  # of what was sent and never confirmed, in milliseconds
    for name, value in wanted.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
