"""An answer with all parts, as a model of a family writes it, and ways to have it written in a dialect."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.server.chat.test_families import TOOLS, words
from tests.server.test_answers import answered

from headway.engine import Delta, RequestResult
from headway.server.chat.reading import AnswerForm, answer_form
from headway.server.formats import Choice, Format

CALLS = [("get_weather", {"place": "Paris", "days": 3}), ("get-time", {"zone": "Europe/Paris"})]
TEXT = "<think>\nWhere?\n</think>\n\nI look.\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
"""Thinks, speaks, and calls two tools."""
WORDS = words("hermes", {})


def form() -> AnswerForm:
    """How the model writes."""
    found = answer_form(WORDS, "", "", TOOLS)
    assert found is not None
    return found


def ended(text: str = TEXT, reason: str = "stop", stopped: str | None = None) -> RequestResult:
    """How such an answer ended: of its prompt of 9 tokens 4 were cached, and 7 are kept."""
    result: RequestResult = answered("ask", text, WORDS.encode(text))
    return replace(result, prompt_tokens=9, cached_tokens=4, kept_tokens=7, finish_reason=reason, stop_reason=stopped)


def whole(written: Format, text: str = TEXT, reason: str = "stop", stopped: str | None = None) -> dict[str, Any]:
    """The answer as one response."""
    choice = Choice(0)
    choice.add(Delta(text, result=ended(text, reason, stopped)))
    return written.whole([choice], {"headway": {}})


def events(written: Format, text: str = TEXT, size: int = 1, reason: str = "stop") -> Iterator[Any]:
    """The same as a stream, with so many characters per step."""
    yield from written.opening(1)
    choice = Choice(0)
    for at in range(0, len(text), size):
        delta = Delta(text[at : at + size], (1,), prompt=None if at else (9, 4, 7))
        yield from written.chunks(0, delta)
    last = Delta("", result=ended(text, reason))
    choice.add(last)
    yield from written.closing(list(written.chunks(0, last)), [choice], {"headway": {}})
