"""Headway's value as a cache policy of vLLM's CPU offloading tier, tried: vLLM's own policies do better (docs/vllm.md).

The tier knows *chunks*: the entries, or the state, of one KV cache group up to a position. Chunks of all groups at one
position of one prefix have the same hash; that is a *place*. A request that comes back can resume at a place where all
groups have what they need: a *point*. Of groups with states and windows only some places have chunks (*sparse* groups,
found out from what requests store); without these every place is a point.

What is kept is decided by the point: expected uses x compute saved over the point before it / chunks that would be
free, with the expected uses of `headway.cache.policy.reuse`. Giving up a point gives up its sparse chunks; entries go
from the end of a prefix, once no point needs them.

Rejected: a value for each chunk by itself. A state without its entries is worth nothing, and entries without a state
behind them are not either; chunks that go one by one leave both.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from headway.cache import Candidate, ComputeCost
from headway.cache.policy.eviction import EvictionQueue, Value
from headway.cache.policy.reuse import PATH, ReuseRates
from headway.errors import ConfigError

__all__ = ["ValueCachePolicy"]

_GROUP_BYTES = 4
"""Bytes at the end of a chunk's key that name its group; the hash before them names the place."""
_GHOSTS = 4
"""Places that are remembered after their chunks went, as a multiple of the tier's chunks."""
_BEHIND, _BEHIND_SHARE = "behind", 0.5
"""Kind of entries behind the last point of a prefix, and what they are worth of what a point there would save: vLLM
stores a state where a prompt parts from such entries."""
_END, _INSIDE = "prompt_end", "junction"
"""Kinds of points in sparse groups, for what is learned of their reuse: the deepest that a request stores; others."""

if not hasattr(CachePolicy, "on_request_access"):
    raise ConfigError(
        "this policy needs the cache policies of vLLM 0.33 or newer, which tell a policy whose chunks it sees"
    )


@dataclass(eq=False, slots=True)
class _Place:
    """One position of one prefix.

    Attributes:
        position: Tokens up to it.
        parent: The place before it, as far as a request has shown it.
        keys: Its chunks that are in the tier.
        children: Places behind it that are needed.
        open: Requests under way that have stored here.
        needed: Whether it has chunks, is open, or leads to a place that has or is.
        uses: How often it was wanted.
        born: Tick when it was stored first.
        used: Tick of its last use.
        kind: Why it is a point, for what is learned of reuse.
        entry: Its number in the queue of points.
    """

    position: int
    parent: _Place | None = None
    keys: dict[int, bytes] = field(default_factory=dict)
    children: int = 0
    open: int = 0
    needed: bool = False
    uses: int = 0
    born: int = 0
    used: int = 0
    kind: str = PATH
    entry: int = -1


@dataclass(eq=False, slots=True)
class _Path:
    """The places that a request under way has shown, by position. A request keeps one for each cache it meets."""

    owner: object
    positions: list[int] = field(default_factory=list)
    places: dict[int, _Place] = field(default_factory=dict)
    stored: set[_Place] = field(default_factory=set)


class ValueCachePolicy(CachePolicy):  # type: ignore[misc, unused-ignore]
    """What saves most compute for its memory stays. One object serves one tier; it is not thread-safe."""

    def __init__(self, cache_capacity: int) -> None:
        """A policy for a tier of `cache_capacity` chunks."""
        super().__init__(cache_capacity)
        self._most_ghosts = _GHOSTS * cache_capacity
        self._cost = ComputeCost()
        self._start()

    def _start(self) -> None:
        self._chunks: dict[bytes, Any] = {}
        self._evictable: set[bytes] = set()
        self._places: dict[bytes, _Place] = {}
        self._ghosts: OrderedDict[bytes, _Place] = OrderedDict()
        self._sparse: set[int] = set()
        self._rates, self._value = ReuseRates(), Value()
        self._points: EvictionQueue[_Place] = EvictionQueue(self._describe, self._value)
        self._useless: deque[_Place] = deque()
        self._tick = 0
        self._era = object()

    # ---- what the tier calls

    def get(self, key: bytes) -> Any:
        """The chunk of `key`, or None. O(1)."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any) -> None:
        """A chunk is about to be stored by a request."""
        path, position = self._path(req_context), req_context.get_offload_key_position(key)
        self._chunks[key] = chunk
        place = self._shown(key, position, path)
        place.keys[_group(key)] = key
        if place not in path.stored:
            path.stored.add(place)
            place.open += 1
        self._settle(place)

    def remove(self, key: bytes) -> None:
        """A store failed: its chunk is gone."""
        if key in self._chunks:
            self._settle(self._take(key)[0])

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Some chunks were used now."""
        self._tick += 1
        for place in self._known(keys):
            place.used = self._tick

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """What is stored again after it went was wanted."""
        self._tick += 1
        for name in dict.fromkeys(key[:-_GROUP_BYTES] for key in keys):
            place = self._ghosts.pop(name, None)
            if place is not None:
                self._places[name] = place
                if not self._sparse or place.kind != PATH:
                    self._wanted(place)

    def on_request_access(self, keys: Iterable[bytes], req_context: Any) -> None:
        """A request has shown some of its prefix."""
        path = self._path(req_context)
        for key in keys:
            if key in self._chunks:
                self._shown(key, req_context.get_offload_key_position(key), path)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """A request has ended: where it resumed was wanted, and what it left is judged like all else."""
        self._tick += 1
        self._learn(key_groups)
        reused = sorted(self._known(reused_keys), key=lambda place: place.position)
        points = [place for place in reused if self._is_point(place)]
        for place in points[-1:] if self._sparse else points:
            self._wanted(place)
        if reused and reused[-1] not in points:  # vLLM now stores a state there
            self._rates.wanted(_BEHIND, max(1, self._tick - reused[-1].used))
        for place in reused:
            place.used = self._tick
        stored = self._path(req_context).stored
        deepest = True
        for place in sorted(stored, key=lambda place: -place.position):
            place.open = max(0, place.open - 1)
            if self._is_point(place):
                place.kind = PATH if not self._sparse else _END if deepest else _INSIDE
                deepest = False
                self._rates.took(place.kind)
            self._settle(place)
        stored.clear()

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Give up exactly `n` chunks that nobody uses and that are not protected.

        Returns:
            Their keys and chunks; None, and nothing is changed, if there are fewer.
        """
        if len(self._evictable) - sum(key in self._evictable for key in protected) < n:
            return None
        out: list[tuple[bytes, Any]] = []
        aside: list[_Place] = []
        while len(out) < n:
            if self._useless:
                place = self._useless.popleft()
                spare = self._free(self._spare(place), protected)
            elif (found := self._points.pop()) is not None:
                place, candidate = found
                point = self._is_point(place)
                spare = self._free([k for g, k in place.keys.items() if self._of_point(g) or not point], protected)
                self._value.evicted(candidate)
                if point and self._sparse and not place.children:
                    self._rates.took(_BEHIND)
            else:  # of requests under way
                spare = [next(iter(self._free(self._evictable, protected)))]
                place = self._places[spare[0][:-_GROUP_BYTES]]
            out += [self._take(key)[1:] for key in spare[: n - len(out)]]
            if spare:
                self._settle(place)
            else:
                aside.append(place)
        for place in aside:
            self._settle(place)
        return out

    def clear(self) -> None:
        """Forget everything."""
        self._start()

    def mark_evictable(self, key: bytes) -> None:
        """Nobody reads or writes a chunk any more."""
        self._evictable.add(key)
        self._settle(self._places[key[:-_GROUP_BYTES]])

    def mark_non_evictable(self, key: bytes) -> None:
        """Somebody reads a chunk."""
        self._evictable.discard(key)

    # ---- places

    def _path(self, context: Any) -> _Path:
        path: _Path | None = context.get_state(_Path)
        if path is None or path.owner is not self._era:
            path = _Path(self._era)
            context.set_state(path)
        return path

    def _shown(self, key: bytes, position: int | None, path: _Path) -> _Place:
        """The place of a key, behind the one before it on the request's path."""
        name = key[:-_GROUP_BYTES]
        place = self._places.get(name)
        if place is None:
            if name in self._ghosts:
                place = self._ghosts.pop(name)
            else:
                place = _Place(position or 0, born=self._tick, used=self._tick)
            self._places[name] = place
        if position is None:
            return place
        if position not in path.places:
            insort(path.positions, position)
            path.places[position] = place
        index = bisect_left(path.positions, position)
        self._link(place, path.places[path.positions[index - 1]] if index else None)
        return place

    def _link(self, place: _Place, parent: _Place | None) -> None:
        if parent is None or parent is place.parent:
            return
        before, place.parent = place.parent, parent
        if place.needed:
            for each, change in ((before, -1), (parent, 1)):
                if each is not None:
                    each.children += change
                    self._settle(each)

    def _known(self, keys: Iterable[bytes]) -> set[_Place]:
        names = {key[:-_GROUP_BYTES] for key in keys}
        return {place for name in names if (place := self._places.get(name)) is not None}

    def _take(self, key: bytes) -> tuple[_Place, bytes, Any]:
        """Take a chunk out. A place without chunks becomes a ghost."""
        name = key[:-_GROUP_BYTES]
        place = self._places[name]
        del place.keys[_group(key)]
        self._evictable.discard(key)
        if not place.keys:
            self._ghosts[name] = self._places.pop(name)
            if len(self._ghosts) > self._most_ghosts:
                self._ghosts.popitem(last=False)
        return place, key, self._chunks.pop(key)

    # ---- what is worth what

    def _learn(self, key_groups: Sequence[Sequence[bytes]]) -> None:
        """Groups that store at fewer places than others are sparse."""
        counts = {_group(keys[0]): len(keys) for keys in key_groups if keys}
        new = {group for group, count in counts.items() if count < max(counts.values())} - self._sparse
        if new:
            self._sparse |= new
            for place in sorted(self._places.values(), key=lambda place: -place.position):
                self._settle(place)

    def _is_point(self, place: _Place) -> bool:
        return bool(place.keys) and all(group in place.keys for group in self._sparse)

    def _of_point(self, group: int) -> bool:
        return group in self._sparse or not self._sparse

    def _spare(self, place: _Place) -> list[bytes]:
        """Chunks of sparse groups that serve nobody: others of the same point are gone."""
        if place.open or self._is_point(place):
            return []
        return [key for group, key in place.keys.items() if group in self._sparse]

    def _free(self, keys: Iterable[bytes], protected: Collection[bytes]) -> list[bytes]:
        return [key for key in keys if key in self._evictable and key not in protected]

    def _settle(self, start: _Place) -> None:
        """Judge a place anew, and those before it as far as that changes them."""
        place: _Place | None = start
        while place is not None:
            if self._is_point(place) or (place.keys and not place.children):
                self._points.push(place)
            else:
                self._points.discard(place)
            needed = bool(place.keys) or place.open > 0 or place.children > 0
            changed, place.needed = needed != place.needed, needed
            if any(key in self._evictable for key in self._spare(place)):
                self._useless.append(place)
            if not changed:
                return
            if place.parent is not None:
                place.parent.children += 1 if needed else -1
            place = place.parent

    def _wanted(self, place: _Place) -> None:
        self._rates.wanted(place.kind, None if place.uses else max(1, self._tick - place.born))
        place.uses += 1
        place.used = self._tick
        if place.entry >= 0:
            self._points.push(place)

    def _describe(self, place: _Place) -> Candidate | None:
        """What there is to know of a point, or of entries with none behind them. None while it cannot go."""
        if place.open or (place.children and not self._sparse) or not self._free(place.keys.values(), ()):
            return None
        point, chunks = self._is_point(place), len(place.keys)
        if point and place.children:
            chunks = len(self._sparse)
        alone, start = point and not place.children, 0
        for before in _before(place):
            if not point or self._is_point(before):
                start = before.position
                break
            alone = alone and before.children == 1 and not before.open
            chunks += len(before.keys) if alone else 0
        kind, share = (place.kind, 1.0) if point else (_BEHIND, _BEHIND_SHARE)
        rate = self._rates.rate(kind, place.uses if point else 0, self._tick - place.born, self._tick - place.used)
        saved = share * self._cost.between(start, max(start + 1, place.position))
        return Candidate(kind, place.position, place.uses, rate, saved, max(1, chunks), place.used, 0.0)


def _before(place: _Place) -> Iterator[_Place]:
    while (parent := place.parent) is not None:
        yield parent
        place = parent


def _group(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
