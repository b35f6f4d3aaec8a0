"""Moves what a rank's blocks hold: whole blocks to host memory and back, and objects into and out of blocks.

All that is moved here was computed before and is used after: a move runs between steps, on the thread of the steps, and
is done when it returns. Bytes are moved as bytes, whatever types they have.

Objects are made and taken apart in host memory. On a CPU that is the arena itself. From a GPU the blocks in question
are fetched in one transfer, and brought back in one where they are written: to shuffle bytes on the GPU would take as
many kernels as there are fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import GroupGeometry, TableKind
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.canonical import (
    Bytes,
    FieldShare,
    GroupShare,
    Portion,
    add_portion,
    local_tokens,
    object_bytes,
    take_portion,
)
from headway.runtime.interface import BlockRange

__all__ = ["BlockMover"]

Int32s = NDArray[np.int32]
_GATHERED = 1 << 18
"""Bytes that are gathered at once where single blocks are small: they stay in the processor's cache on their way."""
_LARGE = 1 << 14
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
        share, table = self.shares[asked.group], self._groups[asked.group].table
        portion = Portion(asked, (0, len(share.fields)))
        data = self.read_portion(portion)
        if len(share.fields) == 1 and len(data) == object_bytes(share.group, asked):
            return data
        whole = np.zeros(object_bytes(share.group, asked), dtype=np.uint8)
        add_portion(whole, asked, portion, share, table, data)
        return whole

    def write(self, asked: BlockRange, data: Bytes) -> None:
        """Write an object, of a rank that is alone."""
        share, table = self.shares[asked.group], self._groups[asked.group].table
        portion = Portion(asked, (0, len(share.fields)))
        self.write_portion(portion, take_portion(data, asked, portion, share, table))

    def read_portion(self, portion: Portion) -> Bytes:
        """What this rank puts into a portion of an object (see `headway.runtime.forward.canonical.add_portion`)."""
        share, group = self.shares[portion.range.group], self._groups[portion.range.group]
        fields = share.fields[slice(*portion.fields)]
        widths = [sum(piece.length for piece in field.mine) for field in fields]
        first, stop = local_tokens(portion.range, share.shard, group.table)
        data = np.empty(
            sum(field.count * width for field, width in zip(fields, widths, strict=True)) * (stop - first), np.uint8
        )
        at = 0
        with self._held(portion, fields, group, written=False) as held:
            for field, width in zip(fields, widths, strict=True):
                part = data[at : at + field.count * (stop - first) * width].reshape(field.count, stop - first, width)
                at += part.size
                for there, here in held.views(field, part, first, stop):
                    inside = 0
                    for piece in field.mine:
                        taken = there[..., piece.local : piece.local + piece.length]
                        here[..., inside : inside + piece.length] = taken
                        inside += piece.length
        return data

    def write_portion(self, portion: Portion, data: Bytes) -> None:
        """Write a portion to its blocks; `data` as from `take_portion`. No other byte of the blocks changes."""
        share, group = self.shares[portion.range.group], self._groups[portion.range.group]
        fields = share.fields[slice(*portion.fields)]
        first, stop = local_tokens(portion.range, share.shard, group.table)
        at = 0
        with self._held(portion, fields, group, written=True) as held:
            for field in fields:
                shape = field.count, stop - first, field.bytes
                part = data[at : at + math.prod(shape)].reshape(shape)
                at += part.size
                for there, here in held.views(field, part, first, stop):
                    there[...] = here
        assert at == len(data), f"{len(data)} bytes were sent for {at} of {portion.range.group}"

    @contextmanager
    def _held(
        self, portion: Portion, fields: Sequence[FieldShare], group: GroupGeometry, written: bool
    ) -> Iterator[_Tokens | _State]:
        """The bytes of a portion's blocks in host memory; where they are not there, they are brought there and back."""
        arena = self.host if portion.range.host else self.arena
        assert arena is not None, "there are no blocks in host memory: `host_blocks` is 0"
        ids = np.asarray(portion.range.blocks, dtype=np.int64)
        size = arena.geometry.block_bytes
        start = 0
        if group.table.kind is TableKind.STATE:
            ends = [group.offset + field.offset + field.bytes for field in fields]
            start = (group.offset + fields[0].offset) // size
            ids = ids[start : -(-max(ends) // size)]
        direct, kept = arena.device.type == "cpu", ids[ids >= 0]
        rows = arena.rows if direct else arena.rows.index_select(0, torch.from_numpy(kept).to(arena.device)).cpu()
        here = ids
        if not direct:
            here = np.full_like(ids, -1)
            here[ids >= 0] = np.arange(len(kept))
        if group.table.kind is TableKind.STATE:
            state = _State(rows.numpy(), here, size, group.offset - start * size)
            yield state
            if written:
                state.put_back()
        else:
            yield _Tokens(rows.numpy(), here, group)
        if written and not direct:
            arena.rows.index_copy_(0, torch.from_numpy(kept).to(arena.device), rows.to(arena.device))


class _State:
    """The bytes of a state, one block's after another's: a field may begin in one and end in the next."""

    def __init__(self, rows: Bytes, ids: NDArray[np.int64], size: int, offset: int) -> None:
        self._rows, self._ids, self._size, self._offset = rows, ids, size, offset
        self._bytes = np.empty((len(ids), size), dtype=np.uint8)
        for at, first, count in _runs(ids):
            self._bytes[at : at + count] = rows[first : first + count, :size]

    def views(self, field: FieldShare, part: Bytes, first: int, stop: int) -> Iterator[tuple[Bytes, Bytes]]:
        """The field's bytes as they are held, and `part`, [count, 1, bytes] both."""
        start = self._offset + field.offset
        yield self._bytes.reshape(-1)[start : start + field.bytes].reshape(1, 1, -1), part

    def put_back(self) -> None:
        """Write to the blocks what has become of the bytes."""
        for at, first, count in _runs(self._ids):
            self._rows[first : first + count, : self._size] = self._bytes[at : at + count]


class _Tokens:
    """The bytes of tokens' entries in their blocks."""

    def __init__(self, rows: Bytes, ids: NDArray[np.int64], group: GroupGeometry) -> None:
        self._rows, self._ids, self._group = rows, ids, group

    def views(self, field: FieldShare, part: Bytes, first: int, stop: int) -> Iterator[tuple[Bytes, Bytes]]:
        """Run by run of blocks: the field's bytes as they are held, and the same tokens of `part`.

        Blocks that are not given are left out.

        Args:
            field: The field.
            part: uint8 [count, stop - first, any width].
            first: First token, by its number in the rank's own order.
            stop: Behind the last one.

        Yields:
            uint8 [count, blocks, tokens, bytes] and [count, blocks, tokens, any width].
        """
        size, stride = self._group.block_tokens, self._rows.shape[1]
        ids = np.where(self._ids < 0, -2 * np.arange(1, len(self._ids) + 1), self._ids)  # none of these follow others
        width, inside = part.shape[2], part.shape[1] * part.shape[2]
        for block, blocks, low, high, at in _stretches(ids, first, stop, size):
            if block < 0:
                continue
            shape = field.count, blocks, high - low
            there: Bytes = np.ndarray(
                (*shape, field.bytes),
                np.uint8,
                self._rows,
                block * stride + self._group.offset + field.offset * size + low * field.bytes,
                (field.step * size, stride, field.bytes, 1),
            )
            here: Bytes = np.ndarray(
                (*shape, width), np.uint8, part, at * width, (inside, (high - low) * width, width, 1)
            )
            yield there, here


def _stretches(ids: NDArray[np.int64], first: int, stop: int, size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut a rank's tokens [first, stop) so that whole blocks with consecutive ids come together.

    Args:
        ids: Blocks from the one on that holds token `first`, or would.
        first: First token.
        stop: Behind the last one.
        size: Tokens in a block.

    Yields:
        Id of the first block, blocks, tokens of each of them [low, high), and how many tokens came before.
    """
    if stop <= first:
        return
    base = first // size
    full = range(-(-first // size), stop // size)
    if first % size:
        yield int(ids[0]), 1, first % size, min(size, stop - base * size), 0
    if len(full):
        for at, block, count in _runs(ids[full.start - base : full.stop - base]):
            yield block, count, 0, size, (full.start + at) * size - first
    if stop % size and stop // size * size >= first:
        yield int(ids[stop // size - base]), 1, 0, stop % size, stop // size * size - first


def _runs(ids: NDArray[np.int64], others: NDArray[np.int64] | None = None) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive ids, those of `others` as well: where each begins, its first id, and how many they are."""
    if not len(ids):
        return
    broken = np.diff(ids) != 1
    if others is not None:
        broken |= np.diff(others) != 1
    starts = [0, *(np.flatnonzero(broken) + 1).tolist(), len(ids)]
    for start, stop in pairwise(starts):
        yield start, int(ids[start]), stop - start


def _copy_rows(source: torch.Tensor, out: Int32s, target: torch.Tensor, to: Int32s) -> None:
    """Copy rows `out` of one memory to rows `to` of another, both uint8 [blocks, stride]."""
    ids, others = out.astype(np.int64), to.astype(np.int64)
    runs = list(_runs(ids, others))
    stride = source.shape[1]
    if source.device.type != "cpu" or target.device.type != "cpu":
        for at, first, count in runs:
            there = int(others[at])
            target[there : there + count].copy_(source[first : first + count], non_blocking=True)
    elif len(ids) * stride >= len(runs) * _LARGE:
        left, right = source.numpy(), target.numpy()
        for at, first, count in runs:
            right[others[at] : others[at] + count] = left[first : first + count]
    else:
        kind = np.dtype((np.void, stride))
        left, right = source.numpy().view(kind)[:, 0], target.numpy().view(kind)[:, 0]
        step = max(1, _GATHERED // stride)
        for start in range(0, len(ids), step):
            right[others[start : start + step]] = left[ids[start : start + step]]
