"""An answer as it comes, taken apart: what is said, what was thought before it, and which tools are called.

transformers' parser finds the parts. Around it stands what a server needs: the same pieces whether an answer is
streamed or not, only the white space that a model wrote between two parts left out, and nothing lost. What looks like
a call and is none (no JSON, or cut off before its arguments) is given out as it was written.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from headway.engine import RequestResult, TextTokenizer
from headway.server.chat.arguments import WrittenCall, written_calls
from headway.server.chat.families import family_of

__all__ = ["AnswerForm", "AnswerReader", "Call", "Piece", "ReadAnswer", "answer_form"]

_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHORT = string.ascii_letters + string.digits
_EDGES = re.compile(r"(?=[<\[])|(?<=[>\]])")
"""Where delimiters may begin and end."""
_BETWEEN = re.compile(r"[\s;,]*")


@dataclass(frozen=True)
class Call:
    """A call of a tool, or more of the arguments of the last one.

    Attributes:
        id: By which its result is sent back.
        name: The function; empty for more of the last call.
        arguments: A JSON object, as text, as far as it has come.
    """

    id: str
    name: str
    arguments: str


@dataclass
class Piece:
    """What has come of an answer, in this order.

    Attributes:
        reasoning: What was thought.
        content: What is said.
        calls: Tools that are called; the first may be more of a call in the piece before.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __iadd__(self, other: Piece) -> Piece:
        self.reasoning += other.reasoning
        self.content += other.content
        for call in other.calls:
            if call.name or not self.calls:
                self.calls.append(call)
            else:
                self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + call.arguments)
        return self


@dataclass(frozen=True)
class AnswerForm:
    """How a model writes its answers to one request.

    Attributes:
        template: A response template of transformers.
        opening: What the parser is to know of the prompt: all, or what the chat template writes in front of answers.
        tools: The tools, whose schemas say of which types their arguments are.
        short_ids: See `Family`.
        most_calls: Calls beyond it are left out; None for any number.
        special: Special tokens, which are left out of what is said; empty if they are to be shown.
    """

    template: dict[str, Any]
    opening: str
    tools: list[Any]
    short_ids: bool
    most_calls: int | None
    special: frozenset[str]


def answer_form(
    tokenizer: TextTokenizer,
    prompt: str,
    opening: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    shown: bool = False,
) -> AnswerForm | None:
    """How a model answers a prompt; None if its answers are nothing but text.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The prompt's text.
        opening: What the chat template writes in front of an answer.
        tools: The tools that may be called; empty if calls are not looked for.
        parallel: Whether there may be more than one call.
        shown: Whether special tokens are part of what is said.
    """
    own, family = tokenizer.response_template, family_of(tokenizer)
    if own is None and family is None:
        return None
    template = dict(own) if own is not None else {} if family is None else family.response_template()
    fields = {name: one for name, one in template["fields"].items() if one and (tools or name != "tool_calls")}
    if not fields.keys() - {"content"}:
        return None
    before = prompt if own is not None else opening if family is not None and family.anchored else ""
    special = frozenset() if shown else tokenizer.special_tokens
    short = family is not None and family.short_ids
    return AnswerForm(
        {**template, "fields": fields}, before, list(tools), short, None if parallel else 1, frozenset(special)
    )


class ReadAnswer:
    """One answer as far as it has been read, whether it has a form or is nothing but text.

    Attributes:
        calls: How many calls have begun in it.
    """

    def __init__(self, form: AnswerForm | None) -> None:
        self.calls = 0
        self._reader = None if form is None else AnswerReader(form)

    def read(self, text: str, *, ended: bool) -> Piece:
        """What `text`, the next of the answer, adds; its last one where it has `ended`."""
        if self._reader is None:
            return Piece(content=text)
        piece = self._reader.read(text)
        if ended:
            piece += self._reader.end()
        self.calls += sum(bool(call.name) for call in piece.calls)
        return piece

    def pieces(self, text: str, *, ended: bool) -> Iterator[Piece]:
        """The same in the order in which the model wrote it: what is said may follow a call."""
        for part in _EDGES.split(text) if self._reader is not None else [text]:
            yield self.read(part, ended=False)
        if ended and self._reader is not None:
            yield self.read("", ended=True)

    def finish_reason(self, result: RequestResult | None) -> str | None:
        """Why it ended, once it has: `tool_calls` where it stopped to have tools called."""
        if result is None:
            return None
        return "tool_calls" if self.calls and result.finish_reason == "stop" else result.finish_reason


class AnswerReader:
    """Reads one answer, piece by piece."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._parser: ResponseParser | None = ResponseParser(form.template, form.opening, tools=form.tools)
        self._held = _held_back(form)
        """The end of the prompt that the parser will tell as if it were of the answer."""
        self._unread = ""
        """What the parser has got and has not told of."""
        self._spaces = {"content": "", "reasoning": ""}
        self._begun: set[str] = set()
        self._calls = 0
        self._tells_written, self._opening = written_calls(form.template)
        self._written: WrittenCall | None = None
        """The call that is being written."""
        special = sorted(form.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def read(self, text: str) -> Piece:
        """What `text`, the next of the answer, adds."""
        piece = Piece()
        for part in _EDGES.split(text):  # so that what cannot be read begins with what the parser has not told
            piece += self._step(part)
        return piece

    def end(self) -> Piece:
        """What was held back, at the answer's end."""
        piece = self._step(None)
        if "content" in self._begun and not self._calls:
            piece.content += self._spaces["content"]
        return piece

    def _step(self, text: str | None) -> Piece:
        """What the parser makes of `text`, or of the end; when it fails, the text that it could not read."""
        if self._parser is None:
            return Piece(content=self._plain(text or ""))
        self._unread += text or ""
        try:
            piece = Piece()
            for event in self._parser.finalize()[1] if text is None else self._parser.feed(text):
                piece += self._take(event)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._parser = None
            begun = self._written is not None and self._written.name
            return Piece(content=self._plain(self._written.rest if begun and self._written else self._unread))
        return piece

    def _take(self, event: Mapping[str, Any]) -> Piece:
        name, kind = event["field"], event["type"]
        if name == "tool_calls":
            self._held = ""  # it was part of what opened the call
            return Piece(calls=list(self._call(event)))
        part = "reasoning" if name in _REASONING else name
        if part not in self._spaces:
            return Piece()
        if kind == "region_open" and part in self._begun:
            self._spaces[part] += "" if self._spaces[part] else "\n"
        if kind != "region_chunk" or not (text := self._answered(event["text"])):
            return Piece()
        self._unread = self._unread.partition(text)[2]
        said = self._said(part, text)
        return Piece(reasoning=said) if part == "reasoning" else Piece(content=said)

    def _answered(self, text: str) -> str:
        """What the parser tells, without the end of the prompt if it comes first."""
        held, self._held = self._held, self._held.removeprefix(text) if len(text) < len(self._held) else ""
        return text.removeprefix(held) if len(held) <= len(text) else ""

    def _call(self, event: Mapping[str, Any]) -> Iterator[Call]:
        """What an event adds to a call, or the calls that it completes.

        Raises:
            ValueError, KeyError, TypeError: There is none.
        """
        if event["type"] == "region_open":
            full = self._form.most_calls is not None and self._calls >= self._form.most_calls
            self._written = WrittenCall(self._opening, self._unread) if self._tells_written and not full else None
        elif event["type"] == "region_chunk" and self._written is not None:
            begun, text = self._written.name, self._written.take(event["text"])
            if self._written.name and not begun:
                self._calls += 1
                yield Call(self._written.id or self._new_id(), self._written.name, text)
            elif text:
                yield Call("", "", text)
        elif event["type"] == "region_close":
            if self._written is None or not self._written.name:
                yield from self._called(event["value"])
            self._unread = "" if self._written is None else self._written.next_opening(self._unread)
            self._written = None

    def _said(self, part: str, text: str) -> str:
        """Text of a part with the white space in front of it held back until something follows."""
        text = self._spaces[part] + (self._special.sub("", text) if self._special else text)
        parted = bool(self._begun - {part}) or bool(self._calls)
        if part not in self._begun and (part == "reasoning" or parted):
            text = text.lstrip()
        shown = text.rstrip()
        self._spaces[part] = text[len(shown) :]
        if shown:
            self._begun.add(part)
        return shown

    def _plain(self, text: str) -> str:
        return self._special.sub("", text) if self._special else text

    def _called(self, value: Any) -> Iterator[Call]:
        """The calls in a value of the parser: one, a list, or JSON objects as text.

        Raises:
            ValueError, KeyError, TypeError: There is none.
        """
        found = list(_objects(value)) if isinstance(value, str) else value if isinstance(value, list) else [value]
        for one in found:
            function = one.get("function", one)
            function = one if isinstance(function, str) else function
            arguments = function.get("arguments", function.get("parameters", {}))
            name = function.get("name") or function["function"]
            if not isinstance(name, str):
                raise TypeError("a call without a name")
            if self._form.most_calls is None or self._calls < self._form.most_calls:
                self._calls += 1
                written = arguments if isinstance(arguments, str) else _written(arguments)
                yield Call(str(one.get("id") or self._new_id()), name, written)

    def _new_id(self) -> str:
        if self._form.short_ids:
            return "".join(secrets.choice(_SHORT) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"


def _written(arguments: Any) -> str:
    """Arguments as JSON; half of a surrogate pair stays the escape that the model wrote."""
    written = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if re.search("[\ud800-\udfff]", written) else written


def _held_back(form: AnswerForm) -> str:
    """The end of a prompt that a parser holds back, because a delimiter may begin in it: a line break before a call."""
    fields = {name: {**one, "optional": True} for name, one in form.template["fields"].items()}
    try:
        _, events = ResponseParser({**form.template, "fields": fields}, form.opening, tools=form.tools).finalize()
    except (AttributeError, KeyError, TypeError, ValueError):  # it ends within a call
        return ""
    return "".join(event["text"] for event in events if event["type"] == "region_chunk")


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that stand one behind the other."""
    place, decoder = 0, json.JSONDecoder()
    while place < len(text):
        found, place = decoder.raw_decode(text, place)
        if not isinstance(found, dict):
            raise TypeError("a call is an object")
        yield found
        between = _BETWEEN.match(text, place)
        place = len(text) if between is None else between.end()
