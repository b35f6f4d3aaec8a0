"""A few tokens of a delta rule go through the recurrent form, where there are no kernels.

transformers computes more than one token of KDA and Gated DeltaNet in chunks of 64, padded, whatever the number.
Without its GPU kernels two tokens are then as dear as 64: a forward of 5 tokens of the built-in model takes 56 ms of
CPU time, where one of 1 token takes 14. The same modules hold the recurrent form, of the same arguments and results,
which is a few small products a token: with it 5 tokens take 15 ms, and 16 take 20. Verifying a draft, and going on
behind a prefix hit with few tokens left, are exactly such short chunks.

The library has no switch for it, so its module's function is replaced for the length of one forward, which runs alone
(`headway.runtime.attention.AttentionSwitch`). Rejected: computing short chunks token by token, which repeats the whole
model for each; and a recurrent function of our own, which would be one more thing to keep equal to the library's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

__all__ = ["MOST_TOKENS", "short_chunks"]

MOST_TOKENS = 16
"""Longest chunk in recurrent form. Measured up to here; longer ones may gain too, but they pay less for padding."""

_PAIRS = (
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
)


@contextmanager
def short_chunks(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Let a forward of `tokens` tokens a row use the recurrent form where that is faster. Not thread-safe."""
    if not 1 < tokens <= MOST_TOKENS or model.device.type != "cpu":
        yield
        return
    home = sys.modules[type(model).__module__]
    pairs = [(chunk, recurrent) for chunk, recurrent in _PAIRS if hasattr(home, chunk) and hasattr(home, recurrent)]
    before = {chunk: getattr(home, chunk) for chunk, _ in pairs}
    try:
        for chunk, recurrent in pairs:
            setattr(home, chunk, _recurrent(home, recurrent))
        yield
    finally:
        for chunk, function in before.items():
            setattr(home, chunk, function)


def _recurrent(home: ModuleType, name: str) -> Callable[..., Any]:
    recurrent = getattr(home, name)

    @wraps(recurrent)
    def compute(*args: Any, chunk_size: int | None = None, **kwargs: Any) -> Any:
        return recurrent(*args, **kwargs)

    return compute
