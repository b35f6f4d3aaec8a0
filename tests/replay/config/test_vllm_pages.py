"""Page rules against what vLLM's own functions gave: `vllm_pages.json`, which tools/record_vllm_pages.py writes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.cache import FullAttention, ParallelLayout, Recurrent, SlidingWindow
from headway.replay.ask.catalogue import model_of
from headway.replay.config.vllm_pages import page_plan

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_pages.json").read_text(encoding="utf-8"))
KINDS = {FullAttention: "Full", SlidingWindow: "SlidingWindow", Recurrent: "Mamba"}
MODELS = sorted({row["model"] for row in RECORDED})


@pytest.mark.parametrize("name", MODELS)
def test_pages_are_those_of_vllm(name: str) -> None:
    checked = 0
    for row in RECORDED:
        if row["model"] != name:
            continue
        layout = ParallelLayout(tp=row["tp"], dcp=row["dcp"])
        model = model_of(name, layout, kv_dtype=row["kv_dtype"])
        for version in row["versions"]:
            plan = page_plan(model.groups, model.layers, model.kinds, layout, version=version, caching=row["caching"])
            groups: Counter[tuple[str, int]] = Counter()
            for table in plan.tables:
                shards = row["dcp"] if table.kind is FullAttention else 1
                groups[KINDS[table.kind], table.span // shards] += table.groups
            found = sorted([*key, count] for key, count in groups.items())
            assert (plan.page_bytes, found) == (row["page_bytes"], row["groups"]), row
            checked += 1
    assert checked >= 4
