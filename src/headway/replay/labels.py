"""Names for runs that are shown side by side: what differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.replay.record import RunRecord
from headway.replay.sizing import format_size

__all__ = ["memory_text", "run_labels", "settings"]


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run, unique among them: the settings in which they differ."""
    flat = [settings(run) for run in runs]
    keys = [key for key in flat[0] if len({str(one.get(key)) for one in flat}) > 1] if flat else []
    names = [", ".join(_word(key, one[key]) for key in keys) or "this run" for one in flat]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def settings(run: RunRecord) -> dict[str, Any]:
    """What a run was made with, flat, in the order in which people name it."""
    sizes = {group.name: format_size(group.bytes) for group in run.groups}
    read = {"trace": run.result.trace, "model": run.model.name, "preset": run.policy.get("preset") or "headway"}
    others = {name: value for name, value in run.policy.items() if name != "preset"}
    return read | sizes | run.layout | others | {"memory": memory_text(run)}


def memory_text(run: RunRecord) -> str:
    """The memory of a run for people."""
    return "endless" if run.memory is None else format_size(run.memory).replace(".0 ", " ")


def _word(key: str, value: Any) -> str:
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if key in ("trace", "model", "memory", "eviction", "placement", "preset", "timing") else f"{key} {text}"
