"""What the server answers, as records: the schemas of `/openapi.json`, and what the tests hold every answer against.

Answers are written as plain dicts (`headway.server.formats`): a record per token would cost more than it says.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Answer",
    "AnswerMessage",
    "AnsweredCall",
    "AnsweredFunction",
    "ChatChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "Completion",
    "CompletionLogprobs",
    "CompletionTokensDetails",
    "ContentLogprob",
    "ErrorBody",
    "Failure",
    "FinishReason",
    "Health",
    "ModelCard",
    "ModelList",
    "Overview",
    "PinDeleted",
    "PromptTokensDetails",
    "ResetDone",
    "Sparse",
    "TextChoice",
    "TokenLogprob",
    "Usage",
]


class Answer(BaseModel):
    """Part of an answer: nothing else is in it."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Answer):
    """Of the tokens of the prompt."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Of the tokens of the answer, where a drafter proposed some."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Sparse(Answer):
    """Fields with a default may be missing; they are never null."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=lambda schema: _drop_defaults(schema))


def _drop_defaults(schema: dict[str, Any]) -> None:
    for field in schema.get("properties", {}).values():
        field.pop("default", None)


class Usage(Sparse):
    """Token counts over all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = None  # type: ignore[assignment]


class TokenLogprob(Answer):
    """A token that was likely at a place."""

    token: str
    bytes: list[int]
    logprob: float


class ContentLogprob(TokenLogprob):
    """The token that was chosen at a place, and those that were likely there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log probabilities of an answer to a chat."""

    content: list[ContentLogprob]
    refusal: None


class AnsweredFunction(Answer):
    """Which function is called, and with what: a JSON object as text."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    """A tool that is to be called."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(Sparse):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = None  # type: ignore[assignment]
    tool_calls: list[AnsweredCall] = None  # type: ignore[assignment]


FinishReason = Literal["stop", "length", "tool_calls", "abort"]
"""Why an answer ended."""


class ChatChoice(Answer):
    """One answer to a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionLogprobs(Answer):
    """Log probabilities of a plain answer."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    """One plain answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class _Whole(Sparse):
    id: str
    created: int
    model: str
    system_fingerprint: None
    usage: Usage
    headway: dict[str, Any] = None  # type: ignore[assignment]


class ChatCompletion(_Whole):
    """The answers to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Whole):
    """The answers to one or more prompts."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class PinDeleted(Answer):
    """A pin was taken back."""

    id: str
    object: Literal["pin"]
    deleted: Literal[True]


class ResetDone(Answer):
    """The cache was emptied."""

    blocks_freed: int
    checkpoints_removed: int
    running_requests_detached: int
    complete: bool


class Overview(Answer):
    """What there is."""

    server: str
    paths: dict[str, str]


class Health(Sparse):
    """Whether requests are taken and computed, and if not, the `reason`; and how many failed because of NaN numbers."""

    status: Literal["ok", "unavailable"]
    reason: str = None  # type: ignore[assignment]
    not_finite: int


class Failure(Answer):
    """What is wrong, in words and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """Why there is no answer."""

    error: Failure
