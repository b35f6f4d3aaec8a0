"""`/v1/responses`: OpenAI's Responses API, without a memory of its own.

The items of an input become the messages of a chat. One answer of a model is several items (what was thought, what is
said, calls), and sent back they become one message again: the template then writes the very text of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from headway.errors import RequestError
from headway.server.chat.messages import (
    CacheControl,
    CalledFunction,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
)
from headway.server.fields import RESPONSES_HINTS, RESPONSES_UNSUPPORTED, STREAM_HINTS
from headway.server.protocol import (
    MAX_TOOLS,
    ChatRequest,
    CommonFields,
    JsonSchema,
    ResponseFormat,
    ShortText,
    check_parts,
    check_tools,
)
from headway.server.records import Record, type_discriminator

__all__ = [
    "NAMES",
    "BreakpointMark",
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionTool",
    "InputPart",
    "Item",
    "MessageItem",
    "NamedFunctionTool",
    "ReasoningConfig",
    "ReasoningItem",
    "ResponsesRequest",
    "ResponsesStreamOptions",
    "TextConfig",
    "TextFormat",
    "chat_of_response",
]

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools[].function.parameters": "tools[].parameters",
    "tools[].function.strict": "tools[].strict",
}
"""Fields of a chat, and those that they come from."""

_ALLOWED = ("message", "function_call", "function_call_output", "reasoning")


class BreakpointMark(Record):
    """OpenAI's word for `cache_control`."""

    HINTS = frozenset({"ttl"})

    mode: Literal["explicit"] = "explicit"


class InputPart(Record):
    """A text in an item."""

    SILENT = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: BreakpointMark | None = None

    @model_validator(mode="after")
    def _has_text(self) -> InputPart:
        if self.words is None:
            raise ValueError(f"a part of type {self.type} needs the field {self._field}")
        return self

    @property
    def _field(self) -> str:
        return "refusal" if self.type == "refusal" else "text"

    @property
    def words(self) -> str:
        """What it says."""
        said: str = getattr(self, self._field)
        return said

    def part(self) -> TextPart:
        """As a chat has it."""
        mark = self.cache_control
        if self.prompt_cache_breakpoint is not None and mark is None:
            mark = CacheControl(type="ephemeral")
        return TextPart(type="text", text=self.words, cache_control=mark)


_Parts = Annotated[list[InputPart], Field(fail_fast=True)]


class MessageItem(Record):
    """A message."""

    SILENT = frozenset({"id", "status", "phase", "object"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts
    cache_control: CacheControl | None = None


class FunctionCallItem(Record):
    """A call that the model made."""

    SILENT = frozenset({"id", "status", "parsed_arguments"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | dict[str, Any]


class FunctionCallOutputItem(Record):
    """What a call gave."""

    SILENT = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts
    name: str | None = None


class ReasoningItem(Record):
    """What the model thought."""

    SILENT = frozenset({"id", "status"})

    type: Literal["reasoning"]
    summary: _Parts = Field(default_factory=list)
    content: _Parts | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    type_discriminator(_ALLOWED, "message"),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    cache_control: CacheControl | None = None


class NamedFunctionTool(NamedFunction):
    """The one function that is to be called."""

    type: Literal["function"]


class TextFormat(Record):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Record):
    """What the text of the answer is to be like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Record):
    """How much the model is to think."""

    HINTS = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: ShortText | None = None


class ResponsesStreamOptions(Record):
    """Options of a streamed answer, of which none changes it."""

    HINTS = STREAM_HINTS


class ResponsesRequest(CommonFields):
    """`POST /v1/responses`."""

    UNSUPPORTED = RESPONSES_UNSUPPORTED
    HINTS = RESPONSES_HINTS

    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponsesStreamOptions | None = None

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse items and tools that this server does not have."""
        _check_items(body.get("input"))
        check_tools(body.get("tools"), "function", "describe it as a function")
        if "message.output_text.logprobs" in _listed(body.get("include")):
            told = "log probabilities are not told here: ask /v1/chat/completions"
            raise RequestError(told, "include", "unsupported_parameter")


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _check_items(items: Any) -> None:
    given = [(f"input[{i}]", item) for i, item in enumerate(_listed(items)) if isinstance(item, dict)]
    for where, item in given:
        kind = item.get("type", "message")
        if kind == "item_reference":
            told = f"{where} names an item, and nothing is stored: send the item itself"
            raise RequestError(told, where, "unsupported_content")
        if kind not in _ALLOWED:
            told = f"{where}: items of the type {str(kind)[:64]} are not supported, only {', '.join(_ALLOWED)}"
            raise RequestError(told, where, "unsupported_content")
    texts = ((f"{where}.{name}", item.get(name)) for where, item in given for name in ("content", "output"))
    check_parts((one for one in texts if one[1] is not None), "input")


# -- to a chat --------------------------------------------------------------------------------------------------------


def chat_of_response(body: ResponsesRequest) -> ChatRequest:
    """The chat that a request asks for.

    Raises:
        RequestError: Fields that contradict each other.
    """
    given = {name: getattr(body, name) for name in CommonFields.model_fields if name in body.model_fields_set}
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += _messages(body.input)
    if not messages:
        raise RequestError("the input is empty: send a text, or a list of items", "input", "invalid_value")
    choice: Any = body.tool_choice
    if isinstance(choice, NamedFunctionTool):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return ChatRequest(
        **given,
        messages=messages,
        max_tokens=body.max_output_tokens,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _tool(tool: FunctionTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function, cache_control=tool.cache_control)


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None:
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise RequestError("text.format.schema is missing", "text.format.schema", "missing_required_parameter")
    schema = None if form.schema_ is None else JsonSchema.model_validate({"schema": form.schema_})
    return ResponseFormat(type=form.type, json_schema=schema)


@dataclass
class _Turn:
    """One answer of the model, as far as its items have been read."""

    reasoning: list[str] = field(default_factory=list)
    content: list[TextPart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    mark: CacheControl | None = None

    def ends_before(self, item: Any) -> bool:
        """Whether `item` begins another: a model thinks, then speaks, then calls."""
        if isinstance(item, ReasoningItem):
            return bool(self.content or self.calls)
        if isinstance(item, MessageItem) and item.role == "assistant":
            return bool(self.content or self.calls)
        return not isinstance(item, FunctionCallItem)

    def take(self, item: Any) -> None:
        """Add one of its items."""
        if isinstance(item, ReasoningItem):
            self.reasoning += [part.words for part in item.content or item.summary]
        elif isinstance(item, FunctionCallItem):
            called = CalledFunction(name=item.name, arguments=item.arguments)
            self.calls.append(ToolCall(id=item.call_id, function=called))
        else:
            self.content += _parts(item.content)
            self.mark = item.cache_control

    def messages(self) -> Iterator[Message]:
        """The message of it, if there is one."""
        if self.reasoning or self.content or self.calls:
            yield Message(
                role="assistant",
                content=self.content or None,
                reasoning_content="\n".join(self.reasoning) or None,
                tool_calls=self.calls or None,
                cache_control=self.mark,
            )


def _messages(items: list[Any]) -> Iterator[Message]:
    turn = _Turn()
    for item in items:
        if turn.ends_before(item):
            yield from turn.messages()
            turn = _Turn()
        if isinstance(item, FunctionCallOutputItem):
            yield Message(role="tool", tool_call_id=item.call_id, name=item.name, content=_parts(item.output))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            yield Message(role=item.role, content=_parts(item.content), cache_control=item.cache_control)
        else:
            turn.take(item)
    yield from turn.messages()


def _parts(content: str | list[InputPart]) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [part.part() for part in content]
