"""What the routes of other APIs answer, as records; see `headway.server.schemas`."""

from __future__ import annotations

from typing import Any, Literal

from headway.server.schemas import Answer, Sparse

__all__ = [
    "CallItem",
    "Detokenized",
    "InputTokensDetails",
    "MessageOfBlocks",
    "MessagesErrorBody",
    "MessagesFailure",
    "MessagesUsage",
    "OutputTokensDetails",
    "ReasoningText",
    "ResponseObject",
    "ResponseUsage",
    "SaidItem",
    "SaidText",
    "TextOfBlock",
    "ThinkingOfBlock",
    "ThinkingTokensDetails",
    "ThoughtItem",
    "TokenCount",
    "Tokenized",
    "ToolUseOfBlock",
    "Version",
]

_Status = Literal["completed", "incomplete"]


class SaidText(Answer):
    """What is said."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class SaidItem(Answer):
    """A message of the answer."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[SaidText]
    status: _Status


class ReasoningText(Answer):
    """What was thought."""

    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(Answer):
    """Reasoning."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None
    status: _Status


class CallItem(Answer):
    """A function that is to be called."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: _Status


class InputTokensDetails(Answer):
    """Of the tokens of the prompt: those that were reused, and those that are kept now beyond them."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Of the tokens of the answer."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(Sparse):
    """An answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: _Status
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    model: str
    output: list[SaidItem | ThoughtItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    headway: dict[str, Any] = None  # type: ignore[assignment]


class TextOfBlock(Answer):
    """What is said."""

    type: Literal["text"]
    text: str


class ThinkingOfBlock(Answer):
    """What was thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOfBlock(Answer):
    """A tool that is to be called."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokensDetails(Answer):
    """Of the tokens of the answer."""

    thinking_tokens: int


class MessagesUsage(Sparse):
    """Token counts. A token of the prompt is in one of the first three: neither reused nor kept, kept now, reused."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails = None  # type: ignore[assignment]


class MessageOfBlocks(Sparse):
    """An answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOfBlock | ThinkingOfBlock | ToolUseOfBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    headway: dict[str, Any] = None  # type: ignore[assignment]


class TokenCount(Answer):
    """How many tokens a conversation has."""

    input_tokens: int


class MessagesFailure(Answer):
    """What is wrong."""

    type: str
    message: str


class MessagesErrorBody(Answer):
    """Why there is no answer, in the form of Anthropic's API."""

    type: Literal["error"]
    error: MessagesFailure
    request_id: str


class Tokenized(Answer):
    """The tokens of a text, and how many a request may have."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The text of tokens."""

    prompt: str


class Version(Answer):
    """Which server this is."""

    version: str
