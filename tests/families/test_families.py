"""Every family of models is equal to `generate()`, warned of or refused; some of them here, all by `make families`.

Twelve families run every time, and a tenth of the others: which, and as which row of the table, `HEADWAY_SEED` chooses,
by default the date. `make test` prints the rows that it ran when one fails; the same seed chooses them again.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.families import run
from tests.families.judge import Judgement, judge
from tests.families.page import PAGE, counts_on_page, outcomes_on_page, version_on_page
from tests.families.scan import Case, cases

ALWAYS = (
    "deepseek_v3",
    "falcon_h1",
    "gemma4_text",
    "gpt_oss",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "mamba2",
    "phi3",
    "qwen3_next",
)
MENDED = ("beam+longrope", "deepseek_v2+longrope", "dory", "mllama")
"""Rows that were wrong, or refused without a reason, until they were in the table."""
SEED = int(os.environ.get("HEADWAY_SEED", datetime.date.today().toordinal()))
CASES = {case.name: case for case in cases()}
TABLE = outcomes_on_page(PAGE.read_text(encoding="utf-8"))
same_version = pytest.mark.skipif(
    version_on_page(PAGE.read_text(encoding="utf-8")) != transformers.__version__,
    reason="the page is for another version of transformers",
)


def chosen() -> list[Case]:
    """One row of each of the twelve, and of a tenth of the other families; and those that were mended."""
    dice = np.random.default_rng(SEED)
    others = sorted({case.family.name for case in CASES.values()} - set(ALWAYS))
    drawn = dice.choice(others, len(others) // 10, replace=False).tolist()
    rows = {name: [case for case in CASES.values() if case.family.name == name] for name in (*ALWAYS, *drawn)}
    found = [of_family[int(dice.integers(len(of_family)))] for of_family in rows.values()]
    return list(dict.fromkeys([*found, *(CASES[name] for name in MENDED)]))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in chosen()])
def test_a_family_is_what_the_table_says(case: Case) -> None:
    torch.set_num_threads(1)
    found = judge(case, seed=0)
    again = f"HEADWAY_SEED={SEED}: {case.name}: {found.reason}"
    assert found.outcome != "fault", again
    if version_on_page(PAGE.read_text(encoding="utf-8")) == transformers.__version__:
        assert found.outcome == TABLE[case.name], again


def test_only_results_of_the_same_code_and_version_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "families.jsonl")
    key = {"transformers": "5.24.0", "code": "abc"}
    assert run.earlier(key) == {}
    for other in ({}, {"code": "def"}, {"transformers": "5.25.0"}):
        line = {**key, **other, "case": f"llama{len(other)}", **asdict(Judgement("equal", hits=len(other)))}
        with run.RESULTS.open("a") as file:
            print(json.dumps(line), file=file)
    assert run.earlier(key) == {"llama0": Judgement("equal")}


@same_version
def test_the_table_has_every_family_that_is_found() -> None:
    assert list(TABLE) == list(CASES)
    assert "fault" not in TABLE.values()
    assert list(TABLE.values()).count("not made") < len(TABLE) / 20


def test_the_counts_on_the_page_are_those_of_its_table() -> None:
    stated, counted = counts_on_page(PAGE.read_text(encoding="utf-8"))
    assert stated == counted
