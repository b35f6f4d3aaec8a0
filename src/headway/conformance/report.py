"""What a check found: records, and their two forms for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Failure", "Report", "summary"]


@dataclass(frozen=True)
class Failure:
    """One wrong answer.

    Attributes:
        step: The step in words, `step 3 (run B)`; `configuration` for the world itself.
        key: What was asked, such as `hit` or `geometry.target.span`.
        expected: What is right, in words.
        actual: What the cache answered, in words.
    """

    step: str
    key: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return f"{self.step}: {self.key}: expected {self.expected}, got {self.actual}"


@dataclass
class Report:
    """The outcome of one scenario.

    Attributes:
        name: The scenario's name.
        why: Its reason, for whoever reads a failure.
        failures: Every wrong answer, in the order of the steps.
    """

    name: str
    why: str = ""
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every answer was right."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """`{"name": ..., "ok": ..., "failures": [...]}`, a failure being its fields by name."""
        failures = [dict(vars(failure)) for failure in self.failures]
        return {"name": self.name, "ok": self.ok, "failures": failures}

    def lines(self) -> list[str]:
        """Lines for people: one for a scenario that is right; else its reason and every wrong answer."""
        if self.ok:
            return [f"ok    {self.name}"]
        head = f"WRONG {self.name}" + (f": {self.why}" if self.why else "")
        return [head, *(f"      {self.name}: {failure}" for failure in self.failures)]


def summary(reports: Sequence[Report]) -> str:
    """One closing line."""
    wrong = sum(not report.ok for report in reports)
    noun = "scenario" if len(reports) == 1 else "scenarios"
    return f"{len(reports)} {noun}, " + (f"{wrong} wrong" if wrong else "all right")
