"""An edge of the prefix tree, and everything that lies on it.

An edge is one run of tokens. On it lie, each at its position: checkpoints, checkpoints that went, pins, and the places
where running leases end. What is kept of an edge is always a prefix of it, and so is what was ever computed: one number
each says it. Moving these records when an edge is split, cut or grown is `tree`'s, in one place.

A checkpoint at position p holds, for every window, chunk and state at once, the blocks that let a request resume
exactly there. It is taken and dropped as one, so a lookup never has to reconcile what different kinds of layers kept.
Without states it serves positions before its own as well, back to `first`: as far as it holds all that each of them
needs. Such a position can lie on another edge, before a place where paths part; `Edge.reach` says where to look.
A model that has none of these can resume anywhere: each of its edges has one checkpoint without blocks, which *floats*:
it lies where the resident part ends and serves every position of that part.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from headway.cache.index.below import Past
from headway.cache.policy.reuse import PATH
from headway.cache.shape.geometry import Ids, TableGeometry

__all__ = ["FAR", "Anchor", "Checkpoint", "Edge", "LostCheckpoint", "Match", "Pin", "Section", "Trim"]

_position = attrgetter("position")

FAR = 2**62
"""A position behind all others, which is never reached; int64 holds what little is added to it."""
_FEW = 64
"""Children of an edge, or fewer, that are all looked at when one of them changes."""


class Section(NamedTuple):
    """What a checkpoint holds of one tail table.

    Attributes:
        first: Block index of the first id (0 for states).
        ids: int32 block ids, in order of block index.
        whole: It is a state, whose blocks are one.
    """

    first: int
    ids: Ids
    whole: bool = False

    def part(self, table: TableGeometry, position: int) -> Section:
        """Of these blocks of `table` those that resuming at `position` needs; of a state all of them."""
        if self.whole:
            return self
        span, first = table.span, table.first_needed(position)
        if first == position:
            return Section(position // span, self.ids[:0])
        low = max(self.first, first // span)
        return Section(low, self.ids[low - self.first : -(-position // span) - self.first])


@dataclass(slots=True, eq=False)
class Checkpoint:
    """All that one position of a path needs to resume, beyond the entries of the whole prefix.

    Attributes:
        position: Tokens before the resume point.
        kind: Kind of placement that took it ("prompt_end", "junction", ...), or "path" where it floats.
        sections: One per tail table, in the order of `CacheGeometry.tail_tables`, with one reference on each block.
        edge: The edge that it lies on.
        first: The first position that it serves: its own in models with states; of no meaning where it floats.
        born: Tick of its birth.
        hits: Leases that resumed from it.
        missed: Leases that would have, had it (or one at its place before) not gone.
        shared: Of both those that did not just go on where the latest lease had ended.
        used: Tick of the last use (or of its birth).
        age: Eviction policy's clock at the last use.
        entry: Number of its valid entry in the eviction queue; -1 when it is not queued.
        pinned: A pin protects it.
        floats: It lies at the resident end and serves every resident position of its edge.
        blocks: Block ids that it holds.
        spare: Some of them only serve positions before its own: they go first.
        floor: It serves no position before this one, whatever its blocks say: they were not filled from their start.
        spilled: Position up to which what it gives was told as about to be evicted.
        elsewhere: A faster memory has a copy of it: as long as that lasts, nothing is lost with this one.
        base: Position that a request could resume at without it, in the memory that it was moved from.
        told: The shadows have heard of the request that left it.
    """

    position: int
    kind: str
    sections: tuple[Section, ...]
    edge: Edge
    first: int = 0
    born: int = 0
    hits: int = 0
    missed: int = 0
    shared: int = 0
    used: int = 0
    age: float = 0.0
    entry: int = -1
    pinned: bool = False
    spare: bool = False
    floor: int = 0
    spilled: int = 0
    elsewhere: bool = False
    base: int = 0
    told: bool = False
    floats: bool = field(init=False)
    blocks: int = field(init=False)

    def __post_init__(self) -> None:
        """What follows from the kind and the sections."""
        self.floats = self.kind == PATH
        self.blocks = sum(len(section.ids) for section in self.sections)

    @property
    def uses(self) -> int:
        """How often it was wanted."""
        return self.hits + self.missed

    @property
    def past(self) -> Past:
        """Its life so far."""
        base = 0 if self.floats else max(self.base, self.edge.resume_point(self.position - 1)[0])
        return Past(self.uses, self.born, self.used, base)

    def reduce(self, sections: tuple[Section, ...], first: int) -> None:
        """Hold `sections` and no more, which serve from `first` on."""
        before, self.sections, self.first, self.spare = self.first, sections, first, False
        self.blocks = sum(len(section.ids) for section in sections)
        self.edge.review_reach(before)


@dataclass(slots=True)
class LostCheckpoint:
    """A checkpoint that was here, or could have been: it was not taken, and is remembered to learn from.

    Attributes:
        position: Tokens before it.
        kind: Kind of placement that took it, or would have.
        when: When it went (clock of the cache).
        cause: Why; None for one that was not taken.
        born: Tick of its birth.
        uses: How often it was wanted, before and since.
        shared: Of these the uses that `Checkpoint.shared` counts.
    """

    position: int
    kind: str
    when: float
    cause: str | None
    born: int
    uses: int
    shared: int = 0


class Trim(NamedTuple):
    """When and why the entries behind the resident end went (models without checkpoints)."""

    when: float
    cause: str


@dataclass(slots=True, eq=False)
class Anchor:
    """The place where a running lease's known path ends: nothing on the way to it is forgotten.

    Attributes:
        edge: The edge it lies on; a root if nothing of it is known.
        position: Entries before it.
        held: Position up to which the lease reads blocks that are the path's, not its own.
    """

    edge: Edge
    position: int
    held: int = 0


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that must stay for a while.

    Attributes:
        edge: The edge on which it ends.
        position: Tokens that it protects.
        until: Time until which it does; renewals move it.
    """

    edge: Edge
    position: int
    until: float


@dataclass(slots=True, eq=False, repr=False)
class Edge:
    """One edge of the tree: the tokens [start, end) that follow its parent's.

    Attributes:
        parent: The edge before it, None for a root.
        start: Position of its first token.
        end: Position after its last.
        text: Its tokens [start, end + lookahead), int32.
        children: Edges that follow, by the bytes of their first lookahead + 1 tokens.
        namespace: The namespace of a root; 0 on other edges.
        resident: Position up to which its entries are kept.
        computed: Position up to which its tokens were ever computed.
        runs: Block ids of each prefix table, int32: of the block indices [start // span, ceil(resident / span)).
        checkpoints: Its checkpoints, ascending by position.
        lost: Checkpoints that went, by position.
        pins: Pins that end on it, one per position at most.
        anchors: Leases that end on it.
        busy: Leases that end on it, and children that are busy.
        resident_children: Children that have anything resident.
        trim: When what lies behind the resident end went, in models without checkpoints.
        reach: No checkpoint on it or behind it serves a position before its own and before this one.
        shades: What each shadow of the tree holds of it; empty before they have heard of a request on it.
    """

    parent: Edge | None
    start: int
    end: int
    text: array[int]
    runs: tuple[array[int], ...]
    children: dict[bytes, Edge] = field(default_factory=dict)
    namespace: int = 0
    resident: int = field(init=False)
    computed: int = field(init=False)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    lost: dict[int, LostCheckpoint] = field(default_factory=dict)
    pins: list[Pin] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    busy: int = 0
    resident_children: int = 0
    trim: Trim | None = None
    reach: int = FAR
    shades: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing of it is resident or computed yet."""
        self.resident = self.computed = self.start

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """All but its relatives: whoever writes a tree writes it edge by edge, so that depth needs no recursion."""
        return None, {name: getattr(self, name) for name in self.__slots__ if name not in ("parent", "children")}

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        """Alone, until the tree that reads it puts it in its place."""
        self.parent, self.children = None, {}
        for name, value in state[1].items():
            setattr(self, name, value)

    @property
    def idle(self) -> bool:
        """Nobody runs on it or behind it, and nothing is resident behind it: its end can be moved back."""
        return self.busy == 0 and self.resident_children == 0

    @property
    def floor(self) -> int:
        """Where its resident end must not go below: the deepest pin on it, or its start."""
        return max([pin.position for pin in self.pins]) if self.pins else self.start

    def path(self) -> Iterator[Edge]:
        """This edge and its ancestors, deepest first, the root excluded."""
        edge = self
        while edge.parent is not None:
            yield edge
            edge = edge.parent

    def edge_at(self, position: int) -> Edge:
        """The edge of the path through this one on which `position` (above 0, not behind this edge) lies."""
        edge = self
        while edge.start >= position:
            assert edge.parent is not None
            edge = edge.parent
        return edge

    def root(self) -> Edge:
        """The root of its namespace."""
        edge = self
        while edge.parent is not None:
            edge = edge.parent
        return edge

    def prefix(self, position: int, lookahead: int) -> Ids:
        """All tokens from the root to `position` on this edge, and the lookahead tokens behind it. Read-only."""
        parts = [memoryview(self.text)[: position - self.start + lookahead]]
        parts += [memoryview(edge.text)[: edge.end - edge.start] for edge in self.path() if edge is not self]
        return np.frombuffer(b"".join(parts[::-1]), dtype=np.int32)

    def move_resident(self, position: int) -> None:
        """Set the resident end; a checkpoint that floats goes with it."""
        was, now = self.resident > self.start, position > self.start
        if was != now and self.parent is not None:
            self.parent.resident_children += 1 if now else -1
        grown, self.resident = position > self.resident, position
        if self.checkpoints and self.checkpoints[0].floats:
            self.checkpoints[0].position = position
            if grown:
                self.checkpoints[0].spilled = 0

    # ---- checkpoints

    def resume_point(self, limit: int) -> tuple[int, Checkpoint | None]:
        """The deepest position at or before `limit` on the path through this edge that can be resumed at, and by what.

        (0, None) if there is none.
        """
        edge: Edge | None = self
        while edge is not None:  # every lookup and eviction asks: no generator
            kept = edge.checkpoints
            if kept:
                one = kept[0]
                if one.position <= limit:
                    one = kept[bisect_right(kept, limit, key=_position) - 1] if len(kept) > 1 else one
                    if one.position > edge.start:
                        return one.position, one
                elif edge.start < limit and one.floats:
                    return limit, one
            edge = edge.parent
        return 0, None

    def serving(self, position: int) -> Checkpoint | None:
        """A checkpoint behind `position`, which lies on this edge, that serves it: here, or where it goes on; or None.

        O(edges and checkpoints behind it that may serve it).
        """
        todo = [self]
        while todo:
            edge = todo.pop()
            if edge.reach <= position:
                for one in edge.checkpoints[bisect_right(edge.checkpoints, position, key=_position) :]:
                    if one.first <= position:
                        return one
                if edge.resident_children:
                    todo.extend(edge.children.values())
        return None

    def note_reach(self, first: int) -> None:
        """A checkpoint on this edge serves positions from `first` on."""
        edge: Edge | None = self
        while edge is not None and first < edge.reach:
            edge.reach = first
            edge = edge.parent

    def review_reach(self, first: int) -> None:
        """No checkpoint on this edge that serves `first` does so any more, or not more than the others do.

        Where many paths part nobody looks at all of them: what is said of it is true as it is.
        """
        edge: Edge | None = self
        while edge is not None and edge.reach >= first and len(edge.children) <= _FEW:
            found = [one.first for one in edge.checkpoints if one.first < one.position]
            edge.reach = min([*found, *(child.reach for child in edge.children.values())], default=FAR)
            edge = edge.parent

    def checkpoint_at(self, position: int) -> Checkpoint | None:
        """The checkpoint on this edge that serves `position`, or None."""
        if self.checkpoints and self.checkpoints[0].floats:
            return self.checkpoints[0] if self.start < position <= self.resident else None
        index = bisect_left(self.checkpoints, position, key=_position)
        found = self.checkpoints[index] if index < len(self.checkpoints) else None
        return found if found is not None and found.position == position else None

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Insert a checkpoint; no other lies at its position."""
        insort(self.checkpoints, checkpoint, key=_position)
        if checkpoint.first < checkpoint.position:
            self.note_reach(checkpoint.first)

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out."""
        del self.checkpoints[bisect_left(self.checkpoints, checkpoint.position, key=_position)]
        if checkpoint.first < checkpoint.position:
            self.review_reach(checkpoint.first)

    @property
    def last_checkpoint(self) -> int:
        """The deepest position of a checkpoint on it, its start if there is none."""
        return self.checkpoints[-1].position if self.checkpoints else self.start

    def pin_at(self, position: int) -> Pin | None:
        """The pin that ends at `position`, or None."""
        return next((pin for pin in self.pins if pin.position == position), None)


class Match(NamedTuple):
    """How far a prompt follows a known path: it ends at `position`, inside or at the end of `edge`."""

    edge: Edge
    position: int

    def goes_on(self, length: int) -> bool:
        """Whether a prompt of `length` tokens that leads here goes on from the end of a path, and nothing else does."""
        return self.position == self.edge.end and not self.edge.children and self.position < length

    def common(self, anchor: Anchor) -> int:
        """Where this path and the one to `anchor` part, or the shorter of them ends. O(edges)."""
        edges = set(self.edge.path())
        shared = next((edge for edge in anchor.edge.path() if edge in edges), None)
        return min(self.position, anchor.position, shared.end) if shared else 0

    def lost(self, low: int, high: int) -> Iterator[LostCheckpoint]:
        """Checkpoints that went from (low, high] of this path, deepest first."""
        for edge in self.edge.path():
            for position in sorted(edge.lost, reverse=True):
                if low < position <= high:
                    yield edge.lost[position]
            if edge.start <= low:
                return
