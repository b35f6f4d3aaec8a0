"""The prefix tree: which token sequences are known, and how far each is resident.

A radix tree over token ids: exact (no hashes), token-granular, and its cost is set by branches, not by blocks. An
edge is one run of tokens. It carries the block ids of the tables that need the whole prefix, and checkpoints *inside*
it, sorted by position: a conversation of 300 turns is still one edge and one comparison.

What is kept of an edge is always a prefix of it, so one number (`resident`) says it, and one structure answers four
questions: what can be reused (resident), what is being computed (known, not computed), what was here and is gone
(computed, not resident: a ghost), and where traffic parts (a branch).

With draft groups an entry also depends on `lookahead` (L) later tokens. So positions count *entries*: the tree is one
over (L+1)-grams, two sequences that share m tokens share m - L positions, and an edge's text holds the L tokens
behind its end as well. What a position means is then the same on every branch behind it: a branch that parts at token
m has its own entries from m - L on.

Everything that lies on an edge is moved here and nowhere else: `split` divides it, `cut` forgets it, `enter` lets an
edge grow. A record that is added to an edge is added to these three.

Invariants:
    * start <= resident <= end; a child has something resident only where its parent is resident to its end.
    * `runs[i]` holds the ids of the block indices [start // span, ceil(resident / span)) of prefix table i, one
      reference each; two edges that meet inside a block both name a block for it (the same one or two copies).
    * Checkpoints lie in (start, resident], pins in (start, resident], anchors in (start, end].
    * Every known position is computed, or lies before an anchor: what nobody computed and nobody will is forgotten.

Rejected: a node per block (cost grows with length, and the block size becomes the granularity of hits); hash chains
(collisions, and the hash must be computed for the whole prompt before anything is known).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from headway.cache.index.edge import Anchor, Checkpoint, Edge, LostCheckpoint, Match, Pin
from headway.cache.index.pool import BlockPool
from headway.cache.policy.reuse import PATH
from headway.cache.shape.geometry import Ids, TableGeometry

__all__ = ["CHECKPOINT_BYTES", "EDGE_BYTES", "NAMESPACE_BYTES", "PrefixTree", "common_prefix", "token_bytes"]

EDGE_BYTES, _RUN_BYTES = 1200, 120
"""What an edge takes apart from tokens and block ids: the object, its containers and its place in its parent's; and
what it takes for each prefix table."""
_LOST_BYTES = 200
"""What the memory of a checkpoint that went takes."""
CHECKPOINT_BYTES = 1600
"""What a checkpoint takes with its sections and its entries in the eviction queue."""
_PIN_BYTES = 300
"""What a pin takes with its end in the heap."""
NAMESPACE_BYTES = 500
"""What the name of a namespace takes: two are remembered for every root."""
_INT32 = np.dtype(np.int32)
_COMPARE_CHUNK = 32768
"""Tokens compared at once: the temporary stays in the second-level cache, and an early difference ends the work
early."""


Placed = TypeVar("Placed", Checkpoint, Pin, Anchor)


class _Laid(Protocol):
    """Who lays something of its own on edges, which moves with them."""

    shade_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside `shade_bytes` on each edge."""

    def shade(self, edge: Edge) -> Any:
        """What is laid on a new edge: it has `split(upper, position)`, which gives the upper half's."""

    def cut(self, shade: Any, keep: int) -> None:
        """The edge of `shade` is forgotten from `keep` on."""


def _divide(items: Sequence[Placed], position: int) -> tuple[list[Placed], list[Placed]]:
    """Those at or before `position`, and those behind it."""
    return [one for one in items if one.position <= position], [one for one in items if one.position > position]


def token_bytes(tables: Sequence[TableGeometry]) -> int:
    """What a known token takes: itself and its part of the block ids, in arrays that grow by an eighth."""
    return 5 + sum(-(-5 // table.span) for table in tables)


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix of two int32 arrays. O(result)."""
    n = min(len(a), len(b))
    for low in range(0, n, _COMPARE_CHUNK):
        high = min(n, low + _COMPARE_CHUNK)
        differs = a[low:high] != b[low:high]
        first = int(differs.argmax())
        if differs[first]:
            return low + first
    return n


def _common(text: array[int], skip: int, data: bytes, offset: int) -> int:
    """Tokens that `text` from index `skip` on and `data` from byte `offset` on have in common."""
    if skip == len(text) or offset == len(data):
        return 0
    return common_prefix(np.frombuffer(text, np.int32)[skip:], np.frombuffer(data, np.int32, offset=offset))


def _count_busy(edge: Edge | None, change: int) -> None:
    """One lease more (1) or less (-1) ends on `edge`."""
    while edge is not None:
        was = edge.busy
        edge.busy = was + change
        if was and edge.busy:
            return
        edge = edge.parent


class PrefixTree:
    """All edges, and the operations on them.

    Tokens come as `bytes` of int32, so that whole edges are compared and found by single calls into C.

    Attributes:
        lookahead: Tokens behind a position that its entries depend on.
        floats: Every edge has a checkpoint that floats: the model can resume anywhere.
        tables: The prefix tables.
        roots: Root of each namespace in which something is known or running, the oldest first.
        tokens: Tokens known.
        edge_count: Edges, without roots.
        losses: Checkpoints that went and are remembered.
        checkpoints: Checkpoints that do not float.
        pins: Pins.
        checkpoint_blocks: Block ids in all checkpoints.
    """

    def __init__(self, lookahead: int, tables: Sequence[TableGeometry], pool: BlockPool, *, floats: bool) -> None:
        """Make an empty tree whose edges hold blocks of `pool` for `tables`."""
        self.lookahead = lookahead
        self.floats = floats
        self.tables = tuple(tables)
        self.roots: dict[int, Edge] = {}
        self.tokens = 0
        self.edge_count = self.losses = self.checkpoints = self.pins = self.checkpoint_blocks = 0
        self._token_bytes = token_bytes(tables)
        self._edge_bytes = EDGE_BYTES + _RUN_BYTES * len(self.tables) + self._token_bytes * lookahead
        self._pool = pool
        self._key_bytes = 4 * (lookahead + 1)
        self._shadows: tuple[_Laid, ...] = ()
        self._nowhere = Edge(None, 0, 0, array("i"), ())

    def __getstate__(self) -> dict[str, object]:
        """The tree as a list of edges, each with the number of its parent."""
        edges = [*self.roots.values(), *self.edges()]
        number = {edge: i for i, edge in enumerate(edges)}
        parents = [-1 if edge.parent is None else number[edge.parent] for edge in edges]
        return {**vars(self), "roots": None, "_edges": (edges, parents)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tie the edges together again."""
        edges: list[Edge]
        parents: list[int]
        edges, parents = state.pop("_edges")
        vars(self).update(state)
        self.roots = {}
        for edge, parent in zip(edges, parents, strict=True):
            edge.parent, edge.children = (None if parent < 0 else edges[parent]), {}
            if edge.parent is None:
                self.roots[edge.namespace] = edge
            else:
                edge.parent.children[self.key(edge.text)] = edge

    @property
    def nbytes(self) -> int:
        """Bytes that all of it takes, estimated from above."""
        roots = len(self.roots) * (self._edge_bytes + 2 * NAMESPACE_BYTES)
        marks = _LOST_BYTES * self.losses + CHECKPOINT_BYTES * self.checkpoints + _PIN_BYTES * self.pins
        marks += 4 * self.checkpoint_blocks
        marks += sum([shadow.nbytes for shadow in self._shadows])
        return roots + self._edge_bytes * self.edge_count + self._token_bytes * self.tokens + marks

    def lay(self, shadows: Sequence[_Laid]) -> None:
        """Say who lays something on edges, before there is any: `shade` lets them."""
        self._shadows = tuple(shadows)
        self._edge_bytes += sum(shadow.shade_bytes for shadow in shadows)

    def shade(self, edges: Sequence[Edge]) -> None:
        """Let shadows lay something on the edges of a path, deepest first, where nothing is laid yet."""
        for edge in edges:
            if edge.shades:
                return
            edge.shades = [shadow.shade(edge) for shadow in self._shadows]

    # ---- finding

    def root(self, namespace: int) -> Edge:
        """Root of a namespace, made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Edge(None, 0, 0, array("i"), (), namespace=namespace)
        return root

    def _drop_unused(self, root: Edge) -> None:
        """Forget a namespace in which nothing is known or running: clients make up salts without end."""
        if root.parent is None and not root.children and not root.anchors:
            del self.roots[root.namespace]

    def find(self, namespace: int, data: bytes) -> Match:
        """How far `data` follows a known path of a namespace. Pure; O(matched tokens + branches)."""
        root = self.roots.get(namespace)
        return Match(self._nowhere, 0) if root is None else self.follow(Match(root, 0), data)

    def follow(self, at: Match, data: bytes) -> Match:
        """Follow the tokens `data`, which begin at `at`, as far as they are known. Pure."""
        edge, base = at
        position, width = base, self._key_bytes
        last = base + len(data) // 4 - self.lookahead
        if position < edge.end:
            position += _common(edge.text, position - edge.start, data, 0) - self.lookahead
            if position < edge.end:
                return Match(edge, max(position, base))
        while position < last:
            offset = 4 * (position - base)
            child = edge.children.get(data[offset : offset + width])
            if child is None:
                break
            edge = child
            if not data.startswith(child.text, offset):
                position += _common(child.text, 0, data, offset) - self.lookahead
                break
            position = child.end
        return Match(edge, position)

    def frontier(self, edge: Edge, position: int) -> int:
        """The position up to which the path to `position` on `edge` is resident."""
        while edge.parent is not None and edge.resident == edge.start:  # every commit asks: no generator
            edge = edge.parent
        return min(edge.resident, position)

    def path_ids(self, edge: Edge, table: int, first: int, stop: int) -> Ids:
        """Block ids of the indices [first, stop) of prefix table `table` on the resident path through `edge`.

        Where two edges meet inside a block, the deeper edge's id stands: it holds the entries of both. Read-only.
        """
        span, parts = self.tables[table].span, []
        at: Edge | None = edge
        while first < stop:
            assert at is not None, "block ids of entries that are not resident"
            run = at.runs[table]
            if run:
                begin = at.start // span
                low = begin if begin > first else first
                if low < stop:
                    parts.append(run[low - begin : stop - begin])
                    stop = low
            at = at.parent
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts[::-1]), _INT32)

    def edges(self) -> Iterator[Edge]:
        """All edges, parents before children, roots excluded."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            edge = stack.pop()
            yield edge
            stack.extend(edge.children.values())

    # ---- places of leases

    def attach(self, at: Match) -> Anchor:
        """Let a lease end at `at`: its way there stays known, and is not trimmed, until `detach`."""
        anchor = Anchor(*at)
        at.edge.anchors.append(anchor)
        _count_busy(at.edge, 1)
        return anchor

    def detach(self, anchor: Anchor) -> None:
        """Undo `attach`."""
        anchor.edge.anchors.remove(anchor)
        _count_busy(anchor.edge, -1)
        self._drop_unused(anchor.edge)

    def move(self, anchor: Anchor, to: Match) -> None:
        """Let a lease end at `to` instead."""
        if to.edge is anchor.edge:
            anchor.position = to.position
            return
        self.detach(anchor)
        anchor.edge, anchor.position = to
        to.edge.anchors.append(anchor)
        _count_busy(to.edge, 1)

    def mark_computed(self, edge: Edge, start: int, stop: int) -> None:
        """Positions [start, stop) of the path through `edge` have been computed."""
        for one in edge.path():
            if one.computed < stop:
                one.computed = max(one.computed, min(stop, one.end))
            if one.start <= start:
                return

    # ---- what moves everything that lies on an edge

    def enter(self, at: Match, data: bytes) -> Match:
        """Make the tokens `data` known behind a place in the tree, where they part from what is known.

        A leaf that ends there grows in place, so a conversation stays one edge; elsewhere a branch is made.

        Args:
            at: Where the tokens begin; `follow(at, data)` gives `at`.
            data: int32; the last `lookahead` of them only tell the entries before them apart.

        Returns:
            The place behind the last entry that the tokens tell.
        """
        edge, position = at
        more = len(data) // 4 - self.lookahead
        if more <= 0:
            return at
        if position < edge.end:
            edge = self.split(edge, position)
        if edge.parent is not None and not edge.children:
            edge.text.frombytes(data[4 * self.lookahead :])
            edge.end += more
            self.tokens += more
            return Match(edge, edge.end)
        child = self._new(edge, position, array("i", data))
        edge.children[self.key(child.text)] = child
        self.tokens += more
        return Match(child, child.end)

    def split(self, edge: Edge, position: int) -> Edge:
        """Divide an edge in two at `position` and return the upper half. The object becomes the lower half."""
        parent, cut = edge.parent, position - edge.start
        assert parent is not None
        assert edge.start < position < edge.end
        upper = self._new(parent, edge.start, edge.text[: cut + self.lookahead])
        parent.children[self.key(edge.text)] = upper
        del edge.text[:cut]
        upper.children[self.key(edge.text)] = edge
        edge.parent, edge.start = upper, position

        upper.runs = tuple(self._split_run(i, upper.start, edge, position) for i in range(len(self.tables)))
        upper.reach = edge.reach
        upper.resident, edge.resident = min(edge.resident, position), max(edge.resident, position)
        upper.computed, edge.computed = min(edge.computed, position), max(edge.computed, position)
        upper.resident_children = int(edge.resident > position)
        upper.trim = edge.trim if upper.computed > upper.resident else None
        edge.trim = edge.trim if edge.computed > edge.resident else None

        self._split_checkpoints(upper, edge, position)
        upper.shades = [shade.split(upper, position) for shade in edge.shades]
        upper.lost = {at: edge.lost.pop(at) for at in list(edge.lost) if at <= position}
        upper.pins, edge.pins = _divide(edge.pins, position)
        upper.anchors, edge.anchors = _divide(edge.anchors, position)
        placed: tuple[Checkpoint | Pin | Anchor, ...] = (*upper.checkpoints, *upper.pins, *upper.anchors)
        for one in placed:
            one.edge = upper
        edge.busy -= len(upper.anchors)
        upper.busy = len(upper.anchors) + (edge.busy > 0)
        return upper

    def cut(self, edge: Edge, keep: int) -> bool:
        """Forget a leaf from position `keep` on. Returns whether nothing is left and it was deleted.

        Nothing that is resident, pinned or running lies there.
        """
        assert edge.resident <= keep
        assert not edge.children
        if keep == edge.start and edge.parent is not None:
            del edge.parent.children[self.key(edge.text)]
            self.edge_count -= 1
            self._drop_unused(edge.parent)
        for shadow, shade in zip(self._shadows, edge.shades, strict=False):
            shadow.cut(shade, keep)
        self.tokens -= edge.end - keep
        del edge.text[keep - edge.start + self.lookahead :]
        edge.end = keep
        edge.computed = min(edge.computed, keep)
        if edge.computed == edge.resident:
            edge.trim = None
        self.losses -= len(edge.lost)
        edge.lost = {at: lost for at, lost in edge.lost.items() if at <= keep}
        self.losses += len(edge.lost)
        return keep == edge.start

    def remember(self, edge: Edge, lost: LostCheckpoint) -> None:
        """A checkpoint of `edge` went."""
        self.losses += lost.position not in edge.lost
        edge.lost[lost.position] = lost

    def forget_lost(self, edge: Edge, position: int) -> LostCheckpoint | None:
        """What `edge` remembers of a checkpoint that went from `position`, which it forgets."""
        found = edge.lost.pop(position, None)
        self.losses -= found is not None
        return found

    def _new(self, parent: Edge, start: int, text: array[int]) -> Edge:
        runs = tuple(array("i") for _ in self.tables)
        edge = Edge(parent, start, start + len(text) - self.lookahead, text, runs)
        self.edge_count += 1
        if self.floats:
            edge.add_checkpoint(Checkpoint(start, PATH, (), edge))
        return edge

    def key(self, text: array[int]) -> bytes:
        """Key of an edge with this text among its parent's children."""
        return text[: self.lookahead + 1].tobytes()

    def _split_run(self, table: int, start: int, lower: Edge, position: int) -> array[int]:
        """Divide the block ids of one table; a block in which the halves meet is named by both. Returns the upper's."""
        run, span = lower.runs[table], self.tables[table].span
        if lower.resident <= position:
            above, run = run[:], array("i")
        else:
            first = start // span
            above, run = run[: -(-position // span) - first], run[position // span - first :]
            if position % span:
                self._pool.share_one(run[0])
        lower.runs = (*lower.runs[:table], run, *lower.runs[table + 1 :])
        return above

    def _split_checkpoints(self, upper: Edge, lower: Edge, position: int) -> None:
        if self.floats:
            (over,), (under,) = upper.checkpoints, lower.checkpoints
            over.hits, over.missed, over.used, over.age = under.hits, under.missed, under.used, under.age
            over.position, under.position = upper.resident, lower.resident
            return
        upper.checkpoints, lower.checkpoints = _divide(lower.checkpoints, position)
