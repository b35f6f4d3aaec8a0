"""From token ids to text, as they come: whole characters only, and nothing of a stop string.

A token may end in the middle of a character, and a tokenizer may write a token differently after another one (a leading
space, a joined accent). So each step decodes a short window twice, with and without what is new, and shows the
difference once it ends in a whole character. Decoding the answer from its start at every step would be quadratic;
decoding each token alone would break characters.

Who sends the text back reaches no further than the last token that is all text: not into a character or a stop string
that has only begun. Up to there the answer is *settled*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["CONTEXT_TOKENS", "Decode", "TextStream"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

CONTEXT_TOKENS = 6
"""Last tokens of the prompt that decide how the first token of the answer is written."""

_BROKEN = "\ufffd"
_MAX_HELD = 8  # tokens held back for an unfinished character: one has 4 bytes, so beyond this it is not going to end
_MAX_WINDOW = 64  # tokens that decode to nothing (special ones) before the window moves on regardless


class TextStream:
    """The text of one answer, grown token by token.

    Attributes:
        text: What has been decoded so far, without what follows a stop string, and without that unless it is shown.
        stopped_by: The stop string that ended the answer, or None.
    """

    def __init__(
        self,
        decode: Decode,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        shown: bool = False,
        least: int = 0,
    ) -> None:
        """Start an answer.

        Args:
            decode: The tokenizer's function.
            prompt: The prompt's tokens, of which the last few are used as context.
            stop: Strings that end the answer.
            shown: The one that ends it is part of its text.
            least: Tokens of the answer before which none is looked for.
        """
        self.text = ""
        self.stopped_by: str | None = None
        self._decode = decode
        self._stop, self._stop_shown, self._least = tuple(stop), shown, least
        self._longest = max((len(s) for s in self._stop), default=0)
        self._unsearched = 0
        self._window = [int(t) for t in prompt[-CONTEXT_TOKENS:]]
        self._read = len(self._window)
        self._started = False
        self._shown = 0
        self._pushed = 0
        self._marks = deque([(0, 0)])
        """Numbers of tokens and of the characters that are their text, from the last settled one on."""

    def push(self, token: int) -> str:
        """Append a token. Returns the text that may be shown now, which may be empty.

        After a stop string was found (`stopped_by`) nothing more may be pushed.
        """
        assert self.stopped_by is None, "the answer has ended"
        if not self._started:
            self._start()
        self._window.append(token)
        self._pushed += 1
        new = self._take_new(final=False)
        if new is None:
            return ""
        self._marks.append((self._pushed, len(self.text) + len(new)))
        return self._grow(new, final=False)

    def finish(self) -> str:
        """End the answer. Returns what was held back: an unfinished character, or the start of a stop string."""
        if self.stopped_by is not None:
            return ""
        return self._grow(self._take_new(final=True) or "", final=True)

    @property
    def settled(self) -> tuple[int, int]:
        """How many first tokens are all text that can be shown, and how many characters that is."""
        return self._marks[0]

    def _start(self) -> None:
        """Forget the context if it ends inside a character: what the answer adds could not be told from it."""
        self._started = True
        if self._window and self._decode(self._window).endswith(_BROKEN):
            self._window, self._read = [], 0

    def _take_new(self, *, final: bool) -> str | None:
        """The text that the last tokens add; None while they end inside a character."""
        before = self._decode(self._window[: self._read]) if self._read else ""
        after = self._decode(self._window)
        held = len(self._window) - self._read
        if after.endswith(_BROKEN) and held < _MAX_HELD and not final:
            return None
        new = after[len(before) :]
        if new or held >= _MAX_WINDOW:
            del self._window[: self._read]
            self._read = len(self._window)
        return new

    def _grow(self, new: str, *, final: bool) -> str:
        searched = max(self._unsearched, len(self.text) - self._longest + 1)
        self.text += new
        if not self._stop or self._pushed < self._least:
            self._settle(len(self.text))
            self._shown = self._unsearched = len(self.text)
            return new
        found = [(at, s) for s in self._stop if (at := self.text.find(s, searched)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda f: (f[0], -len(f[1])))
            self.text = self.text[: at + len(self.stopped_by) if self._stop_shown else at]
        end = len(self.text)
        if not (final or found):
            end -= self._possible_start()
        self._settle(end)
        shown = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return shown

    def _settle(self, end: int) -> None:
        """Take the first `end` characters as the answer's: the last mark at or before stays, with those behind it."""
        while len(self._marks) > 1 and self._marks[1][1] <= end:
            self._marks.popleft()

    def _possible_start(self) -> int:
        """Length of the longest end of the text that a stop string starts with."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            ending = self.text[-length:]
            if any(s.startswith(ending) for s in self._stop):
                return length
        return 0
