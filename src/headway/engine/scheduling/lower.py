"""The tiers below the device's memory, as the scheduler uses them.

A request that would reuse more of a lower tier than of the device begins with that: its lease is filled by a copy
before its first step. The copy is made while the request is admitted, so it is either a request that has computed what
it read back, or one that never had it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache import Below, BelowLoss, Hit, Lease, PrefixCache, Prompt, Step
from headway.engine.errors import RanksLostError
from headway.engine.fetched import Fetched
from headway.engine.scheduling.object_moves import ObjectMoves
from headway.engine.scheduling.object_reader import Fetch, ObjectReader
from headway.engine.scheduling.object_writer import ObjectWriter
from headway.engine.stats import LowerStats
from headway.errors import UnservableError
from headway.tiers import HostCounters, HostTier, ObjectTiers, Rates

__all__ = ["HOST", "Begun", "LowerTiers"]

logger = logging.getLogger(__name__)
Ids = NDArray[np.int32]

HOST = "host"
"""Name of the tier of host memory."""
_LEAST_CHUNK = 16
"""Tokens of a row from which on a step is one of prompts: shorter ones take as long as their weights are read."""
_BYTES_BETWEEN_STEPS = 64 << 20
"""Bytes that are read for object tiers between two steps."""


@dataclass(frozen=True)
class Begun:
    """How a request began.

    Attributes:
        lease: Its lease.
        tier: The tier that it read back from; "" if none.
        tokens: Tokens that it read back.
        kind: Kind of the checkpoint that it read back, or "".
    """

    lease: Lease
    tier: str = ""
    tokens: int = 0
    kind: str = ""

    @property
    def resumed_from(self) -> str:
        """Kind of the checkpoint that it begins at, or ""."""
        return self.kind or self.lease.hit.kind


@dataclass(eq=False)
class LowerTiers:
    """What lies below the memory of a device.

    Attributes:
        cache: The device's cache.
        host: Host memory, or None.
        objects: Disks and shared stores, or None.
        moves: Moves objects between these and blocks; with `objects`.
        write: When something is written to `objects`, see `ObjectWriter`.
        rates: How long moves and computing take.
        failures: Copies that failed, by tier.
    """

    cache: PrefixCache
    host: HostTier | None = None
    objects: ObjectTiers | None = None
    moves: ObjectMoves | None = None
    write: str = "through"
    rates: Rates = field(default_factory=Rates)
    failures: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Listen to what is to be written."""
        self._writer: ObjectWriter | None = None
        self._reader: ObjectReader | None = None
        if self.host is not None:
            self.host.copy = self._timed(self.host.copy, self.host.host.geometry.block_bytes)
        if self.objects is not None and self.moves is not None:
            caches = (self.cache,) if self.host is None else (self.cache, self.host.host)
            self._writer = ObjectWriter(caches, self.objects, self.moves, self.rates, self.write)
            self._reader = ObjectReader(self.objects, self.rates, self.cache.config.cost, self._writer.name)

    def post_to(self, post: Callable[[Callable[[], None]], object]) -> None:
        """Let what arrives be told by `post`, which has a function called in the engine's thread."""
        if self._reader is not None:
            self._reader.post = post

    def _timed(self, copy: Callable[[Ids, Ids], None], block_bytes: int) -> Callable[[Ids, Ids], None]:
        """Measure what is copied out as well: it goes on where no copy back seems worth its time."""

        def timed(out: Ids, back: Ids) -> None:
            started = time.monotonic()
            copy(out, back)
            if len(out):
                self.rates.moved(HOST, len(out) * block_bytes, time.monotonic() - started)

        return timed

    # ---- before a request begins

    def known(self, prompt: Prompt, hit: Hit) -> int:
        """Tokens of `prompt` that can be had at once, from the device or from host memory. Changes nothing."""
        found = self._in_host(prompt, hit)
        return hit.tokens if found is None else found.tokens

    def fetch(self, prompt: Prompt, hit: Hit, done: Callable[[Fetched], None]) -> Fetch | None:
        """Fetch what object tiers have more of `prompt`; None if that is nothing. See `ObjectReader.start`."""
        if self._reader is None or self.moves is None:
            return None
        return self._reader.start(prompt, self.moves.floor(hit.tokens), self.known(prompt, hit), done)

    def usable(self, fetched: Fetched, hit: Hit) -> bool:
        """Whether what was fetched still goes on from what the device has, and nothing was forgotten since."""
        if self._reader is None or self.moves is None or fetched.loaded is None:
            return True
        return fetched.era == self._reader.era and fetched.floor <= self.moves.floor(hit.tokens)

    def has_room(self, prompt: Prompt, hit: Hit, fetched: Fetched | None) -> bool:
        """Whether what would be read back for `prompt` has room now; what has none waits, or is computed."""
        position = max(self.known(prompt, hit), 0 if fetched is None else fetched.position)
        return position <= hit.tokens or self.cache.has_room(hit, position)

    def _in_host(self, prompt: Prompt, hit: Hit) -> Hit | None:
        return None if self.host is None else self.host.find(prompt, hit)

    # ---- the beginning

    def begin(self, prompt: Prompt, hit: Hit, least: int, fetched: Fetched | None = None) -> Begun:
        """Lease memory for a request, with what the tiers have of its prompt.

        Args:
            prompt: The prompt.
            hit: What the device has.
            least: Fewest tokens that are worth going on from.
            fetched: What came from object tiers; it is released.

        Raises:
            UnservableError: The pool could never hold the prompt.
            RanksLostError: The ranks are gone, and the request has no lease.
        """
        try:
            usable = fetched is not None and self.usable(fetched, hit)
            begun = self._begin(prompt, hit, least, fetched if fetched is not None and usable else Fetched())
        finally:
            if fetched is not None:
                fetched.release()
        if self._writer is not None and begun.lease.computed:
            self._writer.wanted(prompt, begun.lease.computed)
        return begun

    def _begin(self, prompt: Prompt, hit: Hit, least: int, fetched: Fetched) -> Begun:
        found = self._in_host(prompt, hit)
        there = max(hit.tokens, 0 if found is None else found.tokens)
        losses = tuple(loss for loss in fetched.losses if loss.position > there)
        if fetched.position > max(there, least - 1):
            return self._from_objects(prompt, hit, least, fetched, losses)
        declined = fetched.declined if fetched.declined > there else 0
        if self.host is not None and found is not None and found.tokens >= least:
            size = self.host.load_bytes(found, hit)
            saved = self.cache.config.cost.between(hit.tokens, found.tokens)
            if self.rates.makes(HOST, self.rates.gain(HOST, size, saved)):
                return self._from_host(self.host, prompt, found, hit, least, Below(declined=declined, losses=losses))
            declined = max(declined, found.tokens)
        if not declined and not losses:
            return Begun(self.cache.lease(prompt, hit, least_hit=least))
        below = Below(declined=declined, losses=losses)
        return Begun(self.cache.lease_below(prompt, below, hit, least_hit=least)[0])

    def _from_host(self, host: HostTier, prompt: Prompt, found: Hit, hit: Hit, least: int, told: Below) -> Begun:
        started, size = time.monotonic(), host.load_bytes(found, hit)
        try:
            lease, loaded = host.load(prompt, found, hit, told)
        except (RanksLostError, UnservableError):
            raise
        except Exception as error:
            loss = self._failed(HOST, found.tokens, error)
            return Begun(self.cache.lease_below(prompt, Below(losses=(loss,)), least_hit=least)[0])
        if not loaded:
            return Begun(lease)
        self.rates.moved(HOST, size, time.monotonic() - started)
        return Begun(lease, HOST, lease.computed - lease.hit.tokens, found.kind)

    def _from_objects(
        self, prompt: Prompt, hit: Hit, least: int, fetched: Fetched, losses: tuple[BelowLoss, ...]
    ) -> Begun:
        assert self.moves is not None
        assert fetched.loaded is not None
        position, kind = fetched.position, fetched.loaded.kind
        lease, step = self.cache.lease_below(prompt, Below(position, kind, floor=position, losses=losses), hit)
        if step is None:
            return Begun(lease)
        try:
            self.moves.write(fetched.loaded.pieces, step, self.cache.tables, lease.row)
        except BaseException as error:
            self.cache.fail(step)
            self.cache.abort([lease.row])
            if isinstance(error, RanksLostError) or not isinstance(error, Exception):
                raise
            loss = self._failed(fetched.tier, position, error)
            return Begun(self.cache.lease_below(prompt, Below(losses=(loss,)), least_hit=least)[0])
        self.cache.commit_one(step, step.counts.item())
        return Begun(lease, fetched.tier, step.counts.item(), kind)

    def _failed(self, tier: str, position: int, error: Exception) -> BelowLoss:
        self.failures[tier] = self.failures.get(tier, 0) + 1
        logger.exception("reading back from tier %s failed: the request computes its prompt", tier)
        return BelowLoss(position, False, tier, "", f"the copy failed ({type(error).__name__})")

    # ---- between steps

    @property
    def busy(self) -> bool:
        """Whether `work` has something to do."""
        return self._writer is not None and self._writer.waiting > 0

    def work(self) -> None:
        """Read some of what is to be written.

        Raises:
            RanksLostError: The ranks are gone.
        """
        if self._writer is not None and self._writer.waiting:
            self._writer.work(_BYTES_BETWEEN_STEPS)

    def measure(self, step: Step, seconds: float) -> None:
        """A step took so long: if it computed prompts, that is what computing takes."""
        counts = step.counts.tolist()
        if max(counts, default=0) >= _LEAST_CHUNK:
            cost = self.cache.config.cost
            each = zip(step.starts.tolist(), counts, strict=True)
            self.rates.computed(sum(cost.between(start, start + count) for start, count in each), seconds)

    # ---- forgetting, and the end

    def ranks_lost(self) -> None:
        """The ranks are gone, and with them what their host memory held."""
        if self.host is not None:
            self.host.reset()
        if self._writer is not None:
            self._writer.forget()

    def reset(self) -> Future[None]:
        """Forget everything in every tier. Done when all have; with an exception that says which have not."""
        self.ranks_lost()
        if self._reader is not None:
            self._reader.era += 1
        if self.objects is not None:
            return self.objects.reset()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def forget(self, prompt: Prompt) -> None:
        """Forget every sequence that begins with `prompt`, in every tier: at once for requests, later on disks."""
        if self.host is not None:
            self.host.host.forget(prompt)
        if self._reader is not None:
            self._reader.era += 1
        if self._writer is not None and self.objects is not None:
            self._writer.forget()  # what waits may begin with it
            if (name := self._writer.name(prompt.namespace)) is not None:
                self.objects.forget(name, prompt.data).add_done_callback(_tell_incomplete)

    def stats(self) -> LowerStats:
        """What lies below."""
        return LowerStats(
            host=None if self.host is None else self.host.host.stats(),
            host_moves=HostCounters() if self.host is None else self.host.counters,
            objects=None if self.objects is None else self.objects.stats(),
            waiting=0 if self._writer is None else self._writer.waiting,
            rates=self.rates,
            failures=dict(self.failures),
        )

    def close(self, grace: float) -> None:
        """Write what is worth it within `grace` seconds, and end. Nothing runs any more."""
        until = time.monotonic() + grace
        if self._writer is not None and self.objects is not None:
            try:
                self._writer.write_all(until)
            except Exception:
                logger.exception("writing what was kept failed: a new server finds what was written before")
            self.objects.close(max(0.0, until - time.monotonic()))


def _tell_incomplete(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        logger.error("%s", error)
