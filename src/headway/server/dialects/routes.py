"""The routes of other APIs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway.server.bodies import read_body
from headway.server.chat.reading import AnswerForm
from headway.server.dialects import messages, responses
from headway.server.dialects.message_blocks import BlocksFormat
from headway.server.dialects.messages import (
    CountTokensRequest,
    MessagesRequest,
    chat_of_messages,
    ignored_in_messages,
)
from headway.server.dialects.response_items import ItemsFormat
from headway.server.dialects.responses import ResponsesRequest, chat_of_response
from headway.server.dialects.tokens import DetokenizeRequest, TokenizeRequest, request_of, tokenized
from headway.server.fields import named_as
from headway.server.formats import Format
from headway.server.records import ignored_fields
from headway.server.service import Asked, GenerationService

__all__ = ["dialect_routes"]


def dialect_routes(service: GenerationService) -> APIRouter:
    """The routes of the other APIs."""
    router, name, tokenizer = APIRouter(), service.options.model_name, service.tokenizer

    @router.post("/v1/responses")
    async def respond(request: Request) -> Response:
        body = await read_body(ResponsesRequest, request, service)

        def write(form: AnswerForm | None) -> Format:
            return ItemsFormat(body, name, tokenizer, form)

        with named_as(responses.NAMES):
            asked = Asked(chat_of_response(body), ignored_fields(body), write, responses.NAMES)
            return await service.converse(asked, request)

    @router.post("/v1/messages")
    async def answer(request: Request) -> Response:
        body = await read_body(MessagesRequest, request, service)

        def write(form: AnswerForm | None) -> Format:
            return BlocksFormat(body, name, tokenizer, form)

        ignored = ignored_in_messages(body)
        if body.thinking is not None and not tokenizer.template_knows("enable_thinking"):
            ignored.append("thinking")
        with named_as(messages.NAMES):
            return await service.converse(Asked(chat_of_messages(body), ignored, write, messages.NAMES), request)

    @router.post("/v1/messages/count_tokens")
    async def count(request: Request) -> dict[str, Any]:
        body = await read_body(CountTokensRequest, request, service)
        with named_as(messages.NAMES):
            _, prompt = await service.prepare(chat_of_messages(body), request)
        return {"input_tokens": len(prompt.tokens)}

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(TokenizeRequest, request, service)
        tokens = await service.tokens(request_of(body), request)
        return tokenized(tokens, body, tokenizer, service.engine.max_model_len)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(DetokenizeRequest, request, service)
        service.require_model(body.model)
        return {"prompt": await service.text(body.tokens, request)}

    return router
