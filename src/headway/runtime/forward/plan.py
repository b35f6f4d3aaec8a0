"""Turns a batch into forwards, and block tables into the indices that a forward reads and writes.

Rows that compute equally many tokens run as one forward, `[rows, tokens]`: all decoding rows together, a prefill chunk
with others of its length or alone. Rows are never padded with made-up tokens: a recurrent state would absorb them. What
is ragged is the history, and that is padded with masked columns, within bounds (`_MAX_WASTE`).

Where tokens are split over ranks, a plan is one rank's: its columns are the entries that it stores, each with its
position in the sequence, and masks compare positions. All that decides how many forwards there are, and whether their
attention is merged over ranks, is computed from what every rank knows.

Where ranks share the tokens of a long forward (`headway.runtime.parallel.prefill_context`), a plan says which are a
rank's own; all else of it speaks of all tokens, since all ranks store alike.

Rejected: one packed row of all tokens with an attention mask between sequences. Recurrent layers would carry one
sequence's state into the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import CacheGeometry, TableGeometry, TableKind
from headway.runtime.forward.batch import RunBatch
from headway.runtime.parallel.prefill_context import share_of

__all__ = ["ForwardPlan", "PlanRules", "TokenPlan", "forwards"]

Int64s = NDArray[np.int64]

_MAX_WASTE = 1.5
"""Padded history columns that a forward may have, as a multiple of the real ones, before its rows are split up."""
_SLACK_COLUMNS = 4096
"""Padded columns that are too few to split rows over."""
_MASK_ELEMENTS = 1 << 22
"""Elements of a mask that is built at once; longer chunks attend in stretches of queries."""
_SCORE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores that attention to a rank's part holds at once, in fp32: 4 MiB, which a CPU's caches hold (2,048 queries to
4,096 entries take a third of the time that they take with 256 MiB), and 256 MiB where each stretch costs launches."""
_MASKS_KEPT = 8
"""Masks that the layers of one forward share; a chunk of more stretches builds them anew for each layer."""


class TokenPlan:
    """How one forward's rows use one token-indexed block table.

    Columns are what the keys of a layer have along their sequence dimension: first the row's history, padded to the
    longest of the forward, then its own new tokens. A forward of single tokens writes before it reads, so its new token
    is the last column of the history; a longer chunk is joined to the history, because a window may be shorter than the
    chunk and then not all of the chunk is kept.

    A table that is split over ranks keeps all of a chunk, some of it on other ranks. So there every forward writes
    before it reads, and its columns are this rank's entries up to its last token: all that the rank has to add. Only a
    prompt's first chunk needs nobody else's, where every rank has computed all of its tokens.

    Attributes:
        past: int64 [rows, blocks]: blocks of the history, 0 where none is held.
        past_columns: Columns that come from blocks.
        hidden: bool [rows, past_columns, 1, 1], True where a column is not the row's own; None if every column is.
        write: (block, offset), int64 [kept] each: where new entries go.
        kept: int64 [kept], which of the rows x tokens new entries are kept; None for all.
        joined: Whether new tokens follow the history as columns of their own.
        merged: Whether the columns are only this rank's, so that attention has to be merged over the ranks.
        count: Tokens that are computed of each row.

    Args:
        table: The table's geometry.
        held: int32 [rows, width], its block ids.
        starts: int64 [rows], position of each row's first token.
        count: See above.
        device: Where index tensors go.
        rank: The rank that reads and writes, 0 to `table.shards` - 1.
        shared: Whether ranks compute some of the tokens each.
    """

    def __init__(
        self,
        table: TableGeometry,
        held: NDArray[np.int32],
        starts: Int64s,
        count: int,
        device: torch.device,
        rank: int = 0,
        shared: bool = False,
    ) -> None:
        self._table = table
        self._device = device
        self._rank = rank if table.shards > 1 else 0
        self.count = count
        self.merged = table.shards > 1 and (count == 1 or shared or bool(starts.any()))
        self.joined = count > 1 and not self.merged
        self._positions = starts[:, None] + np.arange(count)
        self._plan_reads(held, starts, starts if self.joined else starts + count)
        self._plan_writes(held)
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}

    def _plan_reads(self, held: NDArray[np.int32], starts: Int64s, stop: Int64s) -> None:
        """Columns are indices in the order of what this rank stores; a table of one shard stores every position."""
        table, rank, size = self._table, self._rank, self._table.block_tokens
        first = table.first_needed(starts)
        base = first // size * size
        local_stop = table.local_length(stop, rank)
        # A rank may hold nothing of any row; a column that no query sees spares the model a tensor without elements.
        self.past_columns = max(int(np.max(local_stop - base)), int(self.merged))
        index = base[:, None] // size + np.arange(-(-self.past_columns // size))
        ids = np.take_along_axis(held, np.minimum(index, held.shape[1] - 1), axis=1).astype(np.int64)
        columns = base[:, None] + np.arange(self.past_columns)
        own = (columns >= first[:, None]) & (columns < local_stop[:, None])
        self.past = self._tensor(np.maximum(ids, 0))
        self.hidden = None if own.all() else self._tensor(~own)[:, :, None, None]
        keys = np.where(own, table.global_index(columns, rank), -1)
        new = self._positions if self.joined else self._positions[:, :0]
        self._keys = self._tensor(np.concatenate([keys, new], axis=1))
        self._queries = self._tensor(self._positions)

    def _plan_writes(self, held: NDArray[np.int32]) -> None:
        table, positions = self._table, self._positions
        block = np.take_along_axis(held, positions // table.span, axis=1).ravel().astype(np.int64)
        offset = (table.local_index(positions) % table.block_tokens).ravel()
        kept = np.flatnonzero((block >= 0) & (table.owner(positions).ravel() == self._rank))
        self.kept = None if len(kept) == len(block) else self._tensor(kept)
        self.write = (self._tensor(block[kept]), self._tensor(offset[kept]))

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    @property
    def sharded(self) -> bool:
        """Whether the table's tokens are split over ranks."""
        return self._table.shards > 1

    @property
    def past_positions(self) -> torch.Tensor:
        """Position of the token of each column of the history, int64 [rows, past_columns]; -1 where it has none."""
        return self._keys[:, : self.past_columns]

    @property
    def columns(self) -> int:
        """Columns of the keys that a layer attends to."""
        return self._keys.shape[1]

    @property
    def is_plain_causal(self) -> bool:
        """Whether query i sees exactly columns 0 to i: a prompt from its start, within any window or chunk."""
        reach = self._table.window or self._table.chunk or self.columns
        return self.past_columns == 0 and self.columns <= reach

    def stretches(self, queries: int, heads: int = 0) -> Iterator[tuple[int, int]]:
        """Cut `queries` queries into half-open stretches.

        Args:
            queries: How many there are.
            heads: Heads whose scores are computed for a stretch at once; 0 where a kernel need not hold them.
        """
        scores = _SCORE_ELEMENTS.get(self._device.type, _SCORE_ELEMENTS["cuda"])
        limit = min(_MASK_ELEMENTS, scores // heads if heads else _MASK_ELEMENTS)
        step = max(1, limit // max(1, self.columns * len(self._positions)))
        for start in range(0, queries, step):
            yield start, min(queries, start + step)

    def reach(self, stop: int) -> int:
        """Columns, from the first on, that the forward's first `stop` tokens may see, of a merged plan; at least 1."""
        known = self._table.local_length(self._positions[:, stop - 1] + 1, self._rank)
        return max(1, int(known.max()))

    def mask(self, start: int, stop: int) -> torch.Tensor | None:
        """What queries [start, stop) of the forward's tokens see.

        Returns:
            bool [rows, 1, stop - start, columns], True where a column is seen; None if all are. Of a merged plan that
            is of the columns up to `reach(stop)`.
        """
        if (start, stop) not in self._masks:
            if len(self._masks) >= _MASKS_KEPT:
                self._masks.clear()
            self._masks[start, stop] = self._build_mask(start, stop)
        return self._masks[start, stop]

    def _build_mask(self, start: int, stop: int) -> torch.Tensor | None:
        if self._positions.shape[1] == 1 and self.hidden is None:
            return None
        query = self._queries[:, start:stop, None]
        key = self._keys[:, None, : self.reach(stop) if self.merged else None]
        seen = (key <= query) & (key >= 0)
        if self._table.kind is TableKind.WINDOW:
            seen &= key > query - self._table.window
        elif self._table.kind is TableKind.CHUNK:
            seen &= key >= query // self._table.chunk * self._table.chunk
        return seen[:, None]


@dataclass(frozen=True)
class ForwardPlan:
    """One forward of a model.

    Attributes:
        rows: int64 [n], rows of the batch.
        count: Tokens that are computed of each.
        own: Those that this rank computes, half-open; [0, count) where ranks do not share them.
        fresh: Whether they start without a state.
        long: Whether they use the long set of rotary frequencies.
        tokens: int64 [n, count], on the device.
        positions: int64 [n, count], on the device: what the model is told.
        starts: int64 [n], position of each row's first token.
        tables: One plan per token-indexed table, by the table's number.
        states: int64 [n, state_blocks] blocks of the running states, on the device; None without states.
    """

    rows: Int64s
    count: int
    own: tuple[int, int]
    fresh: bool
    long: bool
    tokens: torch.Tensor
    positions: torch.Tensor
    starts: Int64s
    tables: dict[int, TokenPlan]
    states: torch.Tensor | None

    @property
    def shared(self) -> bool:
        """Whether each rank computes a share of the tokens."""
        return self.own != (0, self.count)


@dataclass(frozen=True)
class PlanRules:
    """What a model, and the ranks that run it, ask of its forwards.

    Attributes:
        uniform_starts: Rows run together only if they start at the same position.
        single_steps: A continuation of several tokens is computed one token at a time.
        place: This rank's number among those that share the tokens of a long forward, and how many these are.
    """

    uniform_starts: bool = False
    single_steps: bool = False
    place: tuple[int, int] = (0, 1)


def forwards(
    batch: RunBatch, geometry: CacheGeometry, rules: PlanRules, device: torch.device, rank: int = 0
) -> Iterator[ForwardPlan]:
    """Plan the forwards of a batch, each to be run before the next is planned.

    Every token of the batch is computed by exactly one forward, a row's in order. Ranks differ in `tables` and `own`
    alone.
    """
    ends = np.cumsum(batch.counts)
    firsts = ends - batch.counts
    for rows, offset, count in _alike(batch, geometry, rules):
        starts = batch.starts[rows] + offset
        index = (firsts[rows] + offset)[:, None] + np.arange(count)
        yield _plan(batch, geometry, device, rank, rows, starts, batch.tokens[index], share_of(count, *rules.place))


def _alike(batch: RunBatch, geometry: CacheGeometry, rules: PlanRules) -> Iterator[tuple[Int64s, int, int]]:
    """Put rows together that can run as one forward: yields (rows, tokens of each already done, tokens to compute)."""
    groups: dict[tuple[int, bool, bool, int], list[int]] = {}
    states = any(table.kind is TableKind.STATE for table in geometry.tables)
    for row in range(batch.rows):
        start = int(batch.starts[row]) if rules.uniform_starts else -1
        fresh, long = states and bool(batch.fresh[row]), batch.long is not None and bool(batch.long[row])
        groups.setdefault((int(batch.counts[row]), fresh, long, start), []).append(row)
    for (count, fresh, _, _), members in groups.items():
        single = rules.single_steps and not fresh and count > 1
        for rows in _split_ragged(np.asarray(members, dtype=np.int64), batch.starts, count):
            for offset in range(count) if single else (0,):
                yield rows, offset, 1 if single else count


def _split_ragged(rows: Int64s, starts: Int64s, count: int) -> Iterator[Int64s]:
    """Cut rows into runs of similar length, so that padding a run to its longest wastes little."""
    ordered = rows[np.argsort(-starts[rows], kind="stable")]
    begin, real = 0, 0
    for i, row in enumerate(ordered):
        length = int(starts[row]) + count
        padded = (i + 1 - begin) * (int(starts[ordered[begin]]) + count)
        if padded > _MAX_WASTE * (real + length) + _SLACK_COLUMNS:
            yield ordered[begin:i]
            begin, real = i, 0
        real += length
    yield ordered[begin:]


def _plan(
    batch: RunBatch,
    geometry: CacheGeometry,
    device: torch.device,
    rank: int,
    rows: Int64s,
    starts: Int64s,
    tokens: NDArray[np.int32],
    own: tuple[int, int],
) -> ForwardPlan:
    count = tokens.shape[1]
    tables: dict[int, TokenPlan] = {}
    states: torch.Tensor | None = None
    for table in geometry.tables:
        held = batch.tables[table.index][rows]
        if table.kind is TableKind.STATE:
            states = torch.from_numpy(held[:, : table.state_blocks].astype(np.int64)).to(device)
        else:
            tables[table.index] = TokenPlan(table, held, starts, count, device, rank, own != (0, count))
    told = starts if batch.offsets is None else starts + batch.offsets[rows]
    positions = torch.from_numpy(told[:, None] + np.arange(count)).to(device)
    return ForwardPlan(
        rows=rows,
        count=count,
        own=own,
        fresh=bool(batch.fresh[rows[0]]),
        long=batch.long is not None and bool(batch.long[rows[0]]),
        tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
        positions=positions,
        starts=starts,
        tables=tables,
        states=states,
    )
