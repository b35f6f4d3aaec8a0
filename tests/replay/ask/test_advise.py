"""Advice follows from the runs: the layout that gains, the flags that say it, and the gain of each change."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tell.results import GB, latency, run

from headway.cache import DEFAULT_PLACEMENT
from headway.cli import main
from headway.errors import ConfigError
from headway.replay import generate
from headway.replay.ask.advise import Question, study
from headway.replay.ask.grid import Point
from headway.replay.ask.options import ClockChoice, Hardware, ModelChoice, RankChoice
from headway.replay.ask.setting import Setting
from headway.tell import read_runs
from headway.tell.advice import Study, Variant, advice_text, split_of
from headway.tell.engines import UNSERVED, Setup, beside_running, flags
from headway.tell.run import GroupSize, Memory, RunRecord

TRACE = generate("mixed", 20, seed=1)
K3 = ModelChoice("kimi-k3")


def pretended(hits: dict[int, int], seen: list[Point]) -> Any:
    """A runner that looks up the hit rate by dcp and computes nothing."""

    def runs(points: Sequence[Point]) -> list[RunRecord]:
        seen.extend(points)
        return [
            run(hits[p.config.layout.dcp], {"parted": 500, "evicted": 500 - hits[p.config.layout.dcp]}) for p in points
        ]

    return runs


def question(choice: ModelChoice = K3, memory: str | None = "20GB", tp: int = 8, **more: Any) -> Question:
    return Question(Setting(choice, RankChoice(tp), Hardware(memory)), TRACE, **more)


def decided(hits: dict[int, int]) -> Study:
    return study(question(), pretended(hits, []))


def test_the_smallest_layout_that_is_good_enough_is_taken() -> None:
    assert decided({1: 100, 2: 200, 4: 296, 8: 300}).best.values["dcp"] == 4, "4 is within half a point of 8"
    assert decided({1: 100, 2: 200, 4: 290, 8: 300}).best.values["dcp"] == 8
    leave = decided({1: 300, 2: 300, 4: 302, 8: 302})
    assert leave.best is leave.today
    assert "Layout: leave it" in advice_text(leave)


def test_only_layouts_that_the_model_allows_are_run() -> None:
    seen: list[Point] = []
    # Qwen3-Next has 2 key/value heads: on 8 ranks there are 4 copies of each, and only copies can be split by tokens.
    choice = ModelChoice("qwen3-next")
    found = study(question(choice), pretended({1: 100, 2: 200, 4: 300}, seen))
    assert [variant.name for variant in found.layouts] == ["dcp 1", "dcp 2", "dcp 4"]
    changes = {variant.name: point for variant, point in zip(found.changes, seen[3:], strict=False)}
    assert {point.config.layout.dcp for point in changes.values()} == {4}
    assert changes["half the memory"].config.memory == 10 * GB
    assert changes["twice the memory"].config.memory == 40 * GB
    assert changes["plain LRU"].config.eviction == "lru"
    fp8, bf16 = changes["fp8 attention entries"].config.groups, changes["bf16 states"].config.groups
    usual = seen[0].config.groups
    assert 2 * fp8[0].bytes_per_token == usual[0].bytes_per_token  # type: ignore[union-attr]
    assert bf16[1].state_bytes < usual[1].state_bytes  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="how much memory"):
        study(question(choice, None), pretended({}, []))


def test_what_has_fewer_bytes_already_is_not_offered_again() -> None:
    small = Setting(K3, RankChoice(kv_dtype="fp8", state_dtype="bf16"), Hardware("endless"))
    found = study(Question(small, TRACE), pretended({1: 100}, []))
    names = {variant.name for variant in found.changes}
    assert not names & {"fp8 attention entries", "bf16 states"}


def test_gains_and_remarks() -> None:
    text = advice_text(decided({1: 100, 2: 150, 4: 200, 8: 300}))
    assert "decode context parallelism 8: +20.0 points" in text
    assert "Headway: 10.0% -> 30.0% of tokens (+20.0 points), compute saved 10.0% -> 30.0% (+20.0)" in text
    assert "Expect a hit rate of about 30%" in text
    assert "Most of what is lost is evicted (20% of all tokens)" in text
    for metric in ("headway_prompt_lost_tokens_total", "vllm:prefix_cache_hits_total", "sglang:mamba_usage"):
        assert metric in text


def test_flags() -> None:
    values = {"tp": 8, "dcp": 8, "kv_dtype": "fp8", "state_dtype": "bf16"}
    told = flags(Setup("kimi-k3", values, 20 * GB, None, 50_000_000, 3456.0, 1.0, 4))
    assert told["Headway"] == UNSERVED, "headway serve has no fp8"
    assert told["vLLM"] == (
        "vllm serve kimi-k3 --tensor-parallel-size 8 --decode-context-parallel-size 8 --kv-cache-memory-bytes "
        "20000000000 --kv-cache-dtype fp8 --enable-prefix-caching --mamba-ssm-cache-dtype bfloat16"
    )
    # 4 running requests hold 5 slots of 50 MB each, which leaves 19 GB. Half of that is states: 190 more slots.
    assert told["SGLang"].endswith("--mamba-ssm-dtype bfloat16 --max-mamba-cache-size 210")
    plain = {"tp": 1, "dcp": 1, "kv_dtype": "bf16", "state_dtype": "fp32", "eviction": "lru"}
    told = flags(Setup("llama", plain | {"placement": ("prompt_end",)}, None, 0.9, 0, 100.0, 0.0, 16))
    assert told == {
        "Headway": "headway serve llama --placement prompt_end --eviction lru",
        "vLLM": "vllm serve llama --tensor-parallel-size 1 --gpu-memory-utilization 0.9",
        "SGLang": "sglang serve --model-path llama --tp-size 1 --mem-fraction-static 0.9",
    }
    fp8 = flags(Setup("llama", plain | {"kv_dtype": "fp8"}, None, None, 0, 1.0, 0.5, 16))
    assert fp8["Headway"] == UNSERVED
    shared = flags(Setup("kimi", plain | {"tp": 8, "dcp": 4, "eviction": "value"}, 20 * GB, None, 9, 1.0, 0.5, 16))
    assert shared["Headway"] == "headway serve kimi --tp 8 --dcp 4 --memory 20000000000"
    default = flags(Setup("llama", plain | {"placement": DEFAULT_PLACEMENT}, None, None, 9, 1.0, 0.5, 16))
    assert "--placement" not in default["Headway"]
    assert default["SGLang"].endswith("--mamba-full-memory-ratio 0.5")


def test_states_of_running_requests_come_out_of_the_memory() -> None:
    assert beside_running(20 * GB, 4, 50_000_000) == 19 * GB
    assert beside_running(20 * GB, 400, 0) == 20 * GB, "a model without states holds none"
    assert beside_running(1100, 20, 10) == 100
    with pytest.raises(ConfigError, match="--running 21: their states alone fill the memory; give fewer"):
        beside_running(1060, 21, 10)
    seen: list[Point] = []
    study(question(running=4), pretended(dict.fromkeys((1, 2, 4, 8), 100), seen))
    states = sum(getattr(group, "state_bytes", 0) for group in seen[0].config.groups)
    sglang = {point.config.memory for point in seen if str(point.config.preset).startswith("sglang")}
    assert sglang == {20 * GB - 5 * 4 * states}
    with pytest.raises(ConfigError, match="--running 4000"):
        study(question(running=4000), pretended({}, []))


def test_windows_are_no_states() -> None:
    windowed = replace(
        run(), groups=[GroupSize("full", "FullAttention", 8000), GroupSize("w", "SlidingWindow", 9, 0, 9)]
    )
    one = Variant("dcp 1", {"tp": 1, "dcp": 1, "kv_dtype": "bf16", "state_dtype": "fp32"}, windowed)
    text = advice_text(Study(one, [one], one, []), checkpoint="/models/w", draft=True)
    assert "mamba-" not in text
    assert "states to attention" not in text
    assert "headway serve /models/w --memory 20000000000" in text
    assert "The draft is not in these commands." in text


def test_the_split_is_the_mean_over_the_warm_half() -> None:
    moments = [Memory(i, i, used, states, 1) for i, (used, states) in enumerate([(9, 9), (9, 8), (40, 10), (60, 10)])]
    warm = replace(run(), result=replace(run().result, memory=moments))
    assert split_of(warm) == 20 / 80


def test_imitated_engines_show_what_they_gain() -> None:
    base = decided({1: 100, 2: 150, 4: 200, 8: 300})
    lost = {"parted": 500, "evicted": 450}
    worst = Variant("sglang today", {"preset": "sglang"}, run(50, lost))
    better = Variant("sglang, ratio 2", {"preset": "sglang,memory_ratio=2.0"}, run(250, lost | {"evicted": 250}))
    with_engines = Study(base.today, base.layouts, base.best, base.changes, {"sglang": [worst, better]})
    text = advice_text(with_engines)
    assert "- SGLang: 5.0% -> 25.0% of tokens (+20.0 points), compute saved 5.0% -> 25.0% (+20.0) (sglang, ra" in text
    assert "states to attention as 2 to 1" in text


def test_what_was_not_run_says_why() -> None:
    by_hand = ModelChoice(None, 100, 5_000_000)
    found = study(question(by_hand), pretended({1: 100}, []))
    text = advice_text(found)
    assert "Its tokens cannot be split further over these ranks: dcp=2: only copies" in text
    assert "vLLM: not computed: vLLM's pages: how many layers group 'attention' has is not known" in text


def test_with_a_clock_there_are_times() -> None:
    seen: list[Point] = []

    def runs(which: Sequence[Point]) -> list[RunRecord]:
        seen.extend(which)
        times = {1: 4.0, 2: 2.0, 4: 1.0, 8: 0.5}
        hits = {1: 100, 2: 150, 4: 200, 8: 300}
        return [
            run(
                hits[p.config.layout.dcp],
                {"parted": 500, "evicted": 500 - hits[p.config.layout.dcp]},
                latency=latency(times[p.config.layout.dcp]) if p.config.timing else None,
            )
            for p in which
        ]

    hardware = Hardware("20GB", "b200", weights="1560GB")
    found = study(Question(Setting(K3, RankChoice(8), hardware, clock=ClockChoice("trace")), TRACE), runs)
    assert {point.config.timing is None for point in seen if point.config.preset} == {True}, "they have no clock"
    assert {point.config.timing is None for point in seen if not point.config.preset} == {False}
    text = advice_text(found, share=0.9)
    assert "- as it is: first token within 4 s for half and 8 s for 95% of the requests" in text
    assert "- as advised: first token within 500 ms for half and 1 s for 95% of the requests" in text
    assert "twice the memory: 30.0% (+0.0 points); first token within 1 s for 95%; 20.0 GB per rank" in text
    assert "imitated engines have no clock" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["advise", "--limit", "30", "--jobs", "1", "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert "vllm serve PATH_OR_HUB_ID" in out
    assert (tmp_path / "advice.md").read_text().strip() in out
    assert (tmp_path / "report.html").exists()
    with pytest.raises(SystemExit):
        main(["advise", "--limit", "30", "--jobs", "1", "--out", str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    given = json.loads(out)
    assert given["advice"] == (tmp_path / "advice.md").read_text()
    assert len(given["runs"]) == len(read_runs(tmp_path / "runs.jsonl"))
    assert {run["policy"]["preset"] for run in given["runs"]} >= {None, "vllm-0.33", "sglang-0.5"}
    assert "0 new" in " ".join(err.split()), "all runs were there"
    for wrong, words in (
        (["--gpus", "4", "--tp", "2"], "--gpus 4"),
        (["--running", "-1"], "--running"),
        (["--limit", "0"], "--limit 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["advise", "--limit", "30", "--out", str(tmp_path), *wrong])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
