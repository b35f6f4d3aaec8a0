"""Logs of an OpenAI-style chat API, one inner a line, tokenised here.

The inner is the line itself, or its `body` or `request`; it has `messages`, or `prompt` (a text). The answer, where
the log has it, is in `choices` of the line or of its `response` (or `response.body`), or is `response` as a text.
The time is `timestamp`, `created` or `time`: seconds, or a date in ISO 8601. Everything else passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from headway.errors import ConfigError, TraceError
from headway.formats.lines import Count, Line
from headway.formats.trace import TraceBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTokenizer", "chat_messages", "chat_tokenizer", "read_chat"]

Messages = Sequence[dict[str, Any]]


class _Request(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    prompt: str | int | None = None
    tools: Any = None


class _Answer(msgspec.Struct):
    choices: list[dict[str, Any]] | None = None


class _Timed(msgspec.Struct):
    timestamp: float | str | None = None
    created: float | str | None = None
    time: float | str | None = None
    output_length: Count | None = None


class ChatTokenizer:
    """Turns messages into tokens.

    Attributes:
        render: The text of a prompt, from its messages and its tools, up to where the answer begins.
        loaded: The tokenizer of transformers; None for bytes.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        render: Callable[[Messages, Any], str],
        loaded: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Use `render(messages, tools)` for the text of a prompt and `encode` for its tokens."""
        self._encode, self.render, self.loaded = encode, render, loaded

    def prompt(self, messages: Messages, tools: Any) -> list[int]:
        """Tokens of a prompt, up to where the answer begins."""
        return self._encode(self.render(messages, tools))

    def text(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self._encode(text)


def chat_tokenizer(name: str | None) -> ChatTokenizer:
    """The tokenizer of that name: "bytes" (every byte a token; nothing to download), or one of transformers.

    Raises:
        ConfigError: None named, or one that cannot be loaded.
    """
    if name is None:
        raise ConfigError("a chat log holds text: name the model's tokenizer with --tokenizer (a folder or a hub id)")
    if name == "bytes":
        return ChatTokenizer(lambda text: list(text.encode()), _plain)
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise ConfigError(
            f"tokenizer {name!r} needs transformers: pip install 'headway[serve]', or use --tokenizer bytes"
        ) from None
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {str(error).splitlines()[0]}") from None

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def render(messages: Messages, tools: Any) -> str:
        if not loaded.chat_template:
            return _plain(messages, tools)
        given: Any = messages  # it takes parts of messages as well, whatever its annotation says
        return str(loaded.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=True))

    return ChatTokenizer(encode, render, loaded)


def read_chat(lines: Iterator[Line], builder: TraceBuilder, tokenizer: ChatTokenizer) -> None:
    """Read a chat log.

    Raises:
        TraceError: Names the line and the field.
    """
    for line in lines:
        inner = _inner(line, "body", "request")
        request, timed = inner.to(_Request), line.to(_Timed)
        if request.messages is not None:
            try:
                tokens = tokenizer.prompt(request.messages, request.tools)
            except (TypeError, ValueError, KeyError) as error:
                raise inner.fault("messages", f"the chat template refuses them: {error}") from None
        elif request.prompt is not None:
            tokens = tokenizer.text(str(request.prompt))
        else:
            raise inner.fault("prompt", f"is missing; found {', '.join(map(repr, sorted(inner.fields)))}")
        answer = tokenizer.text(_answer(line))
        try:
            builder.add_tokens(tokens, answer, _time(line, timed), answer_tokens=timed.output_length or 0)
        except TraceError as error:
            raise line.fault("", str(error)) from None


def chat_messages(line: Line) -> tuple[Messages, Any]:
    """The messages and tools of a request of a chat log; no messages where its prompt is a text."""
    request = _inner(line, "body", "request").to(_Request)
    return request.messages or [], request.tools


def _inner(line: Line, *names: str) -> Line:
    """The object that holds the request: the line itself, or one of its fields."""
    for name in names:
        if isinstance(line.fields.get(name), dict):
            return Line(line.where, line.fields[name], f"{line.path}{name}.")
    return line


def _answer(line: Line) -> str:
    """The text of the answer, empty where the log has none."""
    found = line.fields.get("response")
    if isinstance(found, str):
        return found
    response = _inner(_inner(line, "response"), "body")
    choices = response.to(_Answer).choices
    if not choices:
        return ""
    message = _inner(Line(line.where, choices[0]), "message").fields
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


def _plain(messages: Messages, tools: Any) -> str:
    """A prompt for tokenizers without a chat template: every message under its role."""
    head = f"<|tools|>{tools}\n" if tools else ""
    return head + "".join(f"<|{m.get('role', 'user')}|>{_content(m)}\n" for m in messages) + "<|assistant|>"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
