"""Messages and tools of a conversation, as clients send them.

Whatever a server of this API writes into a message may be sent back: what is null asks for nothing, and what only
names things (ids, places, annotations) is left alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from headway.server.records import Record

__all__ = [
    "CacheControl",
    "CalledFunction",
    "Function",
    "Message",
    "Name",
    "NamedFunction",
    "NamedTool",
    "TextPart",
    "Tool",
    "ToolCall",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


class CacheControl(Record):
    """A client's mark that others will share the prompt up to here. How long it lasts is for the cache to decide."""

    HINTS = frozenset({"ttl"})

    type: Literal["ephemeral"]


class TextPart(Record):
    """A part of a message's content: a text, or the words of a refusal that an assistant gave."""

    SILENT = frozenset({"annotations", "logprobs"})

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type} needs the field {self.type}")
        return self

    @property
    def words(self) -> str:
        """What it says."""
        said: str = getattr(self, self.type)
        return said


class CalledFunction(Record):
    """Which function is called, and with what: a JSON object as text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Record):
    """A call that an assistant made."""

    SILENT = frozenset({"index"})

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction
    cache_control: CacheControl | None = None


class Message(Record):
    """One message of a conversation."""

    SILENT = frozenset({"annotations", "audio", "function_call", "id", "object", "status", "phase", "type"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None

    def parts(self) -> list[str]:
        """The texts of its parts."""
        if isinstance(self.content, list):
            return [part.words for part in self.content]
        return [self.content if self.content is not None else self.refusal or ""]


class Function(Record):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Record):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None


class NamedFunction(Record):
    """The name of a function."""

    name: str


class NamedTool(Record):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction
