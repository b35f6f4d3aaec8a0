"""What `headway bench` measures: one function per line, each of which makes a cache and says what to time on it.

Prompts are int32 arrays of random tokens. Nothing is computed: the figures are what the bookkeeping costs an engine. An
operation that changes the cache is measured on a cache brought back to its first state outside the timed part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.bench.measure import Case, Work
from headway.cache import (
    CacheConfig,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    PrefixCache,
    Prompt,
    Recurrent,
    SlidingWindow,
    Step,
)

__all__ = [
    "CONFIGURATIONS",
    "FOUR_GROUPS",
    "Configuration",
    "all_cases",
    "branching_request",
    "decode_row",
    "evict",
    "lookup",
    "lookup_turns",
    "request",
    "step",
]

Ids = NDArray[np.int32]
_VOCABULARY = 150_000
_SHORT = 8192
"""Tokens up to which several lookups are timed together."""


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


def lookup(configuration: Configuration, tokens: int, part: float) -> Work:
    """Look up a prompt of `tokens` tokens that follows a cached one for the share `part` of its length."""
    cache, cached = configuration.cache(tokens), _prompt(tokens, 1)
    _serve(cache, cached)
    asked = cached.copy()
    same = int(tokens * part)
    asked[same:] = (asked[same:] + 1) % _VOCABULARY
    prompt = Prompt(asked)
    return Work(lambda: cache.lookup(prompt), calls=20 if tokens <= _SHORT else 3)


def lookup_turns(configuration: Configuration, tokens: int, turns: int) -> Work:
    """Look up a cached prompt that came as a conversation of `turns` turns."""
    cache, cached = configuration.cache(tokens), _prompt(tokens, 2)
    for turn in range(1, turns + 1):
        _serve(cache, cached[: tokens * turn // turns])
    prompt = Prompt(cached)
    return Work(lambda: cache.lookup(prompt), calls=20 if tokens <= _SHORT else 3)


def request(configuration: Configuration, tokens: int, *, resent: bool, chunk: int | None = None) -> Work:
    """All bookkeeping of one request: lookup, lease, extend, commit, finish; in steps of `chunk` tokens or in one."""
    cache, prompt = configuration.cache(tokens), _prompt(tokens, 3)
    if resent:
        _serve(cache, prompt)
    return Work(lambda: _serve(cache, prompt, chunk), prepare=None if resent else cache.reset)


def branching_request(configuration: Configuration, branches: int) -> Work:
    """All bookkeeping of a request from whose path other prompts parted at `branches` positions, 16 tokens apart."""
    tokens = 16 * (branches + 1)
    states = 106 if any(isinstance(group, Recurrent) for group in configuration.groups) else 0
    cache = configuration.cache(tokens, blocks=(branches + 4) * (3 * states + 4) + tokens)
    prompt = _prompt(tokens, 5)
    _serve(cache, prompt)
    for i in range(branches):
        _serve(cache, np.append(prompt[: 16 * (i + 1)], _prompt(4, 1000 + i)))
    return Work(lambda: _serve(cache, prompt))


def step(configuration: Configuration, leases: int, prompt_tokens: int = 256) -> Work:
    """One decoding step (extend and commit) of `leases` running requests."""
    states = 110 if any(isinstance(group, Recurrent) for group in configuration.groups) else 0
    blocks = leases * (prompt_tokens // 16 + 64 + 3 * states) + 1024
    cache = configuration.cache(0, blocks=blocks)
    rows = np.array([cache.lease(Prompt(_prompt(prompt_tokens, 10 + i))).row for i in range(leases)])
    sampled = np.arange(leases, dtype=np.int32)
    cache.commit(cache.extend(rows, prompt_tokens), sampled=sampled)
    for _ in range(16):
        cache.commit(cache.extend(rows, 1), sampled=sampled)
    return Work(lambda: cache.commit(cache.extend(rows, 1), sampled=sampled))


def decode_row(configuration: Configuration) -> Work:
    """Extend and commit one decoding row that has room in its block, with lists as a simple engine has them.

    A row gets its block before the timed part; the 15 steps behind it need none and are timed together.
    """
    cache = configuration.cache(0, blocks=200_000)
    row = cache.lease(Prompt(_prompt(256, 6))).row
    cache.commit(cache.extend([row], [256]), sampled=[7])
    steps = min(table.block_tokens for table in cache.geometry.tables if table.block_tokens) - 1

    def one() -> None:
        cache.commit(cache.extend([row], [1]), sampled=[7])

    return Work(one, prepare=one, calls=steps)


def evict(checkpoints: int) -> Work:
    """Evictions among `checkpoints` resident checkpoints, each of one state block and one block of entries.

    A running lease asks for 16 blocks at a time, which is eight evictions; its share of the time is small. There are
    fewer and fewer checkpoints: 288 go in all.
    """
    groups: list[LayerSpec] = [FullAttention("attention", 64), Recurrent("state", 1024)]
    config = CacheConfig(groups, 2 * checkpoints + 64, block_tokens=16, placement=("answer_end",))
    cache, random = PrefixCache(config), np.random.default_rng(4)
    for _ in range(checkpoints):
        _serve(cache, random.integers(0, _VOCABULARY, 16, dtype=np.int32))
    row = [cache.lease(Prompt(_prompt(16 * min(1000, config.blocks - 1), 7), no_store=True)).row]
    cache.commit(cache.extend(row, 16 * (cache.free_blocks - 1)))  # what is left is free for a state
    steps: list[Step] = []

    def commit() -> None:
        while steps:
            cache.commit(steps.pop())

    return Work(lambda: steps.append(cache.extend(row, 16 * 16)), prepare=commit, each=8)


def all_cases(sizes: tuple[int, ...], branches: tuple[int, ...], crowds: tuple[int, ...]) -> Iterator[Case]:
    """Every case: prompts of `sizes` tokens, paths with `branches` branch points, evictions among `crowds`."""
    for configuration in CONFIGURATIONS:
        for size in sizes:
            label = f"{configuration.name}/{size // 1024}K"
            of = (configuration, size)
            yield Case(f"{label}/lookup, cached", partial(lookup, *of, 1.0))
            yield Case(f"{label}/lookup parting at 3/4", partial(lookup, *of, 0.75))
            yield Case(f"{label}/lookup, came as 256 turns", partial(lookup_turns, *of, 256))
            yield Case(f"{label}/request, cold, one step", partial(request, *of, resent=False))
            yield Case(f"{label}/request, sent again", partial(request, *of, resent=True))
            name = f"{label}/request, cold, steps of 8,192 tokens"
            yield Case(name, partial(request, *of, resent=False, chunk=8192))
        for count in branches:
            yield Case(
                f"{configuration.name}/request, {count} branch points", partial(branching_request, configuration, count)
            )
    for configuration in (*CONFIGURATIONS, FOUR_GROUPS):
        for leases in (1, 64, 1024):
            yield Case(f"{configuration.name}/step of {leases}", partial(step, configuration, leases), samples=256)
        yield Case(f"{configuration.name}/one row, extend and commit", partial(decode_row, configuration))
    for crowd in crowds:
        yield Case(f"evict one of {crowd}", partial(evict, crowd))
