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
from headway.tell.engines import UNSERVED, Setup, beside_running, fewer_running, flags
from headway.tell.run import CapacityPoint, GroupSize, Kind, Memory, RunRecord

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


def refusing(refused: dict[int, int], hits: dict[int, int]) -> Any:
    """As `pretended`, with requests refused by dcp, of 10 more than are served; all fit into 30 GB."""

    def runs(points: Sequence[Point]) -> list[RunRecord]:
        made = []
        for point in points:
            dcp, hit = point.config.layout.dcp, hits[point.config.layout.dcp]
            gone = refused[dcp] if (point.config.memory or 0) < 30 * GB else 0
            more = {"refused": gone, "refused_tokens": 100 * gone, "needed": 30 * GB} if gone else {}
            made.append(run(hit, {"parted": 500, "evicted": 500 - hit}, memory=point.config.memory, **more))
        return made

    return runs


def test_a_layout_that_refuses_requests_is_none() -> None:
    """dcp 1 and 2 reuse most of what they serve, and refuse requests."""
    found = study(question(), refusing({1: 9, 2: 1, 4: 0, 8: 0}, {1: 400, 2: 400, 4: 200, 8: 201}))
    assert found.best.values["dcp"] == 4
    text = advice_text(found)
    first = text.split("\n\n")[2]
    assert first.startswith("Without context parallelism, 9 of 19 requests need more than the whole memory"), (
        "told first"
    )
    assert "(dcp 1: refuses 9 of 19 requests, dcp 2: refuses 1 of 11 requests, dcp 4: 20.0%, dcp 8: 20.1%)" in text
    assert "Smaller sizes refuse requests: they are no layouts for this traffic." in text
    assert (
        "- Headway: refuses 9 of 19 requests, 40.0% of the tokens of the others reused -> serves all requests" in text
    )
    assert "No layout here serves all" not in text
    none = advice_text(decided({1: 100, 2: 200, 4: 290, 8: 300}))
    assert "refuse" not in none


def test_where_no_layout_serves_all_the_memory_that_would_is_named() -> None:
    found = study(question(), refusing({1: 9, 2: 5, 4: 3, 8: 3}, dict.fromkeys((1, 2, 4, 8), 200)))
    assert found.best.values["dcp"] == 4, "the smallest of those that refuse fewest"
    text = advice_text(found)
    assert (
        "No layout here serves all requests in 20 GB per rank. The commands below refuse 3 of 13: give 30.0 GB" in text
    )
    assert "- memory for every request: 20.0%; 30.0 GB per rank" in text
    assert "- half the memory: 20.0% (+0.0 points); 10.0 GB per rank" in text


def placed(gain: dict[str, int], kinds: dict[str, Kind], never: int = 0) -> Any:
    """A runner by what placements and evictions gain in tokens, over 200 of 1,000."""

    def runs(points: Sequence[Point]) -> list[RunRecord]:
        made = []
        for point in points:
            placement, eviction = ",".join(point.config.placement), str(point.config.eviction)
            hit = 200 + gain.get(placement, 0) + gain.get(eviction, 0)
            lost = {"parted": 500, "evicted": 500 - hit - never, "state_never_taken": never}
            made.append(run(hit, lost, kinds=kinds, memory=point.config.memory))
        return made

    return runs


POOR = {"prompt_end": Kind(100, 3, 4, 90, 88), "answer_end": Kind(100, 50, 60, 40, 9), "junction": Kind(90, 1, 1, 9, 9)}
WITHOUT = "answer_end,junction,breakpoint,boundary"


def test_a_kind_of_checkpoint_that_does_not_pay_is_dropped_where_that_gains() -> None:
    found = study(question(), placed({WITHOUT: 50}, POOR))
    assert [one.name for one in found.policies] == ["plain LRU", "drop prompt_end"], "answer_end pays, junctions stay"
    assert found.best.values["placement"] == WITHOUT
    text = advice_text(found)
    assert "Policies: drop prompt_end (prompt_end pays 3%: that share of its checkpoints was ever reused)." in text
    assert (
        "That saves 5.0 points more compute (compute saved 20.0% as it is; plain LRU: 20.0%, drop prompt_end: 25.0%)"
        in text
    )
    assert f"--placement {WITHOUT}" in text
    assert {one.values.get("placement") for one in found.changes} == {WITHOUT}, "changes start from there"


def test_a_placement_that_gains_less_than_half_a_point_is_left() -> None:
    text = advice_text(study(question(), placed({WITHOUT: 4}, POOR)))
    assert "Policies: leave them. None that was tried gains half a point" in text
    assert "pays" not in text.split("## What to watch")[0]
    assert "--placement" not in text.split("## What it gains")[0]


def test_which_placements_are_tried() -> None:
    def tried(kinds: dict[str, Kind], never: int = 0) -> list[str]:
        return [one.name for one in study(question(), placed({}, kinds, never)).policies]

    assert tried({}) == ["plain LRU"]
    assert tried({"prompt_end": Kind(19, 0, 0, 0, 0)}) == ["plain LRU"], "too few to judge"
    both = {"prompt_end": Kind(100, 0, 0, 9, 9), "answer_end": Kind(100, 19, 19, 9, 9)}
    assert tried(both)[1:] == ["drop prompt_end", "drop answer_end", "drop prompt_end and answer_end"]
    assert tried({}, never=100) == ["plain LRU", "add interval:512", "add interval:4096"]
    endless = study(question(memory="endless"), placed({}, {}))
    assert list(endless.policies) == [], "nothing is ever evicted"


def test_plain_lru_is_advised_where_it_is_better() -> None:
    found = study(question(), placed({"lru": 30}, {}))
    text = advice_text(found)
    assert "Policies: plain LRU. That saves 3.0 points more compute" in text
    assert "--eviction lru" in text


def test_only_layouts_that_the_model_allows_are_run() -> None:
    seen: list[Point] = []
    # Qwen3-Next has 2 key/value heads: on 8 ranks there are 4 copies of each, and only copies can be split by tokens.
    choice = ModelChoice("qwen3-next")
    found = study(question(choice), pretended({1: 100, 2: 200, 4: 300}, seen))
    assert [variant.name for variant in found.layouts] == ["dcp 1", "dcp 2", "dcp 4"]
    tried = {variant.name: point for variant, point in zip([*found.policies, *found.changes], seen[3:], strict=False)}
    changes = {name: point for name, point in tried.items() if name not in {one.name for one in found.policies}}
    assert {point.config.layout.dcp for point in changes.values()} == {4}
    assert changes["half the memory"].config.memory == 10 * GB
    assert changes["twice the memory"].config.memory == 40 * GB
    assert tried["plain LRU"].config.eviction == "lru"
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


def test_lower_tiers_are_tried_one_more_at_a_time() -> None:
    """Without any that are given, some that are usual: 4 and 20 times the memory. Other engines have none."""

    def tried(hardware: Hardware) -> tuple[list[str], set[tuple[tuple[str, int], ...]]]:
        seen: list[Point] = []
        runs = pretended(dict.fromkeys((1, 2, 4, 8), 100), seen)
        found = study(Question(Setting(K3, RankChoice(8), hardware), TRACE), runs)
        assert not any(point.config.tiers for point in seen if point.config.preset)
        sizes = {tuple((tier.name, tier.memory // GB) for tier in point.config.tiers) for point in seen}
        return [variant.name for variant in found.lower], sizes

    host, both = (("host", 80),), (("host", 80), ("disk", 400))
    usual = ["80 GB of host memory", "80 GB of host memory and 400 GB of disk"]
    assert tried(Hardware("20GB")) == (usual, {(), host, both})
    given = ["no lower tiers", "50 GB of host memory"]
    assert tried(Hardware("20GB", host_memory="50GB")) == (given, {(), (("host", 50),)})
    assert tried(Hardware("endless")) == ([], {()})


def test_gains_and_remarks() -> None:
    text = advice_text(decided({1: 100, 2: 150, 4: 200, 8: 300}))
    assert "decode context parallelism 8: +20.0 points" in text
    assert "Headway: 10.0% -> 30.0% of tokens (+20.0 points), compute saved 10.0% -> 30.0% (+20.0)" in text
    assert "Expect a hit rate of about 30%; the memory was not full for half of the trace." in text
    assert "Most of what is lost is evicted (20% of all tokens)" in text
    for metric in ("headway_prompt_lost_tokens_total", "vllm:prefix_cache_hits_total", "sglang:mamba_usage"):
        assert metric in text


def test_the_least_memory_that_is_nearly_enough_is_told() -> None:
    curve = [CapacityPoint(size * 10**9, 0.1, 0.1, rate, rate) for size, rate in ((10, 0.1), (20, 0.29), (40, 0.3))]
    found = decided({1: 100, 2: 100, 4: 100, 8: 100})
    text = advice_text(replace(found, capacity=curve))
    assert "20.0 GB per rank would reuse 29.0% of the tokens, nearly as much as 40.0 GB (30.0%)" in text
    assert "in tokens alone" not in advice_text(found)
    nothing = [CapacityPoint(10**9, 0.0, 0.0), CapacityPoint(2 * 10**9, 0.0, 0.0)]
    text = advice_text(replace(found, capacity=nothing))
    assert "no size of memory up to 2.0 GB reuses anything" in text
    assert "nearly as much" not in text


def test_flags() -> None:
    values = {"tp": 8, "dcp": 8, "kv_dtype": "fp8", "state_dtype": "bf16"}
    told = flags(Setup("kimi-k3", values, 20 * GB, None, 50_000_000, 3456.0, 1.0, 4))
    assert told["Headway"].endswith("--memory 20000000000 --kv-dtype fp8_e4m3 --state-dtype bf16")
    assert flags(Setup("k", values | {"kv_dtype": "fp8_ds_mla"}, None, None, 0, 1.0, 1.0, 4))["Headway"] == UNSERVED
    assert told["vLLM"] == (
        "vllm serve kimi-k3 --tensor-parallel-size 8 --decode-context-parallel-size 8 --kv-cache-memory-bytes "
        "20000000000 --kv-cache-dtype fp8 --enable-prefix-caching --mamba-ssm-cache-dtype bfloat16"
    )
    # 4 running requests hold 5 slots of 50 MB each, which leaves 19 GB. Half of that is states: 190 more slots.
    assert told["SGLang"].endswith("--mamba-ssm-dtype bfloat16 --max-running-requests 4 --max-mamba-cache-size 210")
    plain = {"tp": 1, "dcp": 1, "kv_dtype": "bf16", "state_dtype": "fp32", "eviction": "lru"}
    told = flags(Setup("llama", plain | {"placement": "prompt_end"}, None, 0.9, 0, 100.0, 0.0, 16))
    assert told == {
        "Headway": "headway serve llama --placement prompt_end --eviction lru",
        "vLLM": "vllm serve llama --tensor-parallel-size 1 --gpu-memory-utilization 0.9",
        "SGLang": "sglang serve --model-path llama --tp-size 1 --mem-fraction-static 0.9",
    }
    fp8 = flags(Setup("llama", plain | {"kv_dtype": "fp8"}, None, None, 0, 1.0, 0.5, 16))
    assert fp8["Headway"] == "headway serve llama --kv-dtype fp8_e4m3 --eviction lru"
    shared = flags(Setup("kimi", plain | {"tp": 8, "dcp": 4, "eviction": "adaptive"}, 20 * GB, None, 9, 1.0, 0.5, 16))
    assert shared["Headway"] == "headway serve kimi --tp 8 --dcp 4 --memory 20000000000"
    default = flags(Setup("llama", plain | {"placement": ",".join(DEFAULT_PLACEMENT)}, None, None, 9, 1.0, 0.5, 16))
    assert "--placement" not in default["Headway"]
    assert default["SGLang"].endswith("--mamba-full-memory-ratio 0.5")
    few = flags(Setup("k3", plain | {"eviction": "adaptive"}, 2 * GB, None, 50_000_000, 9.0, 0.5, 1, 2))
    assert few["Headway"] == "headway serve k3 --memory 2000000000 --max-running 8", "8 states are a fifth of it"
    assert "--max-num-seqs 2" in few["vLLM"]
    assert "--max-num-seqs" not in default["vLLM"]


def test_states_of_running_requests_come_out_of_the_memory() -> None:
    assert beside_running(20 * GB, 4, 50_000_000) == 19 * GB
    assert beside_running(20 * GB, 400, 0) == 20 * GB, "a model without states holds none"
    assert beside_running(1100, 20, 10) == 100
    with pytest.raises(ConfigError, match="states of 21 running requests alone fill the memory: give more memory, or"):
        beside_running(1060, 21, 10)
    seen: list[Point] = []
    study(question(running=4), pretended(dict.fromkeys((1, 2, 4, 8), 100), seen))
    states = run().state_bytes
    sglang = {point.config.memory for point in seen if str(point.config.preset).startswith("sglang")}
    assert sglang == {20 * GB - 5 * 4 * states}
    assert fewer_running(20 * GB, 64, 50_000_000, 1) == 64
    assert fewer_running(20 * GB, 64, 50_000_000, 5) == 16
    assert fewer_running(20 * GB, 64, 50_000_000_000, 5) == 1
    assert fewer_running(20 * GB, 64, 0, 5) == 64


def test_fewer_running_requests_are_tried_where_their_states_eat_the_memory() -> None:
    def runs(points: Sequence[Point]) -> list[RunRecord]:
        """Whoever has less than 2 GB refuses most requests."""
        few = {"refused": 709, "refused_tokens": 7090, "needed": 2 * GB}
        return [run(200, memory=p.config.memory, **(few if (p.config.memory or 0) < 2 * GB else {})) for p in points]

    found = study(question(memory="5GB"), runs)
    states = run().state_bytes
    assert {one.running for one in found.engines["sglang"]} == {16, 4}
    assert {one.run.memory for one in found.engines["sglang"]} == {5 * GB - 80 * states, 5 * GB - 20 * states}
    text = advice_text(found)
    assert (
        "- SGLang: refuses 709 of 719 requests, 22.2% of the tokens of the others reused -> serves all requests" in text
    )
    assert "4 running)" in text
    assert "--max-running-requests 4" in text
    assert "With 16 running requests, SGLang's slots for them would take the memory of the cache." in text
    roomy = advice_text(study(question(memory="50GB"), runs))
    assert "would take the memory of the cache" not in roomy
    assert {one.running for one in study(question(running=4000, memory="5GB"), runs).engines["sglang"]} == {3}


def test_windows_are_no_states() -> None:
    windowed = replace(
        run(), groups=[GroupSize("full", "FullAttention", 8000), GroupSize("w", "SlidingWindow", 9, 0, 9)]
    )
    one = Variant("dcp 1", {"tp": 1, "dcp": 1, "kv_dtype": "bf16", "state_dtype": "fp32"}, windowed)
    text = advice_text(Study(one, [one], one, [], one, []), checkpoint="/models/w", draft=True)
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
    with_engines = replace(base, engines={"sglang": [worst, better]})
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
    assert "Replayed in tokens alone" in out
    assert "What other sizes of memory reuse" in (tmp_path / "report.html").read_text()
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
