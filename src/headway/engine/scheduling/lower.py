"""The tiers below the device's memory, as the scheduler uses them.

A request that would reuse more of a lower tier than of the device begins with that: its lease is filled by a copy
before its first step. The copy is made while the request is admitted, so it is either a request that has computed what
it read back, or one that never had it. What is about to be evicted is copied out between steps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from headway.cache import Below, BelowLoss, Hit, Lease, PrefixCache, Prompt, Step
from headway.engine.errors import RanksLostError
from headway.tiers.host import HostTier
from headway.tiers.rates import Rates

__all__ = ["HOST", "Begun", "LowerTiers"]

logger = logging.getLogger(__name__)

_LEAST_CHUNK = 16
"""Tokens of a row from which on a step is one of prompts: shorter ones take as long as their weights are read."""
HOST = "host"
"""Name of the tier of host memory."""


@dataclass(frozen=True)
class Begun:
    """How a request began.

    Attributes:
        lease: Its lease.
        tier: The tier that it read back from; "" if none.
        tokens: Tokens that it read back.
        kind: Kind of the checkpoint that it begins at, or "".
    """

    lease: Lease
    tier: str = ""
    tokens: int = 0
    kind: str = field(default="", kw_only=True)

    @property
    def resumed_from(self) -> str:
        """Kind of the checkpoint that it begins at, or ""."""
        return self.kind or self.lease.hit.kind


@dataclass(eq=False)
class LowerTiers:
    """What lies below the memory of a device.

    Attributes:
        cache: The device's cache.
        host: Host memory.
        rates: How long moves and computing take.
        failures: Copies that failed, by tier.
    """

    cache: PrefixCache
    host: HostTier
    rates: Rates = field(default_factory=Rates)
    failures: dict[str, int] = field(default_factory=dict)

    def known(self, prompt: Prompt, hit: Hit) -> int:
        """Tokens of `prompt` that can be had without computing, from the device or below. Changes nothing."""
        found = self.host.find(prompt, hit)
        return hit.tokens if found is None else found.tokens

    def has_room(self, prompt: Prompt, hit: Hit) -> bool:
        """Whether what would be read back for `prompt` has room now; what has none waits, or is computed."""
        found = self.host.find(prompt, hit)
        return found is None or self.cache.has_room(hit, found.tokens)

    def begin(self, prompt: Prompt, hit: Hit, least: int) -> Begun:
        """Lease memory for a request, with what the tiers have of its prompt.

        Args:
            prompt: The prompt.
            hit: What the device has.
            least: Fewest tokens that are worth going on from.

        Raises:
            UnservableError: The pool could never hold the prompt.
            RanksLostError: The ranks are gone, and the request has no lease.
        """
        found = self.host.find(prompt, hit)
        if found is None or found.tokens < least:
            return Begun(self.cache.lease(prompt, hit, least_hit=least))
        size = self.host.load_bytes(found, hit)
        if self.rates.gain(HOST, size, self.cache.config.cost.between(hit.tokens, found.tokens)) < 0:
            below = Below(declined=found.tokens)
            return Begun(self.cache.lease_below(prompt, below, hit, least_hit=least)[0])
        started = time.monotonic()
        try:
            lease, loaded = self.host.load(prompt, found, hit)
        except RanksLostError:
            raise
        except Exception as error:
            self._failed("reading back from host memory failed: the request computes its prompt")
            loss = BelowLoss(found.tokens, False, HOST, "", f"the copy failed ({type(error).__name__})")
            return Begun(self.cache.lease_below(prompt, Below(losses=(loss,)), least_hit=least)[0])
        if not loaded:
            return Begun(lease)
        self.rates.moved(HOST, size, time.monotonic() - started)
        return Begun(lease, HOST, lease.computed - lease.hit.tokens, kind=found.kind)

    def measure(self, step: Step, seconds: float) -> None:
        """A step took so long: if it computed prompts, that is what computing takes."""
        if step.counts.max(initial=0) >= _LEAST_CHUNK:
            cost = self.cache.config.cost
            ends = (step.starts + step.counts).tolist()
            total = sum(cost.between(start, end) for start, end in zip(step.starts.tolist(), ends, strict=True))
            self.rates.computed(total, seconds)

    def _failed(self, message: str) -> None:
        self.failures[HOST] = self.failures.get(HOST, 0) + 1
        logger.exception("%s", message)

    def ranks_lost(self) -> None:
        """The ranks are gone, and with them what their host memory held."""
        self.host.reset()

    def reset(self) -> None:
        """Forget everything in every tier."""
        self.host.reset()

    def forget(self, prompt: Prompt) -> None:
        """Forget every sequence that begins with `prompt`, in every tier."""
        self.host.host.forget(prompt)
