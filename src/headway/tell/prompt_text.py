"""A prompt as its client knows it: its characters, the messages that they stand in, and what changed in it.

A token's characters are the bytes that the tokenizer says it stands for, so that what is shown is there whatever a
template made of the messages. Where a message ends is found by rendering the conversation with a mark behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from headway.cache import Displaced
from headway.sizes import counted

__all__ = ["Change", "Place", "PromptText", "common_start"]

Messages = Sequence[dict[str, Any]]

_AROUND = 24
"""Characters that are shown on each side of a position."""
_LONGEST_CHANGE = 80
_WORD, _WORD_ENDS = re.compile(r"[\w.:/=+@#%&-]*"), re.compile(r"[\w.:/=+@#%&-]*\Z")
"""What is shown of the words that a change begins and ends in: a time, a date, a name with its value."""
_MARK = "\ue000"
"""A character that no template and hardly a message has: where it comes out, a message ends."""


@dataclass(frozen=True)
class Place:
    """Where a token stands.

    Attributes:
        index: Number of its message; None behind the last one, and where that cannot be told.
        role: Role of that message, or "".
        before: Characters before the token.
        after: Characters from the token on.
    """

    index: int | None = None
    role: str = ""
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        """As a part of a sentence; empty if nothing is known."""
        message = "" if self.index is None else f"message {self.index} ({self.role})"
        text = f"{self.before}|{self.after}".replace("\n", "\\n") if self.before or self.after else ""
        return ": ".join(part for part in (message, text and f"`{text}`") if part)


@dataclass(frozen=True)
class Change:
    """A change of a prompt, behind which stands what stood there before.

    Attributes:
        start: First token of the change.
        stop: Token after its last; `start` if something is missing.
        same_tokens: Tokens behind it that are the same as before.
        place: Where it stands.
        text: The changed text, in whole words; empty where the text is not known.
    """

    start: int
    stop: int
    same_tokens: int
    place: Place
    text: str

    def __str__(self) -> str:
        """As a sentence."""
        where = "" if self.place.index is None else f", message {self.place.index} ({self.place.role})"
        what = f", `{self.text}`" if self.text else ""
        if self.start == self.stop:
            what = ": text that stood there before is missing"
        return (
            f"changed at token {self.start:,}{where}{what}; {counted(self.same_tokens, 'token')} behind it are the "
            f"same as before: if what changes stood behind them, or not at all, they could be reused"
        )


class PromptText:
    """The text of one prompt. Calls what it was given, so it is used where that may be called.

    Attributes:
        tokens: The prompt's tokens.
        messages: Its messages as the template gets them; empty for a plain text.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        piece: Callable[[int], bytes],
        text: str = "",
        messages: Messages = (),
        render: Callable[[Messages], str] | None = None,
    ) -> None:
        """Prepare; nothing is computed before it is asked for.

        Args:
            tokens: The prompt's tokens.
            piece: The bytes that a token stands for.
            text: What `render` made of `messages`.
            messages: The conversation; empty for a plain text.
            render: The chat template, up to where the answer begins; it may raise whatever it likes.
        """
        self.tokens, self.messages = tokens, messages
        self._text, self._render = text, render
        self._piece, self._end = cache(piece), cache(self._find_end)

    def place(self, position: int) -> Place:
        """Where a token stands."""
        index = self._message(position)
        return Place(
            index,
            "" if index is None else str(self.messages[index].get("role", "")),
            self.characters(max(0, position - _AROUND), position)[-_AROUND:],
            self.characters(position, position + _AROUND)[:_AROUND],
        )

    def change(self, found: Displaced) -> Change:
        """A change that the cache has found, in words."""
        place, text = self.place(found.start), ""
        if found.start < found.stop:
            head, tail = _WORD_ENDS.search(place.before), _WORD.match(self.place(found.stop).after)
            assert head is not None
            assert tail is not None
            whole = head[0] + self.characters(found.start, found.stop) + tail[0]
            text = whole.strip(" \n\t.,;:!?()[]{}\"'")
            text = text if len(text) <= _LONGEST_CHANGE else text[: _LONGEST_CHANGE - 3] + "..."
        return Change(found.start, found.stop, found.tokens, place, text)

    def characters(self, start: int, stop: int) -> str:
        """The whole characters in tokens [start, stop)."""
        return b"".join(map(self._piece, self.tokens[start:stop])).decode(errors="ignore")

    def _message(self, position: int) -> int | None:
        """The message whose end is the next one. Messages come in order, but some templates move the first one."""
        offset = self._offset(position) if self.messages else None
        if offset is None:
            return None
        first, low, high = self._end(0), 1, len(self.messages)
        while low < high:
            middle = (low + high) // 2
            end = self._end(middle)
            if end is None:
                return None
            low, high = (low, middle) if offset <= end else (middle + 1, high)
        ends = {} if first is None else {0: first}
        if low < len(self.messages) and (end := self._end(low)) is not None:
            ends[low] = end
        return min((index for index, end in ends.items() if offset <= end), key=ends.__getitem__, default=None)

    def _offset(self, position: int) -> int | None:
        """Characters of the text before a token, or None if the tokens do not spell the text."""
        if not self._stops:
            return None
        stop = self._stops[position - 1] if position else 0
        return len(self._text.encode()[: max(0, stop)].decode(errors="ignore"))

    @cached_property
    def _stops(self) -> list[int]:
        """Bytes of the text before the end of each token; empty if the tokens do not spell the text."""
        pieces = [self._piece(token) for token in self.tokens]
        spelled, text = b"".join(pieces), self._text.encode()
        space = spelled == b" " + text  # some tokenizers write one in front
        return list(accumulate(map(len, pieces), initial=-space))[1:] if space or spelled == text else []

    def _find_end(self, index: int) -> int | None:
        """Characters of the text up to the end of a message's content; None where the template hides it."""
        if self._render is None:
            return None
        marked = [*self.messages]
        try:
            marked[index] = marked[index] | {"content": _marked(marked[index]["content"])}
            rendered = self._render(marked)
        except Exception:  # a template may refuse what it does not know
            return None
        return None if rendered == self._text else common_start(rendered, self._text)


def _marked(content: Any) -> Any:
    """The content of a message, a text or a list of parts, with the mark at its end."""
    if isinstance(content, list):
        return [*content[:-1], content[-1] | {"text": content[-1]["text"] + _MARK}]
    return content + _MARK


def common_start(left: str | list[int], right: str | list[int]) -> int:
    """With how many characters, or tokens, both begin. By bisection, so that whole stretches are compared at once."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
