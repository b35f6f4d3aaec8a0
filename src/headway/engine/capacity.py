"""How many blocks a request needs: one formula for start-up, for submission and for admission.

Engines that count differently in these three places accept requests that then run to their last block and start over,
for ever (vllm#52520). Here the length limit printed at start is found with the very function that refuses requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cache import CacheGeometry, PrefixCache, TableKind
from headway.engine.config import EngineConfig
from headway.errors import ConfigError

__all__ = ["blocks_needed", "fits_beside", "length_limit", "longest_servable"]

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
