"""Moves what a rank's blocks hold: whole blocks to host memory and back, and objects into and out of blocks.

All that is moved here was computed before and is used after: a move runs between steps, on the thread of the steps, and
is done when it returns. Bytes are moved as bytes, whatever types they have.

Objects are made and taken apart in host memory. On a CPU that is the arena itself. From a GPU the blocks in question
are fetched in one transfer, and brought back in one where they are written: to shuffle bytes on the GPU would take as
many kernels as there are fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import GroupGeometry, TableGeometry, TableKind
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.canonical import (
    Bytes,
    FieldShare,
    GroupShare,
    Portion,
    Runs,
    local_tokens,
    object_bytes,
    parts_of_object,
    parts_of_portion,
    portion_bytes,
)
from headway.runtime.interface import BlockRange

__all__ = ["BlockMover"]

Int32s = NDArray[np.int32]
_GATHERED = 1 << 18
"""Bytes that are gathered at once where single blocks are small: they stay in the processor's cache on their way."""
_DENSE = 4
"""Rows per row that is copied up to which all of them are looked at: that is quicker than sorting."""
_LARGE = 1 << 13
"""Bytes of a run from which it is copied by itself."""


class BlockMover:
    """Moves blocks and objects of one rank.

    Args:
        arena: The rank's blocks on its device.
        host: Its blocks in host memory; None for none.
        shares: What it has of each group's objects.
    """

    def __init__(self, arena: Arena, host: Arena | None, shares: tuple[GroupShare, ...]) -> None:
        self.arena = arena
        self.host = host
        self.shares: Mapping[str, GroupShare] = {share.group.name: share for share in shares}
        self._groups = {group.spec.name: group for group in arena.geometry.groups}

    def move(self, out: Int32s, back: Int32s) -> None:
        """Copy whole blocks to host memory, then others back (see `headway.engine.executor.Executor.move_blocks`)."""
        if len(out) == len(back) == 0:
            return
        assert self.host is not None, "there are no blocks in host memory: `host_blocks` is 0"
        _copy_rows(self.arena.rows, out[:, 0], self.host.rows, out[:, 1])
        _copy_rows(self.host.rows, back[:, 0], self.arena.rows, back[:, 1])
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(self.arena.device)

    def read(self, asked: BlockRange) -> Bytes:
        """An object, of a rank that is alone; uint8."""
        share = self.shares[asked.group]
        whole = np.zeros(object_bytes(share.group, asked), dtype=np.uint8)
        self._copy(_all_of(asked, share), parts_of_object(share, asked.tokens, whole), written=False)
        return whole

    def write(self, asked: BlockRange, data: Bytes) -> None:
        """Write an object, of a rank that is alone. No other byte of the blocks changes."""
        share = self.shares[asked.group]
        self._copy(_all_of(asked, share), parts_of_object(share, asked.tokens, data), written=True)

    def read_portion(self, portion: Portion) -> Bytes:
        """What this rank puts into a portion of an object (see `headway.runtime.forward.canonical.add_portion`)."""
        share, table = self._of(portion)
        data = np.empty(portion_bytes(portion, share, table, mine=True), dtype=np.uint8)
        self._copy(portion, parts_of_portion(portion, share, table, data, mine=True), written=False)
        return data

    def write_portion(self, portion: Portion, data: Bytes) -> None:
        """Write a portion to its blocks; `data` as from `take_portion`. No other byte of the blocks changes."""
        self._copy(portion, parts_of_portion(portion, *self._of(portion), data, mine=False), written=True)

    def _of(self, portion: Portion) -> tuple[GroupShare, TableGeometry]:
        return self.shares[portion.range.group], self._groups[portion.range.group].table

    def _copy(self, portion: Portion, parts: Iterable[tuple[FieldShare, Bytes, Runs]], written: bool) -> None:
        """Copy between the blocks of a portion and the bytes of its fields."""
        with self._rows(portion, written) as (rows, ids):
            group, (share, table) = self._groups[portion.range.group], self._of(portion)
            state, size = table.kind is TableKind.STATE, self.arena.geometry.block_bytes
            tokens = local_tokens(portion.range, share.shard, table)
            held = _State(rows, ids, group, size) if state else _Tokens(rows, ids, group, *tokens)
            for field, part, runs in parts:
                for in_blocks, in_part in held.pairs(field, part, runs):
                    if written:
                        in_blocks[...] = in_part
                    else:
                        in_part[...] = in_blocks

    @contextmanager
    def _rows(self, portion: Portion, written: bool) -> Iterator[tuple[Bytes, NDArray[np.int64]]]:
        """Memory of a portion's blocks, uint8 [any, bytes from row to row], and which row each of them is, or -1.

        Where that is not host memory, the blocks are brought there, and back if they are `written`.
        """
        arena = self.host if portion.range.host else self.arena
        assert arena is not None, "there are no blocks in host memory: `host_blocks` is 0"
        ids = np.asarray(portion.range.blocks, dtype=np.int64)
        if arena.device.type == "cpu":
            yield arena.rows.numpy(), ids
            return
        there = torch.from_numpy(ids[ids >= 0]).to(arena.rows.device)
        rows = arena.rows.index_select(0, there).cpu()
        yield rows.numpy(), np.where(ids >= 0, np.cumsum(ids >= 0) - 1, -1)
        if written:
            arena.rows.index_copy_(0, there, rows.to(arena.rows.device))


def _all_of(asked: BlockRange, share: GroupShare) -> Portion:
    return Portion(asked, (0, len(share.fields)))


class _State:
    """The bytes of a state in its blocks, one block's after another's: a field may begin in one and end in another."""

    def __init__(self, rows: Bytes, ids: NDArray[np.int64], group: GroupGeometry, size: int) -> None:
        self._rows, self._ids, self._offset, self._size = rows, ids, group.offset, size

    def pairs(self, field: FieldShare, part: Bytes, runs: Runs) -> Iterator[tuple[Bytes, Bytes]]:
        """Block by block, the same bytes as they are held and in `part`, [1, 1, any width]."""
        for piece, inside in runs:
            at = start = self._offset + field.offset + piece.local
            while at < start + piece.length:
                block, low = divmod(at, self._size)
                count = min(self._size - low, start + piece.length - at)
                target = inside + at - start
                if self._ids[block] >= 0:
                    yield self._rows[self._ids[block], low : low + count], part[0, 0, target : target + count]
                at += count


class _Tokens:
    """The bytes of a rank's tokens [first, stop), by their number in its own order, in the blocks that hold them."""

    def __init__(self, rows: Bytes, ids: NDArray[np.int64], group: GroupGeometry, first: int, stop: int) -> None:
        self._rows, self._group = rows, group
        apart = np.where(ids < 0, -2 * np.arange(1, len(ids) + 1), ids)  # what is not given is in no run
        self._stretches = [each for each in _stretches(apart, first, stop, group.block_tokens) if each[0] >= 0]

    def pairs(self, field: FieldShare, part: Bytes, runs: Runs) -> Iterator[tuple[Bytes, Bytes]]:
        """Run by run of blocks, the same bytes as they are held and in `part`: [count, blocks, tokens, bytes] both.

        Args:
            field: The field.
            part: uint8 [count, tokens, any width].
            runs: What to copy of each token.
        """
        size, stride = self._group.block_tokens, self._rows.shape[1]
        base = self._group.offset + field.offset * size
        for block, blocks, step, low, high, at in self._stretches:
            shape = field.count, blocks, high - low
            place = base + block * stride + low * field.bytes
            strides = field.step * size, step * stride, field.bytes, 1
            there: Bytes = np.ndarray((*shape, field.bytes), np.uint8, self._rows, place, strides)
            here = part[:, at : at + blocks * (high - low)].reshape(*shape, part.shape[2])  # a view: an axis is split
            for piece, inside in runs:
                yield there[..., piece.local : piece.local + piece.length], here[..., inside : inside + piece.length]


_Stretch: TypeAlias = tuple[int, int, int, int, int, int]


def _stretches(ids: NDArray[np.int64], first: int, stop: int, size: int) -> Iterator[_Stretch]:
    """Cut a rank's tokens [first, stop) so that whole blocks with consecutive ids come together.

    Args:
        ids: Blocks from the one on that holds token `first`, or would.
        first: First token.
        stop: Behind the last one.
        size: Tokens in a block.

    Yields:
        Id of the first block, blocks, 1 or -1 from each to the next, tokens of each of them [low, high), and how many
        tokens came before.
    """
    if stop <= first:
        return
    base = first // size
    full = range(-(-first // size), stop // size)
    if first % size:
        yield int(ids[0]), 1, 1, first % size, min(size, stop - base * size), 0
    if len(full):
        whole = ids[full.start - base : full.stop - base]
        starts, steps = _steps(whole)
        for at, stop_at in pairwise([*starts.tolist(), len(whole)]):
            step = int(steps[at]) if stop_at - at > 1 else 1
            yield int(whole[at]), stop_at - at, step, 0, size, (full.start + at) * size - first
    if stop % size and stop // size * size >= first:
        yield int(ids[stop // size - base]), 1, 1, 0, stop % size, stop // size * size - first


def _steps(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut ids, at least one, into runs that follow each other up or down: a pool gives its blocks either way.

    Returns:
        Where runs begin, and from every id to the next 1 or -1, or 0.
    """
    steps = np.diff(ids)
    steps[np.abs(steps) != 1] = 0
    broken = steps == 0
    broken[1:] |= (steps[1:] != steps[:-1]) & ~broken[:-1]
    return _starts(broken), steps


def _starts(broken: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where runs begin, from whether one ends with each thing but the last."""
    return np.concatenate(([0], np.flatnonzero(broken) + 1))


def _copy_rows(source: torch.Tensor, out: Int32s, target: torch.Tensor, to: Int32s) -> None:
    """Copy rows `out` of one memory to rows `to` of another, both uint8 [blocks, stride]."""
    if not len(out):
        return
    ids, others = _ordered(out, to)
    apart = np.diff(others) != 1
    starts = _starts(apart | (np.diff(ids) != 1))
    if source.device.type != "cpu" or target.device.type != "cpu":
        for first, place, count in _slices(starts, ids, others):
            target[place : place + count].copy_(source[first : first + count], non_blocking=True)
        return
    left, right, size = source.numpy(), target.numpy(), source.shape[1] * len(ids)
    if size >= len(starts) * _LARGE:
        for first, place, count in _slices(starts, ids, others):
            right[place : place + count] = left[first : first + count]
    elif size >= len(places := _starts(apart)) * _LARGE:  # straight to where they belong
        rows, to_rows, at = source.view(torch.int64), target.view(torch.int64), torch.from_numpy(ids)
        for first, place, count in _slices(places, np.arange(len(ids)), others):
            torch.index_select(rows, 0, at[first : first + count], out=to_rows[place : place + count])
    else:
        kind, step = np.dtype((np.void, source.shape[1])), max(1, _GATHERED // source.shape[1])
        these, those = left.view(kind)[:, 0], right.view(kind)[:, 0]
        for start in range(0, len(ids), step):
            those[others[start : start + step]] = these[ids[start : start + step]]


def _ordered(out: Int32s, to: Int32s) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of rows by where they are written, which is where runs help most."""
    low, high = int(to.min()), int(to.max())
    if high - low < _DENSE * len(to):
        which = np.full(high - low + 1, -1, dtype=np.int64)
        which[to - low] = out
        found = np.flatnonzero(which >= 0)
        return which[found], found + low
    order = np.argsort(to)
    return out[order].astype(np.int64), to[order].astype(np.int64)


def _slices(
    starts: NDArray[np.int64], ids: NDArray[np.int64], others: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """The first of `ids` and of `others` in each run, and how many they are."""
    counts = np.diff(starts, append=len(ids))
    return zip(ids[starts].tolist(), others[starts].tolist(), counts.tolist(), strict=True)
