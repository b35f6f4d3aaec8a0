"""The shapes of responses: whole answers and chunks of streamed ones, of chat and of plain completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from headway.engine import Delta, RequestResult, TextTokenizer, TokenLogprob
from headway.errors import HeadwayError
from headway.server.chat.reading import AnswerForm, Call, ReadAnswer
from headway.server.errors import error_body

__all__ = ["ChatFormat", "Choice", "CompletionFormat", "Event", "Format", "results", "token_text", "usage"]

Event = dict[str, Any] | str
"""The data of an event of a stream. One with a `type` is named by it."""

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity and no NaN: `max` keeps its first argument unless the other is more


def usage(prompts: Sequence[Sequence[RequestResult]]) -> dict[str, Any]:
    """Token counts over the answers to each prompt. A prompt counts once, cached as its first answer found it."""
    prompt = sum(answers[0].prompt_tokens for answers in prompts)
    completion = sum(len(answer.tokens) for answers in prompts for answer in answers)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answers[0].cached_tokens for answers in prompts)},
    }
    drafted = sum(answer.drafted for answers in prompts for answer in answers)
    if drafted:
        accepted = sum(answer.accepted for answers in prompts for answer in answers)
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return counts


@dataclass
class Choice:
    """One answer as far as it has come.

    Attributes:
        index: Its number in the response.
        text: Its text.
        logprobs: Log probabilities of its tokens.
        result: How it ended, once it has.
        prompt_logprobs: Log probabilities of the prompt's tokens from the second on, where they were asked for.
    """

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: RequestResult | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def add(self, delta: Delta) -> None:
        """Append what a step added."""
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.result = delta.result or self.result
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs


def results(choices: Sequence[Choice]) -> list[RequestResult]:
    """How answers ended that have ended."""
    return [choice.result for choice in choices if choice.result is not None]


class Format(Protocol):
    """How one endpoint writes answers."""

    @property
    def reads_special(self) -> bool:
        """Whether it is to get the special tokens of answers as text."""

    @property
    def tells_kept(self) -> bool:
        """Whether it tells how many tokens of the prompt were kept."""

    def whole(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        """The response with all answers, and what is `told` beside them."""

    def opening(self, answers: int) -> Iterator[Event]:
        """The events with which a stream of so many answers begins."""

    def chunks(self, index: int, delta: Delta) -> Iterator[Event]:
        """The events that add `delta` to answer `index`; none while there is nothing to show."""

    def closing(self, last: list[Event], choices: Sequence[Choice], told: dict[str, Any]) -> Iterator[Event]:
        """The events at the end of a stream: those of the `last` delta, and what follows them."""

    def failed(self, error: HeadwayError) -> Iterator[Event]:
        """The events at the end of a stream that failed."""


@dataclass
class ChatFormat:
    """`/v1/chat/completions`.

    Attributes:
        form: How the model writes its answers; None if they are nothing but text.
        include_usage: A stream ends with a chunk of its own for token counts.
    """

    model: str
    tokenizer: TextTokenizer
    with_logprobs: bool
    form: AnswerForm | None = None
    include_usage: bool = False
    identity: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _answers: dict[int, ReadAnswer] = field(default_factory=dict)
    tells_kept = False

    @property
    def reads_special(self) -> bool:
        """They say which part of an answer is which."""
        return self.form is not None

    def whole(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        """The response with all answers."""
        written = []
        for choice in choices:
            answer = ReadAnswer(self.form)
            piece = answer.read(choice.text, ended=True)
            message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
            if piece.reasoning:
                message["reasoning_content"] = piece.reasoning
            if piece.calls:
                message |= {"content": piece.content or None, "tool_calls": [_called(call) for call in piece.calls]}
            written.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": answer.finish_reason(choice.result),
                }
            )
        return self._frame("chat.completion", written) | self._end(choices, told)

    def opening(self, answers: int) -> Iterator[Event]:
        """The chunks that say who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        for index in range(answers):
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunks(self, index: int, delta: Delta) -> Iterator[Event]:
        """The chunk that adds `delta` to answer `index`."""
        answer = self._answers.setdefault(index, ReadAnswer(self.form))
        begun = answer.calls
        piece = answer.read(delta.text, ended=delta.result is not None)
        if not (piece or delta.result or (self.with_logprobs and delta.logprobs)):
            return
        added: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        added |= {"content": piece.content} if piece.content or not (piece or delta.result) else {}
        if piece.calls:
            first = begun - (not piece.calls[0].name)
            added["tool_calls"] = [{"index": i} | _called(call) for i, call in enumerate(piece.calls, first)]
        choice = {
            "index": index,
            "delta": added,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": answer.finish_reason(delta.result),
        }
        yield self._chunk([choice])

    def closing(self, last: list[Event], choices: Sequence[Choice], told: dict[str, Any]) -> Iterator[Event]:
        """The last chunk with the usage, or one of its own for that."""
        return _closing(last, self._chunk([]) if self.include_usage else None, self._end(choices, told))

    def failed(self, error: HeadwayError) -> Iterator[Event]:
        """The error."""
        yield error_body(error)

    def _end(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        return {"usage": usage([results(choices)])} | told

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._frame("chat.completion.chunk", choices)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.tokenizer.piece(token)
        return {"token": token_text(piece), "bytes": list(piece), "logprob": max(_LOWEST_LOGPROB, logprob)}


@dataclass
class CompletionFormat:
    """`/v1/completions`.

    Attributes:
        echoes: One per prompt: its tokens and its text, to put before each of its answers; empty for no echo.
        answers: Answers to each prompt.
        include_usage: A stream ends with a chunk of its own for token counts.
    """

    model: str
    tokenizer: TextTokenizer
    with_logprobs: bool
    echoes: Sequence[tuple[Sequence[int], str]]
    answers: int = 1
    include_usage: bool = False
    identity: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)
    _scores: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    reads_special = tells_kept = False

    def whole(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        """The response with all answers."""
        written = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + choice.text,
                "logprobs": self._logprobs(choice.index, choice.logprobs, choice.prompt_logprobs),
                "finish_reason": choice.result.finish_reason if choice.result else None,
            }
            for choice in choices
        ]
        return self._frame(written) | self._end(choices, told)

    def opening(self, answers: int) -> Iterator[Event]:
        """The chunks that repeat the prompts, if that was asked for."""
        for index in range(answers):
            if self._echo(index) and not self.with_logprobs:  # with log probabilities the first chunk repeats it
                choice = {"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None}
                yield self._frame([choice])

    def chunks(self, index: int, delta: Delta) -> Iterator[Event]:
        """The chunk that adds `delta` to answer `index`."""
        if not (delta.text or delta.logprobs or delta.result):
            return
        begins = self.with_logprobs and index not in self._offsets
        choice = {
            "index": index,
            "text": self._echo(index) + delta.text if begins else delta.text,
            "logprobs": self._logprobs(index, delta.logprobs, delta.prompt_logprobs),
            "finish_reason": delta.result.finish_reason if delta.result else None,
        }
        yield self._frame([choice])

    def closing(self, last: list[Event], choices: Sequence[Choice], told: dict[str, Any]) -> Iterator[Event]:
        """The last chunk with the usage, or one of its own for that."""
        return _closing(last, self._frame([]) if self.include_usage else None, self._end(choices, told))

    def failed(self, error: HeadwayError) -> Iterator[Event]:
        """The error."""
        yield error_body(error)

    def _end(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        ended = results(choices)
        return {"usage": usage([ended[i : i + self.answers] for i in range(0, len(ended), self.answers)])} | told

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.answers][1] if self.echoes else ""

    def _logprobs(
        self, index: int, logprobs: Sequence[TokenLogprob], of_prompt: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        entries, prompt, rows = list(logprobs), index // self.answers, list[tuple[Any, ...]]()
        if self.echoes and index not in self._offsets:  # the first answer to a prompt has told them
            entries = [*self._scores.setdefault(prompt, of_prompt), *logprobs]
            rows.append((self._text(self.echoes[prompt][0][0]), None, None))
        for entry in entries:
            top = {self._text(token): max(_LOWEST_LOGPROB, value) for token, value in entry.top}
            rows.append((self._text(entry.token), max(_LOWEST_LOGPROB, entry.logprob), top))
        offsets = list(accumulate((len(row[0]) for row in rows), initial=self._offsets.get(index, 0)))
        self._offsets[index] = offsets.pop()
        names = ("tokens", "token_logprobs", "top_logprobs")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)} | {"text_offset": offsets}

    def _text(self, token: int) -> str:
        return token_text(self.tokenizer.piece(token))


def _called(call: Call) -> dict[str, Any]:
    """A call, or more of its arguments."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _closing(last: list[Event], extra: dict[str, Any] | None, end: dict[str, Any]) -> Iterator[Event]:
    """The last chunks, `end` with the very last of them, or with an `extra` one."""
    chunk = last.pop() if extra is None else extra
    assert isinstance(chunk, dict)
    yield from last
    yield chunk | end
    yield "[DONE]"


def token_text(piece: bytes) -> str:
    r"""A token as text; one that is no whole character as `bytes:\xe6\xbc`, so that no two look alike."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
