"""The plug-in of vLLM's server that answers `/v1/headway/explain`, and has the live page (`vllm.endpoint_plugins`).

The path begins with /v1, since that is what vLLM guards by its `--api-key`. The body is that of a chat or a completion,
and goes through vLLM's own handler of these, so the tokens that are looked up are those that would be computed.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from headway.vllm.live import add_live_routes, board_of, error_response
from headway.vllm.options import is_ours

__all__ = ["Endpoint"]

_ASK = {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": {"headway": {"dry_run": True}}}

_MISSING = "this server does not run headway.vllm.Scheduler: start it with --scheduler-cls headway.vllm.Scheduler"


class Endpoint:
    """What vLLM asks of such a plug-in."""

    name = "headway"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/v1/headway/explain", _explain, methods=["POST"])
        add_live_routes(app, board_of(REGISTRY))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Without our scheduler there is nothing to show."""
        if not is_ours(engine_client.vllm_config):
            board_of(REGISTRY).missing = _MISSING


async def _explain(body: dict[str, Any], raw: Request) -> JSONResponse:
    """What would become of the tokens of a prompt. Nothing is computed."""
    chat = "messages" in body
    try:
        asked = (ChatCompletionRequest if chat else CompletionRequest).model_validate({**body, **_ASK})
    except ValidationError as error:  # vLLM's server answers it as it does on its own routes
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error
    state = raw.app.state
    handler = state.openai_serving_chat if chat else state.openai_serving_completion
    answer = await (handler.create_chat_completion if chat else handler.create_completion)(asked, raw)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(jsonable_encoder(answer), answer.error.code)
    told = (answer.kv_transfer_params or {}).get("headway")
    if told is None:
        return error_response(501, "NotImplementedError", _MISSING)
    if "prompt_tokens" not in told:
        return error_response(403, "PermissionDeniedError", "; ".join(told["refused"]))
    return JSONResponse(told)
