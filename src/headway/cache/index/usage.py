"""What checkpoints and paths were used for: the counts that are shown, and the rates that are learned."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from headway.cache.index.below import Past
from headway.cache.index.edge import Checkpoint, Edge, LostCheckpoint, Match
from headway.cache.index.tree import PrefixTree
from headway.cache.policy.eviction import EvictionPolicy
from headway.cache.policy.placement import LAST_END
from headway.cache.policy.reuse import PATH, ReuseRates

__all__ = ["Counters", "Learned", "Usage", "count"]


@dataclass
class Counters:
    """What has happened to checkpoints, by kind of placement, to wishes, and to blocks.

    Attributes:
        taken: Checkpoints taken.
        reused: Checkpoints resumed from at least once.
        resumed: Leases that resumed from one.
        evicted: Checkpoints evicted.
        evicted_unused: Of these, never resumed from.
        refused: Pins and breakpoints that came to nothing, by wish and outcome: "pin:pin_share" for example.
        blocks_evicted: Blocks freed by eviction.
    """

    taken: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    resumed: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    evicted_unused: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    blocks_evicted: int = 0

    @property
    def pins_refused(self) -> int:
        """Pins that came to nothing, for any reason."""
        return sum(times for wish, times in self.refused.items() if wish.startswith("pin:"))

    def copy(self) -> Counters:
        """The same numbers, apart from what happens later."""
        return Counters(**{name: copy.copy(value) for name, value in vars(self).items()})


def count(table: dict[str, int], kind: str) -> None:
    """Add one to the count of `kind`."""
    table[kind] = table.get(kind, 0) + 1


@dataclass
class Learned:
    """What was learned, by one cache or by several that keep the same prompts in different memories.

    Attributes:
        ticks: Uses and changes so far: what `born` and `used` are read from.
        reuse: How often and how soon requests come back, by kind.
    """

    ticks: int = 0
    reuse: ReuseRates = field(default_factory=ReuseRates)

    def tick(self) -> int:
        """One more tick. Returns it."""
        self.ticks += 1
        return self.ticks


class Usage:
    """Uses and births, as they happen.

    Attributes:
        learned: What was learned of them.
        reuse: Of that, how often and how soon requests come back.
        counters: What happened so far.
    """

    def __init__(self, policy: EvictionPolicy, tree: PrefixTree, learned: Learned) -> None:
        """Start with nothing seen; `policy` has the clock that ages are read from."""
        self._policy = policy
        self._tree = tree
        self.learned, self.reuse = learned, learned.reuse
        self.counters = Counters()

    def take(self, checkpoint: Checkpoint, past: Past | None) -> None:
        """A checkpoint was taken, or moved here with its `past`, which teaches nothing.

        One that went from the same place and is remembered hands on its uses.
        """
        checkpoint.age = self._policy.clock
        lost = self._tree.forget_lost(checkpoint.edge, checkpoint.position)
        uses, checkpoint.shared = (0, 0) if lost is None else (lost.uses, lost.shared)
        if past is None:
            checkpoint.used = checkpoint.born = self.learned.tick()
            self.reuse.took(checkpoint.kind)
        else:
            uses, checkpoint.born, checkpoint.used = max(uses, past.uses), past.born, past.used
            checkpoint.base = past.base
        checkpoint.missed = uses
        count(self.counters.taken, checkpoint.kind)

    def pass_over(self, at: Match, kind: str) -> None:
        """A checkpoint could have been taken at `at`, and was not: it counts as taken, and as gone at once."""
        self.reuse.took(kind)
        self._tree.remember(at.edge, LostCheckpoint(at.position, kind, 0.0, None, self.learned.ticks, 0))

    def extend(self, edges: list[Edge], past: Past | None) -> None:
        """More of `edges` is resident: where checkpoints float, they are as fresh as if they had been used.

        What was moved here brings its `past`, and teaches nothing.
        """
        if past is not None:
            for edge in edges if self._tree.floats else ():
                self.recall(edge.checkpoints[0], past)
            return
        now = self.learned.tick()
        if edges:
            self.reuse.took(PATH)
        if self._tree.floats:
            for edge in edges:
                edge.checkpoints[0].used, edge.checkpoints[0].age = now, self._policy.clock

    def recall(self, checkpoint: Checkpoint, past: Past) -> None:
        """What was seen of the copy of a checkpoint in another memory counts for it as well."""
        checkpoint.missed += max(0, past.uses - checkpoint.uses)
        checkpoint.used = max(checkpoint.used, past.used)
        checkpoint.base = past.base

    def resume(self, at: Match, checkpoint: Checkpoint, *, deepest: bool, goes_on: bool) -> None:
        """A lease resumes on the path to `at`, by `checkpoint`.

        Args:
            at: Where.
            checkpoint: What serves it.
            deepest: No checkpoint has gone behind it.
            goes_on: The lease goes on where the latest one had ended, and nothing else does.
        """
        now, clock = self.learned.tick(), self._policy.clock
        if checkpoint.floats:
            first = at.edge.checkpoints[0]
            self.reuse.wanted(PATH, now - first.used if first.uses == 0 else None)
            for edge in at.edge.path():
                one = edge.checkpoints[0]
                one.hits += 1
                one.used, one.age = now, clock
            return
        if checkpoint.hits == 0:
            count(self.counters.reused, checkpoint.kind)
        count(self.counters.resumed, checkpoint.kind)
        if deepest or not checkpoint.kind.startswith(LAST_END):
            self.reuse.wanted(checkpoint.kind, now - checkpoint.born if checkpoint.uses == 0 else None)
        checkpoint.hits += 1
        checkpoint.shared += not goes_on
        checkpoint.used, checkpoint.age = now, clock

    def miss(self, at: Match, low: int, high: int) -> None:
        """A lease would have resumed further in (low, high] of the path to `at`, but for what went from there.

        Of every kind the deepest one counts, as each would have served if it alone had been kept. One at the end of a
        message counts only if it is the deepest of all: such are kept for requests that part there.
        """
        if high <= low:
            return
        if not self._tree.floats:
            seen: set[str] = set()
            for lost in at.lost(low, high):
                if lost.kind not in seen and not (seen and lost.kind.startswith(LAST_END)):
                    seen.add(lost.kind)
                    self.reuse.wanted(lost.kind, self.learned.ticks - lost.born if lost.uses == 0 else None)
                    lost.uses += 1
                    lost.shared += 1
            return
        gone = []
        for edge in at.edge.path():
            if max(low, edge.resident) < min(edge.computed, high):
                gone.append(edge.checkpoints[0])
            if edge.start <= low:
                break
        if gone:
            self.reuse.wanted(PATH, self.learned.ticks - gone[0].used if gone[0].uses == 0 else None)
        for one in gone:
            one.missed += 1
