"""`/tokenize` and `/detokenize`, in vLLM's form: what the tokenizer makes of a text or a conversation, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from headway.engine import TextTokenizer
from headway.errors import RequestError
from headway.server.chat.messages import Message, Tool
from headway.server.fields import UNSUPPORTED
from headway.server.formats import token_text
from headway.server.protocol import MAX_TOOLS, Body, ChatRequest, CompletionRequest, check_messages

__all__ = ["DetokenizeRequest", "TokenizeRequest", "request_of", "tokenized"]


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt or messages."""

    UNSUPPORTED = {"chat_template": UNSUPPORTED["chat_template"]}  # noqa: RUF012

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse what is neither a prompt nor messages, or both."""
        if ("prompt" in body) == ("messages" in body):
            told = "send a prompt, or messages" if "prompt" in body else "prompt is missing; or send messages"
            raise RequestError(told, "prompt", "missing_required_parameter")
        check_messages(body.get("messages"))


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: Annotated[list[int], Field(fail_fast=True)]

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse token ids by their number, before each of them is looked at."""
        given = body.get("tokens")
        if longest is not None and isinstance(given, list) and len(given) > longest:
            told = f"{len(given)} tokens, and this server allows {longest} of prompt and answer together"
            raise RequestError(told, "tokens", "context_length_exceeded")


def request_of(body: TokenizeRequest) -> ChatRequest | CompletionRequest:
    """The request that has the prompt that is asked about."""
    if body.messages is None:
        return CompletionRequest(model=body.model, prompt=body.prompt or "", add_special_tokens=body.add_special_tokens)
    names = ("model", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message")
    given = {name: getattr(body, name) for name in names}
    return ChatRequest(**given, chat_template_kwargs=body.chat_template_kwargs)


def tokenized(tokens: Sequence[int], body: TokenizeRequest, tokenizer: TextTokenizer, longest: int) -> dict[str, Any]:
    """The answer: the tokens, and how many a request may have."""
    words = [token_text(tokenizer.piece(token)) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": longest, "tokens": list(tokens), "token_strs": words}
