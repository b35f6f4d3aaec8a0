"""A scheduler, a real cache and the fake device, driven step by step by a test."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.engine.fakes import EOS, FakeDevice, expected_answer

from headway.cache import (
    CacheConfig,
    ChunkedLocal,
    FullAttention,
    LayerSpec,
    PrefixCache,
    Recurrent,
    SlidingWindow,
)
from headway.engine import EngineConfig, GenerationRequest, RunningRequest, Scheduler, Update
from headway.engine.scheduling.lower import LowerTiers
from headway.engine.scheduling.object_moves import ObjectMoves, object_groups
from headway.tiers import HostTier, ObjectLayout, ObjectTiers, TierConfig
from headway.tiers.store import Store

KEY = b"key"
WORLDS: dict[str, list[LayerSpec]] = {
    "full": [FullAttention("full", 8)],
    "hybrid": [FullAttention("full", 8), Recurrent("state", 60)],
    "window": [FullAttention("full", 8), SlidingWindow("window", 16, window=5)],
    "chunk": [FullAttention("full", 8), ChunkedLocal("chunk", 8, chunk=6)],
    "state": [Recurrent("state", 64)],
    "all": [
        FullAttention("full", 8),
        SlidingWindow("window", 4, window=7),
        ChunkedLocal("chunk", 16, chunk=8),
        Recurrent("state", 100),
    ],
}


_OPEN: weakref.WeakSet[ObjectTiers] = weakref.WeakSet()


def close_tiers() -> None:
    """End the threads of all tiers that benches have opened."""
    while _OPEN:
        _OPEN.pop().close(0.0)


@dataclass
class Bench:
    """A scheduler and what has come out of it."""

    groups: Sequence[LayerSpec]
    blocks: int = 64
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_batched_tokens=16, max_running=4))
    block_tokens: int | None = 4
    placement: Sequence[str] = ("prompt_end", "answer_end", "junction", "breakpoint", "boundary")
    host_blocks: int = 0
    stores: Sequence[tuple[TierConfig, Store]] = ()
    write: str = "through"
    staging: int = 1 << 30
    scan_seconds: float = 10
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.cache_config(), clock=self.clock)
        self.device = self.make_device()
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.lower = self._lower() if self.host_blocks or self.stores else None
        self.scheduler = Scheduler(self.cache, self.config, clock=self.clock, lower=self.lower)
        self.news: list[Update] = []
        self._arrived = 0

    def cache_config(self) -> CacheConfig:
        block_tokens = None if all(isinstance(g, Recurrent) for g in self.groups) else self.block_tokens
        return CacheConfig(self.groups, self.blocks, block_tokens=block_tokens, placement=self.placement, check=True)

    def make_device(self) -> FakeDevice:
        return FakeDevice(self.cache.geometry, self.blocks, host_blocks=self.host_blocks)

    def _lower(self) -> LowerTiers:
        host = HostTier.beside(self.cache, self.host_blocks, self.device.move_blocks) if self.host_blocks else None
        if not self.stores:
            return LowerTiers(self.cache, host)
        groups = object_groups(self.cache.geometry, self.device)
        layout = ObjectLayout(b"weights", groups, self.cache.geometry.lookahead, stretch=8)
        objects = ObjectTiers(layout, KEY, self.stores, self.staging)
        _OPEN.add(objects)
        moves = ObjectMoves(self.cache.geometry, self.device)
        objects.scanned(self.scan_seconds)
        lower = LowerTiers(self.cache, host, objects, moves, self.write)
        lower.post_to(self._post)
        return lower

    def _post(self, call: Callable[[], None]) -> bool:
        self.inbox.put(call)
        return True

    def request(self, tokens: Sequence[int], max_tokens: int = 4, **options: object) -> RunningRequest:
        """A request that has not been queued."""
        self._arrived += 1
        asked = GenerationRequest(np.array(tokens, dtype=np.int32), max_tokens, **options)  # type: ignore[arg-type]
        return RunningRequest.start(asked, f"r{self._arrived}", self._arrived, 0.0, eos=(EOS,))

    def add(self, tokens: Sequence[int], max_tokens: int = 4, **options: object) -> RunningRequest:
        """Queue a request."""
        request = self.request(tokens, max_tokens, **options)
        self.scheduler.add(request)
        return request

    def step(self, wait: bool = True) -> bool:
        """Do one step, or wait for a load, if one should. Returns whether there was one."""
        while not self.inbox.empty():
            self.inbox.get()()
        if self.lower is not None:
            self.lower.work()
        scheduled = self.scheduler.schedule()
        self.news += self.scheduler.take_news()
        if scheduled is None:
            if self.scheduler.loading and wait:
                self.inbox.get(timeout=30)()
                return True
            return False
        assert 0 < scheduled.tokens <= self.config.max_batched_tokens
        try:
            output = self.device.run(scheduled.work)
        except RuntimeError as error:
            self.news += self.scheduler.fail(scheduled, error)
        else:
            self.news += self.scheduler.complete(scheduled, output)
        return True

    def run(self, most: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.step():
                assert self.scheduler.idle
                return
        raise AssertionError(f"not done after {most} steps")

    def expected(self, request: RunningRequest) -> list[int]:
        """What the request must answer."""
        asked = request.request
        return expected_answer(
            self.cache.geometry, asked.tokens.tolist(), asked.max_tokens, ignore_eos=asked.ignore_eos
        )

    def check_right(self, *requests: RunningRequest) -> None:
        """The answers are those of an uncached run."""
        for request in requests:
            assert request.answer.tolist() == self.expected(request), request.request_id

    def check_nothing_leaks(self) -> None:
        """Nobody holds memory, and all of it can be had."""
        stats = self.cache.stats()
        assert self.scheduler.idle
        assert (stats.leases, stats.leased) == (0, 0)
        assert stats.free + stats.evictable + stats.pinned == stats.blocks
        self.cache.reset()
        assert self.cache.free_blocks == self.blocks
