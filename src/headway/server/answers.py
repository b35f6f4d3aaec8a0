"""The tokens of answers that were given, for prompts that send an answer back as text.

Token ids that were sampled are one of many spellings of a text. A tokenizer writes the text of an answer with other ids
somewhere in about one answer of seven at temperature 0.7, and a state that was kept at its end is then lost, however
late the difference lies. So the ids of what was answered are kept, and put back where a prompt begins with exactly the
text that ended with that answer: prompt and answer, from the first character on.

An answer is found by the digest of all text up to its end, so equal answers to other prompts are no matter, and no text
is kept. How many texts have to be digested for a prompt does not grow with what is kept: only ends at which the prompt
has the same few characters are looked at.

What is forgotten on purpose takes its answers along, those under way included: at a reset all of them, with a damaged
prefix those of its salt. Answers stay when the cache makes room: a prompt computed anew in their ids is as right as in
any others, and its path is then the one that earlier requests took, which may still be there in part.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.engine import RequestResult

__all__ = ["GivenAnswer", "GivenAnswers"]

_TAIL = 8
"""Characters before the end of an answer by which it is looked for."""
_MOST_ANSWERS, _MOST_TOKENS = 16_384, 4_194_304
"""Beyond it, what was used longest ago is forgotten: 16 MiB of ids, and about as much again."""


@dataclass(frozen=True)
class GivenAnswer:
    """An answer at the end of a text.

    Attributes:
        start: Characters of the text before it.
        stop: Characters of the text up to its end.
        tokens: int32, its ids.
    """

    start: int
    stop: int
    tokens: NDArray[np.int32]


class GivenAnswers:
    """What was answered, per cache salt; an `Observer` of the engine. May be used by several threads.

    Attributes:
        restore: Whether prompts get the ids back; if not, they are only told that their ids are others.
    """

    def __init__(self, *, restore: bool = True, most: int = _MOST_ANSWERS, most_tokens: int = _MOST_TOKENS) -> None:
        """Keep nothing yet, and at most so many answers and tokens of them."""
        self.restore = restore
        self._most, self._most_tokens = most, most_tokens
        self._answers: OrderedDict[tuple[str, bytes], tuple[GivenAnswer, str]] = OrderedDict()
        self._ends: dict[str, dict[tuple[int, str], int]] = {}
        self._tokens = 0
        self._forgotten_at = 0.0
        self._lock = threading.Lock()

    def request_finished(self, result: RequestResult) -> None:
        """Keep the answer, as far as its tokens are all text; none that was under way when something was forgotten."""
        asked, (count, characters) = result.request, result.settled
        if asked.text and characters and not asked.no_store and result.timings.arrived > self._forgotten_at:
            tokens = np.array(result.tokens[:count], dtype=np.int32)
            self._keep(asked.salt, asked.text + result.text[:characters], len(asked.text), tokens)

    def step_done(self, seconds: float, tokens: int) -> None:
        """Steps are no matter."""

    def forgotten(self, salt: str | None) -> None:
        """Forget the answers with a salt, or all of them."""
        with self._lock:
            self._forgotten_at = time.monotonic()
            for key in [key for key in self._answers if salt is None or key[0] == salt]:
                self._drop(key)

    def _keep(self, salt: str, text: str, start: int, tokens: NDArray[np.int32]) -> None:
        key, tail = (salt, _digest(text)), text[-_TAIL:]
        with self._lock:
            self._drop(key)
            self._answers[key] = (GivenAnswer(start, len(text), tokens), tail)
            ends = self._ends.setdefault(salt, {})
            ends[len(text), tail] = ends.get((len(text), tail), 0) + 1
            self._tokens += len(tokens)
            while self._tokens > self._most_tokens or len(self._answers) > self._most:
                self._drop(next(iter(self._answers)))

    def _drop(self, key: tuple[str, bytes]) -> None:
        if key not in self._answers:
            return
        answer, tail = self._answers.pop(key)
        ends, end = self._ends[key[0]], (answer.stop, tail)
        self._tokens -= len(answer.tokens)
        ends[end] -= 1
        if not ends[end]:
            del ends[end]
        if not ends:
            del self._ends[key[0]]

    def within(self, salt: str, text: str) -> list[GivenAnswer]:
        """The answers that `text` repeats: each where it stood, ascending, without overlap. The longer of two wins."""
        with self._lock:
            ends = {stop for stop, tail in self._ends.get(salt, ()) if text.endswith(tail, 0, stop)}
            found: list[GivenAnswer] = []
            seen, digest = 0, hashlib.blake2b(digest_size=16)
            for stop in sorted(stop for stop in ends if stop <= len(text)):
                digest.update(_bytes(text[seen:stop]))
                seen, key = stop, (salt, digest.digest())
                if key in self._answers:
                    self._answers.move_to_end(key)
                    answer = self._answers[key][0]
                    while found and found[-1].stop > answer.start:
                        found.pop()
                    found.append(answer)
            return found


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(_bytes(text), digest_size=16).digest()
