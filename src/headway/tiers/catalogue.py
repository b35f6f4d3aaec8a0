"""What one tier is known to hold: stretches and checkpoints by digest, what each is worth, and what goes first.

The end of every stretch is a *point*, filed under its digest: the stretch that ends there, if the tier has it, the
checkpoints behind it, and the points after it. Points name the point before them by digest, so records can become known
in any order, and a stretch that was lost leaves a hole that a later write mends: what lies behind is usable again, and
meanwhile by whoever already has the tokens before it. (Rejected: a tree of nodes by tokens, in which a record whose
parent is unknown has no place.)

Eviction: every checkpoint is a candidate, with the priority *price + worth / bytes that its going frees*; the price is
the priority of the last victim, so what nobody asks for sinks (GreedyDual). A stretch goes with the last thing behind:
attention entries without a checkpoint behind them can never be hit. Only where all groups need the whole prefix does a
stretch stand for itself, and goes when nothing is behind it.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from headway.tiers.objects import Manifest, ObjectLayout, PathDigests, Stretch

__all__ = ["Catalogue", "Entry", "Path"]

_FOREIGN = 1 << 17
"""Entries of other servers that are kept in memory."""
_WALK = 64
"""Stretches at most that are counted with a checkpoint that they would go with."""


@dataclass(eq=False, slots=True)
class Entry:
    """A stretch or a checkpoint that the tier holds.

    Attributes:
        folder: Its namespace, as in names.
        record: What is known of it.
        own: It counts against this server's budget.
        whole: It can be used; False while it is being written.
        until: Not to be used before this time, because it failed (seconds, monotonic).
        failures: How often it failed.
        holds: How many writes and loads under way depend on it: it is not evicted.
        worth: Expected seconds that keeping it saves.
        priority: Its place in the queue for eviction; the lowest goes.
        present: It has not been dropped.
        withdrawn: Its objects are to be removed when nothing holds it any more.
    """

    folder: str
    record: Stretch | Manifest
    own: bool = True
    whole: bool = True
    until: float = 0.0
    failures: int = 0
    holds: int = 0
    worth: float = 0.0
    priority: float = 0.0
    present: bool = True
    withdrawn: bool = False

    def usable(self, now: float) -> bool:
        """Whether it can be loaded now."""
        return self.whole and self.until <= now


@dataclass(eq=False, slots=True)
class _Point:
    """The end of a stretch, or the start of a namespace's paths."""

    before: bytes | None = None
    stretch: Entry | None = None
    after: set[bytes] = field(default_factory=set)
    checkpoints: dict[int, dict[bytes, Entry]] = field(default_factory=dict)

    @property
    def leaf(self) -> bool:
        return not self.after and not self.checkpoints


@dataclass(slots=True)
class Path:
    """What a tier holds of one path.

    Attributes:
        stretches: Entry of each whole stretch of the path, None where the tier has none.
        checkpoints: Checkpoints on the path, by position.
    """

    stretches: list[Entry | None]
    checkpoints: dict[int, Entry]


class Catalogue:
    """See the module. Not safe for threads: its tier has a lock.

    Attributes:
        used: Bytes of the entries that count against the budget.
        checkpoints: How many checkpoints there are.
        evictions: How many checkpoints, and stretches that stood for themselves, were evicted.
    """

    def __init__(self, layout: ObjectLayout) -> None:
        """An empty one."""
        self.used = self.checkpoints = 0
        self.evictions = 0
        self._layout = layout
        self._points: dict[tuple[str, bytes], _Point] = {}
        self._entries: dict[tuple[str, bytes], Entry] = {}
        self._queue: list[tuple[float, int, Entry]] = []
        self._price = 0.0
        self._serial = itertools.count()

    # ---- finding

    def path(self, folder: str, digests: PathDigests, floor: int, limit: int) -> Path:
        """What there is between two positions, in O(stretches that are known + different positions of checkpoints)."""
        size, ahead = self._layout.stretch, self._layout.lookahead
        limit = min(limit, digests.tokens - ahead)
        stretches: list[Entry | None] = [None] * digests.stretches
        checkpoints: dict[int, Entry] = {}
        if not self._points:
            return Path(stretches, checkpoints)
        for number in range(floor // size, digests.stretches + 1):
            point = self._points.get((folder, digests.boundary(number)))
            if point is None:
                break  # a point is known as long as anything behind it is
            if number:
                stretches[number - 1] = point.stretch
            for position, entries in point.checkpoints.items():
                if floor < position <= limit and (entry := entries.get(digests.rest(position))) is not None:
                    checkpoints[position] = entry
        return Path(stretches, checkpoints)

    def stretch(self, folder: str, digest: bytes) -> Entry | None:
        """The stretch that ends at a digest."""
        point = self._points.get((folder, digest))
        return point.stretch if point else None

    def checkpoint(self, folder: str, before: bytes, position: int, tokens: bytes) -> Entry | None:
        """The checkpoint at a position behind the end of a stretch."""
        point = self._points.get((folder, before))
        return point.checkpoints.get(position, {}).get(tokens) if point else None

    def entries(self, folder: str | None = None) -> list[Entry]:
        """Everything that is held, or everything of a namespace."""
        return [entry for (place, _), entry in self._entries.items() if folder in (None, place)]

    def entry(self, folder: str, digest: bytes) -> Entry | None:
        """What is held under a digest."""
        return self._entries.get((folder, digest))

    def idle(self) -> list[Entry]:
        """Stretches that nothing is behind, where they are of no use alone."""
        if self._layout.resumes_anywhere:
            return []
        return [point.stretch for point in self._points.values() if point.stretch is not None and point.leaf]

    # ---- changing

    def add(self, entry: Entry) -> Entry:
        """Take an entry in. One that is there already stays, and is returned."""
        folder, record = entry.folder, entry.record
        if isinstance(record, Stretch):
            point = self._point(folder, record.digest)
            if point.stretch is not None:
                return point.stretch
            point.stretch, point.before = entry, record.before
            self._point(folder, record.before).after.add(record.digest)
        else:
            point = self._point(folder, record.before)
            there = point.checkpoints.setdefault(record.position, {})
            if record.tokens in there:
                return there[record.tokens]
            there[record.tokens] = entry
            entry.worth = record.worth
            self.checkpoints += 1
        self.used += entry.record.size if entry.own else 0
        self._entries[folder, record.digest] = entry
        self.rank(entry)
        return entry

    def rank(self, entry: Entry) -> None:
        """Give an entry its place in the queue anew: it was made, or used."""
        entry.priority = self._price + entry.worth / max(1, self._freed(entry))
        self._enqueue(entry)

    def release(self, entry: Entry, written: bool = False) -> list[Entry]:
        """Undo one of an entry's `holds`; returns what waited for that to be removed.

        After a write, a stretch that nothing was written behind goes too.
        """
        gone: list[Entry] = []
        entry.holds -= 1
        if entry.withdrawn and not entry.holds:
            gone.append(entry)
        if written and not entry.holds and entry.present and isinstance(entry.record, Stretch):
            self._prune(entry.folder, entry.record.digest, gone, keep=False)
        return gone

    def disown(self, entry: Entry) -> None:
        """Another server wrote it: it does not count against our budget, and is not ours to evict."""
        self.used -= entry.record.size if entry.own else 0
        entry.own = False

    def trim(self, limit: int = _FOREIGN) -> None:
        """Keep no more than so many entries of other servers in memory; those that became known first go."""
        foreign = [entry for entry in self._entries.values() if not entry.own] if len(self._entries) > limit else []
        for entry in foreign[: max(0, len(foreign) - limit * 7 // 8)]:
            if not entry.holds:
                self.drop(entry, keep=True)

    def drop(self, entry: Entry, keep: bool = False) -> list[Entry]:
        """Take an entry out, and stretches that nothing is left behind; returns all that went, the deepest first.

        Where `keep` is true such stretches stay, first in line for eviction: a checkpoint was lost, and comes again.
        """
        gone: list[Entry] = []
        if not entry.present:
            return gone
        record, folder = entry.record, entry.folder
        if isinstance(record, Stretch):
            self._points[folder, record.digest].stretch = None
            self._went(entry, gone)
            self._prune(folder, record.digest, gone, keep)
        else:
            point = self._points[folder, record.before]
            del point.checkpoints[record.position][record.tokens]
            if not point.checkpoints[record.position]:
                del point.checkpoints[record.position]
            self._went(entry, gone)
            self._prune(folder, record.before, gone, keep)
        return gone

    def evict(self, room: int, capacity: int) -> list[Entry]:
        """Take out the least worth until `room` bytes of `capacity` are free; held entries stay. Returns what went."""
        gone: list[Entry] = []
        held: list[Entry] = []
        while self.used + room > capacity and self._queue:
            priority, _, entry = heapq.heappop(self._queue)
            if not entry.present or priority != entry.priority or not self._queued(entry):
                continue
            if entry.holds:
                held.append(entry)
                continue
            self._price = max(self._price, priority)
            self.evictions += 1
            gone += self.drop(entry)
        for entry in held:
            self._enqueue(entry)
        return gone

    def forget(self, folder: str, data: bytes | None = None, digests: PathDigests | None = None) -> list[Entry]:
        """Take out a namespace; with a path, what begins with it, and what of it no other known path shares.

        What hangs behind a stretch whose tokens are not known goes too: it cannot be told apart.

        Returns:
            What went.
        """
        if data is None or digests is None:
            return [gone for entry in self.entries(folder) for gone in self.drop(entry)]
        found = _Forgetting(self, folder, data, digests)
        doomed = found.doomed + [entry for entry in found.along if self._reach(entry) > found.shared]
        return [gone for entry in doomed for gone in self.drop(entry)]

    # ---- inside

    def _below(self, folder: str, digest: bytes) -> list[Entry]:
        """All that hangs at a point, its own stretch included."""
        found: list[Entry] = []
        todo = [digest]
        while todo:
            point = self._points.get((folder, todo.pop()))
            if point:
                found += [point.stretch] if point.stretch else []
                found += [entry for entries in point.checkpoints.values() for entry in entries.values()]
                todo += point.after
        return found

    def _adrift(self, folder: str, start: bytes) -> list[bytes]:
        """Points that nothing known leads to."""
        return [
            digest
            for (place, digest), point in self._points.items()
            if place == folder and digest != start and point.stretch is None and point.before is None
        ]

    def _enqueue(self, entry: Entry) -> None:
        if self._queued(entry):
            heapq.heappush(self._queue, (entry.priority, next(self._serial), entry))
        if len(self._queue) > 1024 and len(self._queue) > 8 * len(self._points):
            self._queue = [item for item in self._queue if item[2].present and item[0] == item[2].priority]
            heapq.heapify(self._queue)

    def _queued(self, entry: Entry) -> bool:
        """Whether it is for eviction to decide about this entry."""
        if isinstance(entry.record, Manifest):
            return entry.own
        return entry.own and self._points[entry.folder, entry.record.digest].leaf

    def _reach(self, entry: Entry) -> int:
        """How many first bytes of its path an entry speaks of."""
        record, layout = entry.record, self._layout
        position = (record.number + 1) * layout.stretch if isinstance(record, Stretch) else record.position
        return 4 * (position + layout.lookahead)

    def _freed(self, entry: Entry) -> int:
        """Bytes that an entry's going frees, with the stretches that would go too."""
        freed = entry.record.size
        if isinstance(entry.record, Stretch) or self._layout.resumes_anywhere:
            return freed
        place: bytes | None = entry.record.before
        for step in range(_WALK):
            point = self._points.get((entry.folder, place)) if place is not None else None
            alone = len(point.checkpoints) == 1 - min(step, 1) and len(point.after) == min(step, 1) if point else False
            if point is None or not alone or point.stretch is None:
                break
            freed, place = freed + point.stretch.record.size, point.before
        return freed

    def _point(self, folder: str, digest: bytes) -> _Point:
        return self._points.setdefault((folder, digest), _Point())

    def _went(self, entry: Entry, gone: list[Entry]) -> None:
        entry.present = False
        del self._entries[entry.folder, entry.record.digest]
        self.checkpoints -= isinstance(entry.record, Manifest)
        self.used -= entry.record.size if entry.own else 0
        gone.append(entry)

    def _prune(self, folder: str, digest: bytes, gone: list[Entry], keep: bool) -> None:
        """From a point upward: take out stretches that nothing is behind, and points that say nothing."""
        place: bytes | None = digest
        while place is not None:
            point = self._points.get((folder, place))
            if point is None or not point.leaf:
                return
            if point.stretch is not None:
                if keep or self._layout.resumes_anywhere:
                    self._enqueue(point.stretch)  # a leaf from now on
                    return
                if point.stretch.holds:
                    return
                self._went(point.stretch, gone)
                point.stretch = None
            del self._points[folder, place]
            place = point.before
            before = self._points.get((folder, place)) if place is not None else None
            if before is not None:
                before.after.discard(digest)
            digest = place or b""


class _Forgetting:
    """What forgetting a path is about.

    Attributes:
        doomed: What begins with the path.
        along: What lies on the path.
        shared: How many first bytes of the path another known path shares.
    """

    def __init__(self, catalogue: Catalogue, folder: str, data: bytes, digests: PathDigests) -> None:
        self.doomed: list[Entry] = []
        self.along: list[Entry] = []
        self.shared = 0
        points, size = catalogue._points, catalogue._layout.stretch
        on = [digests.boundary(number) for number in range(digests.stretches + 1)]
        for number, boundary in enumerate(on):
            point = points.get((folder, boundary))
            if point is not None:
                self.along += [point.stretch] if point.stretch else []
                start = len(digests.part(0, number * size)) if number else 0
                for entry in (entry for at in point.checkpoints.values() for entry in at.values()):
                    self._judge([entry], entry.record.tokens, data[start:], start)
                for after in point.after.difference(on[number + 1 : number + 2]):
                    stretch = catalogue.stretch(folder, after)
                    inside = catalogue._below(folder, after)
                    self._judge(inside, stretch.record.tokens if stretch else data[start:], data[start:], start)
        for digest in set(catalogue._adrift(folder, on[0])).difference(on):
            self.doomed += catalogue._below(folder, digest)

    def _judge(self, entries: list[Entry], tokens: bytes, rest: bytes, start: int) -> None:
        if tokens.startswith(rest):
            self.doomed += entries
        elif rest.startswith(tokens):
            self.along += entries
        else:
            self.shared = max(self.shared, start + _common(tokens, rest))


def _common(one: bytes, other: bytes) -> int:
    """How many first bytes two byte strings share, in whole tokens."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[: 4 * middle] == other[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return 4 * low
