"""Blocks on their way between memories: what is read elsewhere is held, and a lease copies instead of computing.

Both directions are one idea. What goes out is a hit whose blocks nobody may write or give away until they are copied:
it is held as a running request holds what it resumes from, through eviction, forgetting and reset. What comes in is a
lease whose first step is filled by a copy: its blocks are nobody else's until the step is committed, and nothing of it
can be matched before. So a copy that fails is a step that failed, and there is no third kind of owner.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.cache.index.below import Below
from headway.cache.index.held import HeldBlocks, held_blocks
from headway.cache.index.hit import Hit
from headway.cache.lease.extend import Extender
from headway.cache.lease.open import Opener
from headway.cache.lease.step import Step
from headway.cache.lease.table import Parts
from headway.errors import LeaseError

__all__ = ["Transfers"]


@dataclass(eq=False)
class Transfers(Parts):
    """Holds what is copied out, and begins leases that are copied in.

    Attributes:
        opener: Opens leases.
        extender: Gives them blocks.
    """

    opener: Opener
    extender: Extender

    def hold(self, hit: Hit) -> HeldBlocks:
        """See `PrefixCache.hold_hit`."""
        checkpoint = hit.checkpoint
        if not hit.tokens or checkpoint is None:
            raise LeaseError("this hit has no tokens: there is nothing to hold")
        edge = hit.at.edge.edge_at(hit.tokens)
        held = held_blocks(self.geometry, self.index.tree, edge, hit.tokens, checkpoint)
        for part in held.parts:
            self.pool.hold(part.ids, whole=part.whole)
        self.leases.lent.append(held)
        return held

    def release(self, held: HeldBlocks) -> None:
        """See `PrefixCache.release_hit`."""
        if held not in self.leases.lent:
            raise LeaseError("this hit is not held")
        self.leases.lent.remove(held)
        for part in held.parts:
            self.pool.drop(part.ids, whole=part.whole)

    def check(self, hit: Hit, below: Below) -> None:
        """Refuse to read back what cannot be: nothing, the last token, or what no checkpoint can serve."""
        last = len(hit.prompt.tokens) - max(1, self.geometry.lookahead)
        if below.position and not hit.tokens < below.position <= last:
            raise LeaseError(
                f"a prompt of {len(hit.prompt.tokens)} tokens with a hit of {hit.tokens} cannot be read back up to "
                f"{below.position}: give a position behind the hit, up to {last}"
            )

    def fits(self, hit: Hit, position: int) -> bool:
        """Whether the blocks can be had now that reading back takes, and the checkpoint that it leaves."""
        return self.opener.demand(hit, position, 1) + self.geometry.state_blocks <= self.pool.available

    def begin(self, row: int, below: Below) -> Step:
        """The first step of a lease that was opened to read what is `below`."""
        start = self.leases.planned.item(row)
        return self.extender.extend_one(row, below.position - start, whole=True)
