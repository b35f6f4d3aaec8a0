"""An answer as a list of parts, one behind the other: what other APIs call items or blocks.

Both dialects write their answers in this way. An answer that is streamed and one that is not are the same list: the
whole one is read in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.engine import RequestResult, TextTokenizer
from headway.server.chat.reading import AnswerForm, Piece, ReadAnswer

__all__ = ["AnswerParts", "Change", "Part", "PartsFormat"]


@dataclass
class Part:
    """A part of an answer.

    Attributes:
        kind: What it is.
        text: What was thought or said, or the arguments of the call as JSON; as far as it has come.
        id: Of a call.
        name: Of the function that is called.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Change:
    """What has happened to a part.

    Attributes:
        kind: It has begun, grown, or ended.
        index: Its place in the list.
        part: The part.
        text: What it has grown by.
    """

    kind: Literal["begun", "grown", "ended"]
    index: int
    part: Part
    text: str = ""


@dataclass
class AnswerParts:
    """The parts of one answer as far as it has come.

    Attributes:
        form: How the model writes its answers.
        parts: The parts.
        finish_reason: Why it ended, once it has.
    """

    form: AnswerForm | None
    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        """Begin to read."""
        self._answer = ReadAnswer(self.form)

    def take(self, text: str, result: RequestResult | None) -> Iterator[Change]:
        """What `text`, the next of the answer, does to the list; with `result` it was the last."""
        for piece in self._answer.pieces(text, ended=result is not None):
            yield from self._add(piece)
        self.finish_reason = self._answer.finish_reason(result)
        if result is not None:
            if not self.parts:
                yield from self._begin(Part("content"))
            yield from self._end()

    def _add(self, piece: Piece) -> Iterator[Change]:
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.content:
            yield from self._grow("content", piece.content)
        for call in piece.calls:
            if call.name:
                yield from self._begin(Part("call", "", call.id, call.name))
            if call.arguments:
                yield from self._grow("call", call.arguments)

    def _grow(self, kind: Literal["reasoning", "content", "call"], text: str) -> Iterator[Change]:
        if not self.parts or self.parts[-1].kind != kind:
            yield from self._begin(Part(kind))
        last = self.parts[-1]
        last.text += text
        yield Change("grown", len(self.parts) - 1, last, text)

    def _begin(self, part: Part) -> Iterator[Change]:
        yield from self._end()
        self.parts.append(part)
        yield Change("begun", len(self.parts) - 1, part)

    def _end(self) -> Iterator[Change]:
        if self.parts:
            yield Change("ended", len(self.parts) - 1, self.parts[-1])


@dataclass
class PartsFormat:
    """What the formats of such answers share.

    Attributes:
        body: What was asked.
        model: The model's name.
        tokenizer: Its tokenizer.
        form: How it writes its answers.
    """

    body: Any
    model: str
    tokenizer: TextTokenizer
    form: AnswerForm | None
    tells_kept = True

    def __post_init__(self) -> None:
        """Begin an answer."""
        self._answer = AnswerParts(self.form)

    @property
    def reads_special(self) -> bool:
        """They say which part of an answer is which."""
        return self.form is not None

    def _reasoning_tokens(self) -> int:
        """Tokens of what has been thought."""
        thought = "".join(part.text for part in self._answer.parts if part.kind == "reasoning")
        return len(self.tokenizer.encode(thought)) if thought else 0
