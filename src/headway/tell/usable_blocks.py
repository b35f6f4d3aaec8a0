"""Whole blocks of tokens that requests can use, from what a cache tells of itself: what routers count.

A router counts the blocks of a prompt that a server has, and takes that for what the server reuses. With states it does
not: attention beyond the deepest state of a branch serves nobody. So a block is usable, here, as long as a request can
resume at its end or behind it: up to the deepest checkpoint of each branch, or, in models that resume anywhere, as far
as entries are kept. For a prompt that goes on from where a branch ends that is exact, to a block. For one that leaves a
branch between two checkpoints it is an upper bound; where the checkpoints are is told besides (`ResumePoint`).

The cache speaks of tokens, so blocks may have any size, whatever the cache's own have. A block is named by a hash of
all tokens up to its end, under a key of this object: to readers it is a name, and they hash tokens themselves. Each
block counts what it is usable for (checkpoints in or behind it, as a count of those in it and of the blocks that follow
it), so it is told once, and taken back with the last of these. What is not known is never taken back, and what is
missing before a new block is told with it: an object that has lost its memory (`clear`) is right again with the
traffic.

Rejected: to tell of entries as the cache keeps them. Where a checkpoint goes while others run behind it, its entries
stay, and nobody can use them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import (
    CheckpointReduced,
    CheckpointRemoved,
    CheckpointStored,
    Event,
    ResidentGrown,
    ResidentShrunk,
)

__all__ = ["Change", "ResumePoint", "Space", "UsableBlocks"]

Space = str | int
"""What keeps equal tokens apart: a salt, or the number of a namespace."""
_INT32 = 4


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint.

    Attributes:
        name: Number by which it is taken back.
        position: Tokens before it.
        first: A prompt that shares less of its tokens can resume at the end of that part, from this position on.
        kind: Kind of placement.
        block: The last usable block that ends at or before it, None before the end of the first one.
        tail: The tokens behind that block that a prompt must share: up to `position`, and what drafts look ahead at.
    """

    name: int
    position: int
    first: int
    kind: str
    block: int | None
    tail: Sequence[int]


@dataclass(frozen=True)
class Change:
    """What became usable or ceased to be by one event.

    Attributes:
        space: The space of its tokens.
        parent: The block before the new ones, None if there is none.
        names: Blocks that are usable now, one after another.
        tokens: int32, all tokens of these.
        removed: Blocks that are not usable any more, the deepest first.
        point: A checkpoint that is there now, or serves fewer positions than before.
        gone: Name of a checkpoint that is there no more, and the cause.
    """

    space: Space
    parent: int | None = None
    names: Sequence[int] = ()
    tokens: NDArray[np.int32] | None = None
    removed: Sequence[int] = ()
    point: ResumePoint | None = None
    gone: tuple[int, str] | None = None


@dataclass(slots=True)
class _Block:
    """A usable block: the one before it, its tokens, and what it is needed for."""

    parent: int | None
    space: Space
    tokens: bytes
    uses: int = 0


class UsableBlocks:
    """The usable blocks of one cache.

    Attributes:
        size: Tokens of a block.
    """

    def __init__(self, size: int, *, floats: bool) -> None:
        """Know nothing yet.

        Args:
            size: Tokens of a block.
            floats: The model resumes anywhere (it has no windows, chunks or states), so there are no checkpoints.
        """
        self.size = size
        self._floats = floats
        self._key = secrets.token_bytes(32)
        self._blocks: dict[int, _Block] = {}
        self._points: dict[int, tuple[Space, ResumePoint]] = {}
        self._grown: tuple[Space, int, int] = "", 0, 0

    def __len__(self) -> int:
        """How many blocks are usable."""
        return len(self._blocks)

    def clear(self) -> None:
        """Nothing is usable any more."""
        self._blocks.clear()
        self._points.clear()

    def hear(self, event: Event, space: Space, model: str = "") -> Change | None:
        """Take an event of the cache; `space` and `model` stand for its namespace.

        Namespaces of one space and several models have the same blocks, each for as long as one of them has it.

        Returns:
            What changed, or None. Nothing for what a reset takes: `clear` says that all is gone.
        """
        if getattr(event, "cause", "") == "reset":
            return None
        change: Change | None = None
        if self._floats:
            if isinstance(event, ResidentGrown):
                change = self._grow(event, space)
            elif isinstance(event, ResidentShrunk):
                change = Change(space, removed=self._shrink(event, space))
        elif isinstance(event, ResidentGrown):  # followed by the checkpoint for which it grew
            self._grown = space, event.position, event.start
        elif isinstance(event, CheckpointStored):
            change = self._add(event, space, model)
        elif isinstance(event, CheckpointRemoved):
            change = self._drop(event, space, model)
        elif isinstance(event, CheckpointReduced):
            change = self._reduce(event, space, model)
        told = change and (change.names or change.removed or change.point or change.gone)
        return change if told else None

    def all(self) -> Iterator[Change]:
        """All that is usable, as changes of an empty state: blocks in runs behind each other, then checkpoints."""
        names: list[int] = []
        for name, block in self._blocks.items():  # in the order in which they came: none before the one it follows
            if names and (block.parent != names[-1] or block.space != self._blocks[names[-1]].space):
                yield self._run(names)
                names = []
            names.append(name)
        if names:
            yield self._run(names)
        for space, point in self._points.values():
            yield Change(space, point=point)

    def _run(self, names: Sequence[int]) -> Change:
        first, text = self._blocks[names[0]], b"".join(self._blocks[name].tokens for name in names)
        return Change(first.space, first.parent, names, np.frombuffer(text, np.int32))

    # ---- models with checkpoints

    def _add(self, event: CheckpointStored, space: Space, model: str) -> Change:
        """A checkpoint: the blocks before it are usable."""
        last, grown = self._whole(event), self._grown
        first = min(grown[2] // self.size, last) if grown[:2] == (space, event.position) else last
        chain = _Chain(self, event, space, first, last)
        parent, names, tokens = self._put(chain)
        block, name = chain.name, chain.point(event, model)
        tail = event.prefix[last * self.size :].tolist()
        point = ResumePoint(name, event.position, event.first, event.kind, block, tail)
        if block is not None:
            self._blocks[block].uses += 1
        self._points[name] = space, point
        return Change(space, parent, names, tokens, point=point)

    def _put(self, chain: _Chain) -> tuple[int | None, Sequence[int], NDArray[np.int32] | None]:
        """Enter the blocks of a chain that are missing; what is usable of a path is always a beginning of it.

        Returns:
            The block before them, their names and tokens.
        """
        if chain.name is None or chain.name in self._blocks:
            return None, (), None
        if chain.parent is not None and chain.parent not in self._blocks:
            chain.begin(0)
        known = next(i for i, name in enumerate(chain.names) if name not in self._blocks)
        parent = chain.names[known - 1] if known else chain.parent
        before, size = parent, self.size
        tokens = chain.tokens[(chain.first + known) * size : (chain.first + len(chain.names)) * size]
        for i, name in enumerate(chain.names[known:]):
            if before is not None and not self._floats:
                self._blocks[before].uses += 1
            self._blocks[name] = _Block(before, chain.space, tokens[i * size : (i + 1) * size].tobytes())
            before = name
        return parent, chain.names[known:], tokens

    def _drop(self, event: CheckpointRemoved, space: Space, model: str) -> Change | None:
        """A checkpoint is gone, and with it the blocks that nothing else makes usable."""
        last = self._whole(event)
        found = self._points.pop(_Chain(self, event, space, last, last).point(event, model), None)
        if found is None:
            return None
        removed, name = [], found[1].block
        while name is not None:
            block = self._blocks[name]
            block.uses -= 1
            if block.uses:
                break
            removed.append(name)
            del self._blocks[name]
            name = block.parent
        return Change(space, removed=removed, gone=(found[1].name, event.cause))

    def _reduce(self, event: CheckpointReduced, space: Space, model: str) -> Change | None:
        last = self._whole(event)
        name = _Chain(self, event, space, last, last).point(event, model)
        if name not in self._points:
            return None
        old = self._points[name][1]
        point = ResumePoint(name, old.position, event.first, old.kind, old.block, old.tail)
        self._points[name] = space, point
        return Change(space, point=point)

    # ---- models that resume anywhere

    def _grow(self, event: ResidentGrown, space: Space) -> Change | None:
        first, last = event.start // self.size, self._whole(event)
        if first >= last:
            return None
        chain = _Chain(self, event, space, first, last)
        parent, names, tokens = self._put(chain)
        for name in chain.names if chain.first == first else names:
            self._blocks[name].uses += 1
        return Change(space, parent, names, tokens)

    def _shrink(self, event: ResidentShrunk, space: Space) -> Sequence[int]:
        first, last = event.keep // self.size, self._whole(event)
        removed = []
        for name in reversed(_Chain(self, event, space, first, last).names if first < last else ()):
            block = self._blocks.get(name)
            if block is not None:
                block.uses -= 1
                if not block.uses:
                    del self._blocks[name]
                    removed.append(name)
        return removed

    def _whole(self, event: Event) -> int:
        """How many whole blocks end before an event's position, and before the first symbol of an image."""
        end, tokens = event.position, event.prefix
        symbols = tokens[:end] < 0
        return (int(symbols.argmax()) if symbols.any() else end) // self.size

    def state(self, space: Space) -> Any:
        """What hashes the tokens of a space, from the first one on."""
        name = repr(space).encode()
        return hashlib.blake2b(len(name).to_bytes(8, "little") + name, digest_size=8, key=self._key)


class _Chain:
    """Names of the blocks [first, last) of a path, and of what lies at its end.

    Attributes:
        space: The space.
        tokens: int32, the path.
        first: Index of the first of them.
        parent: Name of the block before them, None if there is none.
        names: Their names.
    """

    def __init__(self, blocks: UsableBlocks, event: Event, space: Space, first: int, last: int) -> None:
        self.space, self.tokens, self._blocks, self._last = space, event.prefix, blocks, last
        self._data = event.prefix.data.cast("B")
        self.begin(first)

    def begin(self, first: int) -> None:
        """Let the block with index `first` be the first. O(tokens), fast, and O(blocks behind it)."""
        size, data = self._blocks.size * _INT32, self._data
        state = self._state = self._blocks.state(self.space)
        state.update(data[: first * size])
        self.first, self.parent = first, _number(state) if first else None
        self.names: list[int] = []
        for block in range(first, self._last):
            state.update(data[block * size : (block + 1) * size])
            self.names.append(_number(state))

    @property
    def name(self) -> int | None:
        """Name of the last block; None if there is none."""
        return self.names[-1] if self.names else self.parent

    def point(self, event: Event, model: str) -> int:
        """Name of the checkpoint that an event is about."""
        state = self._state.copy()
        state.update(self._data[self._last * self._blocks.size * _INT32 :])
        state.update(f"checkpoint {event.position} {model}".encode())
        return _number(state)


def _number(state: Any) -> int:
    return int.from_bytes(state.digest(), "little")
