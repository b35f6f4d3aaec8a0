"""Bodies of requests: read within limits of size and time, and checked."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from headway.errors import RequestError
from headway.server.protocol import Body, parse_body
from headway.server.service import GenerationService, ServerOptions

__all__ = ["read_body"]

BodyT = TypeVar("BodyT", bound=Body)

_MAX_BRACKETS = 250_000
"""Brackets in a body. Reading a hundred thousand lists takes as long as reading many megabytes of text."""

_MAX_NESTED = 128
"""Lists and objects in one another. Whoever walks through a body does so recursively, and Python has an end of that."""


async def read_body(kind: type[BodyT], request: Request, service: GenerationService) -> BodyT:
    """The body of a request.

    Raises:
        RequestError: It is larger than the server takes (413), does not come in time (408), is no JSON, or no `kind`.
    """
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
        RequestError: It is no JSON, would take long to read, or has text that cannot be written as UTF-8, numbers that
            are none, or lists and objects too deep in one another.
    """
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > _MAX_BRACKETS:
        message = (
            f"the body has {brackets} opening brackets, {_MAX_BRACKETS} may be: each may begin a list or an object"
        )
        raise RequestError(message, None, "body_too_large")
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\u" in text:  # an escape may stand for half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "the body has half of a surrogate pair (\\ud800 to \\udfff) by itself: send whole characters"
        raise RequestError(message, None, "invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", None, "invalid_json") from None
    if brackets > _MAX_NESTED and _is_too_deep(value):
        message = f"the body has more than {_MAX_NESTED} lists and objects in one another"
        raise RequestError(message, None, "invalid_json")
    return value


def _finite(text: str) -> float:
    """A number that can be written as JSON again.

    Raises:
        ValueError: It is none.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:32]} is no number of JSON, or too large a one")
    return number


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_NESTED):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
        if not level:
            return False
    return True
