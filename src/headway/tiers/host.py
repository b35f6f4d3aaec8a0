"""Host memory below the device: blocks of the same size, under a second prefix cache.

What is kept there, what goes first, and where a prompt can resume are decided by the very same code as on the device;
this module only moves checkpoints between the two. A move is a hit that is held on one side and a lease on the other
whose first step is filled by copying blocks, so nothing of it can be matched before all of it is there.

Device and host keep different things. A checkpoint is copied out when it is about to be evicted, so that the two
memories hold nearly as much as one of the same sum. What a request reads back stays where it is, but goes first there
as long as the device has its copy.

Rejected: one index over both memories. A path would have blocks in two places, and every rule of the tree would need to
know of it. Rejected as well: copying at the moment of an eviction, which must give its blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import Below, CacheGeometry, Going, HeldHit, Hit, Lease, PrefixCache, Prompt, Step, TableKind

__all__ = ["HostCounters", "HostTier"]

Ids = NDArray[np.int32]
_NONE = np.empty((0, 2), dtype=np.int32)
_STATES_PER_STEP = 4
"""Checkpoints that one step takes, more than which is rare."""


@dataclass
class HostCounters:
    """What was moved.

    Attributes:
        stored: Checkpoints copied to the host.
        stored_blocks: Blocks copied for them.
        refused: Checkpoints that were not copied: the host had no room that it could give.
        loaded: Requests that read back.
        loaded_tokens: Tokens of theirs that were not computed.
        loaded_blocks: Blocks copied for them.
    """

    stored: int = 0
    stored_blocks: int = 0
    refused: int = 0
    loaded: int = 0
    loaded_tokens: int = 0
    loaded_blocks: int = 0


@dataclass(eq=False)
class HostTier:
    """Moves checkpoints between a device's cache and one in host memory.

    Attributes:
        device: The cache of the device.
        host: The cache of the host: of the same groups and layout.
        copy: Copies blocks: int32 [k, 2] (device block, host block) out, then [k, 2] (host block, device block) back.
            What it raises, passes on: nothing has moved then.
        step_tokens: Most tokens that one step computes.
        counters: What was moved.
    """

    device: PrefixCache
    host: PrefixCache
    copy: Callable[[Ids, Ids], None]
    step_tokens: int = 2048
    counters: HostCounters = field(default_factory=HostCounters)

    @classmethod
    def beside(cls, device: PrefixCache, blocks: int, copy: Callable[[Ids, Ids], None], step_tokens: int) -> HostTier:
        """A tier of `blocks` blocks below `device`."""
        config = replace(
            device.config,
            blocks=blocks,
            max_leases=2,
            steps_in_flight=1,
            slots_ahead=0,
            scratch_blocks=0,
            pin_share=0.0,
        )
        return cls(device, PrefixCache(config, beside=device), copy, step_tokens)

    @property
    def ahead(self) -> int:
        """Blocks that a step may take at once: so many are free, or can go without a loss, before it is planned."""
        geometry = self.device.geometry
        tokens = sum(-(-self.step_tokens // table.span) + 1 for table in geometry.token_tables)
        return min(tokens + _STATES_PER_STEP * geometry.state_blocks, self.device.config.blocks)

    # ---- out

    def make_ready(self, blocks: int = 0) -> int:
        """Copy what would be evicted next, until `blocks` blocks (`ahead`, if that is more) can be had without a loss.

        Returns:
            Checkpoints that were copied. O(1) where as many blocks are free.
        """
        wanted = max(blocks, self.ahead)
        if self.device.free_blocks >= wanted:
            return 0
        return sum([self.store(going) for going in self.device.going_next(wanted)])

    def store(self, going: Going) -> bool:
        """Copy a checkpoint to the host, or let what the host has of it count again. Returns whether it was copied."""
        prompt = _prompt_at(going)
        below = self.host.lookup(prompt)
        if below.tokens >= going.position:
            self.host.keep(below)
            return False
        hit = self.device.lookup(prompt)
        if hit.tokens < going.position:
            return False
        held = self.device.hold_hit(hit)
        try:
            return self._copy_out(prompt, held, below)
        finally:
            self.device.release_hit(held)

    def _copy_out(self, prompt: Prompt, held: HeldHit, known: Hit) -> bool:
        below = Below(held.tokens, held.kind, held.floor, held.uses)
        lease, step = self.host.lease_below(prompt, below, known, asked=False)
        if step is None:
            self.host.discard([lease.row])
            self.counters.refused += 1
            return False
        pairs = np.concatenate(_pairs(self.host, lease, step, held, only_kept=True))
        try:
            self.copy(pairs, _NONE)
        except BaseException:
            self.host.fail(step)
            self.host.discard([lease.row])
            raise
        self.host.commit_one(step, step.counts.item())
        self.host.discard([lease.row])
        self.counters.stored += 1
        self.counters.stored_blocks += len(pairs)
        return True

    # ---- in

    def find(self, prompt: Prompt, hit: Hit) -> Hit | None:
        """What the host has of `prompt` behind the device's `hit`; None if nothing. Changes nothing."""
        found = self.host.lookup(prompt)
        return found if found.tokens > hit.tokens else None

    def load(self, prompt: Prompt, found: Hit, hit: Hit) -> tuple[Lease, bool]:
        """Start a request on the device with what the host has of it.

        Returns:
            Its lease, which has computed what was read back, and whether anything was: there may be no room for it.

        Raises:
            UnservableError: As `PrefixCache.lease`.
            Exception: The copy failed. The lease was ended, and nothing of it can be matched.
        """
        held = self.host.hold_hit(found)
        try:
            below = Below(held.tokens, held.kind, held.floor, held.uses)
            lease, step = self.device.lease_below(prompt, below, hit)
            if step is None:
                return lease, False
            pairs = np.concatenate(_pairs(self.device, lease, step, held))
            try:
                self.copy(_NONE, pairs[:, ::-1])
            except BaseException:
                self.device.fail(step)
                self.device.abort([lease.row])
                raise
            self.device.commit_one(step, step.counts.item())
        finally:
            self.host.release_hit(held)
        self.host.lend(found)
        self.counters.loaded += 1
        self.counters.loaded_tokens += step.counts.item()
        self.counters.loaded_blocks += len(pairs)
        return lease, True

    def reset(self) -> None:
        """Forget everything."""
        self.host.reset()


def _prompt_at(going: Going) -> Prompt:
    """A prompt that can resume at a checkpoint and nowhere behind it: at least one token follows."""
    tokens = going.prefix if len(going.prefix) > going.position else np.append(going.prefix, np.int32(0))
    return Prompt(tokens, namespace=going.namespace)


def _pairs(cache: PrefixCache, lease: Lease, step: Step, held: HeldHit, *, only_kept: bool = False) -> list[Ids]:
    """Blocks to copy, int32 [k, 2] each: from those that are held to those of a lease, in its first step.

    `only_kept`: of a state the copy that becomes the checkpoint, and not the running one.
    """
    geometry: CacheGeometry = cache.geometry
    start, stop = step.starts.item(), (step.starts + step.counts).item()
    pairs = [_NONE]
    for number, part in zip(held.tables, held.parts, strict=True):
        table, row = geometry.tables[number], cache.tables[number][lease.row]
        if table.kind is TableKind.STATE:
            targets = [export.destination for export in step.exports]
            targets += [] if only_kept and targets else [row[: len(part.ids)]]
            pairs += [np.stack([part.ids, target], axis=1) for target in targets]
            continue
        first = start // table.span if table.kind is TableKind.PREFIX else part.first
        ids = part.ids[first - part.first :]
        pairs.append(np.stack([ids, row[first : -(-stop // table.span)]], axis=1))
    return pairs
