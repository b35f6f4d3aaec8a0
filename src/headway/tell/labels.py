"""Names for runs that are shown side by side: what differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.sizes import format_bytes
from headway.tell.run import RunRecord

__all__ = ["memory_text", "names_of", "run_labels", "settings", "tier_text"]


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
    others = {name: value for name, value in run.policy.items() if name not in ("preset", "timing", "tiers")}
    others |= _lower(run)
    clock = run.policy.get("timing") or {"clock": "order"}
    return read | sizes | run.layout | others | clock | {"memory": memory_text(run)}


def _lower(run: RunRecord) -> dict[str, str]:
    """Size of each tier below the memory."""
    sizes = {name: tier["memory"] for name, tier in (run.policy.get("tiers") or {}).items()}
    return {tier_text(name): _size(sizes.get(name)) for name in ("host", "disk", "store")}


def _size(size: int | None) -> str:
    return "none" if size is None else format_bytes(size, 1000).replace(".0 ", " ")


def tier_text(name: str) -> str:
    """A tier for people."""
    return {"host": "host memory"}.get(name, name)


def memory_text(run: RunRecord) -> str:
    """The memory of a run for people."""
    return "endless" if run.memory is None else format_bytes(run.memory, 1000).replace(".0 ", " ")


def _word(key: str, value: Any) -> str:
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    key = key.removeprefix(_SIZE)
    if text == "none":
        return f"no {key}"
    return text if key in ("trace", "model", "memory", "eviction", "placement", "preset", "gpu") else f"{key} {text}"
