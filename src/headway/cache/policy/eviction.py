"""What goes first when memory runs out.

An eviction policy is one small class: it gives every candidate a priority, and the lowest goes. The queue below keeps
candidates in a heap with lazy corrections, so an eviction costs O(log n) however much is resident.

No rule is best on all traffic, so the default, `adaptive`, follows the one that has saved most compute lately. What
each would have saved is known from directories of tokens that run beside the cache (`headway.cache.index.shadow`). It
chooses among least recently used, `value`, `greedy-dual` and `shared-value`, the first and last of these without
checkpoints at the ends of prompts, and evicts what the followed one would not have kept.

`value` keeps what saves most for its memory: priority = expected uses a tick x compute saved by one / blocks. The
expectation starts from how often and how soon checkpoints of its kind were wanted so far, and becomes its own the
longer it lives (`headway.cache.policy.reuse`). The compute saved is counted from the next shallower resume point, with
the quadratic term of attention, so deep and lonely checkpoints weigh more. `shared-value` counts the uses by requests
that go another way than those before: a conversation that goes on leaves its earlier turns behind.

`greedy-dual` (Cao and Irani 1997, with frequency): priority = clock at last use +
(past uses + 1) x compute saved / blocks, where the clock is the priority of the last victim.

What was tried and measured is in docs/policy.md.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from headway.errors import ConfigError

__all__ = [
    "EVICTIONS",
    "Adaptive",
    "Candidate",
    "Choice",
    "EvictionPolicy",
    "EvictionQueue",
    "GreedyDual",
    "Lru",
    "SharedValue",
    "Value",
    "Weighing",
    "eviction_policy",
]


_PRICE_STEP = 0.05
"""Weight of the last victim in the running mean that is the price: about the last twenty count."""
_EDGE = 0.003
"""Share by which another policy must have saved more before it is followed."""
_PASSED = 0.3
"""What a checkpoint counts for, of which another one lies behind on the same edge, where 1 is of one at its end."""
_ENDS = frozenset({"prompt_end", "boundary"})
"""Kinds of placement without which agents and chats do better: their requests go on from the ends of answers."""
_ASKED_AGAIN = 2
"""Candidates whose priority is asked for again at an eviction."""
_ASKED_ANEW = 64
"""Candidates that an eviction asks anew after another policy has taken over."""
_CORRECTED = 64
"""Candidates at most that an eviction looks at from the low end of the queue."""


class Candidate(NamedTuple):
    """What a policy may know of something that could be evicted.

    Attributes:
        kind: Kind of placement that took it.
        position: Tokens that it lets a request skip.
        uses: How often it was wanted.
        rate: Expected uses a tick from now on (`headway.cache.policy.reuse`).
        saved: Compute that one use saves over the next shallower resume point (units of `ComputeCost`).
        blocks: Blocks that its eviction would free (at least 1); not whole in a shadow.
        used: Tick of its last use.
        age: The policy's `clock` at its last use.
        shared: Of its uses those by requests that did not just go on where the latest one had ended.
        inner: Another one lies behind it on the same edge.
        kept: The shadow of the policy that is followed keeps it, or has not heard of it.
    """

    kind: str
    position: int
    uses: int
    rate: float
    saved: float
    blocks: float
    used: int
    age: float
    shared: int = 0
    inner: bool = False
    kept: bool = True


class EvictionPolicy(ABC):
    """Ranks candidates; the lowest priority goes first. It keeps a clock and a price, so each cache needs its own.

    Attributes:
        clock: Stamped on a candidate at each use as its `age`.
        price: Value density (rate x saved / blocks) of recent victims: what a block of memory is worth now, 0 while
            nothing had to go.
        learns: It reads `Candidate.rate`.
        without: Kinds of placement that are not taken under it, without what follows a colon.
    """

    clock: float = 0.0
    price: float = 0.0
    learns: bool = True
    without: frozenset[str] = frozenset()

    @abstractmethod
    def priority(self, candidate: Candidate) -> float:
        """Priority of `candidate`. It may change while the candidate waits; the queue asks again now and then."""

    def evicted(self, candidate: Candidate) -> None:
        """`candidate` was chosen as a victim."""
        density = candidate.rate * candidate.saved / candidate.blocks
        self.price += _PRICE_STEP * (density - self.price)


class Weighing(EvictionPolicy):
    """A policy that weighs what a block of a candidate saves: `rank` says it all."""

    @abstractmethod
    def rank(self, density: float, uses: int, rate: float, age: float, shared: int, inner: bool) -> float:
        """The priority of a candidate with these attributes, where `density` is saved / blocks."""

    def priority(self, candidate: Candidate) -> float:
        """The rank of `candidate`."""
        _, _, uses, rate, saved, blocks, _, age, shared, inner, _ = candidate
        return self.rank(saved / blocks, uses, rate, age, shared, inner)


class Value(Weighing):
    """Expected uses a tick x compute saved / blocks."""

    def rank(self, density: float, uses: int, rate: float, age: float, shared: int, inner: bool) -> float:
        """What a block of it is expected to save a tick."""
        return rate * density


class SharedValue(Weighing):
    """Value, where only uses by others count, and what lies before another checkpoint of its edge counts less."""

    def rank(self, density: float, uses: int, rate: float, age: float, shared: int, inner: bool) -> float:
        """What a block of it is expected to save a tick."""
        worth = (shared + 1) / (uses + 1) * rate * density
        return _PASSED * worth if inner else worth


class GreedyDual(Weighing):
    """Past uses and one more x compute saved / blocks, with ageing: what is not used falls behind."""

    learns = False

    def rank(self, density: float, uses: int, rate: float, age: float, shared: int, inner: bool) -> float:
        """Greedy-dual priority with frequency."""
        return age + (uses + 1) * density

    def evicted(self, candidate: Candidate) -> None:
        """Advance the clock to the victim's priority."""
        super().evicted(candidate)
        self.clock = max(self.clock, self.priority(candidate))


class Lru(EvictionPolicy):
    """Least recently used first."""

    learns = False

    def priority(self, candidate: Candidate) -> float:
        """The tick of the last use."""
        return float(candidate.used)


class Choice(NamedTuple):
    """A policy that `Adaptive` may follow, and the kinds of placement that it does without."""

    policy: Weighing | Lru
    without: frozenset[str] = frozenset()


class Adaptive(EvictionPolicy):
    """Follows the one of several policies that has saved most compute lately. The default.

    Each has its own clock and price, which go on in its shadow; `clock` is that of greedy dual.

    Attributes:
        now: Number of the policy that decides now.
    """

    def __init__(self) -> None:
        """Begin with `value`."""
        self._choices: tuple[Choice, ...] = (Choice(Value()),)
        self.now = 0

    def choose_among(self, *, floats: bool) -> tuple[Choice, ...]:
        """The policies that are compared; `floats`: for a model that can resume anywhere."""
        few = (Choice(Value()), Choice(GreedyDual()))
        more = (Choice(Lru()),) if floats else (Choice(Lru(), _ENDS), Choice(SharedValue(), _ENDS))
        self._choices = few + more
        return self._choices

    def follow(self, saved: Sequence[float]) -> bool:
        """Follow the policy that saved most, if that is clearly more. Returns whether it is another one than before.

        Args:
            saved: Compute that each of the choices would have saved lately.
        """
        self.clock = max(choice.policy.clock for choice in self._choices)
        best = max(saved)
        if best <= saved[self.now] * (1 + _EDGE):
            return False
        self.now = saved.index(best)
        self.without = self._choices[self.now].without
        return True

    def priority(self, candidate: Candidate) -> float:
        """That of the policy that decides now; below 0 for what its shadow does not keep, which so goes first."""
        priority = self._choices[self.now].policy.priority(candidate)
        return priority if candidate.kept else -1.0 / (1.0 + priority)


_NAMED: dict[str, type[EvictionPolicy]] = {
    "adaptive": Adaptive,
    "value": Value,
    "shared-value": SharedValue,
    "lru": Lru,
    "greedy-dual": GreedyDual,
}
EVICTIONS = tuple(_NAMED)
"""Policies by name, the default first."""


def eviction_policy(choice: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the object itself.

    Raises:
        ConfigError: Unknown name.
    """
    if isinstance(choice, EvictionPolicy):
        return choice
    if choice in _NAMED:
        return _NAMED[choice]()
    names = ", ".join(repr(name) for name in EVICTIONS)
    raise ConfigError(f"unknown eviction policy {choice!r}: use one of {names}, or an EvictionPolicy object")


class _Queued(Protocol):
    """Something that can stand in the queue: it remembers the number of its valid entry."""

    entry: int


Item = TypeVar("Item", bound=_Queued)


class EvictionQueue(Generic[Item]):
    """Candidates by priority: a heap in which outdated entries are skipped or corrected when they come up.

    Priorities change while candidates wait. An entry whose priority has risen since it was pushed is put back when it
    comes up. One whose priority has fallen would not come up, so every eviction first asks again for the two that were
    asked longest ago: after half as many evictions as there are candidates, all of them stand where they belong.
    Whoever changes a candidate pushes it again.

    What a kind is worth may rise for all of its candidates at once. So an eviction corrects so many at most, and takes
    the lowest of these: what it costs does not depend on how many wait, and it ends whatever a policy answers.
    """

    def __init__(self, describe: Callable[[Item], Candidate | None], policy: EvictionPolicy) -> None:
        """Make an empty queue.

        Args:
            describe: Candidate record of an item, or None if it cannot be evicted now; whoever changes that pushes it
                again.
            policy: Ranks candidates.
        """
        self.describe = describe
        self._policy = policy
        self._heap: list[tuple[float, int, Item]] = []
        self._asked: deque[tuple[float, int, Item]] = deque()
        """The same entries in the order in which they were pushed."""
        self._old: list[tuple[float, int, Item]] = []
        """Entries at the priorities of another policy, a heap: they are asked anew a few at a time."""
        self._entries = 0
        self._live = 0

    def __getstate__(self) -> dict[str, object]:
        """All but whom it asks: who reads the queue sets `describe` again."""
        return {name: value for name, value in vars(self).items() if name != "describe"}

    def __len__(self) -> int:
        """Items that stand in the queue."""
        return self._live

    def push(self, item: Item) -> None:
        """Queue `item` at its present priority, replacing its earlier entry."""
        candidate = self.describe(item)
        if candidate is None:
            self.discard(item)
        else:
            self._enter(item, self._priority(candidate))

    def discard(self, item: Item) -> None:
        """Take `item` out, if it is in."""
        if item.entry >= 0:
            item.entry = -1
            self._live -= 1

    def restart(self) -> None:
        """Another policy ranks from now on. Each eviction asks for some more of what waits, in the order of the old."""
        self._old += self._heap
        heapq.heapify(self._old)
        self._heap, self._asked = [], deque()

    def pop(self) -> tuple[Item, Candidate] | None:
        """Take out the item of lowest priority, or None if nothing can be evicted."""
        moved = 0
        while self._old and (moved < _ASKED_ANEW or not self._heap):
            _, entry, item = heapq.heappop(self._old)
            if item.entry == entry:
                self.push(item)
                moved += 1
        self._ask_oldest()
        asked: list[tuple[float, Item, Candidate]] = []
        lowest = 0
        while self._heap and len(asked) < _CORRECTED and not (asked and asked[lowest][0] <= self._heap[0][0]):
            _, entry, item = self._heap[0]
            if item.entry == entry:
                candidate = self.describe(item)
                if candidate is None:
                    self.discard(item)
                else:
                    asked.append((self._priority(candidate), item, candidate))
                    if asked[-1][0] <= asked[lowest][0]:
                        lowest = len(asked) - 1
            heapq.heappop(self._heap)
        if not asked:
            return None
        _, victim, candidate = asked.pop(lowest)
        self.discard(victim)
        for priority, item, _ in asked:
            self._enter(item, priority)
        return victim, candidate

    def _enter(self, item: Item, priority: float) -> None:
        if item.entry < 0:
            self._live += 1
        self._entries += 1
        item.entry = self._entries
        entry = (priority, self._entries, item)
        heapq.heappush(self._heap, entry)
        self._asked.append(entry)
        most = 2 * self._live + 64
        if len(self._asked) > most or len(self._heap) > most:
            self._drop_outdated()

    def _priority(self, candidate: Candidate) -> float:
        """What the policy says.

        Raises:
            ConfigError: It says what cannot be compared.
        """
        priority = self._policy.priority(candidate)
        if priority != priority:  # not a number: nothing is lower, and it is lower than nothing
            raise ConfigError(
                f"eviction policy {type(self._policy).__name__} gives {candidate} the priority {priority}: "
                f"it must return a number that others can be compared with"
            )
        return priority

    def _ask_oldest(self) -> None:
        """Push the two valid entries again that were pushed longest ago."""
        left = min(_ASKED_AGAIN, self._live)
        while left and self._asked:
            _, entry, item = self._asked.popleft()
            if item.entry == entry:
                self.push(item)
                left -= 1

    def _drop_outdated(self) -> None:
        self._asked = deque([entry for entry in self._asked if entry[2].entry == entry[1]])
        self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
        heapq.heapify(self._heap)
