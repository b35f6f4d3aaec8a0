"""What a request got from disks and shared stores, until it begins."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cache import BelowLoss
from headway.tiers import Loaded

__all__ = ["Fetched"]


@dataclass(frozen=True, eq=False)
class Fetched:
    """What a request got from object tiers.

    Attributes:
        loaded: The objects; None if none were fetched.
        declined: Tokens that tiers have, where computing costs less than fetching them; 0 if none.
        losses: What was to be fetched and was not.
        floor: The objects have what lies behind so many tokens: a request must have these.
        era: How often something had been forgotten when it was looked for.
    """

    loaded: Loaded | None = None
    declined: int = 0
    losses: tuple[BelowLoss, ...] = ()
    floor: int = 0
    era: int = 0

    @property
    def position(self) -> int:
        """Tokens that the objects give."""
        return 0 if self.loaded is None or not self.loaded.kind else self.loaded.position

    @property
    def tier(self) -> str:
        """The tier that most bytes came from; "" for none."""
        moved = () if self.loaded is None else self.loaded.moved
        return max(moved, key=lambda one: one.bytes).tier if moved else ""

    def release(self) -> None:
        """Give the memory of the objects back."""
        if self.loaded is not None:
            self.loaded.release()
