"""Names of prefixes at any position, for models that look prefixes up by hash instead of walking a tree.

Two positions of two requests have the same key exactly if the trace says that the same tokens lie before them. Inside a
block of the trace that two requests share, every position is shared. What only its own request knows (an answer that no
later prompt contains) gets a key of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.replay.endless import Reading, answer_blocks, number_prefixes, sequences
from headway.replay.trace import Trace

__all__ = ["PrefixKeys"]

_OWN_BITS = 32
"""Keys of a request's own positions are minus (request, position) in one number."""


class PrefixKeys:
    """Keys of the prefixes of a trace's requests: prompt and answer."""

    def __init__(self, trace: Trace, reading: Reading) -> None:
        """Number the prefixes. O(S log S) for S symbols."""
        symbols, self._offsets, _ = sequences(trace, reading)
        self._ids = number_prefixes(symbols, self._offsets).ids
        self._width = trace.width
        self._known = trace.prompt_tokens
        if reading.outputs != "never":
            self._known = np.array([_known(trace, reading, i) for i in range(len(trace))])

    def at(self, request: int, positions: NDArray[np.int64]) -> list[int]:
        """Keys of the prefixes that end at `positions` (int64, at least 1, ascending) of a request."""
        width, first = self._width, int(self._offsets[request])
        inside = positions[: int(np.searchsorted(positions, self._known[request], side="right"))]
        index = (inside - 1) // width
        keys: list[int] = (self._ids[first + index] * width + (inside - 1 - index * width)).tolist()
        return keys + [-1 - (request << _OWN_BITS) - int(p) for p in positions[len(inside) :]]

    def multiples(self, request: int, step: int, stop: int) -> list[int]:
        """Keys at step, 2 x step, ... up to and including `stop`."""
        return self.at(request, np.arange(step, stop + 1, step, dtype=np.int64))


def _known(trace: Trace, reading: Reading, request: int) -> int:
    """Tokens of a request from its start that the trace can tell apart from those of others."""
    prompt, answer = len(trace.prompt(request)), len(answer_blocks(trace, reading, request))
    if trace.width == 1:
        return prompt + answer
    return (prompt - 1 + answer) * trace.width if answer else int(trace.prompt_tokens[request])
