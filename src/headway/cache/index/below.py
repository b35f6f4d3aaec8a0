"""What lower tiers of memory have of a prompt, as its lease is told: the cache itself knows nothing of tiers.

A checkpoint that lies below is read back by a lease that copies instead of computing (`PrefixCache.lease`). So there is
one way in which memory becomes known: what a step has written and a commit has made true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Below", "BelowLoss", "Past"]


class Past(NamedTuple):
    """The life of a checkpoint so far, which goes on where it is moved: in ticks of memories that learn together.

    Attributes:
        uses: How often it was wanted.
        born: Tick of its birth.
        used: Tick of its last use, or of its birth.
        base: Where a request would have resumed without it: what it saves counts from there. 0 where it floats.
    """

    uses: int
    born: int
    used: int
    base: int = 0


class BelowLoss(NamedTuple):
    """A checkpoint that a lower tier was to give and did not.

    Attributes:
        position: Tokens before it.
        missed: It was gone; else reading it failed, or what was read was not what had been written.
        tier: Name of the tier.
        group: The cache group whose entries are missing; "" if it is no single one.
        why: What happened, as part of a sentence.
    """

    position: int
    missed: bool
    tier: str
    group: str
    why: str

    def __str__(self) -> str:
        """As a part of a sentence."""
        group = f", group {self.group}" if self.group else ""
        return f"the checkpoint at {self.position} in tier {self.tier}{group}: {self.why}"


@dataclass(frozen=True)
class Below:
    """What of a prompt can be read back from lower tiers, and what could not.

    Attributes:
        position: Tokens that can be read back; 0 if there is nothing.
        kind: Kind of placement that had taken the checkpoint there; "path" for models that can resume anywhere.
        floor: What is read back of windows serves no position before this one: a block that holds the first entry
            that `position` needs is filled from there on only. 0 where it is filled from its start.
        past: The checkpoint's life in the memory that it is read from; None if that learns by itself.
        declined: Tokens that could be read back, where computing those behind the hit costs less; 0 if none.
        losses: What was to be read and was not.
    """

    position: int = 0
    kind: str = ""
    floor: int = 0
    past: Past | None = None
    declined: int = 0
    losses: tuple[BelowLoss, ...] = ()
