"""How many blocks a request needs: one formula for start-up, for submission and for admission.

Engines that count differently in these three places accept requests that then run to their last block and start over,
for ever (vllm#52520). Here the length limit printed at start is found with the very function that refuses requests.
"""

from __future__ import annotations

from headway.cache import CacheGeometry, TableKind

__all__ = ["blocks_needed", "longest_servable"]


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
