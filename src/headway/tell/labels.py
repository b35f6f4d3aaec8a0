"""Names for runs that are shown side by side: what differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.sizes import format_bytes
from headway.tell.run import RunRecord

__all__ = ["memory_text", "names_of", "run_labels", "settings"]


_SIZE = "size of "


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run, unique among them: the settings in which they differ."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names_of([settings(run) for run in runs], "this run"):
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def names_of(flat: Sequence[dict[str, Any]], same: str) -> list[str]:
    """A name for each of some settings: where they differ, or `same` where nothing does."""
    keys = _telling(flat)
    return [", ".join(_word(key, one[key]) for key in keys if key in one) or same for one in flat]


def _telling(flat: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which runs differ, without sizes of groups that only follow from other settings."""
    keys = list(dict.fromkeys(key for one in flat for key in one))
    differ = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    for key in [key for key in differ if key.startswith(_SIZE)]:
        others = [other for other in differ if other != key]
        if len(_names(flat, others)) == len(_names(flat, differ)):
            differ = others
    return differ


def _names(flat: Sequence[dict[str, Any]], keys: Sequence[str]) -> set[str]:
    return {str([one.get(key) for key in keys]) for one in flat}


def settings(run: RunRecord) -> dict[str, Any]:
    """What a run was made with, flat, in the order in which people name it."""
    sizes = {f"{_SIZE}{group.name}": format_bytes(group.bytes, 1000) for group in run.groups}
    read = {"trace": run.result.trace, "model": run.model.name, "preset": run.policy.get("preset") or "headway"}
    others = {name: value for name, value in run.policy.items() if name not in ("preset", "timing")}
    clock = run.policy.get("timing") or {"clock": "order"}
    return read | sizes | run.layout | others | clock | {"memory": memory_text(run)}


def memory_text(run: RunRecord) -> str:
    """The memory of a run for people."""
    return "endless" if run.memory is None else format_bytes(run.memory, 1000).replace(".0 ", " ")


def _word(key: str, value: Any) -> str:
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    key = key.removeprefix(_SIZE)
    return text if key in ("trace", "model", "memory", "eviction", "placement", "preset", "gpu") else f"{key} {text}"
