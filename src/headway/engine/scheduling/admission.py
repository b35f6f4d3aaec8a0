"""What can be served, and what fits beside what runs.

Engines that count blocks differently at start-up, at submission and at admission accept requests that then run to their
last block and start over, for ever (vllm#52520). Here all three ask the geometry, as the cache itself does: what a
request needs is the most that it holds at any of its positions (`CacheGeometry.peak_blocks`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from headway.cache import CacheGeometry, Hit, PrefixCache
from headway.engine.config import EngineConfig
from headway.engine.request import GenerationRequest, RunningRequest
from headway.errors import ConfigError, RequestError, UnservableError
from headway.sizes import counted

__all__ = ["fits_beside", "leader_of", "length_limit", "longest_servable", "require_servable"]

_ENDLESS = 1 << 20
"""Length limit of a model without one: every request reserves an array for its longest answer."""


def longest_servable(geometry: CacheGeometry, blocks: int, limit: int) -> int:
    """Most tokens, up to `limit`, of a request that has the pool of `blocks` blocks to itself; 0 if not even one."""
    return bisect_right(range(1, limit + 1), blocks, key=geometry.peak_blocks)


def length_limit(cache: PrefixCache, config: EngineConfig, model_limit: int | None) -> int:
    """Most tokens of one request: what was asked for, what the model was made for, what the pool holds.

    Raises:
        ConfigError: The pool cannot hold a short request, or not what was asked for.
    """
    wished = [n for n in (config.max_model_len, model_limit) if n is not None]
    limit = min(wished, default=_ENDLESS)
    if config.step_tokens is not None:
        limit = min(limit, config.max_batched_tokens - config.max_running)
    fits = longest_servable(cache.geometry, cache.config.blocks, limit)
    if fits < 2:
        need = cache.geometry.peak_blocks(2) * cache.geometry.block_bytes
        raise ConfigError(
            f"the memory for the cache holds {cache.config.blocks} blocks of {cache.geometry.block_bytes} bytes, and "
            f"one short request needs {need} bytes; raise --memory"
        )
    if fits < limit and config.max_model_len is not None:
        raise ConfigError(
            f"the memory for the cache holds {counted(fits, 'token')} of one request, less than the max_model_len of "
            f"{config.max_model_len}; raise --memory or lower --max-model-len"
        )
    return fits


def fits_beside(cache: PrefixCache, running: Sequence[tuple[int, int]], known: int, hit: int) -> bool:
    """Whether the known tokens of a request and of all that run fit into the pool.

    Shared prefixes are counted once, as if all running requests shared one. Where that is too hopeful, somebody gives
    way; counting each one's in full would let requests with a long common prefix run one by one.

    Args:
        cache: The cache.
        running: Known tokens and tokens of the hit of each running request.
        known: Tokens of the request.
        hit: Tokens that it would reuse.
    """
    geometry = cache.geometry

    def shared(tokens: int) -> int:
        return sum(tokens // table.span for table in geometry.prefix_tables)

    def own(known: int, hit: int) -> int:
        return sum(table.most_blocks(known) for table in geometry.tables) - shared(hit)

    need = own(known, hit) + sum(own(*request) + 1 for request in running)  # one more: a shared block that is copied
    return need + shared(max([hit, *(h for _, h in running)])) <= cache.config.blocks


def leader_of(
    cache: PrefixCache, hit: Hit, prefills: Sequence[RunningRequest], least: int
) -> tuple[RunningRequest, int] | None:
    """The running prefill that a request should wait for, and up to where; None if there is none. Changes nothing.

    Args:
        cache: The cache.
        hit: What it knows of the request's prompt.
        prefills: Running requests that compute prompts.
        least: Fewest tokens that waiting must save.
    """
    reached = [
        (leader, cache.reach(hit, leader.lease.row))
        for leader in prefills
        if leader.lease is not None and leader.computed >= hit.tokens  # else it is slower than computing here
    ]
    if not reached:
        return None
    leader, position = max(reached, key=lambda one: (one[1], one[0].computed))
    return (leader, position) if position > leader.computed and position - hit.tokens >= least else None


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
            f"the prompt has {counted(length, 'token')} and the answer may have {request.max_tokens}, together more "
            f"than the {max_model_len} that this server allows; shorten the prompt or lower max_tokens",
            "prompt",
            "context_length_exceeded",
        )
    lowest, highest = int(np.min(request.tokens)), int(np.max(request.tokens))
    if lowest < 0 or highest >= vocabulary:
        bad = lowest if lowest < 0 else highest
        raise RequestError(f"token {bad} is not in the vocabulary of {vocabulary} tokens", "prompt", "invalid_token")
    needed = cache.geometry.peak_blocks(length + request.max_tokens)
    if needed > cache.config.blocks:
        raise UnservableError(
            f"the request needs {counted(needed, 'block')} and the pool has {cache.config.blocks}; shorten the prompt, "
            f"lower max_tokens, or give the server more --memory",
            needed,
            cache.config.blocks,
        )
