"""Finding what in the prompts of a log keeps known text from being reused, and pricing it by replays of rewritten logs.

1. Changes in front of known text are found in the tokens (`headway.replay.trace.displaced`).
2. Those that look alike in the messages are one fault: a text at one place of one message, tools in another order, or
   old messages that are cut. The one with the most known tokens behind it is looked at first.
3. The log is written anew without it, rendered and replayed. A fault that no rewriting mends is not told.
4. The search goes on in the rewritten log, for what the first fault hid.

A text that changes is moved as a whole sentence or line. It goes to the last message of the user, in front of its text
or behind it, because what stands there is new anyway. In a recording of tokens it goes behind the prompt.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from headway.formats import Trace, TraceBuilder
from headway.formats.chat import ChatEntry, ChatRenderer, add_chat
from headway.replay.trace.displaced import Change, find_changes
from headway.tell.prompt_faults import PromptFault, PromptFix
from headway.tell.run import Figures

__all__ = ["ChatLog", "TokenLog", "find_faults"]

_WORTH = 0.01
"""Share of the prompt tokens that must stand behind a fault, and that mending it must save."""
_ROUNDS, _TRIES = 3, 3
"""Faults that are looked for one after another, and of each round those that are tried until one can be mended."""
_ANCHOR = 24
"""Characters by which it is seen that a text goes on as before."""
_CHANGE = 2000
"""Characters of a text that changes."""
_SENTENCE = 80
"""Characters within which a sentence is looked for around a change."""
_SHOWN = 60
_SENTENCE_END = re.compile(r"[.!?;]\s+|\n+")

Body = Mapping[str, Any]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class _Fault:
    """A fault, before it is priced.

    Attributes:
        kind: As in `PromptFault`.
        message: Number of the message.
        role: Its role.
        head: The text of that message in front of what changes.
        anchor: The text behind it; empty for the end of the message.
    """

    kind: str
    message: int | None = None
    role: str = ""
    head: str = ""
    anchor: str = ""


class _Log(Protocol):
    """A log that can be written anew.

    Attributes:
        trace: It, as a trace.
    """

    trace: Trace

    def fault(self, change: Change) -> _Fault | None:
        """The fault that a change belongs to; None for one that is none."""

    def texts(self, fault: _Fault) -> list[str]:
        """Some texts that change, the first of all requests."""

    def mended(self, fault: _Fault, changes: Sequence[Change]) -> Iterator[tuple[str, _Log]]:
        """The log without a fault, in one or more ways, each with its name."""


def find_faults(log: _Log, run: Callable[[Trace], Figures]) -> list[PromptFault]:
    """What in the prompts of a log keeps known text from being reused.

    Args:
        log: The log.
        run: Replays a trace.

    Returns:
        Faults that can be mended, each priced with those before it mended.
    """
    found: list[PromptFault] = []
    before: PromptFix | None = None
    for _ in range(_ROUNDS):
        for fault, changes in _faults(log):
            before = before or _priced("", run(log.trace))
            priced = [(_priced(what, run(mended.trace)), mended) for what, mended in log.mended(fault, changes)]
            least = before.computed - _WORTH * before.prompt_tokens
            good = sorted((one for one in priced if one[0].computed <= least), key=lambda one: one[0].computed)
            if good:
                found.append(_told(log, fault, changes, before, [fix for fix, _ in good]))
                before, log = good[0]
                break
        else:
            break
    return found


def _faults(log: _Log) -> list[tuple[_Fault, list[Change]]]:
    """Faults with their changes, those with most known tokens behind them first."""
    grouped: defaultdict[_Fault, list[Change]] = defaultdict(list)
    for change in find_changes(log.trace):
        fault = log.fault(change)
        if fault is not None:
            grouped[fault].append(change)
    least = _WORTH * log.trace.tokens
    weights = {fault: sum(change.known for change in changes) for fault, changes in grouped.items()}
    heavy = sorted((fault for fault in grouped if weights[fault] >= least), key=lambda fault: -weights[fault])
    return [(fault, grouped[fault]) for fault in heavy[:_TRIES]]


def _told(
    log: _Log, fault: _Fault, changes: Sequence[Change], before: PromptFix, fixes: list[PromptFix]
) -> PromptFault:
    start = Counter(change.start for change in changes).most_common(1)[0][0]
    example = next(change for change in changes if change.start == start)
    known = sum(change.known for change in changes)
    place = (fault.message, fault.role, log.texts(fault))
    return PromptFault(fault.kind, start, *place, example.request, len(changes), known, before, fixes)


def _priced(what: str, figures: Figures) -> PromptFix:
    return PromptFix(what, figures.prompt_tokens, figures.hit_tokens)


class TokenLog:
    """A recording of tokens. A fault is what stands in front of the same tokens of one request."""

    def __init__(self, trace: Trace) -> None:
        """The log of a trace of tokens."""
        self.trace = trace

    def fault(self, change: Change) -> _Fault | None:
        """Changes in front of what the same request was the first to have."""
        return _Fault("text", anchor=str(change.source)) if change.stop > change.start else None

    def texts(self, fault: _Fault) -> list[str]:
        """None: a recording has none."""
        return []

    def mended(self, fault: _Fault, changes: Sequence[Change]) -> Iterator[tuple[str, TokenLog]]:
        """What changes is moved behind the prompt."""
        start, before = min(c.start for c in changes), max(c.before for c in changes)
        ranges = {change.request: change.stop + before - change.before for change in changes}
        ranges[changes[0].source] = before
        symbols = self.trace.symbols.copy()
        for request, stop in ranges.items():
            prompt, at = self.trace.prompt(request), int(self.trace.offsets[request])
            moved = np.concatenate((prompt[:start], prompt[stop:], prompt[start:stop]))
            symbols[at : at + len(moved)] = moved
        yield "Moved behind the prompt", TokenLog(replace(self.trace, symbols=symbols))


class ChatLog:
    """A log of chats."""

    def __init__(
        self, trace: Trace, entries: Sequence[ChatEntry], renderer: ChatRenderer, bodies: Sequence[Body] | None = None
    ) -> None:
        """The log of a trace.

        Args:
            trace: It, as a trace.
            entries: Its requests, in the order of the trace.
            renderer: What made the tokens of the trace.
            bodies: What the requests are, if not what the entries say.
        """
        self.trace = trace
        self._entries, self._renderer = entries, renderer
        self._bodies = [entry.body for entry in entries] if bodies is None else bodies

    def fault(self, change: Change) -> _Fault | None:
        """The first message, or the tools, in which the two requests differ."""
        ours, theirs = self._bodies[change.request], self._bodies[change.source]
        if ours.get("tools") != theirs.get("tools"):
            listed, before = (sorted(map(_canonical, _tools(body))) for body in (ours, theirs))
            return _Fault("tools") if listed == before != [] else None
        a, b = _messages(theirs), _messages(ours)
        m = next((m for m, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        if m is None:
            return None
        role = str(b[m].get("role", ""))
        if b[m] in a[m + 1 :]:
            return _Fault("history", m, role)
        last = b[m + 1 : m + 2] == a[m + 1 : m + 2] != []
        place = _change_of(_text(a[m]), _text(b[m]), whole=last) if role == a[m].get("role", "") else None
        if place is None:
            return None
        start, stop = place
        return _Fault("text", m, role, _text(b[m])[:start], _text(b[m])[stop : stop + _ANCHOR])

    def texts(self, fault: _Fault) -> list[str]:
        """Up to two texts that change."""
        if fault.kind != "text":
            return []
        found = (_moved(body, fault) for body in self._bodies)
        texts = list(dict.fromkeys(" ".join(text[0].split()) for text in found if text is not None))
        return [text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..." for text in texts[:2]]

    def mended(self, fault: _Fault, changes: Sequence[Change]) -> Iterator[tuple[str, ChatLog]]:
        """Tools in one order; messages kept; or a text moved to the last message of the user."""
        if fault.kind == "tools":
            yield "In one order", self._with([_with_sorted_tools(body) for body in self._bodies])
        elif fault.kind == "history":
            yield "With them kept", self._with(_with_history(self._bodies, fault.message or 0, changes))
        else:
            front, behind = (
                [_with_moved(body, fault, front=where) for body in self._bodies] for where in (True, False)
            )
            if front != behind:  # they are the same where the text stands in that message already
                yield "Moved in front of the text of the last user message", self._with(front)
            yield "Moved behind the text of the last user message", self._with(behind)

    def _with(self, bodies: Sequence[Body]) -> ChatLog:
        builder = TraceBuilder(self.trace.name, self.trace.format, 1, self.trace.outputs)
        for entry, body, time in zip(self._entries, bodies, self.trace.times.tolist(), strict=True):
            add_chat(replace(entry, time=time), body, builder, self._renderer)
        return ChatLog(builder.build(), self._entries, self._renderer, bodies)


def _change_of(before: str, now: str, *, whole: bool) -> tuple[int, int] | None:
    """Where a text has another part than before, as a range of whole sentences or words of `now`.

    Args:
        before: The text before.
        now: The text now.
        whole: What follows the text is the same, so it may differ up to its end.
    """
    start = next((i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), None)
    start = min(len(before), len(now)) if start is None else start
    for stop in range(start, min(len(now) - _ANCHOR, start + _CHANGE) + 1):
        if before.find(now[stop : stop + _ANCHOR], start, start + _CHANGE + _ANCHOR) >= 0:
            return _sentence(now, start, stop)
    return (_sentence(now, start, len(now))[0], len(now)) if whole else None


def _sentence(text: str, start: int, stop: int) -> tuple[int, int]:
    """The sentence around a range, or the words where none begins or ends nearby."""
    near = text[max(0, start - _SENTENCE) : start]
    ends = [match.end() for match in _SENTENCE_END.finditer(near)]
    first = start - len(near) + (ends[-1] if ends else 0)
    if not ends and len(near) == _SENTENCE:
        first = start - len(near) + near.rfind(" ") + 1 if " " in near else start
    tail = text[stop : stop + _SENTENCE]
    match = _SENTENCE_END.search(tail) or re.search(r"\s+|\Z", tail)
    assert match is not None
    return first, stop + match.end()


def _moved(body: Body, fault: _Fault) -> tuple[str, str] | None:
    """The text of a request that changes, and its message without it; None for a request that has no such place."""
    messages, m, head = _messages(body), fault.message or 0, fault.head
    if len(messages) <= m or messages[m].get("role", "") != fault.role:
        return None
    text = _text(messages[m])
    limit = len(head) + _CHANGE + _SENTENCE + _ANCHOR
    stop = text.find(fault.anchor, len(head), limit) if fault.anchor else len(text)
    if not text.startswith(head) or stop <= len(head):
        return None
    return text[len(head) : stop], head + text[stop:]


def _with_moved(body: Body, fault: _Fault, *, front: bool) -> Body:
    found, messages, m = _moved(body, fault), _messages(body), fault.message or 0
    if found is None:
        return body
    text, rest = found
    messages[m] = messages[m] | {"content": rest}
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    last = users[-1] if users else len(messages) - 1
    said = _text(messages[last])
    parts = (
        (text.rstrip("\n") + ("" if text[-1:] == " " else "\n"), said) if front and last != m else (said, "\n", text)
    )
    messages[last] = messages[last] | {"content": "".join(parts)}
    return _with_messages(body, messages)


def _with_sorted_tools(body: Body) -> Body:
    return {**body, "tools": sorted(_tools(body), key=_canonical)} if _tools(body) else body


def _with_history(bodies: Sequence[Body], m: int, changes: Sequence[Change]) -> list[Body]:
    """Requests with the messages from number `m` on that were cut since an earlier one."""
    cut: dict[str, Messages] = {}
    by_request = {change.request: change for change in changes}
    restored = []
    for i, body in enumerate(bodies):
        messages = _messages(body)
        key = _canonical(messages[: m + 1])
        if (change := by_request.get(i)) is not None and key not in cut:
            theirs = _messages(bodies[change.source])
            gone = theirs[m : theirs.index(messages[m], m + 1)]
            cut[key] = [*cut.get(_canonical(theirs[: m + 1]), []), *gone]
        restored.append(_with_messages(body, [*messages[:m], *cut.get(key, []), *messages[m:]]))
    return restored


def _messages(body: Body) -> Messages:
    """The messages of a request, a new list; a plain text counts as one."""
    given = body.get("messages")
    return [{"role": "", "content": str(body.get("prompt", ""))}] if given is None else list(given)


def _with_messages(body: Body, messages: Messages) -> Body:
    if body.get("messages") is None:
        return {**body, "prompt": messages[0]["content"]}
    return {**body, "messages": messages}


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message, as the server joins its parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _tools(body: Body) -> list[Any]:
    given = body.get("tools")
    return list(given) if isinstance(given, list) else []


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
