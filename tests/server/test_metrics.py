"""Every number under `/metrics` is true: counted series of requests, and what they must add up to."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.bench import WORLDS
from tests.server.fakes import Running, running

from headway.cache import CacheStats, Counters
from headway.engine import EngineConfig, EngineCounters, EngineSnapshot, LowerStats, StepWork
from headway.server.tier_metrics import tier_metrics
from headway.tiers import HostCounters, ObjectGroup, ObjectLayout, ObjectTiers, Rates, TierStats

Samples = dict[str, float]


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as made:
        yield made


ROOT = Path(__file__).parents[2]
_RENAMED = re.compile(r"(_(total|count|sum|bucket))+$")


def samples(server: Running) -> Samples:
    """All samples by name and labels, without the labels that every name of vLLM has."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for one in family.samples:
            labels = dict(one.labels)
            if one.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
                assert one.name == "vllm:cache_config_info" or labels.pop("model_name") == "fake"
            shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
            found[f"{one.name}{{{shown}}}" if shown else one.name] = one.value
    return found


def test_a_counted_series_of_requests(server: Running):
    """Two prompts of 16 and 24 tokens, the first one twice; then a stream, and two errors."""
    prompts = ["Once upon a time", "Once upon a time", "Once upon a time in town"]
    answers = [server.complete(prompt, max_tokens=5, ignore_eos=True) for prompt in prompts]
    body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, "stream": True}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    server.complete("a", 400, max_tokens=0)
    server.http.get("/v1/nothing")
    told = samples(server)

    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert cached == 15 + 15
    assert told["vllm:prefix_cache_queries_total"] == told["vllm:prompt_tokens_total"] == 16 + 16 + 24 + 5
    assert told["vllm:prefix_cache_hits_total"] == told["vllm:prompt_tokens_cached_total"] == cached
    assert told['vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'] == cached
    assert told['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 61 - cached
    assert told["vllm:generation_tokens_total"] == 18
    assert told['vllm:request_success_total{finished_reason="length"}'] == 4
    assert told['vllm:request_success_total{finished_reason="stop"}'] == 0
    assert told["vllm:num_preemptions_total"] == 0

    for name in ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"):
        assert told[f"vllm:{name}_count"] == 4
    assert told["vllm:request_prompt_tokens_sum"] == 61
    assert told['vllm:request_prompt_tokens_bucket{le="5.0"}'] == 1
    assert told['vllm:request_prompt_tokens_bucket{le="20.0"}'] == 3
    assert told["vllm:request_generation_tokens_sum"] == told["vllm:request_params_max_tokens_sum"] == 18
    assert told["vllm:request_prefill_kv_computed_tokens_sum"] == 61 - cached
    assert told["vllm:time_to_first_token_seconds_count"] == 4
    assert told["vllm:inter_token_latency_seconds_count"] == 18 - 4
    assert told["vllm:request_time_per_output_token_seconds_count"] == 4
    assert told["vllm:iteration_tokens_total_count"] == told["headway_steps_total"]
    assert told["vllm:iteration_tokens_total_sum"] == told["headway_computed_tokens_total"]
    whole, parts = told["vllm:e2e_request_latency_seconds_sum"], ("queue", "prefill", "decode")
    assert sum(told[f"vllm:request_{part}_time_seconds_sum"] for part in parts) == pytest.approx(whole, abs=1e-3)
    inference = told["vllm:request_inference_time_seconds_sum"]
    assert inference == pytest.approx(sum(told[f"vllm:request_{part}_time_seconds_sum"] for part in parts[1:]))

    assert told['http_requests_total{handler="/v1/completions",method="POST",status="200"}'] == 4
    assert told['http_requests_total{handler="/v1/completions",method="POST",status="400"}'] == 1
    assert told['http_requests_total{handler="other",method="GET",status="404"}'] == 1


def test_the_names_agree_with_our_own(server: Running):
    for text in ("Once upon a time", "Once upon", "Once upon a time"):
        server.complete(text, max_tokens=4)
    told = samples(server)
    for theirs, ours in (
        ("prefix_cache_queries_total", "prompt_tokens_total"),
        ("prefix_cache_hits_total", "prompt_hit_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
        ("e2e_request_latency_seconds_sum", "request_seconds_sum"),
        ("request_queue_time_seconds_sum", "queue_seconds_sum"),
    ):
        assert told[f"vllm:{theirs}"] == pytest.approx(told[f"headway_{ours}"])


def test_levels_while_requests_run_and_wait():
    """One runs, one waits for what it computes, two wait for a place; a fifth is refused."""
    config = EngineConfig(max_batched_tokens=64, max_running=1, max_model_len=600, max_waiting=3)
    steps = iter(range(10**6))
    came, go, looked_at, end = (threading.Event() for _ in range(4))
    with running(config=config) as server, ThreadPoolExecutor(3) as pool:

        def hold(work: StepWork) -> None:
            step = next(steps)
            if step == 0:
                came.set()
                assert go.wait(60)
            elif step == 1:  # the first prompt takes four steps, so this one is still in prefill
                server.engine._take_snapshot()  # what is shown while a step takes long
                looked_at.set()
                assert end.wait(60)

        server.device.before_step = hold
        first = pool.submit(server.complete, "abcdefghij" * 20, max_tokens=3, n=2)
        assert came.wait(60)
        others = [pool.submit(server.complete, text, max_tokens=3) for text in ("Hello", "World")]
        server.wait_for_open(lambda count: count == 4)
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 429
        go.set()
        assert looked_at.wait(60)
        told = samples(server)
        end.set()
        for one in (first, *others):
            one.result(60)
        assert told["vllm:num_requests_running"] == 1
        assert told["vllm:num_requests_waiting"] == 3
        assert told['vllm:num_requests_waiting_by_reason{reason="deferred"}'] == 1
        assert told['vllm:num_requests_waiting_by_reason{reason="capacity"}'] == 2
        assert told['vllm:admission_rejections_total{reason="queue_full"}'] == 1
        states = ("free", "evictable", "leased", "pinned")
        free, evictable, leased, pinned = (told[f'headway_blocks{{state="{state}"}}'] for state in states)
        assert told["vllm:kv_cache_usage_perc"] == (leased + pinned) / (free + evictable + leased + pinned) > 0
        told = samples(server)
        assert told["vllm:num_requests_running"] == told["vllm:num_requests_waiting"] == 0
        assert told["vllm:kv_cache_usage_perc"] == 0
        assert told['http_requests_total{handler="/v1/completions",method="POST",status="429"}'] == 1


def test_answers_to_one_prompt_are_one_group(server: Running):
    server.complete("Hello", max_tokens=4, ignore_eos=True)
    body = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.9, "seed": 1}
    stops = server.complete(["Hello", "World"], n=3, stop=["a", "e", "i", "o", "u"], **body)
    told, lengths = samples(server), stops["usage"]["completion_tokens"]
    assert told["vllm:request_params_n_sum"] == 1 + 3 + 3
    assert told["vllm:request_params_n_count"] == told["vllm:request_max_num_generation_tokens_count"] == 3
    assert told["vllm:request_generation_tokens_sum"] == 4 + lengths
    assert 4 + lengths / 3 <= told["vllm:request_max_num_generation_tokens_sum"] <= 4 + 9 + 9
    assert told["vllm:request_max_num_generation_tokens_sum"] < 4 + lengths


def test_what_is_pinned_is_in_use(server: Running):
    server.complete("Once upon a time", max_tokens=2)
    assert samples(server)["vllm:kv_cache_usage_perc"] == 0, "what may go counts as free"
    server.complete("Once upon a time", max_tokens=2, headway={"pin": True})
    told = samples(server)
    assert told["vllm:kv_cache_usage_perc"] == told['headway_blocks{state="pinned"}'] / 400 > 0


@pytest.mark.parametrize("world", ["full", "hybrid", "all"])
def test_the_size_of_the_cache_in_tokens(world: str):
    with running(WORLDS[world], blocks=200) as server:
        lines = server.http.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:cache_config_info")]
        labels = dict(re.findall(r'(\w+)="(.*?)"', line))
        geometry = server.engine.cache.geometry
        size, blocks = int(labels["block_size"]), int(labels["num_gpu_blocks"])
        spans = [table.span for table in geometry.prefix_tables]
        assert (size, blocks) == (spans[0], 200)
        assert labels["enable_prefix_caching"] == "True"


def test_ends_are_counted_by_how_they_came(server: Running):
    server.complete("Hello", max_tokens=4, ignore_eos=True)
    whole = server.expected("Hello", 40)
    server.complete("Hello", max_tokens=40, stop=[whole[5:7]])
    server.device.fail_when = lambda work: True
    server.complete("World", 500, max_tokens=2)
    server.device.fail_when = lambda work: False
    body = {"prompt": "Tell me", "max_tokens": 500, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    server.wait_for_open(lambda count: count == 0)
    told = samples(server)
    for end in ("stop", "length", "abort", "error"):
        assert told[f'vllm:request_success_total{{finished_reason="{end}"}}'] == 1
    assert told["vllm:e2e_request_latency_seconds_count"] == 4


def test_a_request_that_gave_way_is_counted(monkeypatch: pytest.MonkeyPatch):
    config = EngineConfig(max_batched_tokens=64, max_running=2, max_model_len=100)
    with running(WORLDS["full"], blocks=40, config=config) as server, ThreadPoolExecutor(2) as pool:
        texts = ("abcdefghijkl", "mnopqrstuvwx")
        for one in [pool.submit(server.complete, text, max_tokens=80, ignore_eos=True) for text in texts]:
            one.result(60)
        told = samples(server)
        gave_way = told["vllm:num_preemptions_total"]
        assert gave_way == told["headway_preemptions_total"] == told["vllm:request_num_preemptions_sum"]
        assert gave_way > 0


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the process is told from /proc")
def test_the_process_is_told(server: Running):
    told = samples(server)
    assert told["process_resident_memory_bytes"] > 10**7
    assert told["process_open_fds"] > 3
    assert told["process_cpu_seconds_total"] > 0


def test_labels_cannot_be_made_up(server: Running):
    for path in ("/a", "/b", "/v1/models/none", "/v1/models/other"):
        server.http.get(path)
    server.http.request("BREW", "/health")
    told = samples(server)
    assert told['http_requests_total{handler="other",method="GET",status="404"}'] == 2
    assert told['http_requests_total{handler="/v1/models/{name:path}",method="GET",status="404"}'] == 2
    assert any('method="other",status="405"' in name for name in told)


def families(server: Running) -> set[str]:
    """Names of all metrics, without what their kind adds, and without those of the process."""
    found = [family.name for family in text_string_to_metric_families(server.http.get("/metrics").text)]
    return {_RENAMED.sub("", name) for name in found if not re.search(r"^process_|_created$", name)}


def test_the_page_names_every_metric(server: Running):
    """And no others, but for those that appear with a drafter or with lower tiers."""
    for _ in range(2):
        server.complete("Hello", max_tokens=2)
    page = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8").partition("## Metrics")[2]
    page = page.replace("`..._", "`headway_checkpoints_")
    named = {_RENAMED.sub("", name) for name in re.findall(r"`((?:headway_|vllm:|http_)\w+)", page)}
    told = families(server)
    assert told <= named
    more = {name for name in named - told if not name.startswith("headway_tier")} - {"headway_requests_loading"}
    assert more <= {"headway_draft_tokens", "headway_draft_accepted_tokens"}


def test_the_page_names_every_metric_of_lower_tiers(tmp_path: Path):
    page = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    named = {_RENAMED.sub("", name) for name in re.findall(r"`(headway_(?:tiers?_|requests_loading)\w*)", page)}
    objects = ObjectTiers(ObjectLayout(b"w", (ObjectGroup("full", "prefix", 8),)), b"k" * 16, [])
    told = TierStats("disk", 10, 1, 1, 1, 1, 1, 1, {"late": 1}, 1, "open", 1, False, 1.0)
    lower = LowerStats(
        CacheStats(9, 1, 0, 0, 8, 0, 3, Counters(), 0, 0), HostCounters(), replace(objects.stats(), tiers=(told,)),
        0, Rates(), {"disk": 1},
    )  # fmt: skip
    objects.close()
    now = EngineSnapshot(0, 0, EngineCounters(), CacheStats(9, 1, 0, 0, 8, 0, 3, Counters(), 0, 0), lower=lower)
    found = list(tier_metrics(now, 512))
    assert {_RENAMED.sub("", metric.name) for metric in found} == named
    values = {
        (m.name, *s.labels.values()): s.value for m in found for s in m.samples if not s.name.endswith("_created")
    }
    assert values["headway_tier_used_bytes", "host"] == 8 * 512
    assert values["headway_tier_off", "disk"] == 1
    assert values["headway_tier_failures", "disk", "late"] == 1


def test_the_dashboard_asks_for_metrics_that_are_there(server: Running):
    """Its queries are run by `make check-prometheus`."""
    server.complete("Hello", max_tokens=2)
    told = families(server) | {"process_cpu_seconds", "process_resident_memory_bytes"}
    board = json.loads((ROOT / "deploy" / "grafana" / "headway.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    asked = {_RENAMED.sub("", name) for name in re.findall(r"(?:headway_|vllm:|http_|process_)\w+", " ".join(queries))}
    assert asked
    assert asked <= told
