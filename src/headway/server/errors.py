"""Every error in the form that its API has, OpenAI's or Anthropic's, with the right HTTP status."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headway.engine import EngineBusyError, EngineStoppedError, NotFiniteError, QueueFullError
from headway.errors import HeadwayError, RequestError, UnservableError
from headway.server.logs import request_id

__all__ = [
    "error_body",
    "error_response",
    "install_error_handlers",
    "log_failure",
    "messages_error_body",
    "status_of",
]

logger = logging.getLogger(__name__)

_LONGEST_TOLD = 500
"""Characters of an error that the log shows: they may come from the client."""
_STATUS_OF_CODE = {
    "model_not_found": 404,
    "pin_not_found": 404,
    "body_too_large": 413,
    "invalid_api_key": 401,
    "request_timeout": 408,
}
_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_MESSAGES_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""The same for Anthropic's API."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return _STATUS_OF_CODE.get(error.code or "", 400)
    if isinstance(error, UnservableError):
        return 400
    if isinstance(error, QueueFullError):
        return 429
    return 503 if isinstance(error, EngineStoppedError | EngineBusyError) else 500


def error_body(error: BaseException) -> dict[str, Any]:
    """The body of an error: `{"error": {"message", "type", "param", "code"}}`.

    The message of an error that Headway did not raise on purpose stays in the log: it could name what is none of a
    client's business.
    """
    status = status_of(error)
    message = str(error) if isinstance(error, HeadwayError) else "the server failed; its log says why"
    code = getattr(error, "code", None)
    if isinstance(error, UnservableError):
        code = "unservable"
    elif isinstance(error, QueueFullError):
        code = "queue_full"
    elif isinstance(error, NotFiniteError):
        code = "not_finite"
    return _body(message, status, getattr(error, "param", None), code)


def messages_error_body(error: BaseException) -> dict[str, Any]:
    """The body of an error in the form of Anthropic's API, where the message names the field."""
    told = error_body(error)["error"]
    message, param = told["message"], told["param"]
    return _messages_body(message if param is None or param in message else f"{param}: {message}", status_of(error))


def error_response(error: BaseException, path: str) -> JSONResponse:
    """The response to a request for `path` that failed with `error`."""
    status = status_of(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    if status == 408:
        headers = {"Connection": "close"}
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse((messages_error_body if _of_messages(path) else error_body)(error), status, headers)


def log_failure(error: HeadwayError) -> None:
    """Tell the log, which names the request, why it was refused, or that it failed after it was understood."""
    if status_of(error) >= 500:
        logger.warning("the request failed: %s", error)
    else:
        logger.info("the request was refused: %s", " ".join(str(error)[:_LONGEST_TOLD].split()))  # clients have a part


def install_error_handlers(app: FastAPI) -> None:
    """Make every failing request of `app` answer in this form."""

    async def headway_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HeadwayError)
        log_failure(error)
        return error_response(error, request.url.path)

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path} here; GET / lists what there is"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        status = error.status_code
        in_messages = _of_messages(request.url.path)
        body = _messages_body(message, status) if in_messages else _body(message, status, None, None)
        return JSONResponse(body, status, error.headers)

    async def fault(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error, request.url.path)

    app.add_exception_handler(HeadwayError, headway_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)


def _of_messages(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path.startswith("/v1/messages")


def _messages_body(message: str, status: int) -> dict[str, Any]:
    kind = _MESSAGES_TYPE_OF_STATUS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id.get()}


def _body(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
