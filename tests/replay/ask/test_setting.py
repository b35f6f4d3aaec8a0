"""From what somebody asks to what is replayed."""

from pathlib import Path
from typing import Any

import pytest

from headway.cache import DEFAULT_PLACEMENT, ParallelLayout
from headway.errors import ConfigError, TraceError
from headway.replay.ask.options import ClockChoice, Hardware, ModelChoice, PolicyChoice, RankChoice, TraceChoice
from headway.replay.ask.setting import Setting

K3 = Setting(ModelChoice("kimi-k3"), RankChoice(tp=8, dcp=8), Hardware("20GB"))


def test_everything_asked_arrives() -> None:
    policy = PolicyChoice("prompt_end, interval:512,", "lru", 64)
    config, model = Setting(K3.model, K3.ranks, K3.hardware, policy, outputs="never").configure()
    assert (model.name, config.groups, config.layers) == ("kimi-k3", model.groups, model.layers)
    assert (config.memory, config.layout) == (20 * 10**9, ParallelLayout(tp=8, dcp=8))
    assert (config.placement, config.eviction, config.alignment) == (["prompt_end", "interval:512"], "lru", 64)
    assert (config.outputs, config.preset, config.timing, config.cost) == ("never", None, None, model.cost)
    assert tuple(K3.configure()[0].placement) == DEFAULT_PLACEMENT
    assert K3.changed(preset="vllm").configure()[0].preset == "vllm"


def test_with_a_clock() -> None:
    clock = ClockChoice("trace", 2.0, 32, 4096, "0.25,0.5")
    timing = K3.changed(clock=clock, gpu="b200", weights="1560GB").configure()[0].timing
    assert timing is not None
    assert (timing.speed, timing.max_running, timing.step_tokens, timing.roofline.gpu) == (2.0, 32, 4096, "b200")


def test_a_field_is_changed_wherever_it_is() -> None:
    changed = K3.changed(
        dcp=1, kv_dtype="fp8", memory="5GB", eviction="lru", outputs="never", clock=ClockChoice(speed=2)
    )
    assert (changed.ranks, changed.hardware) == (RankChoice(8, 1, kv_dtype="fp8"), Hardware("5GB"))
    assert (changed.policy.eviction, changed.outputs, changed.clock.speed) == ("lru", "never", 2)
    assert changed.model == K3.model
    assert K3.changed() == K3


def test_without_a_trace_and_a_model_there_is_an_example() -> None:
    none = Setting(ModelChoice())
    example = none.with_example(TraceChoice(), "8GB")
    assert (example.model.model, example.hardware.memory) == ("kimi-linear", "8GB")
    assert none.changed(memory="1GB").with_example(TraceChoice(), "8GB").hardware.memory == "1GB"
    assert none.changed(gpu="h200").with_example(TraceChoice(), "8GB").hardware.memory is None
    by_hand = Setting(ModelChoice(attention_bytes=9))
    assert by_hand.with_example(TraceChoice(), "8GB") == by_hand
    assert none.with_example(TraceChoice(Path(__file__)), "8GB") == none, "a trace of one's own wants a model"
    with pytest.raises(TraceError, match=r"absent\.jsonl: there is no such file"):
        none.with_example(TraceChoice(Path("absent.jsonl")), "8GB")
    both = none.changed(memory="1GB", gpu="h200").with_example(TraceChoice(), "8GB").configure()[0]
    assert (both.memory, both.timing) == (10**9, None)
    assert both.roofline is not None, "the GPU says how fast it is"
    assert both.roofline.gpu == "h200"
    assert example.configure()[0].roofline is None
    unknown = Setting(ModelChoice("qwen3.6-27b"), hardware=Hardware("1GB", "h200"))
    assert unknown.configure()[0].roofline is None, "nothing is known of its compute"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"limit": 0}, "--limit 0: give a number of requests"),
        ({"format": "mooncake"}, "--format: says how a trace is read, and none is given"),
        ({"tokenizer": "bytes", "format": "chat"}, "--format, --tokenizer: says how"),
        ({"trace": Path(__file__), "seed": 3}, "--seed: is for a generated trace"),
        ({"workload": "poems"}, "unknown workload 'poems'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceChoice(**choice).load()


def test_a_generated_trace() -> None:
    trace = TraceChoice(workload="chat", seed=4, limit=20, block_tokens=16).load()
    assert (len(trace), trace.width, trace.format) == (20, 16, "generated")
