"""What can be served, and what fits beside what runs: one formula for start-up, for submission and for admission.

Engines that count differently in these three places accept requests that then run to their last block and start over,
for ever (vllm#52520). Here the length limit printed at start is found with the very function that refuses requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.cache import CacheGeometry, PrefixCache, TableKind
from headway.engine.config import EngineConfig
from headway.engine.request import GenerationRequest
from headway.errors import ConfigError, RequestError, UnservableError

__all__ = ["blocks_needed", "fits_beside", "length_limit", "longest_servable", "require_servable"]

_ENDLESS = 1 << 20
"""Length limit of a model without one: every request reserves an array for its longest answer."""


def blocks_needed(geometry: CacheGeometry, tokens: int, step_tokens: int) -> int:
    """Most blocks that a request holds at once until `tokens` tokens are computed, at most `step_tokens` a step.

    An upper bound by at most one block for each window or chunk, and one for a shared block that has to be copied.
    """
    total = 0
    for table in geometry.tables:
        if table.kind is TableKind.STATE:
            total += table.state_blocks
        elif table.kind is TableKind.PREFIX:
            total += table.blocks_for(tokens)
        else:
            reach = (table.window - 1 if table.kind is TableKind.WINDOW else table.chunk - 1) + step_tokens
            total += min(table.blocks_for(tokens), table.blocks_for(reach) + 1)
    return total


def longest_servable(geometry: CacheGeometry, blocks: int, step_tokens: int, limit: int) -> int:
    """Most tokens, up to `limit`, of a request that has the pool of `blocks` blocks to itself; 0 if not even one."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_needed(geometry, middle, step_tokens) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def length_limit(cache: PrefixCache, config: EngineConfig, model_limit: int | None) -> int:
    """Most tokens of one request: what was asked for, what the model was made for, what the pool holds.

    Raises:
        ConfigError: The pool cannot hold a short request, or not what was asked for.
    """
    wished = [n for n in (config.max_model_len, model_limit) if n is not None]
    limit = min(wished, default=_ENDLESS)
    if not config.chunked_prefill:
        limit = min(limit, config.max_batched_tokens - config.max_running)
    fits = longest_servable(cache.geometry, cache.config.blocks, 1, limit)
    if fits < 2:
        need = blocks_needed(cache.geometry, 2, 1) * cache.geometry.block_bytes
        raise ConfigError(
            f"the memory for the cache holds {cache.config.blocks} blocks of {cache.geometry.block_bytes} bytes, and "
            f"one short request needs {need} bytes; raise --memory"
        )
    if fits < limit and config.max_model_len is not None:
        raise ConfigError(
            f"the memory for the cache holds {fits} tokens of one request, less than the max_model_len of "
            f"{config.max_model_len}; raise --memory or lower --max-model-len"
        )
    return fits


def fits_beside(
    cache: PrefixCache, running: Sequence[tuple[int, int, int]], known: int, hit: int, step_tokens: int
) -> bool:
    """Whether the known tokens of a request and of all that run fit into the pool.

    Shared prefixes are counted once, as if all running requests shared one. Where that is too hopeful, somebody gives
    way; counting each one's in full would let requests with a long common prefix run one by one.

    Args:
        cache: The cache.
        running: Known tokens, computed tokens and tokens of the hit of each running request.
        known: Tokens of the request.
        hit: Tokens that it would reuse.
        step_tokens: Most tokens computed in one step.
    """
    geometry = cache.geometry

    def shared(tokens: int) -> int:
        return sum(tokens // table.span for table in geometry.prefix_tables)

    def own(known: int, computed: int, hit: int) -> int:
        return blocks_needed(geometry, known, min(known - computed, step_tokens)) - shared(hit)

    need = own(known, hit, hit) + sum(own(*request) + 1 for request in running)
    return need + shared(max([hit, *(h for _, _, h in running)])) <= cache.config.blocks


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
