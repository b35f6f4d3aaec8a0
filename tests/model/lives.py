"""Running requests, a cache and what is known about both: the state of one world under test, and its invariants."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tests.model.oracle import Names, Oracle
from tests.model.shadow import Lane, Shadow, first_served
from tests.model.worlds import World

from headway.cache import Media, PrefixCache, ResidentShrunk, Symbols, TableKind

__all__ = ["IMAGES", "PLACEHOLDER", "Clock", "Flight", "Live", "Lives"]

IMAGES = {"x": 3, "y": 5}
"""Placeholders that each picture takes."""
PLACEHOLDER = 7

logging.getLogger("headway.cache").addHandler(logging.NullHandler())
logging.getLogger("headway.cache").propagate = False  # failing listeners are told there, and there are many


def _fail(event: Any) -> None:
    raise RuntimeError("this listener always fails")


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
        flying: Tokens that each of its steps under way computes, oldest first.
        attached: No reset has come over it.
        bookmark: Where it may have to end, if it was told to remember that.
        own_blocks: It keeps its own blocks: what stood in its row when it was seen last, by table.
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
    flying: list[int] = field(default_factory=list)
    attached: bool = True
    bookmark: int | None = None
    own_blocks: list[dict[int, int]] | None = None

    @property
    def planned(self) -> int:
        """Tokens computed when all its steps under way are done."""
        return self.lane.computed + sum(self.flying)

    @property
    def row(self) -> int:
        """Row in the block tables."""
        return int(self.lease.row)


@dataclass
class Flight:
    """A step on its way through the ranks.

    Attributes:
        step: The step.
        lives: Its requests.
        drafts: Draft tokens of each.
        counts: What was granted to each: the step before may undo it.
        exports: What was to be exported.
        rows: The block tables that the ranks were given, by row.
    """

    step: Any
    lives: list[Live]
    drafts: list[list[int]]
    counts: list[int]
    exports: tuple[Any, ...]
    rows: list[dict[int, Any]]


@dataclass
class Clock:
    """A time that the tests set, which is copied with the cache that reads it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


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
    clock: Clock = field(default_factory=lambda: Clock())
    lives: list[Live] = field(default_factory=list)
    past: list[tuple[int, list[int]]] = field(default_factory=list)
    namespaces: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    admitted: int = 0
    objections: list[Exception] = field(default_factory=list)
    image_symbols: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.world.config
        self.cache = PrefixCache(config, clock=self.clock)
        if self.world.arrays:  # take the way of large batches for small ones too
            self.cache._leases.plain = False
        self.geometry = self.cache.geometry
        self.names = Names()
        self.tails = any(t.kind is not TableKind.PREFIX for t in self.geometry.tables)
        self.stateful = self.geometry.state_table is not None
        self.oracle = Oracle(
            self.names,
            self.geometry.lookahead,
            self.tails,
            self.world.ghosts_kept,
            clock=lambda: self.now,
            first_served=lambda position: first_served(self.geometry, position),
        )
        self.shadow = Shadow(self.geometry, config.blocks, self.names)
        self.listen()
        self.check()

    @property
    def now(self) -> float:
        """The time."""
        return self.clock.now

    @now.setter
    def now(self, value: float) -> None:
        self.clock.now = value

    def listen(self) -> None:
        """Listen to the cache, among listeners that fail and one that goes away."""
        self.cache.subscribe(_fail)
        end = self.cache.subscribe(lambda event: end())
        self.cache.subscribe(self._listen)
        self.cache.subscribe(_fail)

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
        """The cache's own invariants, once per operation, and those that can be seen from outside."""
        self.cache.check()
        if self.objections:
            raise self.objections[0]
        cache, blocks = self.cache, self.world.config.blocks
        stats = self.stats = cache.stats()
        assert cache.leases == len(self.lives)
        assert cache.free_blocks == stats.free
        assert min(stats.free, stats.leased, stats.pinned, stats.evictable) >= 0
        assert stats.free + stats.leased + stats.pinned + stats.evictable == blocks, f"blocks are missing: {stats}"
        kept_twice = stats.free + stats.evictable - cache.available
        several = len(self.geometry.prefix_tables) > 1  # a block of one may be kept for the sake of another
        assert kept_twice == 0 or (kept_twice > 0 and several), f"{cache.available} are available: {stats}"
        self._check_own_blocks()
        assert stats.checkpoints == len(self.oracle.checkpoints)
        assert not self.world.roomy or not self.oracle.evictions, "something was evicted from a pool that has room"

    def _check_own_blocks(self) -> None:
        """An entry of the row of a lease with its own blocks never changes, but for windows and chunks that end."""
        for live in self.lives:
            if live.own_blocks is None:
                continue
            for table in self.geometry.tables:
                local = table.kind in (TableKind.WINDOW, TableKind.CHUNK)
                row = self.cache.tables[table.index][live.row]
                for index, block in live.own_blocks[table.index].items():
                    now = int(row[index])
                    assert now == block or (local and now < 0), f"entry {index} of row {live.row} was {block}, is {now}"
                width = live.lane.given // table.span if table.span else 0
                if live.lane.given > live.lane.first:
                    width = -(-live.lane.given // table.span) if table.span else table.state_blocks
                live.own_blocks[table.index] = {i: int(row[i]) for i in range(width) if row[i] >= 0}

    def _pool(self) -> tuple[int, int, int]:
        stats = self.cache.stats()
        return stats.free, stats.leased, stats.evictable

    def _pinned(self) -> bool:
        return self.cache.stats().pinned > 0

    def _answer(self, live: Live, position: int) -> int:
        return 900 + 10 * live.flavour + position % 7

    def spelled(self, tokens: list[int]) -> Symbols:
        """`tokens` as a caller can give them: pictures, which may be cut off, as the cache's symbols."""
        text = self.cache.symbols([])
        for symbol, run in groupby(tokens):
            left = len(list(run))
            if symbol >= 0:
                text = text.followed_by([symbol] * left)
                continue
            image = self.image_symbols[symbol]
            size = IMAGES[image]
            picture = self.cache.symbols([PLACEHOLDER] * size, media=[Media(0, size, image)])
            self.image_symbols[int(picture.tokens[0])] = image  # another symbol, if the cache has been reset
            while left > 0:
                text = text.followed_by(picture[: min(left, size)])
                left -= size
        return text
