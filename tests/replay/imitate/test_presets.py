"""What holds of every preset: their settings in text, and a result of the same form as the cache's own."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.replay.run.test_order import check

from headway.cache import FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay import (
    PRESETS,
    MarconiPreset,
    ReplayConfig,
    SglangPreset,
    Trace,
    TraceBuilder,
    VllmPreset,
    generate,
    replay_trace,
)
from headway.replay.config.presets import described, preset_of

HYBRID: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 200_000)]
PLAIN = [FullAttention("attention", 1000)]
NEAR: list[LayerSpec] = [FullAttention("attention", 1000), SlidingWindow("near", 2000, 50)]
WINDOWS = "vllm,block_tokens=16,running=3,step_tokens=200"
"""With this one the model has windows instead of states."""
SMALL = (
    WINDOWS,
    "headway-in-vllm,state_groups=3,block_tokens=80",
    "vllm,state_groups=3,block_tokens=80,running=3,step_tokens=200",
    "vllm,state_groups=3,block_tokens=80,retention=dense",
    "sglang",
)


def model(preset: str | None) -> tuple[list[LayerSpec], dict[str, int]]:
    """Groups of the model that a preset of `SMALL` is tried with, and their layers."""
    return (NEAR, {"attention": 1, "near": 2}) if preset == WINDOWS else (HYBRID, {})


def test_a_preset_is_named_in_text() -> None:
    assert preset_of("vllm") == VllmPreset()
    assert preset_of("vllm, running=32 ,retention=dense") == VllmPreset(running=32, retention="dense")
    assert preset_of("sglang,memory_ratio=0.5") == SglangPreset(memory_ratio=0.5)
    assert preset_of("marconi,alpha=2") == MarconiPreset(alpha=2.0)
    assert preset_of("headway") is None
    assert preset_of(None) is None
    for name, usual in PRESETS.items():
        assert described(usual).startswith(name)
        assert preset_of(described(usual)) == preset_of(name) == usual


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trt", "unknown preset"),
        ("vllm,blocks=3", "no setting 'blocks'"),
        ("vllm,running=many", "not a whole number"),
        ("vllm,running=0", "running is 0"),
        ("vllm,retention=some", "latest or common or dense"),
        ("vllm,running=64,step_tokens=10", "one token of each step"),
        ("sglang,memory_ratio=0", "memory_ratio"),
        ("sglang,chunk_tokens=100", "multiples of grain_tokens"),
        ("marconi,bootstrap=0", "bootstrap"),
    ],
)
def test_what_cannot_work_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReplayConfig(HYBRID, 10**8, preset=text)


def test_policies_are_the_presets() -> None:
    with pytest.raises(ConfigError, match="are the preset's"):
        ReplayConfig(HYBRID, 10**8, preset="vllm", eviction="lru")


@pytest.mark.parametrize(
    ("preset", "words"), [("vllm", "windows beside states, are not modelled"), ("sglang", "'near' is not modelled")]
)
def test_models_that_are_not_modelled_are_refused(preset: str, words: str) -> None:
    trace = generate("one-off", 3)
    layers = {"attention": 1, "state": 3, "near": 2}
    near = ReplayConfig([*HYBRID, SlidingWindow("near", 100, 50)], 10**8, preset=preset, layers=layers)
    with pytest.raises(ConfigError, match=words):
        replay_trace(trace, near)
    with pytest.raises(ConfigError, match="give more memory"):
        replay_trace(trace, ReplayConfig(HYBRID, 300_000, preset=preset, layers={"attention": 1, "state": 3}))


def replayed(trace: Trace, preset: str, memory: int | None, **options: object) -> None:
    groups, layers = model(preset)
    config = ReplayConfig(groups, memory, preset=preset, layers=layers, **options)  # type: ignore[arg-type]
    result = replay_trace(trace, config, clairvoyant=True)
    check(trace, result)
    assert result.preset.startswith(preset.partition(",")[0])
    assert result.whole == replay_trace(trace, config).whole, "not deterministic"
    if memory is None:
        assert "evicted" not in result.whole.lost


@pytest.mark.parametrize("preset", [*SMALL, "marconi"])
@pytest.mark.parametrize("memory", [3_000_000, 30_000_000, None])
@pytest.mark.parametrize("workload", ["mixed", "chat"])
def test_generated_traces(preset: str, memory: int | None, workload: str) -> None:
    replayed(generate(workload, 60, seed=2, block_tokens=64), preset, memory)


@settings(max_examples=30, print_blob=True)
@example([[0]] * 16 + [[0, 0, 0]], None, SMALL[3], (4, 4), "continuation")
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=20),
    st.sampled_from([1_500_000, 2_500_000, 6_000_000, None]),
    st.sampled_from(SMALL),
    st.sampled_from([(1, 1), (4, 4)]),
    st.sampled_from(["never", "continuation"]),
)
def test_small_traces(
    prompts: list[list[int]], memory: int | None, preset: str, layout: tuple[int, int], outputs: str
) -> None:
    builder = TraceBuilder("made", "test", 32)
    for time, prompt in enumerate(prompts):
        builder.add_blocks([*prompt, "tail"][: len(prompt) + time % 2], len(prompt) * 32 + 5 * (time % 2), 70, time)
    tp, dcp = (1, 1) if preset == WINDOWS else layout
    replayed(builder.build(), preset, memory, layout=ParallelLayout(tp=tp, dcp=dcp), outputs=outputs)


@pytest.mark.parametrize("preset", [*SMALL, None])
def test_memory_is_sampled_from_the_first_request_to_the_last(preset: str | None) -> None:
    trace = generate("mixed", 150, seed=2, block_tokens=64)
    groups, layers = model(preset)
    moments = replay_trace(trace, ReplayConfig(groups, 300_000_000, preset=preset, layers=layers)).memory
    assert [moment.request for moment in moments] == [*range(0, 150, 2), 150]
    arrivals = [trace.times[min(moment.request, 149)] for moment in moments]
    late = [0.0, *(trace.times[moment.request - 1] for moment in moments[1:])]
    assert [moment.time for moment in moments] == (late if preset is None or preset.startswith("headway") else arrivals)
    assert 0 < moments[-1].used <= 300_000_000


def test_answers_can_be_cut() -> None:
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks([1], 64, 500, 0.0)
    builder.add_blocks([1], 64, 3, 1.0)
    assert builder.build().cut_answers(32).answer_tokens.tolist() == [32, 3]
    with pytest.raises(Exception, match="cannot be cut"):
        generate("chat", 5).cut_answers(3)
