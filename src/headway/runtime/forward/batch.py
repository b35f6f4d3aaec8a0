"""What an engine asks of a model in one step, and what it gets back: numpy in, one logits tensor out.

These records are the whole interface between the scheduler and the tensors. They hold no policy: which rows run, how
many tokens each computes and which blocks they use is decided above; here it is only written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import Step
from headway.errors import ConfigError

__all__ = ["RunBatch", "RunResult", "StateMove", "batch_of"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class StateMove:
    """State blocks to copy once the forward has run.

    Attributes:
        source: int32 [k], the blocks of a running state, in order.
        destination: int32 [k], the blocks that take the copy.
        row: The row of the batch whose state it is.
    """

    source: Int32s
    destination: Int32s
    row: int


def _no_copies() -> Int32s:
    return np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True)
class RunBatch:
    """One step of a model: n rows (sequences), each computing `counts[i]` tokens from position `starts[i]`.

    Nothing here is changed by running it. The arrays may be views of the cache's own tables, as long as those stay
    unchanged until `run` returns.

    Attributes:
        tokens: int [sum(counts)], the token ids of all rows, one row after another.
        starts: int64 [n], the position of each row's first token: that many earlier tokens are in its blocks.
        counts: int64 [n], tokens to compute, at least 1 each.
        tables: one int32 [n, width] array per block table of the geometry, row i belonging to row i of the batch; -1
            where no block is held. Of a state table the first `state_blocks` columns are the running state.
        fresh: bool [n], True where the recurrent state starts from zeros instead of being read (start 0).
        copies: int32 [k, 2], whole blocks (source, destination) to copy before anything is computed. All sources are
            read before any destination is written.
        exports: states to copy after the forward, in order.
        all_logits: bool [n], rows whose logits at every position are wanted; None for no row.
        long: bool [n], rows that use the long set of rotary frequencies (`headway.runtime.interface.LongRope`); None
            for no row.
        offsets: int64 [n], what the model is told beyond the positions in the blocks; None for nothing. With it the
            self-check reaches the end of a context without filling it.
    """

    tokens: Int32s
    starts: Int64s
    counts: Int64s
    tables: Sequence[Int32s]
    fresh: Bools
    copies: Int32s = field(default_factory=_no_copies)
    exports: Sequence[StateMove] = ()
    all_logits: Bools | None = None
    long: Bools | None = None
    offsets: Int64s | None = None

    def __post_init__(self) -> None:
        """Refuse arrays whose lengths contradict each other.

        Raises:
            ConfigError: Lengths that differ, or a row without tokens.
        """
        n = len(self.starts)
        lengths = [len(self.counts), len(self.fresh), *(len(table) for table in self.tables)]
        if any(length != n for length in lengths):
            raise ConfigError(f"a batch of {n} starts has counts, fresh and tables of {lengths} rows: make them equal")
        if n and int(np.min(self.counts)) < 1:
            raise ConfigError("a batch holds a row without tokens to compute: leave such rows out")
        if len(self.tokens) != int(np.sum(self.counts)):
            raise ConfigError(f"a batch has {len(self.tokens)} tokens, its counts add up to {int(np.sum(self.counts))}")

    @property
    def rows(self) -> int:
        """Number of sequences in the batch."""
        return len(self.starts)


@dataclass(frozen=True)
class RunResult:
    """Logits of one step.

    Attributes:
        logits: float32 [n, vocab], those that follow each row's last token, on the model's device.
        all_logits: one float32 [counts[i], vocab] tensor per row where it was asked for (its row j follows the row's
            token j), else None.
        finite: bool [n], on the model's device: whether all that the row computed is made of finite numbers (see
            `headway.runtime.forward.finite`). Where it is not, nothing of the row's step may be used.
    """

    logits: torch.Tensor
    all_logits: tuple[torch.Tensor | None, ...]
    finite: torch.Tensor


def batch_of(
    step: Step,
    tables: Sequence[Int32s],
    tokens: Sequence[NDArray[Any]],
    all_logits: Bools | None = None,
    long: Bools | None = None,
) -> tuple[RunBatch, Int64s]:
    """Build the batch that a step of the prefix cache calls for.

    Args:
        step: What `PrefixCache.extend` granted.
        tables: `PrefixCache.tables`.
        tokens: One int array per row of the step: the token ids at positions [start, start + count). Rows that were
            granted nothing are left out of the batch; theirs are not read.
        all_logits: bool [rows of the step], rows whose logits at every position are wanted.
        long: bool [rows of the step], rows that use the long set of rotary frequencies.

    Returns:
        The batch, and int64 [n] for each row of the batch its index in the step.
    """
    kept = np.flatnonzero(np.asarray(step.counts) > 0)
    rows = np.asarray(step.rows)[kept]
    parts = [np.asarray(tokens[int(i)], dtype=np.int32) for i in kept]
    batch = RunBatch(
        tokens=np.concatenate(parts) if parts else np.empty(0, dtype=np.int32),
        starts=np.asarray(step.starts, dtype=np.int64)[kept],
        counts=np.asarray(step.counts, dtype=np.int64)[kept],
        tables=[table[rows] for table in tables],
        fresh=np.isin(rows, np.asarray(step.fresh)),
        copies=step.copies,
        exports=[
            StateMove(export.source, export.destination, int(np.flatnonzero(rows == export.row)[0]))
            for export in step.exports
        ],
        all_logits=None if all_logits is None else np.asarray(all_logits, dtype=np.bool_)[kept],
        long=None if long is None else np.asarray(long, dtype=np.bool_)[kept],
    )
    return batch, kept.astype(np.int64)
