"""`/v1/messages`: Anthropic's Messages API.

A message's blocks become a message of a chat, and results of tools become messages of their own. Marks of
`cache_control` stay where they are: they are the breakpoints of the chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from headway.errors import RequestError
from headway.server.chat.messages import (
    CacheControl,
    CalledFunction,
    Function,
    Message,
    Name,
    NamedFunction,
    NamedTool,
    TextPart,
    Tool,
    ToolCall,
)
from headway.server.fields import MESSAGES_HINTS, MESSAGES_UNSUPPORTED
from headway.server.protocol import (
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    CommonFields,
    JsonSchema,
    ResponseFormat,
    ShortText,
    check_parts,
    check_tools,
)
from headway.server.records import Record, ignored_fields, type_discriminator

__all__ = [
    "NAMES",
    "Block",
    "CountTokensRequest",
    "CustomTool",
    "MessagesMetadata",
    "MessagesRequest",
    "OutputConfig",
    "OutputFormat",
    "TextBlock",
    "Thinking",
    "ThinkingBlock",
    "ToolChoice",
    "ToolResultBlock",
    "ToolUseBlock",
    "Turn",
    "chat_of_messages",
    "ignored_in_messages",
]

NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tools[].function.strict": "tools[].strict",
    "stop": "stop_sequences",
    "tools[].function.parameters": "tools[].input_schema",
}
"""Fields of a chat, and those that they come from."""

_BILLING = "x-anthropic-billing-header:"
"""Begins a part of `system` that changes with each request and is not meant for the model."""
_LONGEST_USER = 512


class TextBlock(Record):
    """A text."""

    SILENT = frozenset({"parsed_output"})

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    def part(self) -> TextPart:
        """As a chat has it."""
        return TextPart(type="text", text=self.text, cache_control=self.cache_control)


class ThinkingBlock(Record):
    """What the model thought."""

    SILENT = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Record):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Record):
    """What a call gave."""

    HINTS = frozenset({"is_error"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    cache_control: CacheControl | None = None


_ALLOWED = ("text", "thinking", "tool_use", "tool_result")


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    type_discriminator(_ALLOWED, "text"),
]


class Turn(Record):
    """A message of one side."""

    SILENT = frozenset({"id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container"})

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]

    @property
    def blocks(self) -> list[Any]:
        """Its blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class CustomTool(Record):
    """A tool that the model may call."""

    HINTS = frozenset({"allowed_callers", "eager_input_streaming", "input_examples"})

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Record):
    """Whether a tool is to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Record):
    """Whether the model is to think."""

    HINTS = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Record):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Record):
    """What the answer is to be like."""

    effort: ShortText | None = None
    format: OutputFormat | None = None


class MessagesMetadata(Record):
    """Who asks."""

    user_id: str | None = None


class CountTokensRequest(CommonFields):
    """`POST /v1/messages/count_tokens`."""

    UNSUPPORTED = MESSAGES_UNSUPPORTED
    HINTS = MESSAGES_HINTS

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[ShortText], Field(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    metadata: MessagesMetadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def check(cls, body: Mapping[str, Any], longest: int | None) -> None:
        """Refuse blocks and tools that this server does not have."""
        _check_blocks(body.get("messages"))
        check_tools(body.get("tools"), "custom", "describe it with an input_schema")

    @property
    def billed(self) -> bool:
        """Whether `system` begins with a line that is not meant for the model."""
        first = self.system[0].text if isinstance(self.system, list) and self.system else self.system
        return isinstance(first, str) and first.startswith(_BILLING)


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]


def _check_blocks(messages: Any) -> None:
    turns = messages if isinstance(messages, list) else []
    given = [(f"messages[{i}].content", turn.get("content")) for i, turn in enumerate(turns) if isinstance(turn, dict)]
    check_parts(given, "messages")
    blocks = [
        (f"{where}[{j}]", block)
        for where, content in given
        for j, block in enumerate(content if isinstance(content, list) else [])
        if isinstance(block, dict)
    ]
    check_parts(((f"{where}.content", block.get("content")) for where, block in blocks), "messages")
    for where, block in blocks:
        if block.get("type") not in _ALLOWED:
            kind = str(block.get("type"))[:64]
            told = f"{where}: blocks of the type {kind} are not supported, only {', '.join(_ALLOWED)}"
            raise RequestError(told, where, "unsupported_content")


# -- to a chat --------------------------------------------------------------------------------------------------------


class _ClippedChat(ChatRequest):
    """Clients of this API ask for the same most tokens whatever the prompt: the answer may be shorter."""

    CLIPS: ClassVar[bool] = True


def chat_of_messages(body: CountTokensRequest) -> ChatRequest:
    """The chat that a request asks for.

    Raises:
        RequestError: Fields that contradict each other, or blocks where they cannot be.
    """
    given = {name: getattr(body, name) for name in CommonFields.model_fields if name in body.model_fields_set}
    messages = [*_system(body)]
    for i, turn in enumerate(body.messages):
        messages += _assistant(turn, i) if turn.role == "assistant" else _others(turn, i)
    if body.metadata is not None and body.metadata.user_id is not None and body.user is None:
        given["user"] = body.metadata.user_id[:_LONGEST_USER]
    choice = body.tool_choice
    config, form = body.output_config, body.output_format
    form = form if config is None or config.format is None else config.format
    return _ClippedChat(
        **given,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        continue_final_message=body.messages[-1].role == "assistant",
        response_format=None if form is None else _response_format(form),
        reasoning_effort=None if config is None else config.effort,
        chat_template_kwargs=_variables(body),
    )


def ignored_in_messages(body: CountTokensRequest) -> list[str]:
    """Fields of a request that are ignored."""
    return [*ignored_fields(body), *(["system (x-anthropic-billing-header)"] if body.billed else [])]


def _variables(body: CountTokensRequest) -> dict[str, Any] | None:
    """The variables of the template: most that can think have this one."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type == "enabled"} | (body.chat_template_kwargs or {})


def _system(body: CountTokensRequest) -> Iterator[Message]:
    given = body.system
    if isinstance(given, str):
        words = given.partition("\n")[2].lstrip("\n") if body.billed else given
        parts = [TextPart(type="text", text=words)] if words else []
    else:
        parts = [block.part() for block in (given or ())[body.billed :]]
    if parts:
        yield Message(role="system", content=parts)


def _assistant(turn: Turn, i: int) -> Iterator[Message]:
    """What the model said: it thinks, then speaks, then calls."""
    thought, said, calls = list[str](), list[TextPart](), list[ToolCall]()
    for j, block in enumerate(turn.blocks):
        if isinstance(block, ThinkingBlock):
            thought.append(block.thinking)
        elif isinstance(block, TextBlock):
            said.append(block.part())
        elif isinstance(block, ToolUseBlock):
            called = CalledFunction(name=block.name, arguments=block.input)
            calls.append(ToolCall(id=block.id, function=called, cache_control=block.cache_control))
        else:
            _refuse_place(block, turn, i, j)
    yield Message(
        role="assistant",
        content=said or None,
        reasoning_content="\n".join(thought) or None,
        tool_calls=calls or None,
    )


def _others(turn: Turn, i: int) -> Iterator[Message]:
    """What others said, and what calls gave."""
    said: list[TextPart] = []
    role: Any = turn.role
    for j, block in enumerate(turn.blocks):
        if isinstance(block, TextBlock):
            said.append(block.part())
            continue
        if not isinstance(block, ToolResultBlock) or turn.role == "system":
            _refuse_place(block, turn, i, j)
        if said:
            yield Message(role=role, content=said)
        said, given = [], block.content or ""
        content = given if isinstance(given, str) else [text.part() for text in given]
        yield Message(role="tool", tool_call_id=block.tool_use_id, content=content, cache_control=block.cache_control)
    if said or not turn.blocks:
        yield Message(role=role, content=said)


def _refuse_place(block: Any, turn: Turn, i: int, j: int) -> None:
    where = f"messages[{i}].content[{j}]"
    raise RequestError(f"{where}: a message of the role {turn.role} has no {block.type}", where, "invalid_value")


def _tool(tool: CustomTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function, cache_control=tool.cache_control)


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise RequestError("tool_choice.name is missing", "tool_choice.name", "missing_required_parameter")
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _response_format(form: OutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema.model_validate({"schema": form.schema_}))
