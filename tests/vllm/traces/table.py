"""The table of judge 1, as Markdown, from the records of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["render"]

Record = dict[str, Any]
_HEAD = (
    "| model | trace | GB per rank | engine | reused | times vLLM's | steps | preemptions | ms per request | arrival |",
    "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)
_CHECKED = (
    "| model | trace | GB per rank | mode | forwards checked | preemptions | aborted | resets |",
    "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
)


def render(records: Sequence[Record]) -> str:
    """Tables of what was measured and what was checked, and the reasons where vLLM is ahead."""
    measured = [record for record in records if not record["cell"]["checked"]]
    checked = [record for record in records if record["cell"]["checked"]]
    measured.sort(key=lambda record: (_setting(record), record["cell"]["engine"] != "vllm", record["cell"]["engine"]))
    base = {_setting(record): record for record in measured if record["cell"]["engine"] == "vllm"}
    lines = [*_HEAD, *(_row(record, base.get(_setting(record))) for record in measured)] if measured else []
    lines += ["", *_behind(measured)] if measured else []
    if checked:
        lines += ["", *_CHECKED, *map(_checked_row, checked)]
    return "\n".join(lines) + "\n"


def _setting(record: Record) -> tuple[Any, ...]:
    """What two engines must share to be compared, and the order of the table."""
    cell = record["cell"]
    models, traces = ("kimi-k3", "qwen3-next", "gpt-oss-120b"), ("conversation", "agents", "synthetic")
    mode = cell["asynchronous"], cell["drafts"], cell["requests"]
    return models.index(cell["model"]), mode[:2], traces.index(cell["trace"]), mode[2], cell["memory"]


def _row(record: Record, vllm: Record | None) -> str:
    cell = record["cell"]
    rate = record["reused"] / record["prompt_tokens"]
    ratio = f"{record['reused'] / vllm['reused']:.2f}" if vllm and vllm["reused"] else ""
    steps = f"{record['steps']:,}" + (" (asynchronous)" if cell["asynchronous"] else "")
    spent = f"{record['ms_scheduling'] + record['ms_updating']:.2f} | {record['ms_arriving']:.2f}"
    what = f"{cell['model']} | {cell['trace']}, {record['requests']:,} requests | {cell['memory']:g} | {cell['engine']}"
    rejected = f", {record['rejected']} rejected" if record["rejected"] else ""
    return f"| {what} | {rate:.1%} | {ratio} | {steps} | {record['preemptions']}{rejected} | {spent} |"


def _behind(measured: Sequence[Record]) -> list[str]:
    """For each setting in which an engine of vLLM reuses more than Headway: by how much, and where Headway lost."""
    lines = []
    for own in (record for record in measured if record["cell"]["engine"] == "headway"):
        cell, total = own["cell"], own["prompt_tokens"]
        for other in measured:
            if other["cell"]["engine"] == "headway" or _setting(other) != _setting(own):
                continue
            if (ahead := (other["reused"] - own["reused"]) / total) > 0:
                lost = sorted(own["waterfall"].items(), key=lambda item: -item[1])
                why = ", ".join(f"{reason} {tokens / total:.1%}" for reason, tokens in lost[:6])
                where = f"{cell['model']}, {cell['trace']}, {cell['memory']:g} GB"
                lines.append(f"- {other['cell']['engine']} is {ahead:.1%} ahead on {where}. Headway lost: {why}.")
    return lines or ["In no cell does vLLM reuse more."]


def _checked_row(record: Record) -> str:
    cell = record["cell"]
    mode = "asynchronous" if cell["asynchronous"] else "synchronous"
    mode += f", {cell['drafts']} drafts" if cell["drafts"] else ""
    counts = f"{record['checked']:,} | {record['preemptions']} | {record['aborted']} | {record['resets']}"
    what = f"{cell['model']} | {cell['trace']}, {record['requests']:,} requests | {cell['memory']:g}"
    return f"| {what} | {mode} | {counts} |"
