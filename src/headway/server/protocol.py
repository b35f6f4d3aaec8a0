"""What clients may send: the OpenAI API's fields that are supported, and Headway's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StringConstraints, Tag, ValidationError

from headway.errors import RequestError
from headway.server.chat.messages import Message, NamedTool, Tool
from headway.server.fields import HINTS, STREAM_HINTS, UNSUPPORTED, Unsupported, refuse_unsupported
from headway.server.records import Record, unknown_field

__all__ = [
    "MAX_STOPS",
    "MAX_TOOLS",
    "Body",
    "ChatRequest",
    "CommonFields",
    "CompletionRequest",
    "GenerationFields",
    "HeadwayOptions",
    "JsonSchema",
    "ResponseFormat",
    "ShortText",
    "StreamOptions",
    "StructuredOutputs",
    "check_messages",
    "check_parts",
    "check_tools",
    "parse_body",
]

_MAX_CHOICES = 64
MAX_STOPS = 16
_MAX_PARTS = 16384
"""Messages and parts of messages in a request: each costs time before anything is known of its length in tokens."""
_MAX_BIASES = 8192
MAX_TOOLS = 1024
_MAX_PROMPTS = 256
"""Prompts of one plain completion, and answers that it may ask for."""
ShortText = Annotated[str, StringConstraints(max_length=512)]


class StreamOptions(Record):
    """Options of a streamed answer."""

    HINTS = STREAM_HINTS

    include_usage: bool | None = None


class JsonSchema(Record):
    """A schema that the answer fits, with what OpenAI's clients say besides; it is followed whether `strict` or not."""

    name: ShortText | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Record):
    """The form of the answer, as OpenAI's clients ask for it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Record):
    """The form of the answer, as vLLM's clients ask for it: one of the first five."""

    CLOSED = True

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False


class HeadwayOptions(Record):
    """What Headway offers beyond the OpenAI API.

    Attributes:
        explain: Say in the response why no more of the prompt was reused.
        no_store: Read the cache, keep nothing of this request in it.
        pin: Protect the first so many tokens of the prompt from eviction; true for the whole prompt.
        pin_seconds: For how long; by default as long as the server lets a pin last.
    """

    CLOSED = True

    explain: bool = False
    no_store: bool = False
    pin: bool | Annotated[int, Field(ge=0)] = False
    pin_seconds: Annotated[float, Field(ge=0.001, le=1e12)] | None = None


def _few_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens may have a bias")
    return given


class Body(Record):
    """A body.

    Attributes:
        UNSUPPORTED: Fields of its API that are refused.
    """

    UNSUPPORTED: ClassVar[Unsupported] = {}
    HINTS: ClassVar[Mapping[str, str]] = {}

    model: str | None = None

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse by a look at a body what is better told so than by what validation finds.

        Args:
            body: The body.
            longest: Most tokens of prompt and answer together.

        Raises:
            RequestError: The message names the field and what to send instead.
        """


class CommonFields(Body):
    """Fields that every endpoint with an answer takes in the same words."""

    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)] | None = (
        None
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    user: ShortText | None = None
    cache_salt: ShortText | None = None
    headway: HeadwayOptions = HeadwayOptions()


class GenerationFields(CommonFields):
    """Fields that chat and plain completions share."""

    UNSUPPORTED = UNSUPPORTED
    HINTS = HINTS

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stop: ShortText | Annotated[list[ShortText], Field(max_length=MAX_STOPS)] | None = None
    add_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    guided_grammar: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings.

        Raises:
            RequestError: An empty one.
        """
        given = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        if "" in given:
            raise RequestError("a stop string is empty; it would end every answer at once", "stop")
        return tuple(given)


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`, and what the other dialects are translated to.

    Attributes:
        CLIPS: More tokens than there is room for may be asked for: the answer has as many as fit.
    """

    CLIPS: ClassVar[bool] = False

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    reasoning_effort: ShortText | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse what this server cannot take in messages."""
        check_messages(body.get("messages"))


def _kind_of_prompt(given: Any) -> str:
    """Which form of a prompt is meant, by its first element: faults of the other forms are not looked for."""
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, list):
        return "list[list[int]]"
    if isinstance(given, list):
        return "list[int]" if isinstance(first, int) else "list[str]"
    return "str"


_Tokens = Annotated[list[int], Field(fail_fast=True)]


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[str], Field(fail_fast=True, max_length=_MAX_PROMPTS), Tag("list[str]")]
        | Annotated[_Tokens, Tag("list[int]")]
        | Annotated[list[_Tokens], Field(fail_fast=True, max_length=_MAX_PROMPTS), Tag("list[list[int]]")],
        Discriminator(_kind_of_prompt),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse token ids by their number, before each of them is looked at."""
        _refuse_long_tokens(body.get("prompt"), longest)


RequestT = TypeVar("RequestT", bound=Body)


def parse_body(kind: type[RequestT], body: Any, longest: int | None = None, *, strict: bool = False) -> RequestT:
    """Check a decoded JSON body.

    Args:
        kind: What it should be.
        body: The body.
        longest: Most tokens of prompt and answer together. Of a longer prompt of token ids nothing else is checked.
        strict: Refuse every field that is not known.

    Raises:
        RequestError: The message names the first field at fault and what it should be.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", None, "invalid_body")
    supported = refuse_unsupported(body, kind.UNSUPPORTED)
    kind.check(supported, longest)
    try:
        request = kind.model_validate(supported)
    except ValidationError as error:
        raise _as_request_error(error) from None
    if (unknown := unknown_field(request, strict=strict)) is not None:
        param, record = unknown
        raise RequestError(f"unknown field {param}{_hint(param, record)}", param, "unknown_parameter")
    return request


def _refuse_long_tokens(prompt: Any, longest: int | None) -> None:
    """Refuse token ids by their number, before each of them is looked at."""
    if longest is None or not isinstance(prompt, list):
        return
    for given in [prompt, *prompt[:_MAX_PROMPTS]]:
        if isinstance(given, list) and len(given) >= longest and isinstance(given[0], int):
            raise RequestError(
                f"the prompt has {len(given)} tokens, and this server allows {longest} of prompt and answer together",
                "prompt",
                "context_length_exceeded",
            )


_FOREIGN_PARTS = {
    "image": "images are",
    "image_url": "images are",
    "input_image": "images are",
    "audio": "audio is",
    "audio_url": "audio is",
    "input_audio": "audio is",
    "video_url": "video is",
    "document": "documents are",
    "file": "files are",
    "input_file": "files are",
}


def check_parts(lists: Iterable[tuple[str, Any]], named: str) -> None:
    """Refuse parts of content that are no text, with a better reason than `unexpected value`; or too many of them.

    Args:
        lists: Contents, lists or not, and where they stand.
        named: The field that they are all in.

    Raises:
        RequestError: The message names the part.
    """
    parts = 0
    for where, content in lists:
        parts += 1 + (len(content) if isinstance(content, list) else 0)
        if parts > _MAX_PARTS:
            raise RequestError(f"more than {_MAX_PARTS} messages and parts of messages", named, "invalid_value")
        for i, part in enumerate(content if isinstance(content, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _FOREIGN_PARTS:
                told = f"{_FOREIGN_PARTS[kind]} not supported: this server takes text only"
                raise RequestError(told, f"{where}[{i}]", "unsupported_content")


def check_tools(tools: Any, kind: str, instead: str) -> None:
    """Refuse tools that others run: those of a type other than `kind`.

    Raises:
        RequestError: The message names the tool, and what to do `instead`.
    """
    for i, tool in enumerate(tools if isinstance(tools, list) else []):
        given = tool.get("type") if isinstance(tool, dict) else None
        if given not in (None, kind):
            message = f"tools[{i}]: tools of the type {str(given)[:64]} are not run here; {instead}"
            raise RequestError(message, f"tools[{i}]", "unsupported_parameter")


def check_messages(messages: Any) -> None:
    """Refuse what this server cannot take in messages of a chat.

    Raises:
        RequestError: The message names the place.
    """
    given = messages if isinstance(messages, list) else []
    said = [(f"messages[{i}]", one) for i, one in enumerate(given) if isinstance(one, dict)]
    check_parts(((f"{where}.content", one.get("content")) for where, one in said), "messages")
    for where, message in said:
        _check_message(message, where)


def _check_message(message: dict[str, Any], where: str) -> None:
    if message.get("role") == "function" or message.get("function_call"):
        raise RequestError(
            f"{where}: functions are not supported; send tool_calls and messages of the role tool, which took their "
            "place",
            where,
            "unsupported_parameter",
        )
    if message.get("content") is None and message.get("role") != "assistant":
        raise RequestError(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
    if message.get("audio"):
        raise RequestError(
            "audio is not supported: this server takes text only", f"{where}.audio", "unsupported_content"
        )


def _as_request_error(error: ValidationError) -> RequestError:
    """The fault that went deepest into the body, and best had the right type: of a union's branches, the one meant."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    fault = max(faults, key=lambda f: (sum(isinstance(s, int) for s in f["loc"]), not f["type"].endswith("_type")))
    param = _path(fault["loc"])
    if fault["type"] == "missing":
        return RequestError(f"{param} is missing", param, "missing_required_parameter")
    expected = _EXPECTED.get(re.sub(r"\[\d+\]", "[]", param))
    if expected is not None and fault["type"] in _SHAPES:
        return RequestError(f"{param} must be {expected}", param, "invalid_value")
    said = fault["msg"].removeprefix("Value error, ")
    return RequestError(f"{param}: {said[:1].lower()}{said[1:]}", param, "invalid_value")


def _hint(param: str, record: type[BaseModel]) -> str:
    """What an unknown field may have been meant to be: all fields of `headway`, or the nearest of the record's."""
    if record is HeadwayOptions:
        return f"; headway has {', '.join(HeadwayOptions.model_fields)}"
    near = get_close_matches(param.rpartition(".")[2], record.model_fields, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


_SHAPES = {
    "literal_error",
    "list_type",
    "string_type",
    "model_type",
    "dict_type",
    "too_short",
    "int_type",
    "model_attributes_type",
}
_EXPECTED = {
    "messages": 'a list of at least one message, such as [{"role": "user", "content": "Hello"}]',
    "messages[]": 'an object, such as {"role": "user", "content": "Hello"}',
    "messages[].content": 'a text, or a list of parts such as {"type": "text", "text": "Hello"}',
    "messages[].content[]": 'an object, such as {"type": "text", "text": "Hello"}',
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "tools": 'a list of tools, such as [{"type": "function", "function": {"name": "look", "parameters": {...}}}]',
    "tool_choice": '"auto", "none", "required", or {"type": "function", "function": {"name": "look"}}',
    "headway": f"an object with any of {', '.join(HeadwayOptions.model_fields)}",
}
"""Fields of a shape that clients get wrong, and what they should be."""


def _path(location: tuple[int | str, ...]) -> str:
    """A field's path as a client writes it, without the names that pydantic gives to branches of a union."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in _BRANCHES:
            path += f".{step}" if path else step
    return path


_BRANCHES = {"str", "int", "bool", "TextPart", "NamedTool", "constrained", "literal"}
