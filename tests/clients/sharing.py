"""What exact sharing allows: of each prompt, the longest beginning that it has in common with what was computed before.

No cache of exact prefixes can reuse more. The last token of a prompt is always computed, since the answer starts from
its logits, and the last token of an answer never was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["allowed"]


def allowed(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Tokens of each prompt that could be reused, from the prompts and answers of requests in their order."""
    known: list[np.ndarray] = []
    found = []
    for prompt, answer in requests:
        tokens = np.asarray(prompt, dtype=np.int64)
        found.append(min(len(tokens) - 1, max((_common(tokens, one) for one in known), default=0)))
        known.append(np.concatenate((tokens, np.asarray(answer[:-1], dtype=np.int64))))
    return found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter
