"""The facts of several runs side by side: which is best, what moves between them, what more memory buys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.errors import ConfigError
from headway.tell.facts import RunFacts, WaterfallLine, facts_of
from headway.tell.labels import names_of, run_labels, settings
from headway.tell.lower import LowerStep, lower_steps
from headway.tell.reasons import LINES
from headway.tell.run import RunRecord

__all__ = ["Comparison", "Move", "compare", "refusals"]


_LEAST = 0.0005
"""Share of the tokens below which nothing has moved: it would be shown as 0.0 points."""


@dataclass(frozen=True)
class Move:
    """The line of the waterfall that falls most from the worst run to the best, and by which share of the tokens."""

    line: WaterfallLine
    share: float


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: The runs.
        facts: Those of each run.
        labels: A name for each run.
        best: Number of the run that refuses fewest requests, and of these saves most compute, the first among equals.
        worst: Number of the one that saves least compute, of those that refuse as few.
        focus: Number of the run that is shown in detail.
        moved: What the best run loses less of than the worst; None where there is nothing.
        sizes: Runs that differ in their memory alone, by the settings in which these sets differ: numbers of runs, the
            smallest memory first.
        lower: What lower tiers of memory bring to the run in focus, one tier more at a time; empty without such runs.
    """

    runs: Sequence[RunRecord]
    facts: list[RunFacts]
    labels: list[str]
    best: int
    worst: int
    focus: int
    moved: Move | None
    sizes: dict[str, list[int]]
    lower: list[LowerStep]

    @property
    def alone(self) -> bool:
        """Whether there is only one run."""
        return len(self.runs) == 1

    @property
    def timed(self) -> list[int]:
        """Numbers of the runs that have times."""
        return [i for i, run in enumerate(self.runs) if run.result.latency]

    @property
    def lines(self) -> list[str]:
        """Lines of the waterfall that any run has."""
        return [name for name in LINES if any(name in run.result.whole.lost for run in self.runs)]

    def telling(self, most: int) -> list[int]:
        """Numbers of at most `most` runs, in their order: all, or evenly from the best to the worst."""
        if len(self.runs) <= most:
            return list(range(len(self.runs)))
        ranked = sorted(range(len(self.runs)), key=lambda i: (refusals(self.facts[i]), -self.facts[i].compute_saved))
        return sorted({ranked[round(k * (len(ranked) - 1) / (most - 1))] for k in range(most)})


def refusals(facts: RunFacts) -> int:
    """Requests that a run refused."""
    return facts.refused.requests if facts.refused else 0


def compare(runs: Sequence[RunRecord], *, labels: Sequence[str] | None = None, focus: int | None = None) -> Comparison:
    """Put runs side by side.

    Args:
        runs: At least one.
        labels: What to call them; by default the settings in which they differ.
        focus: Number of the run to be shown in detail; by default the best.

    Raises:
        ConfigError: No runs.
    """
    if not runs:
        raise ConfigError("a report needs at least one run")
    facts = [facts_of(run) for run in runs]
    numbers = range(len(runs))
    fewest = min(refusals(one) for one in facts)
    serving = [i for i in numbers if refusals(facts[i]) == fewest]
    best = max(serving, key=lambda i: (facts[i].compute_saved, -i))
    worst = min(serving, key=lambda i: facts[i].compute_saved)
    return Comparison(
        runs,
        facts,
        list(run_labels(runs) if labels is None else labels),
        best,
        worst,
        best if focus is None else focus,
        None if best == worst else _moved(facts[worst], facts[best]),
        _sizes(runs),
        lower_steps(facts, _beside(runs, best if focus is None else focus)),
    )


def _beside(runs: Sequence[RunRecord], focus: int) -> list[int]:
    """Runs that differ from the one in focus in their lower tiers at most."""
    flat = [settings(replace(run, policy=run.policy | {"tiers": {}})) for run in runs]
    return [i for i, one in enumerate(flat) if one == flat[focus]]


def _moved(worst: RunFacts, best: RunFacts) -> Move | None:
    left = {line.name: line.share for line in best.lost}
    moves = [Move(line, line.share - left.get(line.name, 0.0)) for line in worst.lost]
    most = max(moves, key=lambda move: move.share, default=None)
    return most if most is not None and most.share >= _LEAST else None


def _sizes(runs: Sequence[RunRecord]) -> dict[str, list[int]]:
    sets: dict[str, list[int]] = defaultdict(list)
    flat = [{key: value for key, value in settings(run).items() if key != "memory"} for run in runs]
    for number, run in enumerate(runs):
        if run.memory:
            sets[str(flat[number])].append(number)
    kept = [sorted(numbers, key=lambda i: runs[i].memory or 0) for numbers in sets.values() if len(numbers) > 1]
    return dict(zip(names_of([flat[numbers[0]] for numbers in kept], "this cache"), kept, strict=True))
