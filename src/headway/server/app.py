"""The FastAPI application: routes, limits and the key."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from headway import __version__
from headway.engine import Engine, EngineBusyError, TextTokenizer
from headway.errors import RequestError
from headway.server.bodies import read_body
from headway.server.connections import HeadAsGet, RequestIds
from headway.server.dialects.routes import dialect_routes
from headway.server.errors import install_error_handlers
from headway.server.live import LiveView
from headway.server.metrics import Metrics
from headway.server.openapi import openapi_document
from headway.server.prefixes import PrefixUses
from headway.server.protocol import ChatRequest, CompletionRequest
from headway.server.recorder import Observers
from headway.server.service import GenerationService, ServerOptions

__all__ = ["PATHS", "create_app"]

logger = logging.getLogger(__name__)

PATHS = {
    "POST /v1/chat/completions": "answer a conversation",
    "POST /v1/completions": "continue a text",
    "POST /v1/responses": "answer a conversation, in the form of OpenAI's Responses API",
    "POST /v1/messages": "answer a conversation, in the form of Anthropic's Messages API",
    "POST /v1/messages/count_tokens": "how many tokens such a conversation has",
    "POST /tokenize": "the tokens of a text or a conversation",
    "POST /detokenize": "the text of tokens",
    "GET /v1/models": "the model that is served",
    "GET /v1/models/NAME": "the same, by its name",
    "GET /health": "200 while requests are taken and computed, else 503",
    "GET /ping": "the same",
    "GET /version": "the version of the server",
    "GET /metrics": "counters for Prometheus",
    "GET /v1/headway/live": "what the page at / shows in a browser, as JSON or as a stream of events",
    "DELETE /v1/pins/ID": "take back a pin, by the id that the answer told",
    "GET /openapi.json": "this API as a schema: every field that is taken and answered",
    "POST /reset_prefix_cache": "forget every prefix",
}
"""What `GET /` answers: every path, and what it is for."""

_LAST_STEP_SECONDS = 60.0
"""How long a shutdown waits for a step to end. A device that hangs must not keep the process."""


def create_app(engine: Engine, tokenizer: TextTokenizer, options: ServerOptions) -> ASGIApp:
    """Build the application around an engine that was started. When it shuts down, it closes the engine.

    Servers of ASGI applications let running requests end before they shut an application down, so nobody is cut off.

    Args:
        engine: The engine; its observer is set to the application's metrics.
        tokenizer: The model's tokenizer; several threads of the server use it.
        options: The server's options.
    """
    service = GenerationService(engine, tokenizer, options)
    metrics = Metrics(engine, options.model_name, options.kv_events)
    recorder = options.recorder
    told = options.explain != "off"
    prefixes = PrefixUses(tokenizer.decode if options.explain == "all" else None) if told else None
    view = LiveView(engine, options.model_name, prefixes)
    observers = (metrics, service.answers, recorder, prefixes)
    engine.observer = Observers([one for one in observers if one is not None])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with view.sampling():
            yield
        if not await asyncio.to_thread(engine.close, _LAST_STEP_SECONDS + engine.config.tiers.tier_grace):
            logger.error("the last step does not end: it is left behind")
        service.close()
        if recorder is not None:
            recorder.close()
        if options.kv_events is not None:
            options.kv_events.close()

    app = FastAPI(title="Headway", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    install_error_handlers(app)
    app.include_router(_open_routes(engine, metrics, options))
    keyed = [Depends(_key_check(options.api_keys))]
    for routes in (_api_routes(service), dialect_routes(service), view.routes()):
        app.include_router(routes, dependencies=keyed)
    wrapped: ASGIApp = HeadAsGet(metrics.around(app))  # counted next to the application, which knows the route
    if options.cors_origins:
        wrapped = CORSMiddleware(
            wrapped, options.cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    return RequestIds(wrapped)  # around everything: a response to a fault of ours has an id as well


def _open_routes(engine: Engine, metrics: Metrics, options: ServerOptions) -> APIRouter:
    """What anyone may ask, key or not."""
    document = openapi_document(keyed=bool(options.api_keys), strict=options.strict)
    router = APIRouter()

    @router.get("/")
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return LiveView.page()
        return JSONResponse({"server": f"headway {__version__}", "paths": PATHS}, headers={"Vary": "Accept"})

    @router.get("/openapi.json")
    async def describe() -> dict[str, Any]:
        return document

    @router.get("/health")
    async def health() -> JSONResponse:
        reason = engine.unavailable
        if reason is None:
            return JSONResponse({"status": "ok", "not_finite": engine.not_finite})
        return JSONResponse({"status": "unavailable", "reason": reason, "not_finite": engine.not_finite}, 503)

    @router.get("/ping")
    async def ping() -> JSONResponse:
        return await health()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    return router


def _api_routes(service: GenerationService) -> APIRouter:
    router = APIRouter()
    options, started = service.options, int(time.time())
    model = {
        "id": options.model_name,
        "object": "model",
        "created": started,
        "owned_by": "headway",
        "max_model_len": service.engine.max_model_len,
    }

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(ChatRequest, request, service)
        return await service.chat(body, request)

    @router.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await read_body(CompletionRequest, request, service)
        return await service.complete(body, request)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return model

    @router.delete("/v1/pins/{name}")
    def unpin(name: str) -> dict[str, Any]:
        try:
            found = service.pins.lift(name)
        except TimeoutError:
            raise EngineBusyError("a step takes long; the pin will be lifted when it has ended") from None
        if not found:
            raise RequestError(f"there is no pin {name!r}: it is over, or was taken back", None, "pin_not_found")
        return {"id": name, "object": "pin", "deleted": True}

    @router.post("/reset_prefix_cache")
    def reset() -> dict[str, Any]:
        try:
            report = service.reset()
        except TimeoutError:
            raise EngineBusyError("a step takes long; the prefix cache will be emptied when it has ended") from None
        return {
            "blocks_freed": report.blocks_freed,
            "checkpoints_removed": report.checkpoints,
            "running_requests_detached": report.leases_detached,
            "complete": report.leases_detached == 0,
        }

    return router


def _key_check(api_keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """What lets in whoever sends one of `api_keys`, and says in the request's state which."""

    async def check(request: Request) -> None:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            sent = request.headers.get("x-api-key", "")
        given = sent.strip().encode("latin-1")
        fits = [hmac.compare_digest(given, key.encode()) for key in api_keys]  # all, so that time is equal
        if any(fits):
            request.state.api_key = api_keys[fits.index(True)]
        elif api_keys:
            raise RequestError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                None,
                "invalid_api_key",
            )

    return check
