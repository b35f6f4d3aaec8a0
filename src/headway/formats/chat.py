"""Logs of an OpenAI-style chat API, one request a line, and files of whole dialogues; tokenised here.

The request is the line itself, or its `body` or `request`; it has `messages`, or `prompt` (a text). The answer, where
the log has it, is in `choices` of the line or of its `response` (or `response.body`), or is `response` as a text.
The time is `timestamp`, `created` or `time`: seconds, or a date in ISO 8601. Everything else passes.

A line with `traj` is a whole dialogue, as tau-bench writes them: every message of the assistant answers those before.

What a request is in tokens, and where its messages end, says a `ChatRenderer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any, Protocol

import msgspec

from headway.errors import RequestError, TraceError
from headway.formats.blocks import Reader
from headway.formats.lines import Count, Line
from headway.formats.trace import TraceBuilder

__all__ = ["ByteRenderer", "ChatEntry", "ChatRenderer", "Rendered", "add_chat", "chat_entries", "read_chat"]

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """A prompt in tokens.

    Attributes:
        tokens: Its tokens.
        boundaries: Where its messages end, in tokens, ascending.
        salt: Only requests with the same salt share prefixes.
    """

    tokens: Sequence[int]
    boundaries: Sequence[int] = ()
    salt: str = ""


class ChatRenderer(Protocol):
    """Makes tokens of requests."""

    def prompt(self, body: Mapping[str, Any]) -> Rendered:
        """The prompt of a request, up to where the answer begins.

        Raises:
            RequestError: A request that would not be taken, such as messages that the chat template refuses.
        """

    def text(self, messages: Messages, tools: Any) -> str:
        """The text of a prompt."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text alone."""

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for."""


class ByteRenderer:
    """Every byte is one token, and every message stands under its role: nothing to download, no model's own form."""

    def prompt(self, body: Mapping[str, Any]) -> Rendered:
        """The prompt of a request."""
        if body.get("messages") is None:
            return Rendered(self.encode(str(body["prompt"])), salt=str(body.get("cache_salt") or ""))
        return Rendered(self.encode(self.text(body["messages"], body.get("tools"))), salt=body.get("cache_salt") or "")

    def text(self, messages: Messages, tools: Any) -> str:
        """The text of a prompt."""
        head = f"<|tools|>{tools}\n" if tools else ""
        return head + "".join(f"<|{m.get('role', 'user')}|>{_content(m)}\n" for m in messages) + "<|assistant|>"

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        """The byte itself."""
        return bytes([token])


class _Request(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    prompt: str | int | None = None
    tools: Any = None


class _Answer(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Count | None = None


class _Dialogue(msgspec.Struct):
    traj: list[dict[str, Any]]
    tools: Any = None


class _Timed(msgspec.Struct):
    timestamp: float | str | None = None
    created: float | str | None = None
    time: float | str | None = None
    output_length: Count | None = None


@dataclass(frozen=True)
class ChatEntry:
    """A request of a log.

    Attributes:
        line: Where it stands, for messages.
        body: The request.
        answer: The text of its answer, empty where the log has none.
        answer_tokens: Tokens of the answer as far as the log says.
        time: Seconds of arrival.
        session: Number of its dialogue where the log holds whole ones, else -1.
    """

    line: Line
    body: Mapping[str, Any]
    answer: str
    answer_tokens: int
    time: float
    session: int = -1


def chat_entries(line: Line, number: int) -> Iterator[ChatEntry]:
    """The requests of a line of a log, which is its object number `number`.

    Raises:
        TraceError: Names the line and the field.
    """
    if line.has("traj"):
        yield from _dialogue(number, line)
        return
    inner = _inner(line, "body", "request")
    request, timed = inner.to(_Request), line.to(_Timed)
    if request.messages is None and request.prompt is None:
        raise inner.fault("prompt", f"is missing; found {', '.join(map(repr, sorted(inner.fields)))}")
    answer, told = _answer(line)
    yield ChatEntry(inner, inner.fields, answer, max(told, timed.output_length or 0), _time(line, timed))


def read_chat(builder: TraceBuilder, renderer: ChatRenderer, entries: list[ChatEntry] | None = None) -> Reader:
    """What reads the lines of a chat log, and keeps their requests in `entries` where these are wanted."""
    numbers = count()

    def read(line: Line) -> None:
        for entry in chat_entries(line, next(numbers)):
            add_chat(entry, entry.body, builder, renderer)
            if entries is not None:
                entries.append(entry)

    return read


def add_chat(entry: ChatEntry, body: Mapping[str, Any], builder: TraceBuilder, renderer: ChatRenderer) -> None:
    """Add a request of a log, with that body, to a trace.

    Raises:
        TraceError: A body that the renderer refuses; names the line and the field.
    """
    builder.session = entry.session
    try:
        found = renderer.prompt(body)
        builder.add_tokens(
            found.tokens,
            renderer.encode(entry.answer),
            entry.time,
            answer_tokens=entry.answer_tokens,
            boundaries=found.boundaries,
            scope=found.salt or None,
        )
    except RequestError as error:
        raise entry.line.fault(error.param or "", str(error)) from None
    except TraceError as error:
        raise entry.line.fault("", str(error)) from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise entry.line.fault("messages", f"cannot be rendered: {error}") from None


def _dialogue(number: int, line: Line) -> Iterator[ChatEntry]:
    """The requests of a whole dialogue, a second apart."""
    found = line.to(_Dialogue)
    turns = [i for i, message in enumerate(found.traj) if message.get("role") == "assistant" and i]
    if not turns:
        raise line.fault("traj", "no message of the assistant answers others")
    tools = {} if found.tools is None else {"tools": found.tools}
    for turn, i in enumerate(turns):
        body = {"messages": found.traj[:i]} | tools
        yield ChatEntry(line, body, _text_of(found.traj[i]), 0, float(turn), number)


def _inner(line: Line, *names: str) -> Line:
    """The object that holds the request: the line itself, or one of its fields."""
    for name in names:
        if isinstance(line.fields.get(name), dict):
            return Line(line.where, line.fields[name], f"{line.path}{name}.")
    return line


def _answer(line: Line) -> tuple[str, int]:
    """The text of the answer, empty where the log has none, and how many tokens it had as far as the log says."""
    found = line.fields.get("response")
    if isinstance(found, str):
        return found, 0
    response = _inner(_inner(line, "response"), "body")
    choices = response.to(_Answer).choices
    if not choices:
        return "", 0
    usage = response.fields.get("usage")
    told = Line(line.where, usage, "usage.").to(_Usage).completion_tokens if isinstance(usage, dict) else 0
    return _text_of(_inner(Line(line.where, choices[0]), "message").fields), told or 0


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content", message.get("text"))
    return content if isinstance(content, str) else ""


def _time(line: Line, timed: _Timed) -> float:
    """Seconds of arrival; a date becomes seconds since 1970."""
    for name in ("timestamp", "created", "time"):
        value = getattr(timed, name)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                raise line.fault(name, f"expected seconds or a date in ISO 8601, found {value!r}") from None
        if value is not None:
            return float(value)
    return 0.0


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
