"""How many blocks a request needs: one formula for start-up, for submission and for admission.

Engines that count differently in these three places accept requests that then run to their last block and start over,
for ever (vllm#52520). Here the length limit printed at start is found with the very function that refuses requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cache import CacheGeometry, PrefixCache, TableKind

__all__ = ["blocks_needed", "fits_beside", "longest_servable"]


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
