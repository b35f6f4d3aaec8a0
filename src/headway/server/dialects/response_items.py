"""Answers of `/v1/responses`: the response with its items, and the events that tell of a streamed one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.engine import Delta, RequestResult
from headway.errors import HeadwayError
from headway.server.dialects.parts import Change, Part, PartsFormat
from headway.server.dialects.responses import ResponsesRequest
from headway.server.errors import error_body
from headway.server.formats import Choice, Event

__all__ = ["ItemsFormat"]

_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}


@dataclass
class ItemsFormat(PartsFormat):
    """How `/v1/responses` writes an answer.

    Attributes:
        created: When it began, in seconds since 1970.
    """

    body: ResponsesRequest
    created: float = field(default_factory=lambda: float(int(time.time())))

    def __post_init__(self) -> None:
        """Begin a response."""
        super().__post_init__()
        self._id = _new_id("resp")
        self._ids: list[str] = []
        self._sent = 0

    def whole(self, choices: Sequence[Choice], told: dict[str, Any]) -> dict[str, Any]:
        """The response."""
        for change in self._answer.take(choices[0].text, choices[0].result):
            self._name(change)
        return self._response(choices[0].result) | told

    def opening(self, answers: int) -> Iterator[Event]:
        """The response, of which nothing has come yet."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response(None))

    def chunks(self, index: int, delta: Delta) -> Iterator[Event]:
        """The events of what has come of the items."""
        for change in self._answer.take(delta.text, delta.result):
            self._name(change)
            place = {"output_index": change.index, "item_id": self._ids[change.index]}
            if change.part.kind == "call":
                yield from self._call_events(change, place)
            else:
                yield from self._text_events(change, place)

    def closing(self, last: list[Event], choices: Sequence[Choice], told: dict[str, Any]) -> Iterator[Event]:
        """The whole response."""
        yield from last
        response = self._response(choices[0].result) | told
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: HeadwayError) -> Iterator[Event]:
        """The error, and the response that it ended."""
        told = error_body(error)["error"]
        yield self._event("error", code=told["code"] or told["type"], message=told["message"], param=told["param"])
        failure = {"code": "server_error", "message": told["message"]}
        yield self._event("response.failed", response=self._response(None) | {"status": "failed", "error": failure})

    # -- events -------------------------------------------------------------------------------------------------------

    def _call_events(self, change: Change, place: dict[str, Any]) -> Iterator[Event]:
        name = "response.function_call_arguments"
        if change.kind == "grown":
            yield self._event(f"{name}.delta", **place, delta=change.text)
            return
        if change.kind == "ended":
            yield self._event(f"{name}.done", **place, arguments=change.part.text, name=change.part.name)
        yield self._item_event(change)

    def _text_events(self, change: Change, place: dict[str, Any]) -> Iterator[Event]:
        part = _content(change.part)
        place = place | {"content_index": 0}
        name = "response.output_text" if change.part.kind == "content" else "response.reasoning_text"
        scores: dict[str, Any] = {"logprobs": []} if change.part.kind == "content" else {}
        if change.kind == "begun":
            yield self._item_event(change)
            yield self._event("response.content_part.added", **place, part=part)
        elif change.kind == "grown":
            yield self._event(f"{name}.delta", **place, delta=change.text, **scores)
        else:
            yield self._event(f"{name}.done", **place, text=change.part.text, **scores)
            yield self._event("response.content_part.done", **place, part=part)
            yield self._item_event(change)

    def _item_event(self, change: Change) -> Event:
        begun = change.kind == "begun"
        item = self._item(change.index, "in_progress" if begun else self._status_of(change.index))
        if begun and change.part.kind != "call":
            item["content"] = []  # its part is told by an event of its own
        name = "response.output_item.added" if begun else "response.output_item.done"
        return self._event(name, output_index=change.index, item=item)

    def _event(self, kind: str, /, **data: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1} | data

    # -- the response -------------------------------------------------------------------------------------------------

    def _name(self, change: Change) -> None:
        if change.kind == "begun":
            self._ids.append(_new_id(_PREFIXES[change.part.kind]))

    def _status_of(self, index: int) -> str:
        last = index == len(self._answer.parts) - 1
        return "incomplete" if last and self._answer.finish_reason in ("length", "abort") else "completed"

    def _item(self, index: int, status: str) -> dict[str, Any]:
        part = self._answer.parts[index]
        if part.kind == "reasoning":
            shown: dict[str, Any] = {"type": "reasoning", "summary": [], "content": [_content(part)]}
            return {"id": self._ids[index], **shown, "encrypted_content": None, "status": status}
        if part.kind == "call":
            called = {"call_id": part.id, "name": part.name, "arguments": part.text}
            return {"id": self._ids[index], "type": "function_call", **called, "status": status}
        said = {"role": "assistant", "content": [_content(part)]}
        return {"id": self._ids[index], "type": "message", **said, "status": status}

    def _response(self, result: RequestResult | None) -> dict[str, Any]:
        asked, status, why = self.body, "in_progress", None
        if result is not None:
            status = "completed"
            if self._answer.finish_reason in ("length", "abort"):
                status = "incomplete"
                why = {"reason": "max_output_tokens"} if self._answer.finish_reason == "length" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "completed_at": float(int(time.time())) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": {},
            "model": self.model,
            "output": [self._item(i, self._status_of(i)) for i in range(len(self._answer.parts))],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": _format(asked)},
            "tool_choice": _choice(asked),
            "tools": [_tool(tool.model_dump(include=_TOLD)) for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if result is None else self._usage(result),
            "user": asked.user,
        }

    def _usage(self, result: RequestResult) -> dict[str, Any]:
        return {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": result.cached_tokens,
                "cache_write_tokens": result.kept_tokens - result.cached_tokens,
            },
            "output_tokens": len(result.tokens),
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": result.prompt_tokens + len(result.tokens),
        }


_TOLD = {"type", "name", "description", "parameters", "strict"}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "strict": bool(given["strict"])}


def _choice(asked: ResponsesRequest) -> Any:
    choice = "auto" if asked.tool_choice is None else asked.tool_choice
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.name}


def _format(asked: ResponsesRequest) -> dict[str, Any]:
    form = None if asked.text is None else asked.text.format
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    told = {"name": form.name or "answer", "description": form.description, "schema": form.schema_}
    return {"type": "json_schema", **told, "strict": bool(form.strict)}
