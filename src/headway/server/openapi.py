"""`/openapi.json`: what the server takes and answers, from the very records that check it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from headway import __version__
from headway.server import schemas
from headway.server.dialects import schemas as dialects
from headway.server.dialects.messages import CountTokensRequest, MessagesRequest
from headway.server.dialects.responses import ResponsesRequest
from headway.server.dialects.tokens import DetokenizeRequest, TokenizeRequest
from headway.server.protocol import Body, ChatRequest, CompletionRequest
from headway.tell.live import LiveRecord

__all__ = ["openapi_document"]

_BODIES: tuple[type[Body], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_OF_PLACE = "#/components/schemas/{model}"
_WHY = {
    400: "The request cannot be served as it stands.",
    401: "The key is missing or wrong.",
    404: "There is no such thing here.",
    408: "The body did not arrive in time.",
    413: "The body is larger than the server takes.",
    429: "The queue is full.",
    500: "The request failed while it ran.",
    503: "The server cannot compute now; the response says when to try again.",
}
_STREAM = {
    "schema": {
        "type": "object",
        "description": (
            "A server-sent event: `data` is JSON, a chunk or an error, and for chat and plain completions `[DONE]` in "
            "the last one. Where the JSON has a `type`, `event` is the same."
        ),
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    }
}


def openapi_document(*, keyed: bool, strict: bool) -> dict[str, Any]:
    """The document of a server; `keyed` says that it asks for a key, `strict` that it takes no unknown fields."""
    api, asked = (400, 401, 404, 405, 408, 413, 429, 500, 503), (401, 404, 405, 500, 503)
    paths: dict[str, Any] = {
        "/v1/chat/completions": {
            "post": _operation("Answer a conversation.", schemas.ChatCompletion, api, ChatRequest, stream=True)
        },
        "/v1/completions": {
            "post": _operation("Continue a text.", schemas.Completion, api, CompletionRequest, stream=True)
        },
        "/v1/responses": {
            "post": _operation("Answer a conversation.", dialects.ResponseObject, api, ResponsesRequest, stream=True)
        },
        "/v1/messages": {
            "post": _operation("Answer a conversation.", dialects.MessageOfBlocks, api, MessagesRequest, stream=True)
        },
        "/v1/messages/count_tokens": {
            "post": _operation("Count the tokens of a conversation.", dialects.TokenCount, api, CountTokensRequest)
        },
        "/tokenize": {"post": _operation("Tokens of a text.", dialects.Tokenized, api, TokenizeRequest)},
        "/detokenize": {"post": _operation("Text of tokens.", dialects.Detokenized, api, DetokenizeRequest)},
        "/v1/models": {"get": _operation("The model that is served.", schemas.ModelList, asked)},
        "/v1/models/{name}": {"get": _operation("The same, by its name.", schemas.ModelCard, asked, name="name")},
        "/v1/pins/{id}": {"delete": _operation("Take back a pin.", schemas.PinDeleted, asked, name="id")},
        "/reset_prefix_cache": {"post": _operation("Forget every prefix.", schemas.ResetDone, asked)},
        "/health": {"get": _operation("Whether requests are taken and computed.", schemas.Health, ())},
        "/ping": {"get": _operation("The same.", schemas.Health, ())},
        "/version": {"get": _operation("The version of the server.", dialects.Version, ())},
        "/metrics": {"get": {"responses": {"200": _response("Counters for Prometheus.", {"text/plain": {}})}}},
        "/openapi.json": {"get": {"responses": {"200": _response("This document.", {"application/json": {}})}}},
        "/v1/headway/live": {"get": _operation("What the cache does now.", LiveRecord, asked, stream=True)},
        "/": {"get": _operation("What there is; the live page for browsers.", schemas.Overview, ())},
    }
    paths["/"]["get"]["responses"]["200"]["content"]["text/html"] = {}
    for path in ("/health", "/ping"):
        paths[path]["get"]["responses"]["503"] = paths[path]["get"]["responses"]["200"]
    for item in paths.values():
        if "get" in item:
            item["head"] = _without_bodies(item["get"])
    if keyed:
        for path in (path for path in paths if path.startswith(("/v1", "/reset", "/tokenize", "/detokenize"))):
            for operation in paths[path].values():
                operation["security"] = [{"key": []}, {"x-api-key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": _schemas(strict),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _schemas(strict: bool) -> dict[str, Any]:
    answers = (kind for module in (schemas, dialects) for kind in vars(module).values() if _is_record(kind, module))
    kinds = [*_BODIES, *answers]
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_OF_PLACE)
    live = TypeAdapter(LiveRecord).json_schema(ref_template=_OF_PLACE, mode="serialization")
    told: dict[str, Any] = found["$defs"] | live.pop("$defs") | {"LiveRecord": live}
    for kind in _BODIES:
        properties = told[kind.__name__]["properties"]
        for name, (neutral, reason) in kind.UNSUPPORTED.items():
            properties[name] = {"enum": list(neutral), "description": f"Not supported: {reason}."}
        for name, instead in kind.HINTS.items():
            properties[name] = {"description": f"Ignored: {instead}."}
    for schema in told.values():
        if schema.get("additionalProperties") is True:
            schema["additionalProperties"] = not strict
    told["HeadwayOptions"]["additionalProperties"] = False
    return told


def _is_record(found: Any, module: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel) and found.__name__ in module.__all__


def _operation(
    summary: str,
    answer: type[BaseModel | LiveRecord],
    failures: tuple[int, ...],
    body: type[BaseModel] | None = None,
    *,
    name: str | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _reference(answer)}}
    responses = {"200": _response(summary, content | ({"text/event-stream": _STREAM} if stream else {}))}
    failure = dialects.MessagesErrorBody if body in (MessagesRequest, CountTokensRequest) else schemas.ErrorBody
    error = {"application/json": {"schema": _reference(failure)}}
    responses |= {str(status): _response(_WHY.get(status, "Another method."), error) for status in failures}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if name is not None:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    return operation


def _without_bodies(operation: dict[str, Any]) -> dict[str, Any]:
    """The same for HEAD."""
    told = {
        status: {name: one[name] for name in one if name != "content"} for status, one in operation["responses"].items()
    }
    return operation | {"responses": told}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    named = {"x-request-id": {"schema": {"type": "string"}, "required": True}}
    return {"description": description, "headers": named, "content": content}


def _reference(kind: type[BaseModel | LiveRecord]) -> dict[str, Any]:
    return {"$ref": _OF_PLACE.format(model=kind.__name__)}
