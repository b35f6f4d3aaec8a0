"""The block pool: uniform byte blocks, one free list and one reference count for everything.

A block is `block_bytes` of memory on every rank, with one id valid on all of them. The pool knows ids and counts,
nothing of what the blocks hold. All operations work on arrays; each is O(ids given), a block costs O(1) amortised.
Single ids, which are frequent, take a shorter way than an array of one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError

__all__ = ["BlockPool"]

Ids = NDArray[np.int32]


class BlockPool:
    """Free list and reference counts of a fixed number of blocks.

    Attributes:
        blocks: Number of blocks.
        references: int32 [blocks], holders of each block; 0 means free.
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
        self._stack = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        self._free = blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._free

    def take(self, count: int) -> Ids:
        """Take `count` free blocks, each with one holder.

        The caller has made sure that they are free.
        """
        assert count <= self._free, "take() beyond the free blocks"
        self._free -= count
        ids = self._stack[self._free : self._free + count].copy()
        if count == 1:
            self.references[ids.item(0)] = 1
        else:
            self.references[ids] = 1
        return ids

    def share(self, ids: Ids) -> None:
        """Add a holder to each of `ids` (all distinct, none free)."""
        if len(ids) == 1:
            self.references[ids.item(0)] += 1
        else:
            self.references[ids] += 1

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
        left = self.references[ids] - 1
        self.references[ids] = left
        freed = ids[left == 0]
        return self._push(freed)

    def release_repeated(self, ids: Ids) -> int:
        """Like `release`, for ids that may occur more than once (one holder dropped for each occurrence)."""
        distinct, counts = np.unique(ids, return_counts=True)
        left = self.references[distinct] - counts.astype(np.int32)
        self.references[distinct] = left
        return self._push(distinct[left == 0])

    def _push(self, freed: Ids) -> int:
        count = len(freed)
        if count:
            self._stack[self._free : self._free + count] = freed
            self._free += count
        return count

    def free_ids(self) -> Ids:
        """Ids on the free list, for invariant checks."""
        return self._stack[: self._free]
