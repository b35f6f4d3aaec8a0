"""What the live page shows of a server: the record, made at most once a second however many watch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from headway import __version__
from headway.engine import Engine, EngineSurvey
from headway.server.metrics import values_of
from headway.server.prefixes import PrefixUses
from headway.tell.live import SAMPLE_SECONDS, Board, LiveRecord, LiveRequest, live_events
from headway.tell.live_page import live_page

__all__ = ["LiveView"]

_FRESH_SECONDS = 0.9
_SHOWN_REQUESTS, _SHOWN_PREFIXES = 20, 6
_SURVEY_SHARE = 100
"""A survey holds up the engine: the next one waits so many times as long as it took."""


class LiveView:
    """The record of one server, for any thread."""

    def __init__(self, engine: Engine, model: str, prefixes: PrefixUses | None) -> None:
        """Watch an engine.

        Args:
            engine: The engine.
            model: Name under which the model is served.
            prefixes: Which prefixes save and cost most; None if nobody is told.
        """
        self._engine, self._prefixes = engine, prefixes
        self._board = Board(f"headway {__version__}", model, time.monotonic(), reuses=engine.config.prefix_reuse)
        self._lock = threading.Lock()
        self._record: LiveRecord | None = None
        self._made = self._next_survey = 0.0
        self._survey: EngineSurvey | None = None

    def record(self) -> LiveRecord:
        """What there is to see now, or was up to a second ago."""
        with self._lock:
            if self._record is None or time.monotonic() >= self._made + _FRESH_SECONDS:
                self._record = self._make()
                self._made = time.monotonic()
            return self._record

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Remember the counters every few seconds, whether or not anybody watches."""

        async def sample() -> None:
            while True:
                await asyncio.to_thread(self._sample)
                await asyncio.sleep(SAMPLE_SECONDS)

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def routes(self) -> APIRouter:
        """The path with the data."""
        router = APIRouter()

        @router.get("/v1/headway/live")
        async def live(request: Request) -> Response:
            if "text/event-stream" in request.headers.get("accept", ""):
                headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
                if request.scope.get("head"):  # who asks for no body does not wait for the end of the stream
                    return Response(media_type="text/event-stream", headers=headers)
                events = live_events(self.record, lambda: self._engine.stopping)
                return StreamingResponse(events, media_type="text/event-stream", headers=headers)
            record = await asyncio.to_thread(self.record)
            return JSONResponse(record.as_dict(), headers={"Cache-Control": "no-store"})

        return router

    @staticmethod
    def page() -> HTMLResponse:
        """The page itself, which holds no data."""
        text, headers = live_page()
        return HTMLResponse(text, headers=headers)

    def _sample(self) -> None:
        with self._lock:
            self._add()

    def _add(self) -> tuple[int, int]:
        """Tell the board the counters of now. Returns the requests that run and wait."""
        now = self._engine.snapshot()
        values = values_of(now, self._engine.cache.geometry.block_bytes)
        values["generation_tokens"] = {"": now.counters.generated_tokens}
        self._board.add(values, time.monotonic())
        return now.running, now.waiting

    def _make(self) -> LiveRecord:
        running, waiting = self._add()
        known: dict[str, Any] = {"running": running, "waiting": waiting}
        if time.monotonic() >= self._next_survey and (found := self._engine.survey()) is not None:
            self._survey = found
            self._next_survey = time.monotonic() + _SURVEY_SHARE * found.seconds
        if self._survey is not None:
            holdings = self._survey.holdings
            known |= {"kinds": holdings.blocks, "kept": holdings.checkpoints}
            known["requests"] = [LiveRequest(**asdict(one)) for one in self._survey.requests[:_SHOWN_REQUESTS]]
        if self._prefixes is not None:
            known["saving"], known["costing"] = self._prefixes.most(_SHOWN_PREFIXES)
        return self._board.record(time.monotonic(), unavailable=self._engine.unavailable or "", **known)
