"""The live page inside vLLM's server: what the statistics of steps tell, on the page that our own server has.

The page is served at `/headway`, which vLLM's `--api-key` does not guard: it holds no data and asks for all of it. The
data lies under `/v1`, which is guarded. A process that serves has one board, as it has one registry of metrics. With
several front-ends each is told of a part of the steps, so its page shows a part of the requests.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry

from headway import __version__
from headway.tell.live import Board, LiveRecord, live_events
from headway.tell.live_page import live_page
from headway.tell.metrics import METRICS, Values

__all__ = ["VllmBoard", "add_live_routes", "board_of", "error_response"]


class VllmBoard:
    """What all engines of a process have told, summed. For any thread.

    Attributes:
        missing: Why nothing will be told, or "".
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.missing = ""
        self._lock = threading.Lock()
        self._board = Board(f"Headway {__version__} in vLLM", "", time.monotonic())
        self._told: dict[str, dict[int, Counter[str]]] = {}
        self._queues: dict[int, tuple[int, int]] = {}

    def add(self, told: Mapping[str, Mapping[str, int]], engine: int, model: str) -> None:
        """Take what an engine told: of totals what was added, of levels what they are."""
        with self._lock:
            self._board.model, self.missing = model, ""
            for name, values in told.items():
                known = self._told.setdefault(name, {}).setdefault(engine, Counter())
                for key, value in values.items():
                    known[key] = known[key] + value if METRICS[name].grows else value
            self._board.add(self._summed(), time.monotonic())

    def add_queue(self, running: int, waiting: int, engine: int) -> None:
        """Take how many requests run and wait in an engine."""
        with self._lock:
            self._queues[engine] = running, waiting

    def record(self) -> LiveRecord:
        """What there is to see now."""
        with self._lock:
            running = sum(running for running, _ in self._queues.values())
            waiting = sum(waiting for _, waiting in self._queues.values())
            return self._board.record(time.monotonic(), running=running, waiting=waiting)

    def _summed(self) -> Values:
        """Over all engines; a block has the same size in all of them."""
        summed: Values = {}
        for name, engines in self._told.items():
            total: Counter[str] = Counter()
            for values in engines.values():
                total.update(values)
            summed[name] = next(iter(engines.values())) if name == "block_bytes" else total
        return summed


@cache
def board_of(registry: CollectorRegistry) -> VllmBoard:
    """The board of the process whose metrics are in `registry`."""
    return VllmBoard()


def error_response(code: int, kind: str, message: str) -> JSONResponse:
    """An error as vLLM's server has them."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, code)


def add_live_routes(app: FastAPI, board: VllmBoard) -> None:
    """Serve the page and its data."""

    async def page() -> Response:
        text, headers = live_page()
        return HTMLResponse(text, headers=headers)

    async def live(raw: Request) -> Response:
        if board.missing:
            return error_response(501, "NotImplementedError", board.missing)
        if "text/event-stream" in raw.headers.get("accept", ""):
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(live_events(board.record), media_type="text/event-stream", headers=headers)
        return JSONResponse(board.record().as_dict(), headers={"Cache-Control": "no-store"})

    app.add_api_route("/headway", page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/v1/headway/live", live, methods=["GET"], response_model=None)
