"""The page of the documentation with the table of families: written from judgements, and read back by a test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.families.judge import OUTCOMES, Judgement
from tests.families.scan import Case, Family
from tests.families.tiny import CONVOLUTIONS, ROPE

__all__ = ["PAGE", "counts_on_page", "outcomes_on_page", "render", "version_on_page"]

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

_HEAD = """# Families of models

This page says what Headway does with each family of models of transformers that has states, windows, chunks or rotary
positions. Look up the `model_type` in your model's `config.json`. `make families` writes this page; do not edit it.

A family is here because its configuration class in transformers {version} has a field for one of these. All other
families have full attention alone, with learned or relative positions. Each row is a tiny model with random weights
that ran through the engine, in fp32. Its sizes are odd: one key/value head, a vocabulary of 251, a window of 13 tokens,
a short convolution of {narrow} or {wide} taps. Requests were batched, cut into chunks, shared, preempted and evicted at
random, and steps failed. The answers were compared with the model's own `generate()`.

- *equal*: every answer is the one of `generate()`, and prefixes were reused.
- *warned*: every answer is equal, and the server warns at load that it reuses less, or nothing. In transformers itself,
  a continuation of this class by several tokens is not its own full forward.
- *refused*: the server does not start, and says why.
- *not made*: transformers makes no tiny model of the class, or cannot generate with it.

Equality with `generate()` is promised for fp32 only. In bf16 both round, and near ties between two tokens fall either
way. A test compares both with the answers of fp32, over several families. Headway's share of differing tokens is not
above that of `generate()` by more than chance.
"""


def render(rows: Sequence[tuple[Case, Judgement]], version: str) -> str:
    """The page for all rows, of transformers `version`."""
    notes: dict[str, int] = {}
    lines = [_HEAD.format(version=version, narrow=CONVOLUTIONS[0], wide=CONVOLUTIONS[1]), "## Counts", ""]
    lines += [f"| | {' | '.join(OUTCOMES[:-1])} |", "| --- |" + " ---: |" * len(OUTCOMES[:-1])]
    for title, counts in _counts({case.name: found.outcome for case, found in rows}).items():
        lines.append(f"| {title} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES[:-1])} |")
    lines += [
        "",
        "## Table",
        "",
        f"| model type | as its class makes it | {CONVOLUTIONS[1]} taps | scaled rotary positions |",
    ]
    lines.append("| --- | --- | --- | --- |")
    by_family: dict[Family, dict[str, str]] = {}
    for case, found in rows:
        cell = found.outcome + (f" ({_note(found.reason, case, notes)})" if found.reason else "")
        by_family.setdefault(case.family, {})[_column(case.name)] = cell
    for family, cells in by_family.items():
        scaled = "; ".join(f"{kind} {cells[kind]}" for kind in ROPE if kind in cells)
        lines.append(f"| `{family.name}` | {cells['']} | {cells.get('conv', '')} | {scaled} |")
    lines += ["", "## Reasons", "", "What the server says, or transformers where no model is made:", ""]
    lines += [f"{number}. `{reason}`" for reason, number in notes.items()]
    return "\n".join(lines) + "\n"


def _note(reason: str, case: Case, notes: dict[str, int]) -> int:
    """The number of a reason; names of classes and figures that differ between families are left out of it."""
    text = reason.replace(case.family.architecture, "The model").replace("`", "'").replace("|", "/")
    text = re.sub(r"\bby \d[\d.e+-]*( of the)", r"by a part\1", re.sub(r"\S*ForCausalLM\b", "The model", text))
    return notes.setdefault(text, len(notes) + 1)


def _column(name: str) -> str:
    variant = name.partition("+")[2]
    return "conv" if variant.startswith("conv") else variant


def _counts(outcomes: Mapping[str, str]) -> dict[str, Counter[str]]:
    """How often each outcome came, by what is varied."""
    titles = {"": "as its class makes it", "conv": f"{CONVOLUTIONS[1]} taps"}
    found: dict[str, Counter[str]] = {title: Counter() for title in (*titles.values(), *ROPE, "all rows")}
    for name, outcome in outcomes.items():
        column = _column(name)
        found[titles.get(column, column)][outcome] += 1
        found["all rows"][outcome] += 1
    return found


def outcomes_on_page(text: str) -> dict[str, str]:
    """The outcome of every row of the table, by the row's name."""
    found = {}
    word = "|".join(OUTCOMES)
    for name, plain, wide, scaled in re.findall(
        r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE
    ):
        found[name] = re.match(word, plain)[0]  # type: ignore[index]
        if wide.strip():
            found[f"{name}+conv{CONVOLUTIONS[1]}"] = re.match(word, wide)[0]  # type: ignore[index]
        for kind, outcome in re.findall(rf"(\w+) ({word})", scaled):
            found[f"{name}+{kind}"] = outcome
    return found


def counts_on_page(text: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The counts that the page states, and those of its table."""
    section = text.partition("## Counts")[2].partition("## Table")[0]
    stated = {
        t: [int(n) for n in row.split("|")] for t, row in re.findall(r"^\| (\w[^|]*) \| ([\d| ]+) \|$", section, re.M)
    }
    counted = _counts(outcomes_on_page(text))
    return stated, {title: [counts[outcome] for outcome in OUTCOMES[:-1]] for title, counts in counted.items()}


def version_on_page(text: str) -> str:
    """The version of transformers that the page is for."""
    found = re.search(r"transformers (\d[\w.]*\d)", text)
    return found[1] if found else ""
