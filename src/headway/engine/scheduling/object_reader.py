"""What requests read back from disks and shared stores: looked for, weighed, and fetched while they wait.

No request waits much longer than computing would take: neither for what a store says of its prompt, nor for objects. A
store that takes longer to answer than its answers save is not asked at all.

A request that waits for objects holds no blocks. So loads cannot hold each other up, and nothing that arrives late can
be written over what others use. When all of a checkpoint has arrived in memory of this process and is verified, the
request goes on; whatever fell short has lowered what it gets by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headway.cache import BelowLoss, ComputeCost, Prompt
from headway.engine.fetched import Fetched
from headway.tiers import Failure, Load, Loaded, Namespace, ObjectTiers, Place, Rates

__all__ = ["Fetch", "ObjectReader"]

_LONGEST_SECONDS = 30.0
"""Longest time that a request waits for objects."""
_SLACK, _MOST_SLACK_SECONDS = 10.0, 0.5
"""Objects may take so many times what they should, even where computing takes less, but no longer than that."""
_UNMEASURED_SECONDS = 2.0
"""Least time that objects get before computing was measured."""
_ASKING_SECONDS = 1.0
"""Longest time that a request waits for what a store says of its prompt."""
_WHY = {
    "missing": "an object was gone",
    "late": "it did not come in time",
    "corrupt": "what came is not what was written",
    "failed": "the tier reported an error",
    "refused": "the tier was switched off",
    "cancelled": "the load was given up",
    "forgotten": "it was forgotten meanwhile",
    "memory": "it is larger than the memory for loads",
}


class Fetch:
    """A request's wait for objects. `done` is called once, in the engine's thread, unless it was cancelled.

    Attributes:
        done: Told what came.
    """

    def __init__(self, done: Callable[[Fetched], None]) -> None:
        self.done: Callable[[Fetched], None] | None = done
        self.load: Load | None = None

    def cancel(self) -> None:
        """Give up: `done` is not called any more."""
        self.done = None
        if self.load is not None:
            self.load.cancel()

    def end(self, fetched: Fetched) -> None:
        """Tell what came, or give it back if nobody wants it any more."""
        if self.done is None:
            fetched.release()
        else:
            self.done(fetched)


@dataclass(eq=False)
class ObjectReader:
    """Finds and fetches objects for requests.

    Attributes:
        objects: The tiers.
        rates: What computing takes.
        cost: The compute of a prompt.
        name: A namespace as tiers know it; None if it is forgotten.
        post: Has a function called in the engine's thread.
        era: How often something was forgotten: what was looked for before must not be used.
    """

    objects: ObjectTiers
    rates: Rates
    cost: ComputeCost
    name: Callable[[int], Namespace | None]
    post: Callable[[Callable[[], None]], object] = lambda call: call()
    era: int = 0

    def start(self, prompt: Prompt, floor: int, known: int, done: Callable[[Fetched], None]) -> Fetch | None:
        """Fetch what tiers have of `prompt` behind its first `known` tokens, with all that lies behind `floor`.

        Returns:
            The wait; None where there is nothing to wait for, and `done` is not called.
        """
        name, limit = self.name(prompt.namespace), len(prompt.tokens) - 1
        if name is None or known >= limit:
            return None
        fetch = Fetch(done)

        def searched() -> None:
            if fetch.done is not None and not self._fetch(fetch, name, prompt, floor, known):
                fetch.end(Fetched())

        def answered() -> None:
            self.post(searched)

        computing = self._computing(known, limit)
        if self.objects.search(name, prompt.data, floor, limit, answered, min(_ASKING_SECONDS, computing), computing):
            return fetch
        return fetch if self._fetch(fetch, name, prompt, floor, known) else None

    def _fetch(self, fetch: Fetch, name: Namespace, prompt: Prompt, floor: int, known: int) -> bool:
        """Begin to fetch the place that saves most time. Returns whether there is something to wait for."""
        found = self.objects.find(name, prompt.data, floor, len(prompt.tokens) - 1)
        places = [place for place in found if place.position > known]
        if not places:
            return False
        best = max(places, key=lambda place: (self._gain(place, known), place.position))
        era, seconds, gain = self.era, self._patience(best, known), self._gain(best, known)
        if gain <= 0:
            best, seconds = places[-1], _MOST_SLACK_SECONDS
        if not self.rates.makes(best.tiers[0], gain):
            self.post(lambda: fetch.end(Fetched(declined=best.position)))
            return True

        def ended(loaded: Loaded) -> None:
            losses = tuple(_loss(best.position, failure) for failure in loaded.failures[:1])
            if not self.post(lambda: fetch.end(Fetched(loaded, losses=losses, floor=floor, era=era))):
                loaded.release()

        fetch.load = self.objects.load(best, floor, ended, seconds)
        return True

    def _computing(self, known: int, position: int) -> float:
        """Seconds that computing takes from one position to another; infinitely many while it was not measured."""
        per_compute = self.rates.per_compute
        return math.inf if per_compute is None else self.cost.between(known, position) * per_compute

    def _gain(self, place: Place, known: int) -> float:
        """Seconds that fetching a place saves; while computing was not measured, what it saves of compute."""
        if self.rates.per_compute is None:
            return self.cost.between(known, place.position)
        return self._computing(known, place.position) - place.seconds

    def _patience(self, place: Place, known: int) -> float:
        """Seconds to wait for a place: about as long as computing would take."""
        computing, moving = self._computing(known, place.position), _SLACK * place.seconds
        if computing == math.inf:
            return min(_LONGEST_SECONDS, max(_UNMEASURED_SECONDS, moving))
        return min(_LONGEST_SECONDS, max(computing, min(_MOST_SLACK_SECONDS, moving)))


def _loss(position: int, failure: Failure) -> BelowLoss:
    missed = failure.reason == "missing"
    return BelowLoss(position, missed, failure.tier, failure.span.group, _WHY.get(failure.reason, failure.reason))
