"""A record of a run survives JSON, and says what is wrong with one that is not."""

import json
from dataclasses import replace

import pytest

from headway.cache import FullAttention, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import TraceError
from headway.replay import ReplayConfig, Roofline, Timing, generate, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.replay.ask.record import record_of, settings_of
from headway.tell.run import RunRecord

LAYOUT = ParallelLayout(tp=8, dcp=8)
MODEL = model_of("kimi-k3", LAYOUT)
CONFIG = ReplayConfig(MODEL.groups, 20_000_000_000, LAYOUT, MODEL.cost)


def record(config: ReplayConfig = CONFIG) -> RunRecord:
    trace = generate("mixed", 40, seed=2)
    return record_of(replay_trace(trace, config, clairvoyant=True), config, MODEL, trace)


def test_a_record_survives_json() -> None:
    made = record()
    assert RunRecord.from_dict(json.loads(json.dumps(made.as_dict()))) == made


def test_sizes_of_a_token_and_of_a_checkpoint() -> None:
    made = record()
    assert made.token_bytes == 27_648 / 8
    assert made.checkpoint_bytes == 56_171_520
    groups = [FullAttention("a", 100), FullAttention("b", 50, 0, False), SlidingWindow("w", 10, 129), Recurrent("s", 7)]
    mixed = record_of(made.result, replace(CONFIG, groups=groups, layout=LAYOUT), MODEL, generate("chat", 2))
    assert mixed.token_bytes == 100 / 8 + 50
    assert mixed.checkpoint_bytes == 10 * 128 + 7
    assert mixed.state_bytes == 7, "a window is no state"


def test_settings_tell_configurations_apart() -> None:
    others = [
        replace(CONFIG, memory=None),
        replace(CONFIG, eviction="lru"),
        replace(CONFIG, placement=("prompt_end",)),
        replace(CONFIG, alignment=512),
        replace(CONFIG, layout=ParallelLayout(tp=8)),
        replace(CONFIG, outputs="never"),
        replace(CONFIG, groups=[FullAttention("a", 9, 0, False)]),
        replace(CONFIG, groups=[FullAttention("a", 9, 0, True)]),
    ]
    texts = [json.dumps(settings_of(config), sort_keys=True) for config in (CONFIG, *others)]
    assert len(set(texts)) == len(texts)
    assert json.dumps(settings_of(replace(CONFIG)), sort_keys=True) == texts[0]


def test_a_preset_is_recorded_with_its_version() -> None:
    bare = record_of(record().result, replace(CONFIG, preset="vllm,running=32"), MODEL, generate("chat", 2))
    assert bare.policy["preset"] == "vllm-0.33,running=32"
    assert settings_of(replace(CONFIG, preset="vllm")) == settings_of(replace(CONFIG, preset="vllm-0.33"))


def test_a_clock_is_short_in_a_record_and_whole_in_the_key() -> None:
    slow, fast = (
        Timing(Roofline(MODEL.cost, flops, 1e12, 1e9, 1.0, 1.0, 1.0, gpu="h300"), 2.0, 16, 2048)
        for flops in (1e15, 2e15)
    )
    made = record_of(record().result, replace(CONFIG, timing=slow), MODEL, generate("chat", 2))
    assert made.policy["timing"] == {
        "gpu": "h300",
        "speed": "x2",
        "at once": 16,
        "tokens per step": 2048,
        "waits for": "256 tokens",
    }
    assert settings_of(replace(CONFIG, timing=slow)) != settings_of(replace(CONFIG, timing=fast))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": "much"}, "run: field 'memory': expected a whole number or null, found str 'much'"),
        ({"model": "kimi"}, "run: field 'model': expected an object, found str 'kimi'"),
        ({"groups": [{"name": "a"}]}, r"run: field 'groups\[0\].kind': is missing; found 'name'"),
    ],
)
def test_what_is_no_record_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        RunRecord.from_dict(record().as_dict() | change)
