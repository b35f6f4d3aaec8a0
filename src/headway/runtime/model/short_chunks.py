"""A few tokens of a delta rule go through the recurrent form, where there are no kernels.

transformers computes more than one token of KDA and Gated DeltaNet in chunks of 64, padded, whatever the number.
Without its GPU kernels two tokens are then as dear as 64: a forward of 5 tokens of the built-in model takes 56 ms of
CPU time, where one of 1 token takes 14. The same modules hold the recurrent form, of the same arguments and results,
which is a few small products a token: with it 5 tokens take 15 ms, and 16 take 20. Verifying a draft, and going on
behind a prefix hit with few tokens left, are exactly such short chunks. So is a dry run, which computes nothing but
walks through all of it.

The library has no switch for it, so its module's function is replaced, once, by one that chooses: the recurrent form
in a thread that runs a forward of a short chunk, else what was there. Rejected: replacing it for the length of a
forward (ranks that are threads of one process take each other's form away), computing short chunks token by token,
which repeats the whole model for each; and a recurrent function of our own, which would be one more thing to keep
equal to the library's.
"""

from __future__ import annotations

import sys
import threading
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


_installing = threading.Lock()


class _Choice(threading.local):
    """What this thread computes."""

    short = False


_choice = _Choice()


@contextmanager
def short_chunks(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Let a forward of `tokens` tokens per row, in this thread, use the recurrent form where that is faster."""
    if not 1 < tokens <= MOST_TOKENS or model.device.type not in ("cpu", "meta"):
        yield
        return
    for kind in type(model).__mro__:  # a model of ours inherits from the one whose module has the functions
        _install(sys.modules[kind.__module__])
    _choice.short = True
    try:
        yield
    finally:
        _choice.short = False


def _install(home: ModuleType) -> None:
    """Replace the chunk functions of a model's module by ones that choose, where that has not been done yet."""
    with _installing:
        for chunk, recurrent in _PAIRS:
            function = getattr(home, chunk, None)
            if function is not None and hasattr(home, recurrent) and not hasattr(function, "headway_chooses"):
                setattr(home, chunk, _choosing(function, getattr(home, recurrent)))


def _choosing(chunks: Callable[..., Any], recurrent: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(chunks)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not _choice.short:
            return chunks(*args, **kwargs)
        kwargs.pop("chunk_size", None)
        return recurrent(*args, **kwargs)

    compute.headway_chooses = True  # type: ignore[attr-defined]
    return compute
