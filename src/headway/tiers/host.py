"""Host memory below the device: blocks of the same size, under a second prefix cache.

What is kept there, what goes first, and where a prompt can resume are decided by the very same code as on the device;
this module only moves checkpoints between the two. A move is a hit that is held on one side and a lease on the other
whose first step is filled by copying blocks, so nothing of it can be matched before all of it is there.

Device and host keep different things. A checkpoint is copied out when it is about to be evicted, so that the two
memories hold nearly as much as one of the same sum. What a request reads back stays where it is, but goes first there
as long as the device has its copy.

Both learn as one. A checkpoint's life goes on where it is moved, and what it saves counts from where a request would
have resumed without it in the memory that it came from. So each of them gives up what one memory would have given up.

Rejected: one index over both memories. A path would have blocks in two places, and every rule of the tree would need to
know of it. Rejected as well: copying ahead of evictions, from the end of the queue. The order changes while
steps are planned, so that some of what went had not been copied, and some of what was copied did not go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import Below, CacheGeometry, HeldBlocks, Hit, Lease, PrefixCache, Prompt, Spill, Step, TableKind
from headway.errors import UnservableError

__all__ = ["HostCounters", "HostTier"]

_LOG = logging.getLogger("headway.tiers")
Ids = NDArray[np.int32]
_NONE = np.empty((0, 2), dtype=np.int32)


@dataclass
class HostCounters:
    """What was moved.

    Attributes:
        stored: Checkpoints copied to the host.
        stored_blocks: Blocks copied for them.
        refused: Checkpoints that were not copied: the host had no room that it could give.
        failed: Checkpoints that were not copied: copying failed.
        loaded: Requests that read back.
        loaded_tokens: Tokens of theirs that were not computed.
        loaded_blocks: Blocks copied for them.
    """

    stored: int = 0
    stored_blocks: int = 0
    refused: int = 0
    failed: int = 0
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
        counters: What was moved.
    """

    device: PrefixCache
    host: PrefixCache
    copy: Callable[[Ids, Ids], None]
    counters: HostCounters = field(default_factory=HostCounters)

    @classmethod
    def beside(cls, device: PrefixCache, blocks: int, copy: Callable[[Ids, Ids], None]) -> HostTier:
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
        tier = cls(device, PrefixCache(config, beside=device), copy)
        device.spill(tier.store)
        return tier

    # ---- out

    def store(self, spill: Spill) -> None:
        """Copy what the device is about to evict, or let what the host has of it count again. Never raises."""
        known = self.host.lookup(prompt := _prompt_at(spill))
        if self._remind(spill, known):
            return
        held = spill.blocks
        below = Below(held.tokens, held.kind, held.floor, held.past)
        try:
            lease, step = self.host.lease_below(prompt, below, known, asked=False)
        except UnservableError:  # the host is smaller than this prompt alone
            self.counters.refused += 1
            return
        if step is None:
            self.host.discard([lease.row])
            self.counters.refused += 1
            return
        pairs = np.concatenate(_pairs(self.host, lease, step, held, only_kept=True))
        try:
            self.copy(pairs, _NONE)
        except Exception:
            _LOG.exception("copying to host memory failed: what is evicted now is lost")
            self.host.fail(step)
            self.host.discard([lease.row])
            self.counters.failed += 1
            return
        self.host.commit_one(step, step.counts.item())
        self.host.discard([lease.row])
        self.counters.stored += 1
        self.counters.stored_blocks += len(pairs)

    def remind(self, spill: Spill) -> bool:
        """Let what the host has of what the device is about to evict count again. Returns whether it has it."""
        return self._remind(spill, self.host.lookup(_prompt_at(spill)))

    def _remind(self, spill: Spill, known: Hit) -> bool:
        if known.tokens < spill.blocks.tokens:
            return False
        self.host.keep(known, spill.blocks.past)
        return True

    # ---- in

    def find(self, prompt: Prompt, hit: Hit) -> Hit | None:
        """What the host has of `prompt` behind the device's `hit`; None if nothing. Changes nothing."""
        found = self.host.lookup(prompt)
        return found if found.tokens > hit.tokens else None

    def load_bytes(self, found: Hit, hit: Hit) -> int:
        """Bytes that every rank copies to read back `found` behind the device's `hit`."""
        tables = self.host.geometry.tables
        blocks = [found.blocks(table.index) for table in tables if table.kind is not TableKind.SCRATCH]
        known = sum(hit.tokens // table.span for table in self.host.geometry.prefix_tables)
        return (sum(map(len, blocks)) - known) * self.host.geometry.block_bytes

    def load(self, prompt: Prompt, found: Hit, hit: Hit, told: Below | None = None) -> tuple[Lease, bool]:
        """Start a request on the device with what the host has of it; `told`: what other tiers did not give.

        Returns:
            Its lease, which has computed what was read back, and whether anything was: there may be no room for it.

        Raises:
            UnservableError: As `PrefixCache.lease`.
            Exception: The copy failed. The lease was ended, and nothing of it can be matched.
        """
        held = self.host.hold_hit(found)
        try:
            told = told or Below()
            below = replace(told, position=held.tokens, kind=held.kind, floor=held.floor, past=held.past)
            lease, step = self.device.lease_below(prompt, below, hit)
            if step is None:
                return lease, False
            pairs = np.concatenate(_pairs(self.device, lease, step, held))
            try:
                self.copy(_NONE, pairs)
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


def _prompt_at(spill: Spill) -> Prompt:
    """A prompt that can resume at a checkpoint and nowhere behind it: at least one token follows."""
    more = len(spill.prefix) > spill.blocks.tokens
    return Prompt(spill.prefix if more else np.append(spill.prefix, np.int32(0)), namespace=spill.namespace)


def _pairs(cache: PrefixCache, lease: Lease, step: Step, held: HeldBlocks, *, only_kept: bool = False) -> list[Ids]:
    """Blocks to copy, int32 [k, 2] each: from those that are held to those of a lease, in its first step.

    `only_kept`: of a state the copy that becomes the checkpoint, and not the running one.
    """
    geometry: CacheGeometry = cache.geometry
    start = step.starts.item()
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
        pairs.append(np.stack([ids, row[first : first + len(ids)]], axis=1))
    return pairs
