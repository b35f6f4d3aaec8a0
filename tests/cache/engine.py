"""What the tests of the cache share: a cache of a few small groups, and an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.cache import CacheConfig, FullAttention, Lease, PrefixCache, Prompt, Recurrent

__all__ = ["ATTENTION", "DRAFT", "STATE", "Engine", "tokens"]

ATTENTION = FullAttention("attn", 64)
DRAFT = FullAttention("draft", 16, lookahead=3)
STATE = Recurrent("state", 512)
"""Two blocks of four tokens of `ATTENTION`."""


def tokens(*parts: tuple[int, int]) -> np.ndarray:
    """int32 tokens: `(stream, n)` stands for the first n tokens of a stream; streams have no token in common."""
    return np.concatenate([np.arange(n, dtype=np.int32) + 1000 * stream for stream, n in parts])


@dataclass
class Engine:
    """A cache with a fake clock, and what a scheduler does with it.

    Attributes:
        cache: The cache.
        now: The time.
    """

    cache: PrefixCache
    now: list[float] = field(default_factory=lambda: [0.0])

    @classmethod
    def of(cls, *groups: Any, blocks: int = 100, block_tokens: int = 4, **options: Any) -> Engine:
        """An engine with an empty cache that checks itself after every operation."""
        now = [0.0]
        config = CacheConfig(groups=groups, blocks=blocks, block_tokens=block_tokens, check=True, **options)
        return cls(PrefixCache(config, clock=lambda: now[0]), now)

    @staticmethod
    def prompt(text: np.ndarray, **options: Any) -> Prompt:
        """A prompt."""
        return Prompt(text, **options)

    def start(self, text: np.ndarray, **options: Any) -> Lease:
        """Lease a prompt."""
        return self.cache.lease(Prompt(text, **options))

    def step(self, *leases: Lease, count: int | None = None, sampled: int = 7) -> list[int]:
        """One step of several leases, each up to its next stop or of `count` tokens. Returns what was granted."""
        counts = [lease.next_stop - lease.computed if count is None else count for lease in leases]
        step = self.cache.extend([lease.row for lease in leases], counts)
        self.cache.commit(step, sampled=np.full(len(leases), sampled, dtype=np.int32))
        return step.counts.tolist()

    def compute(self, lease: Lease) -> None:
        """Compute the whole prompt."""
        while lease.computed < len(lease.prompt.tokens):
            assert self.step(lease)[0] > 0

    def run(self, text: np.ndarray, answer: Sequence[int] = (7,), **options: Any) -> int:
        """Serve a request and return how many tokens it reused. Of the answer all but the last token are computed."""
        lease = self.start(text, **options)
        for token in answer:
            known = lease.tokens
            while lease.tokens == known:
                assert self.step(lease, sampled=token)[0] > 0
        self.cache.finish([lease.row])
        return lease.hit.tokens

    def hit(self, text: np.ndarray, **options: Any) -> int:
        """Tokens that a prompt would reuse now."""
        return self.cache.lookup(Prompt(text, **options)).tokens
