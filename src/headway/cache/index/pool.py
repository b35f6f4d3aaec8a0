"""The block pool: uniform byte blocks, one free list, and two counts for each block.

A block is `block_bytes` of memory on every rank, with one id valid on all of them. The pool knows ids and counts,
nothing of what the blocks hold:

    * *references*: who holds it (an edge, a checkpoint, a lease). Without any it is free.
    * *users*: which leases and pins need it now. What is held and has no user can be evicted, so the blocks that
      could be had are known at any time without looking for them: all but those with a user.

All operations work on arrays of ids; each is O(ids given). Arrays are indexed by int64, which numpy need not convert.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError

__all__ = ["BlockPool"]

Ids = NDArray[np.int32]


class BlockPool:
    """Free list and counts of a fixed number of blocks.

    Attributes:
        blocks: Number of blocks.
        references: int32 [blocks], holders of each block; 0 means free.
        users: int32 [blocks], leases and pins that need each block.
        pins: int32 [blocks], how many of the users are pins.
        used: Blocks with a user.
        pinned: Blocks under a pin.
    """

    def __init__(self, blocks: int) -> None:
        """Make a pool of `blocks` free blocks.

        Raises:
            ConfigError: `blocks` below 1.
        """
        if blocks < 1:
            raise ConfigError(f"blocks is {blocks}: the pool needs at least one block")
        self.blocks = blocks
        self.references = np.zeros(blocks, dtype=np.int32)
        self.users = np.zeros(blocks, dtype=np.int32)
        self.pins = np.zeros(blocks, dtype=np.int32)
        self.used = 0
        self.pinned = 0
        self._stack = np.arange(blocks - 1, -1, -1, dtype=np.int64)
        self._free = blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._free

    @property
    def available(self) -> int:
        """Blocks that are free or could be evicted. O(1)."""
        return self.blocks - self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's own arrays."""
        return 20 * self.blocks

    # ---- leases: a reference and a use at once

    def take(self, count: int) -> Ids:
        """Take `count` free blocks, each with one holder, who needs it.

        The caller has made sure that they are free.
        """
        assert count <= self._free, "take() beyond the free blocks"
        self._free -= count
        self.used += count
        at = self._stack[self._free : self._free + count]
        self.references[at] = 1
        self.users[at] = 1
        return at.astype(np.int32)

    def hold(self, ids: Ids) -> None:
        """Add a holder who needs them to each of `ids` (all distinct, none free)."""
        self.share(ids)
        self.use(ids)

    def drop(self, ids: Ids) -> int:
        """Undo `hold` or `take` and return how many blocks became free."""
        self.disuse(ids)
        return self.release(ids)

    def drop_repeated(self, ids: Ids) -> None:
        """Like `drop`, for ids that may occur more than once (one holder and user less for each occurrence)."""
        if len(ids) == 0:
            return
        at, counts = np.unique(ids, return_counts=True)
        less = counts.astype(np.int32)
        self.users[at] -= less
        self.used -= int(np.count_nonzero(self.users[at] == 0))
        self.references[at] -= less
        self._push(at[self.references[at] == 0])

    # ---- uses

    def use(self, ids: Ids) -> None:
        """Add a user to each of `ids` (all distinct, none free)."""
        self.used += _raise(self.users, ids)

    def disuse(self, ids: Ids) -> None:
        """Take a user from each of `ids` (all distinct)."""
        self.used -= _lower(self.users, ids)

    def pin(self, ids: Ids) -> None:
        """Put each of `ids` (all distinct) under a pin, which is a use."""
        self.pinned += _raise(self.pins, ids)
        self.use(ids)

    def unpin(self, ids: Ids) -> None:
        """Undo `pin`."""
        self.pinned -= _lower(self.pins, ids)
        self.disuse(ids)

    # ---- references

    def share(self, ids: Ids) -> None:
        """Add a holder to each of `ids` (all distinct, none free)."""
        _raise(self.references, ids)

    def share_one(self, block: int) -> None:
        """Add a holder to one block."""
        self.references[block] += 1

    def release_one(self, block: int) -> int:
        """Drop one holder of one block and return 1 if it became free, else 0."""
        left = self.references.item(block) - 1
        self.references[block] = left
        if left:
            return 0
        self._stack[self._free] = block
        self._free += 1
        return 1

    def release(self, ids: Ids) -> int:
        """Drop one holder of each of `ids` (all distinct) and return how many became free."""
        if len(ids) == 1:
            return self.release_one(ids.item(0))
        at = ids.astype(np.int64)
        left = self.references[at] - 1
        self.references[at] = left
        return self._push(at if not left.any() else at[left == 0])

    def _push(self, freed: NDArray[np.integer]) -> int:
        count = len(freed)
        self._stack[self._free : self._free + count] = freed
        self._free += count
        return count

    def free_ids(self) -> NDArray[np.int64]:
        """Ids on the free list, for invariant checks."""
        return self._stack[: self._free]


def _raise(counts: Ids, ids: Ids) -> int:
    """Add one to the counts of distinct blocks and return how many were 0."""
    if len(ids) == 1:  # most often
        block = ids.item(0)
        counts[block] += 1
        return int(counts.item(block) == 1)
    at = ids.astype(np.int64)
    before = counts[at]
    counts[at] = before + 1
    return len(at) - int(np.count_nonzero(before))


def _lower(counts: Ids, ids: Ids) -> int:
    """Take one from the counts of distinct blocks and return how many are 0 now."""
    if len(ids) == 1:
        block = ids.item(0)
        counts[block] -= 1
        return int(counts.item(block) == 0)
    at = ids.astype(np.int64)
    after = counts[at] - 1
    counts[at] = after
    return len(at) - int(np.count_nonzero(after))
