"""The FastAPI application: routes, limits and the key."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from headway import __version__
from headway.engine import Engine, EngineBusyError, TextTokenizer
from headway.errors import RequestError
from headway.server.connections import RequestIds
from headway.server.errors import install_error_handlers
from headway.server.live import LiveView
from headway.server.metrics import Metrics
from headway.server.openapi import openapi_document
from headway.server.prefixes import PrefixUses
from headway.server.protocol import ChatRequest, CompletionRequest, GenerationFields, parse_body
from headway.server.recorder import Observers
from headway.server.service import GenerationService, ServerOptions

__all__ = ["PATHS", "create_app"]

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=GenerationFields)

PATHS = {
    "POST /v1/chat/completions": "answer a conversation",
    "POST /v1/completions": "continue a text",
    "GET /v1/models": "the model that is served",
    "GET /v1/models/NAME": "the same, by its name",
    "GET /health": "200 while requests are taken and computed, else 503",
    "GET /metrics": "counters for Prometheus",
    "GET /v1/headway/live": "what the page at / shows in a browser, as JSON or as a stream of events",
    "DELETE /v1/pins/ID": "take back a pin, by the id that the answer told",
    "GET /openapi.json": "this API as a schema: every field that is taken and answered",
    "POST /reset_prefix_cache": "forget every prefix",
}
"""What `GET /` answers: every path, and what it is for."""

_MAX_BRACKETS = 250_000
"""Brackets in a body. Reading a hundred thousand lists takes as long as reading many megabytes of text."""
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
        if not await asyncio.to_thread(engine.close, _LAST_STEP_SECONDS):
            logger.error("the last step does not end: it is left behind")
        service.close()
        if recorder is not None:
            recorder.close()
        if options.kv_events is not None:
            options.kv_events.close()

    app = FastAPI(title="Headway", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    install_error_handlers(app)
    app.include_router(_open_routes(engine, metrics, options))
    for routes in (_api_routes(service), view.routes()):
        app.include_router(routes, dependencies=[Depends(_key_check(options.api_keys))])
    counted = metrics.around(app)  # next to the application, which says what route a request took
    return RequestIds(counted)  # around everything: a response to a fault of ours has an id as well


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
        body = await _body(ChatRequest, request, service)
        return await service.chat(body, request)

    @router.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await _body(CompletionRequest, request, service)
        return await service.complete(body, request)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != options.model_name:
            raise RequestError(
                f"the model {name!r} is not served here; {options.model_name!r} is", "model", "model_not_found"
            )
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
        given = sent.strip().encode("latin-1")
        fits = [hmac.compare_digest(given, key.encode()) for key in api_keys]  # all, so that time is equal
        if any(fits) and scheme.lower() == "bearer":
            request.state.api_key = api_keys[fits.index(True)]
        elif api_keys:
            raise RequestError(
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", None, "invalid_api_key"
            )

    return check


async def _body(kind: type[BodyT], request: Request, service: GenerationService) -> BodyT:
    given = await _read_json(request, service.options)
    return parse_body(kind, given, service.engine.max_model_len, strict=service.options.strict)


async def _read_json(request: Request, options: ServerOptions) -> Any:
    """The decoded body.

    Raises:
        RequestError: It is larger than the server takes (413), does not come in time (408), or is no JSON.
    """
    limit, seconds = options.max_body_bytes, options.client_timeout
    too_large = RequestError(f"the body is larger than {limit} bytes", None, "body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds (--client-timeout of the server)"
        raise RequestError(message, None, "request_timeout") from None
    except ClientDisconnect:
        raise RequestError("the client went away while it sent the body") from None
    return _decoded(body)


def _decoded(body: bytearray) -> Any:
    """What JSON in UTF-8 says.

    Raises:
        RequestError: It is no JSON, would take long to read, or has text that cannot be written as UTF-8.
    """
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > _MAX_BRACKETS:
        message = (
            f"the body has {brackets} opening brackets, {_MAX_BRACKETS} may be: each may begin a list or an object"
        )
        raise RequestError(message, None, "body_too_large")
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:  # an escape may stand for half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "the body has half of a surrogate pair (\\ud800 to \\udfff) by itself: send whole characters"
        raise RequestError(message, None, "invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", None, "invalid_json") from None
    return value
