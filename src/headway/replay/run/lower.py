"""Lower tiers of memory in a replay: caches of the same kind, one below the other, whose moves take simulated time.

Each tier takes what the one above is about to evict, so all of them together hold nearly as much as one memory of the
same sum; and a request reads back from the tier that saves it most time, straight into its own memory. What a tier
keeps and gives up is decided by the same code as on the device, also where a server would keep objects and not blocks
(disk and store): canonical objects have the same bytes.

A move takes its bytes over the tier's rate, and the latency. Moves from and to the host stop the step that they are
made for, as they do in the engine. From a disk or a store a request waits, one load after another, while others go on;
writing there goes on beside the steps, and what comes when too much waits to be written is not kept. A load is taken
where it is faster than computing, if it is known how fast that is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.cache import Below, Hit, PrefixCache, Prompt, Spill
from headway.engine.fetched import Fetched
from headway.engine.scheduling.lower import Begun, LowerTiers
from headway.engine.scheduling.object_reader import Fetch
from headway.replay.config import Roofline, Tier
from headway.tell.run import TierUse
from headway.tiers import HostTier

__all__ = ["LowerRun"]

_MOST_BEHIND = 10.0
"""Seconds of writing that may wait for a tier; what comes then is not kept there."""


@dataclass(frozen=True, eq=False)
class _Arrived(Fetched):
    """What a request has waited for.

    Attributes:
        level: The tier that it is read from; None for none.
        tokens: Symbols that it gives.
    """

    level: _Level | None = None
    tokens: int = 0

    @property
    def position(self) -> int:
        """Symbols that it gives."""
        return self.tokens


@dataclass(frozen=True)
class _Choice:
    """A way to read back: from which tier, what is there, and the seconds and bytes of the move."""

    level: _Level
    found: Hit
    size: int
    seconds: float


class _Level:
    """One tier of a run.

    Attributes:
        tier: How large and how fast it is.
        takes: Moves what the memory above it evicts.
        gives: Moves what a request reads back.
        written: When all that waits to be written there is.
        read: When all that was asked for from there is read.
        seconds_in: Seconds of moves from there.
        seconds_out: Seconds of moves to there.
        bytes_in: Bytes read, of one rank.
        compute: FLOPs that reading back saved.
        declined: Requests for which computing was faster.
        skipped: Checkpoints that came when too much waited to be written.
    """

    def __init__(self, tier: Tier, device: PrefixCache, above: PrefixCache, block_bytes: int) -> None:
        self.tier, self.block_bytes = tier, block_bytes
        self.takes = HostTier.beside(above, max(1, tier.memory // block_bytes), _move_nothing)
        self.gives = HostTier(device, self.takes.host, _move_nothing)
        self.written = self.read = 0.0
        self.seconds_in = self.seconds_out = self.compute = 0.0
        self.declined = self.skipped = self.bytes_in = 0

    @property
    def cache(self) -> PrefixCache:
        """What it keeps."""
        return self.takes.host

    @property
    def stops_steps(self) -> bool:
        """Whether moves stop the step that they are made for."""
        return self.tier.name == "host"

    def take(self, spill: Spill) -> float:
        """Keep what is about to be evicted above. Returns the seconds of the move."""
        before = self.takes.counters.stored_blocks
        self.takes.store(spill)
        size = (self.takes.counters.stored_blocks - before) * self.block_bytes
        seconds = self.tier.latency + size / self.tier.write if size else 0.0
        self.seconds_out += seconds
        return seconds


class LowerRun(LowerTiers):
    """The tiers below a cache.

    Attributes:
        stopped: Seconds that moves have stopped steps since somebody set it to 0.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tiers: Sequence[Tier],
        block_bytes: int,
        roofline: Roofline | None,
        clock: Callable[[], float],
        *,
        timed: bool,
    ) -> None:
        """Put `tiers` below `cache`, the first one nearest.

        Args:
            cache: The device's cache.
            tiers: The tiers.
            block_bytes: Bytes of a block on one rank.
            roofline: How fast prompts are computed; None if it is not known: then all that can be read back is.
            clock: Seconds.
            timed: The clock moves: writing can fall behind.
        """
        super().__init__(cache)
        self._clock, self._paced = clock, timed
        self._prefill = 0.0 if roofline is None else roofline.flops
        self._levels: list[_Level] = []
        self._waits: list[tuple[float, int, Fetch, _Arrived]] = []
        self.stopped = 0.0
        self._started = 0
        above = cache
        for tier in tiers:
            level = _Level(tier, cache, above, block_bytes)
            above.spill(partial(self._take, level))
            self._levels.append(level)
            above = level.cache

    def _take(self, level: _Level, spill: Spill) -> None:
        now = self._clock()
        if self._paced and not level.stops_steps and level.written - now > _MOST_BEHIND:
            level.skipped += not level.takes.remind(spill)
            return
        seconds = level.take(spill)
        level.written = max(level.written, now) + seconds
        self.stopped += seconds if level.stops_steps else 0.0

    # ---- what is there

    def known(self, prompt: Prompt, hit: Hit) -> int:
        """Symbols of `prompt` that can be had at once, from the device or from host memory. Changes nothing."""
        found = [level.gives.find(prompt, hit) for level in self._levels if level.stops_steps]
        return max([hit.tokens, *(one.tokens for one in found if one is not None)])

    def _best(self, prompt: Prompt, hit: Hit) -> tuple[_Choice | None, list[_Choice]]:
        """The way to read `prompt` back that saves most time, None if none does; and all ways."""
        found = []
        for level in self._levels:
            if (one := level.gives.find(prompt, hit)) is not None:
                size = level.gives.load_bytes(one, hit)
                found.append(_Choice(level, one, size, level.tier.latency + size / level.tier.read))
        best = max(found, key=partial(self._gain, hit), default=None)
        return (best if best is not None and self._gain(hit, best) > 0 else None), found

    def _gain(self, hit: Hit, way: _Choice) -> float:
        """Seconds that reading back saves; where they are not known, the symbols that are not computed."""
        if not self._prefill:
            return float(way.found.tokens - hit.tokens)
        return self.cache.config.cost.between(hit.tokens, way.found.tokens) / self._prefill - way.seconds

    # ---- requests

    def fetch(self, prompt: Prompt, hit: Hit, done: Callable[[Fetched], None]) -> Fetch | None:
        """Let a request wait for a disk or store, where that is best; None where it need not wait."""
        best, _ = self._best(prompt, hit)
        if best is None or best.level.stops_steps:
            return None
        fetch, level = Fetch(done), best.level
        level.read = max(level.read, self._clock()) + best.seconds
        self._started += 1
        heapq.heappush(self._waits, (level.read, self._started, fetch, _Arrived(level=level, tokens=best.found.tokens)))
        return fetch

    @property
    def next_arrival(self) -> float:
        """When what a request waits for arrives next; infinite if none waits."""
        return self._waits[0][0] if self._waits else float("inf")

    def deliver(self) -> None:
        """Tell requests whose wait is over."""
        while self.next_arrival <= self._clock():
            _, _, fetch, arrived = heapq.heappop(self._waits)
            fetch.end(arrived)

    def begin(self, prompt: Prompt, hit: Hit, least: int, fetched: Fetched | None = None) -> Begun:
        """Lease memory for a request, with what the tiers have of its prompt.

        Args:
            prompt: The prompt.
            hit: What the device has.
            least: Fewest symbols that are worth going on from.
            fetched: What it has waited for; None with requests that do not wait.

        Raises:
            UnservableError: The memory could never hold the prompt.
        """
        best, ways = self._best(prompt, hit)
        if fetched is not None and best is not None and not best.level.stops_steps:
            waited = fetched.level if isinstance(fetched, _Arrived) else None
            best = next((way for way in ways if way.level is waited), None)
        if best is None or best.found.tokens < least:
            declined = max((way.found.tokens for way in ways), default=0) if best is None else 0
            for way in ways if declined else ():
                way.level.declined += 1
            below = Below(declined=declined)
            return Begun(self.cache.lease_below(prompt, below, hit, least_hit=least)[0])
        level, compute = best.level, self.cache.config.cost.between(hit.tokens, best.found.tokens)
        lease, loaded = level.gives.load(prompt, best.found, hit)
        if not loaded:
            return Begun(lease)
        level.seconds_in += best.seconds
        level.compute += compute
        level.bytes_in += best.size
        self.stopped += best.seconds if level.stops_steps else 0.0
        return Begun(lease, level.tier.name, lease.computed - lease.hit.tokens, best.found.kind)

    # ---- the end

    def uses(self, symbol: int) -> list[TierUse]:
        """What each tier did; a symbol has that many tokens."""
        return [self._use(level, symbol) for level in self._levels]

    def _use(self, level: _Level, symbol: int) -> TierUse:
        out, back, cache = level.takes.counters, level.gives.counters, level.cache
        return TierUse(
            name=level.tier.name,
            memory=level.tier.memory,
            used=(cache.config.blocks - cache.free_blocks) * level.block_bytes,
            source=level.tier.source,
            requests=back.loaded,
            tokens=back.loaded_tokens * symbol,
            bytes_in=level.bytes_in,
            seconds_in=level.seconds_in,
            declined=level.declined,
            checkpoints=out.stored,
            bytes_out=out.stored_blocks * level.block_bytes,
            seconds_out=level.seconds_out,
            skipped=level.skipped + out.refused,
            prefill_seconds=level.compute / self._prefill if self._prefill else None,
        )


def _move_nothing(out: NDArray[np.int32], back: NDArray[np.int32]) -> None:
    """There are no bytes."""
