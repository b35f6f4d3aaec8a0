"""Where every token lives: computed once from specs and layout, and asked by everything else.

Groups that need the same entries at a resume point (same kind, same window or chunk, same sharding) are always taken
and freed together, so they share one *block table*: their bytes add up and one block id holds their entries of the same
tokens. There is at most one table of sharded full attention, one of replicated full attention, one for each window and
chunk, and one of states. A target and its MLA draft thus cost one block id for a stretch of tokens, not two.

Rejected: a table a group. It needs twice the ids and twice the bookkeeping for a draft, and it rounds the draft's
memory up to blocks sized for the target. (For an engine whose groups have tables of their own anyway, a spec says so.)
Also rejected: one block size for all kinds (the engines' choice), which
inflates an attention block to the size of a state.

Formulas for N shards, interleave I, b tokens in a block on one rank, V = N*b:
token p lies in block p // V, on rank (p // I) % N, at offset ((p % V) // (N*I)) * I + p % I inside the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache.shape.spec import (
    ChunkedLocal,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
    check_names,
)
from headway.errors import ConfigError

__all__ = ["CacheGeometry", "GroupGeometry", "Ids", "Longs", "TableGeometry", "TableKind"]

Ids = NDArray[np.int32]
"""Block ids, or tokens."""
Longs = NDArray[np.int64]
"""Positions, counts or rows."""
Positions = TypeVar("Positions", int, Longs)
_FIRST_STRETCH = 1024
"""Positions at the end of a sequence that are searched first for its largest need; then twice as many, and so on."""
_PEAKS_REMEMBERED = 4096
"""Lengths whose largest need is remembered."""


class TableKind(Enum):
    """What the entries of a block table are needed for."""

    PREFIX = "prefix"
    """Every entry of the prefix (full attention)."""
    WINDOW = "window"
    """The last window - 1 entries."""
    CHUNK = "chunk"
    """The entries since the start of the chunk."""
    STATE = "state"
    """One state after exactly the prefix."""
    SCRATCH = "scratch"
    """Nothing: a running sequence has them for itself."""


@dataclass(frozen=True)
class TableGeometry:
    """Geometry of one block table.

    Attributes:
        index: Number of the table.
        kind: What its entries are needed for.
        shards: Ranks over which its tokens are split (1: every rank holds all).
        block_tokens: Tokens in one block on one rank; 0 for states.
        bytes_per_token: Bytes of one token on the rank that stores it, over all groups of the table; 0 for states.
        state_bytes: Bytes of one state on one rank, over all groups of the table; 0 for token-indexed tables.
        state_blocks: Blocks that one state takes, or a sequence has as scratch; 0 for token-indexed tables.
        window: Tokens that a query sees (WINDOW), else 0.
        chunk: Tokens in a chunk (CHUNK), else 0.
        interleave: Consecutive tokens on one rank.
        span: Tokens of the sequence that one block id covers (0 for states).
    """

    index: int
    kind: TableKind
    shards: int = 1
    block_tokens: int = 0
    bytes_per_token: int = 0
    state_bytes: int = 0
    state_blocks: int = 0
    window: int = 0
    chunk: int = 0
    interleave: int = 1
    span: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """What follows from the other fields."""
        object.__setattr__(self, "span", self.block_tokens * self.shards)

    def first_needed(self, position: Positions) -> Positions:
        """First position whose entry is needed to resume at `position` (equal to it where none is).

        Takes an int, or int64 of any shape and returns that shape.
        """
        if self.kind is TableKind.WINDOW:
            first = position - self.window + 1
            return first * (first > 0)
        if self.kind is TableKind.CHUNK:
            return position // self.chunk * self.chunk
        return position * 0 if self.kind is TableKind.PREFIX else position

    def serves_from(self, position: int, block: int) -> int:
        """First position at which one can resume by what a checkpoint at `position` holds: blocks from `block` on.

        Of a window these begin with a whole block; of a chunk only its own entries count. At least 1.
        """
        if self.kind is TableKind.STATE:
            return position
        if self.kind is TableKind.WINDOW:
            return block * self.span + self.window - 1 if block and self.window > 1 else 1
        return max(1, self.first_needed(position))

    def blocks_at(self, position: Positions) -> Positions:
        """Block ids that a sequence holds while it computes the token at `position`: what that token sees, and itself.

        Takes an int, or int64 of any shape and returns that shape.
        """
        if not self.span:
            return position * 0 + self.state_blocks
        return position // self.span + 1 - self.first_needed(position) // self.span

    def blocks_copied(self, position: int) -> int:
        """Block ids that a sequence which resumes at `position` copies, and holds until its first step is done."""
        if self.kind is TableKind.STATE:
            return self.state_blocks if position else 0
        if self.kind is TableKind.SCRATCH:
            return 0
        return int(position % self.span > 0 and self.first_needed(position) < position)

    def most_blocks(self, length: int) -> int:
        """Upper bound of `blocks_at` over the first `length` positions, which long sequences reach."""
        if not self.span:
            return self.state_blocks
        end = self.blocks_for(length)
        if self.kind is TableKind.WINDOW:
            return min(end, (self.window - 2) // self.span + 2)
        if self.kind is TableKind.CHUNK:
            latest = self.span - math.gcd(self.chunk, self.span)  # where in its block the first token of a chunk lies
            return min(end, (latest + self.chunk - 1) // self.span + 1)
        return end

    def blocks_for(self, tokens: int) -> int:
        """Block ids that cover positions [0, tokens); all that a sequence has of a table of states or scratch."""
        if not self.span:
            return self.state_blocks
        return -(-tokens // self.span)

    def owner(self, positions: ArrayLike) -> Longs:
        """Rank (0 to shards - 1) that stores each position."""
        return np.asarray(positions, dtype=np.int64) // self.interleave % self.shards

    def local_index(self, positions: ArrayLike) -> Longs:
        """Number of earlier tokens that the owner of each position stores: its index in the owner's own order."""
        p = np.asarray(positions, dtype=np.int64)
        stripe = self.shards * self.interleave
        return p // stripe * self.interleave + p % self.interleave

    def global_index(self, local: ArrayLike, rank: int) -> Longs:
        """Position of the token with index `local` on `rank`: the inverse of `local_index` on its own tokens."""
        index = np.asarray(local, dtype=np.int64)
        stripe = self.shards * self.interleave
        return index // self.interleave * stripe + rank * self.interleave + index % self.interleave

    def local_length(self, length: ArrayLike, rank: int) -> Longs:
        """How many of the first `length` tokens `rank` stores."""
        n = np.asarray(length, dtype=np.int64)
        stripe = self.shards * self.interleave
        rest = np.clip(n % stripe - rank * self.interleave, 0, self.interleave)
        return n // stripe * self.interleave + rest

    def slots(self, positions: ArrayLike, rank: int, row: Ids) -> Longs:
        """Slots of `positions` on `rank`.

        Args:
            positions: Token positions, any shape.
            rank: The rank, 0 to shards - 1.
            row: Block-table row, int32 [width]: block index -> block id.

        Returns:
            int64, shape of `positions`: block id x block_tokens + offset, or -1 where another rank owns the token.
        """
        p = np.asarray(positions, dtype=np.int64)
        local = self.local_index(p)
        slot = row[p // self.span].astype(np.int64) * self.block_tokens + local % self.block_tokens
        return np.where(self.owner(p) == rank, slot, -1)


@dataclass(frozen=True)
class GroupGeometry:
    """Where one group's bytes lie.

    Attributes:
        spec: The group's spec.
        table: Geometry of the block table it uses.
        offset: First byte of its region: inside a block (token-indexed), or inside the state's bytes (recurrent).
    """

    spec: LayerSpec
    table: TableGeometry
    offset: int

    @property
    def span(self) -> int:
        """Tokens of the sequence that one block id covers (0 for states)."""
        return self.table.span

    @property
    def shards(self) -> int:
        """Ranks over which the group's tokens are split."""
        return self.table.shards

    @property
    def block_tokens(self) -> int:
        """Tokens in one block on one rank (0 for states)."""
        return self.table.block_tokens


class CacheGeometry:
    """Geometry of all groups under one layout.

    Attributes:
        layout: The parallel layout.
        block_bytes: Bytes of one block on every rank.
        tables: Geometry of each block table.
        groups: Geometry of each group, in the order given.
        lookahead: Largest lookahead of any group: a resume point p needs p + lookahead matched tokens.
        prefix_tables: The tables of full attention.
        tail_tables: The tables of windows, chunks and states: what a checkpoint holds.
        token_tables: All tables but that of states.
        state_table: The table of states, or None.
        state_blocks: Blocks that one state takes, 0 without states.
        local: Whether there are windows or chunks, whose blocks are let go as the sequence goes on.
        checkpoint_blocks: Blocks that a checkpoint takes, as a rough figure.
        least_span: Tokens in a block of the finest table of full attention, 1 if there is none.
        ranges: Whether a checkpoint can serve positions before its own: there are windows or chunks, and no states.
    """

    def __init__(
        self,
        groups: Sequence[LayerSpec],
        layout: ParallelLayout | None = None,
        *,
        block_tokens: int | None = None,
        block_bytes: int | None = None,
        scratch_blocks: int = 0,
    ) -> None:
        """Compute the geometry.

        Args:
            groups: Specs of the cache groups.
            layout: Parallel layout; one rank if not given.
            block_tokens: Tokens of the first token-indexed table in one block on one rank (16 if neither is given).
            block_bytes: Bytes of a block on one rank, instead of `block_tokens`.
            scratch_blocks: Blocks that every running sequence has for itself besides, in a last table of their own.

        Raises:
            ConfigError: Sizes that cannot work; the message says what to change.
        """
        check_names(groups)
        self.layout = layout or ParallelLayout()
        if block_tokens is not None and block_bytes is not None:
            raise ConfigError("give block_tokens or block_bytes, not both: either fixes the other")
        families = _families(groups)
        if block_bytes is None:
            block_bytes = _block_bytes(families, self.layout, 16 if block_tokens is None else block_tokens)
        self.block_bytes = block_bytes
        self.tables = tuple(_table(i, family, self.layout, self.block_bytes) for i, family in enumerate(families))
        self.groups = _place_groups(groups, families, self.tables)
        if scratch_blocks:
            self.tables += (TableGeometry(len(families), TableKind.SCRATCH, state_blocks=scratch_blocks),)
        self.lookahead = max(group.lookahead for group in groups)
        self.prefix_tables = tuple(t for t in self.tables if t.kind is TableKind.PREFIX)
        self.tail_tables = tuple(t for t in self.tables if t.kind not in (TableKind.PREFIX, TableKind.SCRATCH))
        self.state_table = next((t for t in self.tables if t.kind is TableKind.STATE), None)
        self.state_blocks = self.state_table.state_blocks if self.state_table else 0
        self.local = any(t.kind in (TableKind.WINDOW, TableKind.CHUNK) for t in self.tables)
        self.ranges = self.local and self.state_table is None
        self.token_tables = tuple(t for t in self.tables if t.span)
        self.checkpoint_blocks = sum(t.blocks_for(t.window or t.chunk) for t in self.tail_tables)
        self.least_span = min((t.span for t in self.prefix_tables), default=1)
        self._blocks_per_token = sum(1 / t.span for t in self.token_tables)
        self._blocks_besides = 4 * len(self.token_tables) + 2 * self.state_blocks + scratch_blocks
        self._peaks: dict[tuple[int, int], int] = {}

    def serves_from(self, position: int, blocks: Sequence[int]) -> int:
        """First position that a checkpoint at `position` serves whose tail tables begin with the indices `blocks`."""
        return max(t.serves_from(position, block) for t, block in zip(self.tail_tables, blocks, strict=True))

    def peak_blocks(self, length: int, start: int = 0) -> int:
        """Most blocks that a sequence alone in the pool needs at once, over all its positions.

        It is computed in steps of one token, which need least. The peak need not lie at the end: a chunk is largest
        just before the next one begins.

        Args:
            length: Tokens of the sequence.
            start: Position from which it is computed. What resuming there copies is not counted: see `resume_blocks`.

        Returns:
            The largest of `blocks_at` of the positions [start, length), 0 if there are none. Exact. O(tables) without
            windows and chunks; else one pass over the last few thousand positions or chunks. Remembered.
        """
        if length <= start:
            return 0
        peak = self._peaks.get((length, start))
        if peak is None:
            if len(self._peaks) >= _PEAKS_REMEMBERED:
                self._peaks.clear()
            peak = self._peaks[length, start] = self._find_peak(length, start)
        return peak

    def _find_peak(self, length: int, start: int) -> int:
        """`peak_blocks`: backwards, until no earlier position can reach what has been found."""
        peak = sum(table.blocks_at(length - 1) for table in self.tables)
        stop, stretch = length - 1, _FIRST_STRETCH
        while stop > start and self._most_blocks(stop) > peak:
            low = max(start, stop - stretch)
            rises = [np.arange(-(-low // t.span) * t.span, stop, t.span) for t in self.token_tables]
            positions = np.concatenate([[low], *rises])  # the need rises only where a block begins
            need = sum((table.blocks_at(positions) for table in self.tables), start=np.zeros_like(positions))
            peak = max(peak, int(need.max()))
            stop, stretch = low, min(2 * stretch, 64 * _FIRST_STRETCH)
        return peak

    def _most_blocks(self, length: int) -> int:
        return sum(table.most_blocks(length) for table in self.tables)

    def resume_blocks(self, position: int) -> int:
        """Blocks that the first step of one token needs at `position`, if what precedes it is resumed from a hit.

        A block that `position` lies inside of, and the state, are copied: original and copy are held at once.
        """
        return sum(table.blocks_at(position) + table.blocks_copied(position) for table in self.tables)

    def blocks_kept_twice(self, position: int) -> int:
        """Blocks that the index keeps beside a sequence's copies as long as that runs, if it has resumed at `position`.

        The index keeps one prefix for all tables. The sequence uses it up to the last block boundary of any table
        before `position`, which can lie inside a block of another table: that one the sequence has copied.
        """
        kept = max((position // table.span * table.span for table in self.prefix_tables), default=0)
        return sum(kept % table.span > 0 for table in self.prefix_tables)

    def fits_anyway(self, blocks: int, length: int) -> bool:
        """Whether `length` tokens fit into `blocks` wherever they resume, by the roughest bound. O(1)."""
        return length * self._blocks_per_token + self._blocks_besides <= blocks

    def fits(self, blocks: int, length: int, start: int = 0) -> bool:
        """Whether `peak_blocks(length, start) <= blocks`: O(tables) wherever `blocks` is not scarce."""
        return self._most_blocks(length) <= blocks or self.peak_blocks(length, start) <= blocks

    def group(self, name: str) -> GroupGeometry:
        """Geometry of the group called `name`.

        Raises:
            KeyError: No such group.
        """
        return {group.spec.name: group for group in self.groups}[name]


def _families(groups: Sequence[LayerSpec]) -> list[list[LayerSpec]]:
    """Groups that share a table, token-indexed ones in the order given, states last."""
    families: dict[tuple[object, ...], list[LayerSpec]] = {}
    for spec in groups:
        need = getattr(spec, "window", 0) or getattr(spec, "chunk", 0)
        apart = "" if isinstance(spec, Recurrent) or not spec.own_table else spec.name
        families.setdefault((type(spec), spec.sharded, need, apart), []).append(spec)
    return sorted(families.values(), key=lambda family: isinstance(family[0], Recurrent))


def _bytes_per_token(family: list[LayerSpec]) -> int:
    return sum(spec.bytes_per_token for spec in family if not isinstance(spec, Recurrent))


def _block_bytes(families: list[list[LayerSpec]], layout: ParallelLayout, block_tokens: int) -> int:
    """Bytes of a block in which `block_tokens` tokens of the first table fit; a state's where there are only states."""
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}, it must be at least 1")
    first = families[0]
    if isinstance(first[0], Recurrent):
        return sum(spec.state_bytes for spec in first if isinstance(spec, Recurrent))
    if first[0].sharded and layout.shards > 1 and block_tokens % layout.interleave:
        raise ConfigError(
            f"block_tokens={block_tokens} is not a multiple of interleave={layout.interleave}: a block must hold whole "
            f"stripes, so choose an interleave that divides {block_tokens} or a larger block"
        )
    return block_tokens * _bytes_per_token(first)


def _table(index: int, family: list[LayerSpec], layout: ParallelLayout, block_bytes: int) -> TableGeometry:
    first = family[0]
    if isinstance(first, Recurrent):
        total = sum(spec.state_bytes for spec in family if isinstance(spec, Recurrent))
        return TableGeometry(index, TableKind.STATE, state_bytes=total, state_blocks=-(-total // block_bytes))
    per_token = _bytes_per_token(family)
    shards = layout.shards if first.sharded else 1
    interleave = layout.interleave if shards > 1 else 1
    fit = block_bytes // per_token // interleave * interleave
    if fit == 0:
        raise ConfigError(
            f"group {first.name!r}: a block of {block_bytes} bytes cannot hold {interleave} token(s) of {per_token} "
            f"bytes (the interleave); raise block_tokens so that block_bytes is at least {interleave * per_token}"
        )
    return TableGeometry(
        index,
        _KINDS[type(first)],
        shards=shards,
        block_tokens=fit,
        bytes_per_token=per_token,
        window=getattr(first, "window", 0),
        chunk=getattr(first, "chunk", 0),
        interleave=interleave,
    )


def _place_groups(
    groups: Sequence[LayerSpec], families: list[list[LayerSpec]], tables: Sequence[TableGeometry]
) -> tuple[GroupGeometry, ...]:
    """Give every group its region: one after another, in the order of the specs of its table."""
    placed: dict[str, GroupGeometry] = {}
    for family, table in zip(families, tables, strict=True):
        offset = 0
        for spec in family:
            placed[spec.name] = GroupGeometry(spec, table, offset)
            offset += spec.state_bytes if isinstance(spec, Recurrent) else spec.bytes_per_token * table.block_tokens
    return tuple(placed[spec.name] for spec in groups)


_KINDS = {FullAttention: TableKind.PREFIX, SlidingWindow: TableKind.WINDOW, ChunkedLocal: TableKind.CHUNK}
