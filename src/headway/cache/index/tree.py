"""The prefix tree: which token sequences are known, and how far each is resident.

A radix tree over token ids: exact (no hashes), token-granular, and its cost is set by branches, not by blocks. An
edge is one numpy run of tokens. It carries the block ids of the tables that need the whole prefix, and checkpoints
*inside* it, sorted by position: a conversation of 300 turns is still one edge and one comparison.

What is kept of an edge is always a prefix of it, so one number (`resident`) says it, and one structure answers four
questions: what can be reused (resident), what is being computed (known, leased, not resident), what was here and is
gone (known, neither leased nor resident: a ghost), and where traffic parts (a branch).

With draft groups an entry also depends on `lookahead` (L) later tokens. So positions count *entries*: the tree is one
over (L+1)-grams, two sequences that share m tokens share m - L positions, and an edge's text holds the L tokens
behind its end as well. What a position means is then the same on every branch behind it: a branch that parts at token
m has its own entries from m - L on.

Invariants:
    * start <= resident <= end; a child has something resident only where its parent is resident to its end.
    * `runs[i]` holds the ids of the block indices [start // span, ceil(resident / span)) of prefix table i, one
      reference each; two edges that meet inside a block both name a block for it (the same one or two copies).
    * checkpoints lie in (start, resident].
    * `active` counts the leases whose path ends at this edge or below.

Rejected: a node a block (cost grows with length, and the block size becomes the granularity of hits); hash chains
(collisions, and the hash must be computed for the whole prompt before anything is known).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.cache.index.checkpoint import Checkpoint

__all__ = ["GrowingArray", "Key", "LostCheckpoint", "Match", "Node", "PrefixTree", "SplitHook", "common_prefix"]

Ints = NDArray[np.int32]
Key = int | bytes
"""First token of an edge, or the bytes of its first lookahead + 1 tokens."""

_COMPARE_CHUNK = 32768
"""Tokens compared at once: the temporary stays in the second-level cache, and an early difference ends the work
early."""


def common_prefix(a: Ints, b: Ints) -> int:
    """Length of the longest common prefix of two int32 arrays. O(result)."""
    n = min(len(a), len(b))
    for low in range(0, n, _COMPARE_CHUNK):
        high = min(n, low + _COMPARE_CHUNK)
        differs = a[low:high] != b[low:high]
        first = int(differs.argmax())
        if differs[first]:
            return low + first
    return n


class GrowingArray:
    """An int32 array that grows at its end in O(1) amortised an element."""

    __slots__ = ("_buffer", "size")

    def __init__(self, values: Ints | None = None) -> None:
        """Start with a copy of `values`, or empty."""
        self._buffer = np.empty(0, dtype=np.int32) if values is None else np.array(values, dtype=np.int32)
        self.size = len(self._buffer)

    @property
    def view(self) -> Ints:
        """The elements; valid until the array changes."""
        return self._buffer[: self.size]

    def extend(self, values: Ints) -> None:
        """Append `values`."""
        size = self.size + len(values)
        if size > len(self._buffer):
            grown = np.empty(max(size, self.size + self.size // 2), dtype=np.int32)
            grown[: self.size] = self.view
            self._buffer = grown
        self._buffer[self.size : size] = values
        self.size = size

    def pop(self) -> int:
        """Take the last element off."""
        self.size -= 1
        return self._buffer.item(self.size)

    def cut(self, size: int) -> Ints:
        """Keep the first `size` elements and return a copy of those that went."""
        gone = self._buffer[size : self.size].copy()
        self.size = size
        return gone


@dataclass(slots=True)
class LostCheckpoint:
    """A checkpoint that was here.

    Attributes:
        position: Tokens before it.
        kind: Kind of placement that took it.
        when: When it went (clock of the cache).
        cause: Why.
        born: Tick of its birth.
        uses: How often it was wanted, before and since.
    """

    position: int
    kind: str
    when: float
    cause: str
    born: int
    uses: int


class Node:
    """One edge of the tree: the tokens [start, end) that follow its parent's.

    Attributes:
        parent: The edge before it, None for a root.
        start: Position of its first token.
        end: Position after its last.
        text: Its tokens [start, end + lookahead).
        children: Edges that follow, by their first lookahead + 1 tokens (see `PrefixTree.key`).
        resident: Position up to which its entries are kept.
        seen: Position up to which its tokens were ever computed.
        runs: Block ids of each prefix table, see the invariants above.
        marks: Positions of its checkpoints, ascending.
        checkpoints: The checkpoints, in the order of `marks`.
        rows: Leases whose path ends in this edge.
        active: Leases whose path ends in this edge or below.
        resident_children: Children that have anything resident.
        uses: Leases that resumed behind its start, or would have, had it not been trimmed.
        used: Tick of the last such lease.
        age: Eviction policy's clock at the last use.
        entry: Number of its valid entry in the eviction queue; -1 when it is not queued.
        pinned_to: Position up to which it must stay until `pinned_until` (models without checkpoints).
        pinned_until: Time of the end of the pin.
        pinned_blocks: Blocks that count against the cap on pins.
        lost: Checkpoints that were evicted from it, the latest last, bounded.
        trimmed: When and why part of it was evicted, or None.
    """

    __slots__ = (
        "active",
        "age",
        "checkpoints",
        "children",
        "end",
        "entry",
        "lost",
        "marks",
        "parent",
        "pinned_blocks",
        "pinned_to",
        "pinned_until",
        "resident",
        "resident_children",
        "rows",
        "runs",
        "seen",
        "start",
        "text",
        "trimmed",
        "used",
        "uses",
    )

    def __init__(self, parent: Node | None, start: int, end: int, text: GrowingArray, tables: int) -> None:
        """Make an edge of which nothing is resident."""
        self.parent = parent
        self.start = start
        self.end = end
        self.text = text
        self.children: dict[Key, Node] = {}
        self.resident = start
        self.seen = start
        self.runs = tuple(GrowingArray() for _ in range(tables))
        self.marks: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self.rows: set[int] = set()
        self.active = 0
        self.resident_children = 0
        self.uses = 0
        self.used = 0
        self.age = 0.0
        self.entry = -1
        self.pinned_to = 0
        self.pinned_until = 0.0
        self.pinned_blocks = 0
        self.lost: list[LostCheckpoint] = []
        self.trimmed: tuple[float, str] | None = None

    def path(self) -> Iterator[Node]:
        """This edge and its ancestors, deepest first, the root excluded."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def prefix(self, position: int) -> Ints:
        """A copy of all tokens from the root to `position` in this edge, and the lookahead tokens behind it."""
        ahead = self.text.size - (self.end - self.start)
        parts = [self.text.view[: position - self.start + ahead]]
        parts += [node.text.view[: node.end - node.start] for node in self.path() if node is not self]
        return np.concatenate(parts[::-1])

    def checkpoint_at_or_before(self, position: int) -> Checkpoint | None:
        """The deepest checkpoint at or before `position` on the path through this edge."""
        node: Node | None = self
        while node is not None:  # every eviction asks several times: no generator
            marks = node.marks
            if marks and marks[0] <= position:
                return node.checkpoints[bisect_right(marks, position) - 1]
            node = node.parent
        return None

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Insert a checkpoint; no other lies at its position."""
        index = bisect_right(self.marks, checkpoint.position)
        self.marks.insert(index, checkpoint.position)
        self.checkpoints.insert(index, checkpoint)

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out."""
        index = bisect_right(self.marks, checkpoint.position) - 1
        assert self.checkpoints[index] is checkpoint
        del self.marks[index], self.checkpoints[index]


class Match(NamedTuple):
    """How far a prompt follows a known path: it ends at `position`, inside or at the end of `node`."""

    node: Node
    position: int

    def deepest_lost(self, low: int, high: int) -> dict[str, LostCheckpoint]:
        """Of every kind the deepest checkpoint that went from (low, high] of this path; at one position, the latest."""
        found: dict[str, LostCheckpoint] = {}
        for node in self.node.path():
            for lost in node.lost:
                if low < lost.position <= high and (
                    lost.kind not in found or lost.position >= found[lost.kind].position
                ):
                    found[lost.kind] = lost
            if node.start <= low:
                break
        return found


class SplitHook(Protocol):
    """What must happen to resources when an edge is split."""

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` was cut: its part before `lower.start` is now `upper`, which holds nothing yet."""


class PrefixTree:
    """The tree's operations, for groups with a given lookahead.

    Attributes:
        lookahead: Tokens behind a position that its entries depend on.
    """

    def __init__(self, lookahead: int, tables: int, hook: SplitHook) -> None:
        """Operate on edges that hold blocks of `tables` tables; `hook` divides what a split edge holds."""
        self.lookahead = lookahead
        self._tables = tables
        self._hook = hook

    def root(self) -> Node:
        """A root, with nothing known behind it."""
        return Node(None, 0, 0, GrowingArray(), self._tables)

    def key(self, tokens: Ints) -> Key:
        """Key of an edge that begins with `tokens` (more than lookahead of them)."""
        return tokens[: self.lookahead + 1].tobytes() if self.lookahead else tokens.item(0)

    def follow(self, at: Match, tokens: Ints) -> Match:
        """Follow `tokens`, which begin at `at`, as far as they are known. Pure; O(matched tokens + branches)."""
        node, position = at
        base, last = position, position + len(tokens) - self.lookahead
        if position < node.end:
            position += common_prefix(node.text.view[position - node.start :], tokens) - self.lookahead
            if position < node.end:
                return Match(node, max(position, base))
        while position < last:
            child = node.children.get(self.key(tokens[position - base :]))
            if child is None:
                break
            node = child
            position += common_prefix(node.text.view, tokens[position - base :]) - self.lookahead
            if position < node.end:
                break
        return Match(node, position)

    def enter(self, at: Match, tokens: Ints) -> Match:
        """Make `tokens` known behind a place in the tree, where they part from what is known.

        A leaf that ends there grows in place, so a conversation stays one edge; elsewhere a branch is made.

        Args:
            at: Where the tokens begin; `follow(at, tokens)` gives `at`.
            tokens: int32; the last `lookahead` of them only tell the entries before them apart.

        Returns:
            The place behind the last entry that the tokens tell.
        """
        node, position = at
        more = len(tokens) - self.lookahead
        if more <= 0:
            return at
        if position < node.end:
            node = self.split(node, position)
        if node.parent is not None and not node.children:
            node.text.extend(tokens[self.lookahead :])
            node.end += more
            return Match(node, node.end)
        child = Node(node, position, position + more, GrowingArray(tokens), self._tables)
        node.children[self.key(tokens)] = child
        return Match(child, child.end)

    def split(self, node: Node, position: int) -> Node:
        """Cut an edge in two at `position` and return the upper half. The node object becomes the lower half.

        Checkpoints, leases' ends and tokens go to the half they lie in; the hook divides what depends on them.
        """
        parent = node.parent
        assert parent is not None
        assert node.start < position < node.end
        cut, text = position - node.start, node.text.view
        upper = Node(parent, node.start, position, GrowingArray(text[: cut + self.lookahead]), self._tables)
        parent.children[self.key(text)] = upper
        upper.children[self.key(text[cut:])] = node
        upper.active = node.active
        upper.seen = min(node.seen, position)
        upper.uses, upper.used, upper.age = node.uses, node.used, node.age
        upper.trimmed = node.trimmed if node.resident < position else None
        upper.lost = [lost for lost in node.lost if lost.position <= position]
        node.lost = [lost for lost in node.lost if lost.position > position]
        node.text = GrowingArray(text[cut:])
        node.parent, node.start = upper, position
        node.seen = max(node.seen, position)
        _split_checkpoints(upper, node, position)
        self._hook.split(upper, node)
        return upper

    def cut(self, node: Node, keep: int) -> bool:
        """Forget the tokens of a leaf from position `keep` on. Returns whether nothing is left and it was deleted."""
        if keep == node.start and node.parent is not None:
            del node.parent.children[self.key(node.text.view)]
        node.text.cut(keep - node.start + self.lookahead)
        node.end = keep
        node.seen = min(node.seen, keep)
        return keep == node.start


def _split_checkpoints(upper: Node, lower: Node, position: int) -> None:
    index = bisect_right(lower.marks, position)
    upper.marks, lower.marks = lower.marks[:index], lower.marks[index:]
    upper.checkpoints, lower.checkpoints = lower.checkpoints[:index], lower.checkpoints[index:]
    for checkpoint in upper.checkpoints:
        checkpoint.node = upper
