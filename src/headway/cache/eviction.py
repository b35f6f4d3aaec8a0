"""What goes first when memory runs out.

An eviction policy is one small class: it gives every candidate a priority, and the lowest goes. The queue below keeps
candidates in a heap with lazy corrections, so an eviction costs O(log n) however much is resident.

The default is economic (greedy dual, Cao and Irani 1997, with frequency): priority = clock at last use + expected
reuse x compute saved / blocks. The clock is the priority of the last victim, so what is not used ages. The compute
saved is counted from the next shallower resume point, with the quadratic term of attention, so deep and lonely
checkpoints weigh more. Expected reuse is past uses plus one; that one is weighed by how many uses checkpoints of its
kind had so far, in comparison with the ends of prompts, and counts two at most (`PayRates`).

Rejected, measured on the two Mooncake traces (Kimi-K3, 20 and 50 GB a rank): past uses plus the plain pay rate, which
made whoever was used once outlive everything new (18.5% of tokens reused where LRU reuses 21.3%); compute saved from
the sequence's start instead of the next resume point (1 to 3 points less).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from headway.errors import ConfigError

__all__ = ["Candidate", "EvictionPolicy", "EvictionQueue", "Lru", "Value", "eviction_policy"]


_PRICE_STEP = 0.05
"""Weight of the last victim in the running mean that is the price: about the last twenty count."""


class Candidate(NamedTuple):
    """What a policy may know of something that could be evicted.

    Attributes:
        kind: Kind of placement that took it.
        position: Tokens that it lets a request skip.
        reuse: Expected number of uses to come: past uses, and one more that is weighed by how its kind pays
            (`PayRates.weight`).
        saved: Compute that one use saves over the next shallower resume point (units of `ComputeCost`).
        blocks: Blocks that its eviction would free (at least 1).
        used: Tick of its last use.
        age: The policy's `clock` at its last use.
    """

    kind: str
    position: int
    reuse: float
    saved: float
    blocks: int
    used: int
    age: float


class EvictionPolicy(ABC):
    """Ranks candidates; the lowest priority goes first. It keeps a clock and a price, so each cache needs its own.

    Attributes:
        clock: Stamped on a candidate at each use as its `age`.
        price: Value density (reuse x saved / blocks) of recent victims: what a block of memory is worth now, 0 while
            nothing had to go.
    """

    clock: float = 0.0
    price: float = 0.0

    @abstractmethod
    def priority(self, candidate: Candidate) -> float:
        """Priority of `candidate`; it must not fall while the candidate merely waits."""

    def evicted(self, candidate: Candidate) -> None:
        """`candidate` was chosen as a victim."""
        density = candidate.reuse * candidate.saved / candidate.blocks
        self.price += _PRICE_STEP * (density - self.price)


class Value(EvictionPolicy):
    """Expected reuse x compute saved / blocks, with ageing. The default."""

    def priority(self, candidate: Candidate) -> float:
        """Greedy-dual priority with frequency."""
        return candidate.age + candidate.reuse * candidate.saved / candidate.blocks

    def evicted(self, candidate: Candidate) -> None:
        """Advance the clock to the victim's priority."""
        super().evicted(candidate)
        self.clock = max(self.clock, self.priority(candidate))


class Lru(EvictionPolicy):
    """Least recently used first."""

    def priority(self, candidate: Candidate) -> float:
        """The tick of the last use."""
        return float(candidate.used)


def eviction_policy(choice: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the object itself.

    Raises:
        ConfigError: Unknown name.
    """
    if isinstance(choice, EvictionPolicy):
        return choice
    if choice == "value":
        return Value()
    if choice == "lru":
        return Lru()
    raise ConfigError(f"unknown eviction policy {choice!r}: use 'value', 'lru' or an EvictionPolicy object")


class _Queued(Protocol):
    """Something that can stand in the queue: it remembers the number of its valid entry."""

    entry: int


Item = TypeVar("Item", bound=_Queued)


class EvictionQueue(Generic[Item]):
    """Candidates by priority: a heap in which outdated entries are skipped or corrected when they come up.

    An entry whose priority has risen since it was pushed is put back; one whose priority has fallen must be pushed
    again by whoever made it fall.
    """

    def __init__(self, describe: Callable[[Item], Candidate | None], policy: EvictionPolicy) -> None:
        """Make an empty queue.

        Args:
            describe: Candidate record of an item, or None if it cannot be evicted now; whoever changes that pushes it
                again.
            policy: Ranks candidates.
        """
        self._describe = describe
        self._policy = policy
        self._heap: list[tuple[float, int, Item]] = []
        self._entries = 0
        self._live = 0

    def __len__(self) -> int:
        """Items that stand in the queue."""
        return self._live

    def push(self, item: Item) -> None:
        """Queue `item` at its present priority, replacing its earlier entry."""
        candidate = self._describe(item)
        if candidate is None:
            self.discard(item)
            return
        if item.entry < 0:
            self._live += 1
        self._entries += 1
        item.entry = self._entries
        heapq.heappush(self._heap, (self._policy.priority(candidate), item.entry, item))
        if len(self._heap) > 4 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Take `item` out, if it is in."""
        if item.entry >= 0:
            item.entry = -1
            self._live -= 1

    def pop(self) -> tuple[Item, Candidate] | None:
        """Take out the item of lowest priority, or None if nothing can be evicted."""
        while self._heap:
            stored, entry, item = heapq.heappop(self._heap)
            if item.entry != entry:
                continue
            self.discard(item)
            candidate = self._describe(item)
            if candidate is None:
                continue
            priority = self._policy.priority(candidate)
            if priority > stored and self._heap and priority > self._heap[0][0]:
                self.push(item)
                continue
            return item, candidate
        return None

    def clear(self) -> None:
        """Forget everything."""
        for _, _, item in self._heap:
            item.entry = -1
        self._heap.clear()
        self._live = 0
