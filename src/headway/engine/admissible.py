"""What is wrong with a request that nobody can serve, said before it waits in a queue."""

from __future__ import annotations

import numpy as np

from headway.cache import PrefixCache
from headway.engine.capacity import blocks_needed
from headway.engine.request import GenerationRequest
from headway.errors import RequestError, UnservableError

__all__ = ["require_servable"]


def require_servable(request: GenerationRequest, cache: PrefixCache, vocabulary: int, max_model_len: int) -> None:
    """Refuse a request that cannot be served as it stands.

    Args:
        request: The request.
        cache: The cache that would hold it; only its geometry and its configuration are read.
        vocabulary: Token ids are below it.
        max_model_len: Most tokens of prompt and answer together.

    Raises:
        RequestError: The message names what to change.
        UnservableError: It would not fit into the whole pool.
    """
    length = len(request.tokens)
    if length == 0:
        raise RequestError("the prompt is empty; send at least one token", "prompt", "empty_prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}, it must be at least 1", "max_tokens")
    if length + request.max_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens and the answer may have {request.max_tokens}, together more than the "
            f"{max_model_len} that this server allows; shorten the prompt or lower max_tokens",
            "prompt",
            "context_length_exceeded",
        )
    lowest, highest = int(np.min(request.tokens)), int(np.max(request.tokens))
    if lowest < 0 or highest >= vocabulary:
        bad = lowest if lowest < 0 else highest
        raise RequestError(f"token {bad} is not in the vocabulary of {vocabulary} tokens", "prompt", "invalid_token")
    needed = blocks_needed(cache.geometry, length + request.max_tokens, 1)
    if needed > cache.config.blocks:
        raise UnservableError(
            f"the request needs {needed} blocks and the pool has {cache.config.blocks}; shorten the prompt, "
            f"lower max_tokens, or give the server more --memory",
            needed,
            cache.config.blocks,
        )
