"""A call as it is written: its name, and then the text of its arguments, before the call is complete.

This is for calls that are written in JSON, as one object or behind their name. From where the arguments begin, it is a
call, and what comes of it is told at once, in the model's own words. Other forms are told when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import regex

__all__ = ["WrittenCall", "written_calls"]

_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BARE = re.compile(r"\s*(?=\{)")
_BEHIND_NAME = {"name": "{name}", "arguments": "{content}"}


class WrittenCall:
    """One call, as far as its text has come.

    Attributes:
        name: The function, once it is known that this is a call; else "".
        id: The id that the model gave it, if it gives any.
    """

    def __init__(self, opening: Any, opened: str) -> None:
        """Begin one.

        Args:
            opening: The pattern that finds the name in the text before the arguments; None where it is in the object.
            opened: That text.
        """
        self.name = self.id = ""
        self._opening = opening
        self._named = None if opening is None else opening.search(opened)
        self._text = ""
        self._read: int | None = None
        self._end: int | None = None
        self._depth, self._quoted, self._escaped = 0, False, False

    def take(self, text: str) -> str:
        """What `text`, the next of the call, adds to its arguments."""
        self._text += text
        if self._read is None and not self._begin():
            return ""
        assert self._read is not None
        start = self._read
        while self._read < len(self._text) and self._end is None:
            self._look_at(self._text[self._read])
            self._read += 1
            if self._depth == 0:
                self._end = self._read
        return self._text[start : self._read]

    @property
    def rest(self) -> str:
        """What was written behind the arguments."""
        return "" if self._end is None else self._text[self._end :]

    def next_opening(self, unread: str) -> str:
        """What may begin another call behind this one, where a call ends with the next: the end of `unread`, or ""."""
        behind = unread.rpartition(self._text)[2]
        begins = self._opening is not None and self._opening.match(behind, partial=True)
        return behind if begins else ""

    def _begin(self) -> bool:
        """Look for the beginning of the arguments. Returns whether it has come."""
        found = (_NAMED if self._opening is None else _BARE).match(self._text)
        if found is None or (self._opening is not None and self._named is None):
            return False
        try:
            told = json.loads(found[1]) if self._named is None else self._named["name"]
        except ValueError:
            return False
        self.name, self._read = told, found.end()
        self.id = "" if self._named is None else self._named.groupdict().get("id") or ""
        return True

    def _look_at(self, sign: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or sign != '"'
            self._escaped = sign == "\\" and not self._escaped
        else:
            self._quoted = sign == '"'
            self._depth += (sign in "{[") - (sign in "}]")


def written_calls(template: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether a response template has calls that can be told as they are written, and what their name is found by."""
    calls = template["fields"].get("tool_calls") or {}
    function = (calls.get("transform") or {}).get("function")
    if calls.get("content") != "json":
        return False, None
    if function == "{content}":
        return True, None
    pattern = calls.get("open_pattern") or ""
    return (True, regex.compile(pattern)) if function == _BEHIND_NAME and "(?P<name>" in pattern else (False, None)
