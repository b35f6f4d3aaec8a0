"""Who computes: the one interface between the scheduler and whatever has the weights.

The scheduler decides and never touches a tensor; an executor acts and never decides. `headway.engine.ranks.in_process`
runs the model in this process, `headway.engine.ranks.driver` on ranks in processes or Ray actors. Neither needs more
than this: all records here are plain data, every block id in them is valid on all ranks, and sampling is part of the
step, so that only token ids travel back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.cache import Step
from headway.runtime.interface import BlockRange, CanonicalGroup, RowAnswer, SampleRow

__all__ = ["BlockRange", "CanonicalGroup", "Executor", "StepWork"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class StepWork(msgspec.Struct, frozen=True, tag=True):
    """One step for all ranks.

    Attributes:
        step: What the cache granted: rows, starts, counts, copies before and exports after.
        tables: The cache's block tables; row `step.rows[i]` belongs to row i of the step.
        tokens: One int32 array per row of the step, its known tokens at [start, start + count). Where they are fewer
            than the count, the rest is room for a draft, which the executor makes itself.
        samples: One per row of the step: how to choose the next token, or None where none is wanted yet.
        following: int64 [rows of the step], the token at start + count where it is known, else -1; for `scored`, and
            for drafters whose entries depend on it. None where nobody asks.
        leases: int64 [rows of the step], a number that each row's lease keeps from step to step, where `step.rows` are
            not that; None where they are.
        long: bool [rows of the step], rows that are computed with the long set of rotary frequencies
            (`headway.runtime.interface.LongRope`); None for a model with one set.
        scored: One per row of the step: the log probabilities of its known tokens are wanted, with so many of the most
            likely ones, or None. None for no row.
    """

    step: Step
    tables: Sequence[Int32s]
    tokens: Sequence[Int32s]
    samples: Sequence[SampleRow | None]
    following: Int64s | None = None
    leases: Int64s | None = None
    long: Bools | None = None
    scored: Sequence[int | None] | None = None


class Executor(Protocol):
    """Something that computes steps, one at a time, and moves what they have computed between them.

    Attributes:
        canonical: What the objects of each cache group are, by its name.
    """

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        """See the class; known once there is room for the cache."""
        ...

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        """Copy, compute, export and sample, in this order. Returns one record per row of the step.

        Raises:
            RanksLostError: The step failed, and what all blocks hold is lost: only `restart` helps.
            Exception: The step failed. Nothing of it counts, and blocks that it was to write hold anything.
        """

    def check(self) -> None:
        """Look, between steps, whether all that is needed for the next one is there. Returns at once.

        Raises:
            RanksLostError: It is not, and what all blocks hold is lost: only `restart` helps.
        """

    def restart(self) -> None:
        """Make an executor that lost its ranks ready for steps again, with blocks that hold anything.

        Raises:
            Exception: That is not possible.
        """

    def move_blocks(self, out: Int32s, back: Int32s) -> None:
        """Copy whole blocks on every rank between its device and its host memory. Done when it returns.

        Args:
            out: int32 [k, 2], (block of the device, block of host memory) to copy out; all of these come first.
            back: int32 [k, 2], (block of host memory, block of the device) to copy back.

        Raises:
            RanksLostError: As for `run`.
            Exception: It failed. Blocks that it was to write hold anything.
        """

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        """Read the object of each range: the canonical bytes of all ranks together.

        Raises:
            RanksLostError: As for `run`.
            Exception: It failed; nothing has changed.
        """
        ...

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        """Write an object to the blocks of each range. No other bytes of these blocks change.

        Raises:
            RanksLostError: As for `run`.
            Exception: It failed. Blocks that it was to write hold anything.
        """

    def close(self) -> None:
        """Release the device. Nothing runs afterwards."""
