"""Running requests, a cache and what is known about both: the state of one world under test, and its invariants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.model.oracle import Names, Oracle
from tests.model.shadow import Lane, Shadow
from tests.model.worlds import World

from headway.cache import PrefixCache, ResidentShrunk, TableKind

__all__ = ["Flight", "Live", "Lives"]


@dataclass
class Live:
    """A running request.

    Attributes:
        lease: The cache's lease.
        namespace: Its namespace.
        tokens: All tokens known so far.
        prompt_length: How many of them are the prompt.
        publish: Whether what it computes may be published.
        flavour: Which answer it gives.
        due: Positions at which checkpoints are due while the prompt is computed.
        lane: What the device knows of it.
        doomed: Its step failed: it can only be aborted.
        flying: It is in a step that has not been committed.
        attached: No reset has come over it.
    """

    lease: Any
    namespace: int
    tokens: list[int]
    prompt_length: int
    publish: bool
    flavour: int
    due: set[int]
    lane: Lane
    doomed: bool = False
    flying: bool = False
    attached: bool = True

    @property
    def row(self) -> int:
        """Row in the block tables."""
        return int(self.lease.row)


@dataclass
class Flight:
    """A step on its way through the ranks."""

    step: Any
    lives: list[Live]
    drafts: list[list[int]]


@dataclass
class Lives:
    """One world under test.

    Attributes:
        world: Its configuration.
        cache: The real cache.
        oracle: What is right.
        shadow: What the ranks hold.
        lives: Running requests.
        past: Sequences so far: (namespace, tokens).
        namespaces: Namespaces in use since the last reset.
        flights: Steps on their way, oldest first; the ranks do them in this order.
    """

    world: World
    now: float = 0.0
    lives: list[Live] = field(default_factory=list)
    past: list[tuple[int, list[int]]] = field(default_factory=list)
    namespaces: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    admitted: int = 0
    objections: list[Exception] = field(default_factory=list)
    image_symbols: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.world.config
        self.cache = PrefixCache(config, clock=lambda: self.now)
        if self.world.arrays:  # take the way of large batches for small ones too
            self.cache._leases.few = 0
        self.geometry = self.cache.geometry
        self.names = Names()
        self.tails = any(t.kind is not TableKind.PREFIX for t in self.geometry.tables)
        self.stateful = self.geometry.state_table is not None
        self.oracle = Oracle(
            self.names, self.geometry.lookahead, self.tails, self.world.ghosts_kept, clock=lambda: self.now
        )
        self.shadow = Shadow(self.geometry, config.blocks, self.names)
        self.cache.subscribe(self._listen)
        self.check()

    def _listen(self, event: Any) -> None:
        """Judge an event. The cache keeps to itself what listeners raise, so that waits for the next check."""
        try:
            self.oracle.on_event(event)
            self._judge_eviction(event)
        except Exception as error:
            self.objections.append(error)

    def _judge_eviction(self, event: Any) -> None:
        """Nothing that a running request resumed from may go, but a last block of which it has a copy of its own."""
        if isinstance(event, ResidentShrunk) and event.cause == "evicted":
            ahead = self.geometry.lookahead
            span = min((table.span for table in self.geometry.prefix_tables), default=1 << 30)
            path = self.names.path(event.namespace, event.prefix.tolist())
            for live in self.lives:
                whole = live.lane.first // span * span
                kept = live.lane.path[: whole + ahead + 1] if live.attached and whole else []
                assert path[event.keep + 1 + ahead] not in kept, "what a running request resumed from was evicted"

    def check(self) -> None:
        """Invariants that can be seen from outside."""
        if self.objections:
            raise self.objections[0]
        cache, blocks = self.cache, self.world.config.blocks
        stats = cache.stats()
        assert cache.leases == len(self.lives)
        assert cache.free_blocks == stats.free
        assert min(stats.free, stats.leased, stats.pinned, stats.evictable) >= 0
        assert stats.free + stats.leased + stats.pinned + stats.evictable == blocks, f"blocks are missing: {stats}"
        assert not self.world.roomy or not self.oracle.evictions, "something was evicted from a pool that has room"

    def _pool(self) -> tuple[int, int, int]:
        stats = self.cache.stats()
        return stats.free, stats.leased, stats.evictable

    def _pinned(self) -> bool:
        return self.cache.stats().pinned > 0

    def _answer(self, live: Live, position: int) -> int:
        return 900 + 10 * live.flavour + position % 7
