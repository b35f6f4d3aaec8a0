"""An estimate of what a cache that knows the future reaches with the same memory, to measure policies against.

It takes a checkpoint only where a later request will resume (where that request leaves what an endless memory would
know), and keeps it while it is worth its memory: when memory runs out, the one with the fewest

    tokens it saves at its next use / (bytes that dropping it frees x requests until then)

goes. The bytes are its state and the attention entries that only it holds. A request that runs needs memory as well:
its own entries and one state; one that could never run is refused, as the cache does. A request resumes at the deepest
checkpoint kept on its path, also where another was wanted.

This is a good heuristic and not the optimum, which is a knapsack over time (out of reach even for equal sizes on a
tree): a policy could in principle do better, and does where the memory holds hardly more than the request that
runs. Ties go to the older checkpoint, so it is deterministic. With unlimited memory it reaches the endless ceiling.

Rejected: counting later requests that would use a checkpoint for want of a deeper one. It keeps shallow places at the
cost of deep ones and loses up to six points on the public conversation trace.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import FullAttention, Recurrent
from headway.formats import Trace
from headway.replay.config.config import ReplayConfig
from headway.replay.config.groups import reach_of
from headway.replay.trace.prefixes import Reading, number_prefixes, read_outputs, sequences

__all__ = ["clairvoyant_hits"]

Longs = NDArray[np.int64]
_NEVER = 1 << 60


def clairvoyant_hits(trace: Trace, config: ReplayConfig, matches: Longs, reading: Reading | None = None) -> Longs:
    """Tokens of each prompt that the clairvoyant reuses, int64 [R].

    Args:
        trace: The trace.
        config: Model and memory; its policies are not used.
        matches: What `endless_matches` gave for this trace and reading.
        reading: How answers are read.
    """
    future = _future(trace, matches, reading or read_outputs(trace, config.outputs))
    token, state = _weights(config)
    memory = float("inf") if config.memory is None else float(config.memory)
    return _Clairvoyant(future, memory, token, state).all()


def _weights(config: ReplayConfig) -> tuple[float, float]:
    """Bytes of one rank for a token of full attention, and for what a checkpoint holds beside it."""
    token = state = 0.0
    for group in config.groups:
        if isinstance(group, FullAttention):
            token += group.bytes_per_token / (config.layout.shards if group.sharded else 1)
        elif isinstance(group, Recurrent):
            state += group.state_bytes
        else:
            state += group.bytes_per_token * (reach_of(group) - 1)
    return token, state


@dataclass(frozen=True)
class _Future:
    """The places where requests will resume, as a tree, and who passes them.

    Attributes:
        depth: Tokens before each place.
        parent: The next shallower place on its path, -1 for none.
        demands: Requests that want each place, ascending.
        wanted: Place that each request wants, -1 for none.
        bounds: Where each request's places begin in `passed`.
        passed: Places that each request computes through, shallowest first.
        prompt: Tokens of each prompt.
        length: Tokens of each request, its answer included.
        reused: Tokens that each request reuses if it gets the place that it wants.
    """

    depth: list[int]
    parent: list[int]
    demands: list[list[int]]
    wanted: list[int]
    bounds: list[int]
    passed: list[int]
    prompt: list[int]
    length: list[int]
    reused: list[int]


def _future(trace: Trace, matches: Longs, reading: Reading) -> _Future:
    symbols, offsets, prompts = sequences(trace, reading)
    prefixes = number_prefixes(symbols, offsets)
    requests = len(trace)
    wanted_symbols = np.minimum(-(-matches // trace.width), prompts - 1)
    some = wanted_symbols > 0
    ends = prefixes.ids[offsets[:-1][some] + wanted_symbols[some] - 1]
    number = np.full(prefixes.count, -1)
    number[np.unique(ends)] = np.arange(len(np.unique(ends)))
    wanted = np.full(requests, -1)
    wanted[some] = number[ends]
    places = np.flatnonzero(number[prefixes.ids] >= 0)
    owner = np.searchsorted(offsets, places, side="right") - 1
    passed = number[prefixes.ids[places]]
    depth, parent = np.zeros(int(number.max()) + 1, dtype=np.int64), np.full(int(number.max()) + 1, -1)
    depth[passed] = (places - offsets[owner] + 1) * trace.width
    inner = np.flatnonzero(owner[1:] == owner[:-1]) + 1
    parent[passed[inner]] = passed[inner - 1]
    demands: list[list[int]] = [[] for _ in range(len(depth))]
    for request in np.flatnonzero(some).tolist():
        demands[wanted[request]].append(request)
    return _Future(
        depth.tolist(),
        parent.tolist(),
        demands,
        wanted.tolist(),
        np.searchsorted(owner, np.arange(requests + 1)).tolist(),
        passed.tolist(),
        trace.prompt_tokens.tolist(),
        (trace.prompt_tokens + trace.answer_tokens).tolist(),
        matches.tolist(),
    )


class _Clairvoyant:
    """The run: which places are kept, what they weigh, and which goes next."""

    def __init__(self, future: _Future, memory: float, token: float, state: float) -> None:
        self._future, self._memory, self._token, self._state = future, memory, token, state
        places = len(future.depth)
        self._kept = [False] * places
        self._below = [0] * places
        """Kept places at or below each."""
        self._turn = [0] * places
        """Number of the next demand of each place."""
        self._next = [demands[0] for demands in future.demands]
        self._heap: list[tuple[float, int, int]] = []
        self._used = 0.0
        self._pushed = 0

    def all(self) -> Longs:
        """Run every request."""
        return np.array([self._one(i) for i in range(len(self._future.wanted))], dtype=np.int64)

    def _one(self, now: int) -> int:
        future, kept = self._future, self._kept
        wanted = future.wanted[now]
        if future.prompt[now] * self._token + self._state > self._memory:
            if wanted >= 0:
                self._advance(wanted, now)
            return 0
        at = wanted
        while at >= 0 and not kept[at]:
            at = future.parent[at]
        hit = future.depth[at] if at >= 0 else 0
        if wanted >= 0:
            self._advance(wanted, now)
        passed = future.passed[future.bounds[now] : future.bounds[now + 1]]
        resident = max((future.depth[p] for p in passed if self._below[p]), default=0)
        work = self._state + max(0, future.length[now] - resident) * self._token
        if self._used + work > self._memory:
            self._shrink(self._memory - work, now, at)
        for place in passed:
            if future.depth[place] > hit and not kept[place] and self._next[place] < _NEVER:
                self._keep(place, now)
        if self._used > self._memory:
            self._shrink(self._memory, now, -1)
        return future.reused[now] if at == wanted and at >= 0 else hit

    def _advance(self, place: int, now: int) -> None:
        """The demand of a place by request `now` is over."""
        demands = self._future.demands[place]
        self._turn[place] += 1
        more = self._turn[place] < len(demands)
        self._next[place] = demands[self._turn[place]] if more else _NEVER
        if self._kept[place]:
            if more:
                self._push(place, now)
            else:
                self._drop(place, now)

    def _keep(self, place: int, now: int) -> None:
        self._used += self._weight(place)
        self._kept[place] = True
        at = place
        while at >= 0:
            self._below[at] += 1
            at = self._future.parent[at]
        self._push(place, now)

    def _drop(self, place: int, now: int) -> None:
        self._kept[place] = False
        at, heir = place, -1
        while at >= 0:
            self._below[at] -= 1
            if heir < 0 and self._kept[at]:
                heir = at
            at = self._future.parent[at]
        self._used -= self._weight(place)
        if heir >= 0 and self._below[heir] == 1:
            self._push(heir, now)

    def _weight(self, place: int) -> float:
        """Bytes of a place that is not kept, if it were: its state and the entries that nothing else kept holds."""
        parent, below = self._future.parent, self._below
        at = place
        while at >= 0 and not below[at]:
            at = parent[at]
        held = self._future.depth[at] if at >= 0 else 0
        return self._state + (self._future.depth[place] - held) * self._token

    def _worth(self, place: int, now: int) -> float:
        """What a kept place is worth now."""
        future, at = self._future, self._future.parent[place]
        alone, shared = future.depth[place], self._below[place] > 1
        floor = -1
        while at >= 0 and not self._kept[at]:
            if floor < 0 and self._below[at] > 1:
                floor = future.depth[at]
            at = future.parent[at]
        above = future.depth[at] if at >= 0 else 0
        entries = 0 if shared else alone - (floor if floor >= 0 else above)
        weight = self._state + entries * self._token
        return (alone - above) / (weight * max(1, self._next[place] - now)) if weight else float("inf")

    def _push(self, place: int, now: int) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self._worth(place, now), self._pushed, place))

    def _shrink(self, memory: float, now: int, spare: int) -> None:
        """Drop what is worth least until no more than `memory` bytes are used, all but `spare`."""
        held: list[tuple[float, int, int]] = []
        while self._used > memory and self._heap:
            worth, number, place = heapq.heappop(self._heap)
            if not self._kept[place]:
                continue
            if place == spare:
                held.append((worth, number, place))
                continue
            present = self._worth(place, now)
            if present > worth and self._heap and present > self._heap[0][0]:
                heapq.heappush(self._heap, (present, number, place))
                continue
            self._drop(place, now)
        for entry in held:
            heapq.heappush(self._heap, entry)
