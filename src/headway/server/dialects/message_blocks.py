"""Answers of `/v1/messages`: the message with its blocks, and the events that tell of a streamed one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway.engine import Delta, RequestResult
from headway.errors import HeadwayError
from headway.server.dialects.messages import MessagesRequest
from headway.server.dialects.parts import Change, Part, PartsFormat
from headway.server.errors import messages_error_body
from headway.server.formats import Choice, Event

__all__ = ["BlocksFormat"]

_SIGNATURE = "headway"
"""Of what was thought: clients send it back, and some leave out what has none. It is not looked at."""


@dataclass
class BlocksFormat(PartsFormat):
    """How `/v1/messages` writes an answer."""

    body: MessagesRequest

    def __post_init__(self) -> None:
        """Begin a message."""
        super().__post_init__()
        self._id = f"msg_{uuid.uuid4().hex}"
        self._begun = False

    def whole(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        """The message."""
        result = choices[0].result
        assert result is not None
        for _ in self._answer.take(choices[0].text, result):
            pass
        blocks = [_block(part) for part in self._answer.parts]
        return self._message(blocks, self._usage(result)) | self._end(result) | told

    def opening(self, answers: int) -> Iterator[Event]:
        """Nothing: a message begins with how much of its prompt was cached, which is known with the first token."""
        return iter(())

    def chunks(self, index: int, delta: Delta) -> Iterator[Event]:
        """The events of what has come of the blocks."""
        if not self._begun:
            self._begun = True
            tokens, cached, kept = delta.prompt or (0, 0, 0)
            usage = _usage(tokens, cached, kept, len(delta.tokens))
            yield {"type": "message_start", "message": self._message([], usage)}
            yield {"type": "ping"}
        for change in self._answer.take(delta.text, delta.result):
            yield from _block_events(change)

    def closing(self, last: list[Event], choices: Sequence[Choice], told: dict[str, Any]) -> Iterator[Event]:
        """Why it ended, and how many tokens there are."""
        result = choices[0].result
        assert result is not None
        yield from last
        yield {"type": "message_delta", "delta": self._end(result), "usage": self._usage(result)} | told
        yield {"type": "message_stop"}

    def failed(self, error: HeadwayError) -> Iterator[Event]:
        """The error."""
        yield messages_error_body(error)

    def _message(self, blocks: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _end(self, result: RequestResult) -> dict[str, Any]:
        stopped = result.stop_reason if isinstance(result.stop_reason, str) else None
        reason = "end_turn" if stopped is None else "stop_sequence"
        if self._answer.finish_reason == "tool_calls":
            reason, stopped = "tool_use", None
        elif self._answer.finish_reason == "length":
            full = len(result.tokens) < self.body.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self, result: RequestResult) -> dict[str, Any]:
        counts = _usage(result.prompt_tokens, result.cached_tokens, result.kept_tokens, len(result.tokens))
        if tokens := self._reasoning_tokens():
            counts["output_tokens_details"] = {"thinking_tokens": tokens}
        return counts


def _usage(prompt: int, cached: int, kept: int, output: int) -> dict[str, Any]:
    """Token counts: three kinds of tokens of the prompt, each token in one of them."""
    return {
        "input_tokens": prompt - kept,
        "cache_creation_input_tokens": kept - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _object(part.text)}
    return {"type": "text", "text": part.text}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call, without what JSON in UTF-8 cannot have; of one that was cut off there are none."""
    try:
        found = json.loads(text or "{}")
        found = json.loads(json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _block_events(change: Change) -> Iterator[Event]:
    part, index = change.part, change.index
    if change.kind == "begun":
        block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": _EMPTY.get(part.kind, block)}
    elif change.kind == "grown":
        kind, field = _DELTAS[part.kind]
        yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: change.text}}
    else:
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
