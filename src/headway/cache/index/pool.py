"""The block pool: uniform byte blocks, one free list, and two counts for each block.

A block is `block_bytes` of memory on every rank, with one id valid on all of them. The pool knows ids and counts,
nothing of what the blocks hold:

    * *references*: who holds it (an edge, a checkpoint, a lease). Without any it is free.
    * *users*: which leases and pins need it now. What is held and has no user can be evicted, so the blocks that
      could be had are known at any time without looking for them: all but those with a user.

Both counts of a block lie in one integer, so that what changes both, as most calls do, changes one array. All
operations work on arrays of distinct ids; each is O(ids given). Single ids, which are frequent, take a shorter way.
"""

from __future__ import annotations

import numpy as np

from headway.cache.shape.geometry import Ids, Longs
from headway.errors import ConfigError

__all__ = ["BlockPool"]

_USER = 1 << 32
"""What one user adds to the count of a block; a holder adds one."""
_HOLDERS = _USER - 1
"""The part of a count that is holders."""
_CHANGES = {(h, u): np.array(h + u * _USER) for h in (-1, 0, 1) for u in (-1, 0, 1)}
_FEW = 4
"""Ids up to which it is faster to treat one after the other."""
_ONE_USER = np.array(_USER)
"""Numbers as arrays, which numpy need not convert again for each use."""


class BlockPool:
    """Free list and counts of a fixed number of blocks.

    Attributes:
        blocks: Number of blocks.
        free: Blocks that nobody holds.
        used: Blocks with a user.
        pinned: Blocks under a pin.
        pins: int32 [blocks], how many of the users of each block are pins.
    """

    def __init__(self, blocks: int) -> None:
        """Make a pool of `blocks` free blocks.

        Raises:
            ConfigError: `blocks` below 1.
        """
        if blocks < 1:
            raise ConfigError(f"blocks is {blocks}: the pool needs at least one block")
        self.blocks = self.free = blocks
        self.used = self.pinned = 0
        self.pins = np.zeros(blocks, dtype=np.int32)
        self._counts = np.zeros(blocks, dtype=np.int64)
        self._stack = np.arange(blocks - 1, -1, -1, dtype=np.int64)

    @property
    def available(self) -> int:
        """Blocks that are free or could be evicted. O(1)."""
        return self.blocks - self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's own arrays."""
        return self.pins.nbytes + self._counts.nbytes + self._stack.nbytes

    @property
    def references(self) -> Longs:
        """int64 [blocks], holders of each block, of a state on its first block (1 on the others); 0 means free."""
        return self._counts & _HOLDERS

    @property
    def users(self) -> Longs:
        """int64 [blocks], leases and pins that need each block, of a state on its first block (1 on the others)."""
        return self._counts >> 32

    def take(self, count: int) -> Ids:
        """Take `count` free blocks, each with one holder, who needs it.

        The caller has made sure that they are free.
        """
        assert count <= self.free, "take() beyond the free blocks"
        self.free -= count
        self.used += count
        at = self._stack[self.free : self.free + count]
        self._counts[at] = 1 + _USER
        return at.astype(np.int32)

    def hold(self, ids: Ids, *, whole: bool = False) -> None:
        """Add a holder who needs them to each of `ids` (none free)."""
        self._change(ids, 1, 1, whole)

    def drop(self, ids: Ids, *, whole: bool = False) -> None:
        """Undo `hold` or `take`."""
        self._change(ids, -1, -1, whole)

    def drop_repeated(self, ids: Ids) -> None:
        """Like `drop`, for ids that may occur more than once (one holder and user less for each occurrence)."""
        if len(ids):
            distinct, counts = np.unique(ids, return_counts=True)
            self._change(distinct, -1, -1, times=counts)

    def use(self, ids: Ids, *, whole: bool = False) -> None:
        """Add a user to each of `ids` (none free)."""
        self._change(ids, 0, 1, whole)

    def disuse(self, ids: Ids, *, whole: bool = False) -> None:
        """Take a user from each of `ids`."""
        self._change(ids, 0, -1, whole)

    def share(self, ids: Ids) -> None:
        """Add a holder to each of `ids` (none free)."""
        self._change(ids, 1, 0)

    def share_one(self, block: int) -> None:
        """`share` for one block."""
        self._change_one(block, 1, 0)

    def release_one(self, block: int) -> None:
        """`release` for one block."""
        self._change_one(block, -1, 0)

    def release(self, ids: Ids, *, whole: bool = False) -> int:
        """Drop one holder of each of `ids` and return how many became free."""
        return self._change(ids, -1, 0, whole)

    def pin(self, ids: Ids, *, whole: bool = False) -> None:
        """Put each of `ids` under a pin, which is a use."""
        self.pins[ids] += 1
        self.pinned += int(np.count_nonzero(self.pins[ids] == 1))
        self.use(ids, whole=whole)

    def unpin(self, ids: Ids, *, whole: bool = False) -> None:
        """Undo `pin`."""
        self.pins[ids] -= 1
        self.pinned -= int(np.count_nonzero(self.pins[ids] == 0))
        self.disuse(ids, whole=whole)

    def free_ids(self) -> Longs:
        """Ids on the free list, for invariant checks."""
        return self._stack[: self.free]

    def _change_one(self, block: int, holders: int, users: int, state: Ids | None = None) -> int:
        """Change the counts of one block, which may be the first of a state."""
        before, weight = self._counts.item(block), 1 if state is None else len(state)
        self._counts[block] = after = before + holders + users * _USER
        self.used += weight * ((after >= _USER) - (before >= _USER))
        if holders >= 0 or after & _HOLDERS:
            return 0
        if state is None:
            self._stack[self.free] = block
        else:
            self._counts[state] = 0
            self._stack[self.free : self.free + weight] = state
        self.free += weight
        return weight

    def _change(self, ids: Ids, holders: int, users: int, whole: bool = False, times: Longs | None = None) -> int:
        """Add to the holders and users of distinct blocks (1, 0 or -1 each, or so many `times` that).

        Returns:
            How many blocks became free.
        """
        if whole:
            return self._change_one(ids.item(0), holders, users, ids)
        if len(ids) <= _FEW and times is None:
            return sum([self._change_one(block, holders, users) for block in ids.tolist()])
        at = ids.astype(np.int64)  # which numpy need not convert again to index with it
        before, change = self._counts[at], _CHANGES[holders, users]
        self._counts[at] = after = before + (change if times is None else times * change)
        if users > 0:
            self.used += int(np.count_nonzero(before < _ONE_USER))
        elif users < 0:
            self.used -= int(np.count_nonzero(after < _ONE_USER))
        if holders >= 0:
            return 0
        freed = at[after & _HOLDERS == 0]
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)
        return len(freed)
