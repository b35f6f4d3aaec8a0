"""What the ranks are asked to do: one step of a batch of leases."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache.shape.geometry import Ids, Longs

__all__ = ["Rows", "StateExport", "Step"]

Rows = Longs
"""Rows of leases."""

_new_serial = itertools.count(1).__next__


@dataclass(slots=True, eq=False)
class StateExport:
    """A copy of a running state that the ranks make when `position` tokens are computed.

    Attributes:
        row: The lease's row.
        position: Tokens after which the state is to be copied.
        source: int32 [state_blocks], blocks of the running state.
        destination: int32 [state_blocks], blocks to copy to, in the same order.
    """

    row: int
    position: int
    source: Ids
    destination: Ids


@dataclass(slots=True)
class Step:
    """What the ranks must do next for a batch of leases.

    Where leases may have two steps under way, the older one can undo rows of the newer: their `counts` become 0 and
    their `exports` go, in this very object. Whatever the ranks made of such rows does not count.

    Attributes:
        rows: int64 [n], rows of the leases.
        starts: int64 [n], tokens computed before the step.
        counts: int64 [n], tokens to compute; 0 where no memory could be found, and nothing changed for that lease.
        copies: int32 [k, 2], blocks (source, destination) to copy whole on every rank before the forward pass.
        fresh: int64 [m], rows whose recurrent state starts from zeros.
        exports: States to copy after the forward pass, or at their position inside it.
        serial: Number of the step, unlike that of any other of any cache.
    """

    rows: Rows
    starts: Longs
    counts: Longs
    copies: Ids
    fresh: Rows
    exports: tuple[StateExport, ...]
    serial: int = field(default_factory=_new_serial)

    @property
    def exhausted(self) -> NDArray[np.bool_]:
        """Bool [n], leases that got no memory in this step, or were undone."""
        exhausted: NDArray[np.bool_] = self.counts == 0
        return exhausted
