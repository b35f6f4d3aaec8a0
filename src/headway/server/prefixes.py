"""Which parts of prompts are reused most, and which are computed again most: counted as requests end.

A prompt is divided where its messages end (a plain text at 64, 128, 256, ... tokens), and a part is known by all the
text up to its end: so what requests share is one part, and what they do not share is not. Names are digests with a
key of this process: they say which parts are the same, and nobody can try out what a part says.

The table is bounded. When it is full, the parts of which least was reused or lost go, and begin anew if they come back.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.engine import GenerationRequest, RequestResult
from headway.tell.live import PrefixUse
from headway.tell.reasons import UNSAVABLE

__all__ = ["PrefixUses"]

_MOST = 4096
"""Parts that are remembered."""
_PARTS = 64
"""Parts of one prompt; what follows the first ones is one part."""
_FIRST_CUT = 64
_SHOWN_TOKENS = 24
_NAME_BYTES = 5


@dataclass(slots=True)
class _Part:
    """A part and what became of its tokens."""

    start: int
    stop: int
    head: tuple[int, ...]
    requests: int = 0
    reused: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def weight(self) -> int:
        return self.reused + self.lost.total()


class PrefixUses:
    """The table; an `Observer` of the engine. May be used by several threads."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """Start empty; with `decode` the first tokens of a part are kept and told as text, else nothing of the text."""
        self._decode = decode
        self._key = secrets.token_bytes(16)
        self._parts: dict[str, _Part] = {}
        self._lock = threading.Lock()

    def request_finished(self, result: RequestResult) -> None:
        """Count what became of a prompt, if its request was ever admitted."""
        found, asked = result.explanation, result.request
        if found is None:
            return
        lost = [(one.reason.value, one.start, one.stop) for one in found.losses if one.reason.value not in UNSAVABLE]
        with self._lock:
            for name, start, stop in self._named_parts(asked):
                part = self._parts.get(name)
                if part is None:
                    head = asked.tokens[start : min(stop, start + _SHOWN_TOKENS)].tolist() if self._decode else ()
                    part = self._parts[name] = _Part(start, stop, tuple(head))
                part.requests += 1
                part.reused += max(0, min(stop, result.cached_tokens) - start)
                for reason, low, high in lost:
                    if (tokens := min(stop, high) - max(start, low)) > 0:
                        part.lost[reason] += tokens
            if len(self._parts) > _MOST:
                heavy = sorted(self._parts.items(), key=lambda item: item[1].weight)[_MOST // 4 :]
                self._parts = dict(heavy)

    def step_done(self, seconds: float, tokens: int) -> None:
        """Nothing to count."""

    def forgotten(self, salt: str | None) -> None:
        """Begin anew where all was forgotten."""
        if salt is None:
            with self._lock:
                self._parts.clear()

    def most(self, count: int) -> tuple[list[PrefixUse], list[PrefixUse]]:
        """The parts of which most was reused, and those of which most was lost; at most `count` of each."""
        with self._lock:
            parts = list(self._parts.items())
            reused = sorted((item for item in parts if item[1].reused), key=lambda item: -item[1].reused)
            lost = sorted((item for item in parts if item[1].lost), key=lambda item: -item[1].lost.total())
            return [self._told(*item) for item in reused[:count]], [self._told(*item) for item in lost[:count]]

    def _told(self, name: str, part: _Part) -> PrefixUse:
        reason = max(part.lost, key=part.lost.__getitem__, default="")
        text = "" if self._decode is None else self._decode(part.head)
        return PrefixUse(name, part.start, part.stop, part.requests, part.reused, part.lost.total(), reason, text)

    def _named_parts(self, asked: GenerationRequest) -> Iterator[tuple[str, int, int]]:
        """Name, start and stop of each part of a prompt. O(its tokens)."""
        digest = hashlib.blake2b(asked.salt.encode(), key=self._key, digest_size=_NAME_BYTES)
        start = 0
        for stop in _cuts(asked):
            digest.update(asked.tokens[start:stop].tobytes())
            yield digest.hexdigest(), start, stop
            start = stop


def _cuts(asked: GenerationRequest) -> list[int]:
    """Where a prompt is divided, its end included."""
    length = len(asked.tokens)
    cuts = asked.boundaries or [_FIRST_CUT << i for i in range(_PARTS)]
    return [*sorted({cut for cut in cuts if 0 < cut < length})[: _PARTS - 1], length]
