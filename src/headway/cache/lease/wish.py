"""What a caller asked for beyond the answer, a pin or a breakpoint, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Outcome", "Wish"]


class Outcome(Enum):
    """What became of a wish."""

    PENDING = "pending"
    """The lease has not computed so far yet."""
    KEPT = "kept"
    """The position can be resumed at, and is pinned if that was the wish."""
    NO_CHECKPOINT = "no_checkpoint"
    """No checkpoint is there, and none will be: the prompt resumed at or behind the position, so that one could be made
    only by computing again, or no state can be kept that early (position 0)."""
    NO_ROOM = "no_room"
    """No memory was free for the checkpoint when the position was computed."""
    PIN_SHARE = "pin_share"
    """Pins would have protected more than their share of the pool, or left this prompt too little of it."""
    NOT_PLACED = "not_placed"
    """The cache's placement does not include breakpoints."""
    NOT_STORED = "not_stored"
    """The prompt leaves nothing behind: `no_store`, or its part of the cache was reset while it ran."""
    ENDED = "ended"
    """The lease ended before it had computed so far."""


@dataclass(slots=True)
class Wish:
    """A pin or a breakpoint of one prompt. Its outcome changes while the lease runs.

    Attributes:
        kind: "pin" or "breakpoint".
        asked: The position that the caller gave.
        position: Where it can be: `asked`, or the last position before it at which a state can be exported and behind
            which enough of the prompt is left to compute.
        outcome: What became of it.
    """

    kind: str
    asked: int
    position: int
    outcome: Outcome = Outcome.PENDING
