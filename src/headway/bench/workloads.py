"""What `headway bench` measures: one function a figure, each returning the median microseconds of one operation.

Prompts are int32 arrays of random tokens. Nothing is computed: the figures are what the bookkeeping costs an engine. An
operation that changes the cache is measured on a cache brought back to its first state outside the timed part.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import (
    CacheConfig,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    PrefixCache,
    Prompt,
    Recurrent,
    SlidingWindow,
)

__all__ = ["CONFIGURATIONS", "FOUR_GROUPS", "Configuration", "evict", "lookup", "lookup_turns", "request", "step"]

Ids = NDArray[np.int32]
_VOCABULARY = 150_000


@dataclass(frozen=True)
class Configuration:
    """A model and layout to measure.

    Attributes:
        name: Short name.
        title: What it stands for.
        groups: Cache groups.
        layout: Parallel layout.
    """

    name: str
    title: str
    groups: list[LayerSpec]
    layout: ParallelLayout

    def cache(self, tokens: int, *, blocks: int | None = None) -> PrefixCache:
        """A cache in which four sequences of `tokens` tokens fit, or with `blocks` blocks."""
        probe = CacheConfig(self.groups, 1, block_tokens=16, layout=self.layout).geometry()
        sequence = sum(table.blocks_for(tokens) for table in probe.tables)
        states = probe.state_table.state_blocks if probe.state_table else 0
        enough = 4 * (sequence + 3 * states) + 64
        return PrefixCache(
            CacheConfig(self.groups, blocks or enough, block_tokens=16, layout=self.layout, exports_inside=True)
        )


CONFIGURATIONS = (
    Configuration(
        "full", "full attention alone, 16 tokens a block", [FullAttention("attention", 8192)], ParallelLayout()
    ),
    Configuration(
        "kimi-k3",
        "Kimi-K3 with a DSpark draft, TP 8 DCP 8: target MLA, draft MLA, KDA states",
        [FullAttention("target", 27648), FullAttention("draft", 5760), Recurrent("kda", 56_171_520)],
        ParallelLayout(tp=8, dcp=8),
    ),
)

FOUR_GROUPS = Configuration(
    "four groups",
    "sharded attention, a replicated draft, a sliding window and states: four block tables, DCP 2",
    [
        FullAttention("attention", 8192),
        FullAttention("draft", 2048, sharded=False),
        SlidingWindow("window", 4096, 128),
        Recurrent("state", 524_288),
    ],
    ParallelLayout(tp=2, dcp=2),
)


def _prompt(tokens: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, _VOCABULARY, tokens, dtype=np.int32)


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _median(
    operation: Callable[[], object], prepare: Callable[[], object] | None = None, repeats: int = 30, inner: int = 1
) -> float:
    """Median microseconds of `operation` after one warm-up; `inner` calls are timed together."""
    times = []
    with _quiet():
        for i in range(repeats + 1):
            if prepare is not None:
                prepare()
            start = time.perf_counter_ns()
            for _ in range(inner):
                operation()
            if i:
                times.append((time.perf_counter_ns() - start) / inner / 1e3)
    return statistics.median(times)


def _serve(cache: PrefixCache, tokens: Ids, chunk: int | None = None) -> None:
    """All bookkeeping of one request with an answer of one token."""
    prompt = Prompt(tokens)
    lease = cache.lease(prompt, cache.lookup(prompt))
    rows = np.array([lease.row])
    length, computed = len(tokens), lease.hit.tokens
    while computed < length:
        step = cache.extend(rows, min(length - computed, chunk or length))
        computed += int(step.counts[0])
        cache.commit(step, sampled=np.array([7], dtype=np.int32))
    cache.finish(rows)


def lookup(configuration: Configuration, tokens: int, part: float) -> float:
    """Look up a prompt of `tokens` tokens that follows a cached one for the share `part` of its length."""
    cache, cached = configuration.cache(tokens), _prompt(tokens, 1)
    _serve(cache, cached)
    asked = cached.copy()
    same = int(tokens * part)
    asked[same:] = (asked[same:] + 1) % _VOCABULARY
    prompt = Prompt(asked)
    return _median(lambda: cache.lookup(prompt), inner=20 if tokens <= 8192 else 3)


def lookup_turns(configuration: Configuration, tokens: int, turns: int) -> float:
    """Look up a cached prompt that came as a conversation of `turns` turns."""
    cache, cached = configuration.cache(tokens), _prompt(tokens, 2)
    for turn in range(1, turns + 1):
        _serve(cache, cached[: tokens * turn // turns])
    prompt = Prompt(cached)
    return _median(lambda: cache.lookup(prompt), inner=20 if tokens <= 8192 else 3)


def request(configuration: Configuration, tokens: int, *, resent: bool, chunk: int | None = None) -> float:
    """All bookkeeping of one request: lookup, lease, extend, commit, finish; in steps of `chunk` tokens or in one."""
    cache, prompt = configuration.cache(tokens), _prompt(tokens, 3)
    if resent:
        _serve(cache, prompt)
        return _median(lambda: _serve(cache, prompt, chunk))
    return _median(lambda: _serve(cache, prompt, chunk), prepare=cache.reset)


def step(configuration: Configuration, leases: int, prompt_tokens: int = 256) -> tuple[float, float]:
    """One decoding step (extend and commit) of `leases` running requests: median and mean of 256 steps."""
    states = 110 if any(isinstance(group, Recurrent) for group in configuration.groups) else 0
    blocks = leases * (prompt_tokens // 16 + 64 + 3 * states) + 1024
    cache = configuration.cache(0, blocks=blocks)
    rows = np.array([cache.lease(Prompt(_prompt(prompt_tokens, 10 + i))).row for i in range(leases)])
    sampled = np.arange(leases, dtype=np.int32)
    cache.commit(cache.extend(rows, prompt_tokens), sampled=sampled)
    times = []
    with _quiet():
        for i in range(272):
            start = time.perf_counter_ns()
            cache.commit(cache.extend(rows, 1), sampled=sampled)
            if i >= 16:
                times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times), statistics.fmean(times)


def evict(checkpoints: int) -> float:
    """One eviction among `checkpoints` resident checkpoints, each of one state block and one block of entries."""
    groups: list[LayerSpec] = [FullAttention("attention", 64), Recurrent("state", 1024)]
    config = CacheConfig(groups, 3 * checkpoints + 64, block_tokens=16, placement=("answer_end",))
    cache, random = PrefixCache(config), np.random.default_rng(4)
    for _ in range(checkpoints):
        _serve(cache, random.integers(0, _VOCABULARY, 16, dtype=np.int32))
    index = cache._index  # its step alone is measured: through the public face an eviction comes with a whole request
    return _median(lambda: index.make_room(cache.free_blocks + 1), repeats=200)
