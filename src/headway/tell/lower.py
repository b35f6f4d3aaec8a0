"""What lower tiers of memory bring: of one run, and one tier more at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.sizes import format_bytes
from headway.tell.facts import RunFacts, TierFacts
from headway.tell.labels import tier_text

__all__ = ["LowerStep", "lower_steps", "on_lower", "on_tiers"]

_LITTLE = 0.005
"""Share of all tokens below which a tier adds little."""
_BEHIND = 0.01
"""Share of the checkpoints for a tier that may be left out before it is said."""


@dataclass(frozen=True)
class LowerStep:
    """One tier more.

    Attributes:
        name: "host", "disk" or "store".
        memory: Bytes of it for one rank.
        before: Share of the prompt tokens reused without it.
        after: Share reused with it.
        minutes: Minutes of prefill that it saves per hour, after paying for all moves; None where that is not known.
    """

    name: str
    memory: int
    before: float
    after: float
    minutes: float | None


def lower_steps(facts: Sequence[RunFacts], numbers: Sequence[int]) -> list[LowerStep]:
    """One tier more at a time, each time with the smallest size that gives nearly the most.

    Args:
        facts: Facts of runs.
        numbers: Those that differ in their tiers alone.

    Returns:
        The steps; none where no run is without tiers, or none has any.
    """
    runs = [facts[i] for i in numbers]
    steps: list[LowerStep] = []
    now = next((run for run in runs if not run.tiers), None)
    while now is not None:
        shape, last = _shape(now), now
        more = [run for run in runs if len(run.tiers) == len(shape) + 1 and _shape(run)[:-1] == shape]
        most = max((run.reused for run in more), default=0.0)
        enough = [run for run in more if run.reused >= most - _LITTLE]
        now = min(enough, key=lambda run: run.tiers[-1].memory, default=None)
        if now is not None:
            told, before = [tier.minutes for tier in now.tiers], [tier.minutes for tier in last.tiers]
            minutes = None if None in told else sum(m or 0.0 for m in told) - sum(m or 0.0 for m in before)
            steps.append(LowerStep(now.tiers[-1].name, now.tiers[-1].memory, last.reused, now.reused, minutes))
    return steps


def _shape(facts: RunFacts) -> list[tuple[str, int]]:
    return [(tier.name, tier.memory) for tier in facts.tiers]


def on_lower(steps: Sequence[LowerStep]) -> str:
    """What each tier adds to those above it."""
    parts = []
    for number, step in enumerate(steps):
        size = format_bytes(step.memory, 1000).replace(".0 ", " ")
        if step.after - step.before < _LITTLE:
            who = f"a {tier_text(step.name)} below it" if number else f"{size} of {tier_text(step.name)} per rank"
            parts.append(f"{who} adds little ({step.after:.1%} instead of {step.before:.1%})")
            continue
        place = "below it" if number else "per rank"
        text = f"{size} of {tier_text(step.name)} {place}: {step.after:.1%} of the tokens instead of {step.before:.1%}"
        parts.append(text + _on_minutes(step.minutes))
    return "; ".join(parts) + "." if parts else ""


def _on_minutes(minutes: float | None) -> str:
    if minutes is None:
        return ""
    if minutes <= 0:
        return ", but its moves take as long as the prefill that they save"
    saved = f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.2g} seconds"
    return f", {saved} of prefill saved per hour after paying for all moves"


def on_tiers(facts: RunFacts) -> str:
    """What each tier of a run gave back."""
    told = " ".join(_on_tier(tier) for tier in facts.tiers)
    if facts.tiers and all(tier.minutes is None for tier in facts.tiers):
        told += " What that saves of time is not known: name the GPU (--gpu), and use a trace with arrival times."
    return told


def _on_tier(tier: TierFacts) -> str:
    who = f"The {tier_text(tier.name)} ({format_bytes(tier.memory, 1000).replace('.0 ', ' ')} of a rank)"
    text = f"{who} gave back {100 * tier.share:.1f} of 100 tokens{_on_minutes(tier.minutes) if tier.share else ''}."
    if tier.skipped > _BEHIND and tier.writing is not None:
        text += (
            f" Its link was writing for {min(1.0, tier.writing):.0%} of the time, and still {tier.skipped:.0%} of the "
            f"checkpoints for it were not written."
        )
    return text
