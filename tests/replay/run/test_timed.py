"""Replay with arrival times: the roofline by hand, the scheduler on the simulated clock, what the estimates say."""

import numpy as np
import pytest
from tests.replay.run.test_order import check

from headway.cache import ComputeCost, FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay import ReplayConfig, ReplayResult, Roofline, Timing, Trace, TraceBuilder, generate, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.replay.ask.options import ClockChoice, Hardware
from headway.replay.ask.sizing import memory_of, timing_of, with_active
from headway.replay.config.gpus import Gpu, gpu_of
from headway.replay.config.roofline import roofline_of
from headway.tell.latency import Percentiles, Wait

HYBRID: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 200_000)]
SLOW = Roofline(ComputeCost(1.0, 0.0), 1000.0, 1e30, 1.0, 1.0, 0.0, 0.0)
"""A thousand tokens per second, whatever they are."""


def seconds(roofline: Roofline, *rows: tuple[int, int]) -> float:
    starts, counts = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return roofline.seconds(starts, counts)


def test_computing_prompts() -> None:
    """F(n) = 10 n + 4 n^2 / 2. Tokens [100, 150): 500 + 2 x (150^2 - 100^2) = 25,500; tokens [0, 10): 300."""
    roofline = Roofline(ComputeCost(10.0, 4.0), 1000.0, 1e30, 1.0, 1.0, 0.0, 0.0)
    assert seconds(roofline, (100, 50)) == pytest.approx(25.5)
    assert seconds(roofline, (100, 50), (0, 10)) == pytest.approx(25.8)


def test_moving_bytes() -> None:
    """Weights 1,000 of which a token needs 1/10; 3 bytes a token of attention, 50 a state, 2 in a window of 20."""
    roofline = Roofline(ComputeCost(1.0, 0.0), 1e30, 10.0, 1000.0, 0.1, 3.0, 50.0, ((2.0, 20),))
    one = 100 + 3 * 101 + 2 * 50 + 2 * 21
    assert seconds(roofline, (100, 1)) == pytest.approx(one / 10)
    two = 200 + 3 * (101 + 7) + 2 * 2 * 50 + 2 * (21 + 7)
    assert seconds(roofline, (100, 1), (6, 1)) == pytest.approx(two / 10)
    assert seconds(roofline, (0, 50)) == pytest.approx((1000 + 3 * 50 + 100 + 2 * 50) / 10), "all weights, once"
    assert seconds(roofline, (100, 1), (6, 0)) == pytest.approx((100 + 3 * 107 + 100 + 2 * 27) / 10)


def test_the_roofline_of_a_model_on_gpus() -> None:
    gpu = Gpu("made", 10**9, 100.0, 200.0, 50.0, "a test")
    groups = [FullAttention("a", 80), FullAttention("d", 8, 0, False), SlidingWindow("w", 6, 128), Recurrent("s", 900)]
    layout, cost = ParallelLayout(tp=4, dcp=4), ComputeCost(20.0, 1.0)
    found = roofline_of(groups, layout, cost, gpu, parameters=100, weight_bytes=200, reached=(0.5, 0.2))
    assert (found.flops, found.bandwidth) == (4 * 100 * 0.5, 50 * 0.2)
    assert (found.weight_bytes, found.active) == (50, 0.1)
    assert (found.token_bytes, found.state_bytes, found.windows) == (80 / 4 + 8, 900, ((6.0, 128),))
    assert roofline_of(groups, layout, cost, gpu, parameters=100, weight_bytes=100).flops == 4 * 200 * 0.5, "in fp8"
    for shares in ((0.0, 0.5), (0.5, 1.5)):
        with pytest.raises(ConfigError, match="shares"):
            roofline_of(groups, layout, cost, gpu, parameters=100, weight_bytes=200, reached=shares)
    with pytest.raises(ConfigError, match="weights"):
        roofline_of(groups, layout, cost, gpu, parameters=0, weight_bytes=200)


def test_percentiles() -> None:
    found = Percentiles.of([float(n) for n in range(101)])
    assert found == Percentiles(50.0, 90.0, 95.0, 99.0, 50.0)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)


def test_waits_over_time_are_in_order_of_arrival() -> None:
    """Of 80 requests in order of their end, the last that ended arrived first; two of them make one of 40 stretches."""
    arrivals = [float(79 - n) for n in range(80)]
    found = Wait.over(arrivals, [10.0 * arrival for arrival in arrivals])
    assert len(found) == 40
    assert found[0] == Wait(0.0, 2, 5.0, 9.5)
    assert found[-1] == Wait(78.0, 2, 785.0, 789.5)
    assert Wait.over([], []) == []


def trace(*arrivals: float, prompt: int = 640, answer: int = 11, shared: bool = False) -> Trace:
    builder = TraceBuilder("made", "test", 64)
    blocks = prompt // 64
    for number, time in enumerate(arrivals):
        first = 0 if shared else number * blocks
        builder.add_blocks(range(first, first + blocks), prompt, answer, time)
    return builder.build()


def timed(found: Trace, memory: int | None = None, **options: object) -> ReplayResult:
    return replay_trace(found, ReplayConfig(HYBRID, memory, timing=Timing(SLOW, **options)))  # type: ignore[arg-type]


def test_one_request_waits_for_its_prompt_and_then_for_each_token() -> None:
    latency = timed(trace(5.0)).latency
    assert latency is not None
    assert latency.queue.p50 == 0.0
    assert latency.first_token.p50 == pytest.approx(0.640)
    assert latency.each_token.p50 == pytest.approx(0.001)
    assert latency.total.p50 == latency.seconds == pytest.approx(0.650)
    assert latency.busy == pytest.approx(1.0)
    assert latency.answer_tokens == pytest.approx(11 / 0.650)
    assert latency.computed_tokens == pytest.approx(650 / 0.650), "the last token of an answer is not computed"


def test_who_comes_second_waits_in_the_queue() -> None:
    latency = timed(trace(0.0, 0.1), max_running=1).latency
    assert latency is not None
    assert latency.queue.mean == pytest.approx((0.0 + 0.550) / 2)
    assert latency.first_token.mean == pytest.approx((0.640 + 0.550 + 0.640) / 2)


def test_traffic_can_be_compressed() -> None:
    apart, together = timed(trace(0.0, 10.0)).latency, timed(trace(0.0, 10.0), speed=100.0).latency
    assert apart is not None
    assert together is not None
    assert apart.seconds == pytest.approx(10.650)
    assert apart.busy == pytest.approx(1.3 / 10.650)
    assert together.seconds == pytest.approx(1.3)


def test_a_hit_is_not_computed_again() -> None:
    """Both have ten blocks; the second resumes at the end of the ninth, the last before its last token."""
    latency = timed(trace(0.0, 10.0, shared=True)).latency
    assert latency is not None
    assert latency.first_token.mean == pytest.approx((0.640 + 0.064) / 2)


def test_memory_that_runs_out_preempts() -> None:
    found = timed(trace(0.0, 0.0, prompt=320, answer=400), memory=1_500_000)
    latency = found.latency
    assert latency is not None
    assert latency.preemptions > 0
    assert latency.requests == 2


def test_prompts_that_never_fit_are_refused() -> None:
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks(range(100), 6400, 1, 0.0)
    builder.add_blocks([1000], 64, 1, 1.0)
    found = timed(builder.build(), memory=1_000_000)
    assert (found.refused, found.refused_tokens, found.whole.requests) == (1, 6400, 1)
    assert timed(builder.build(), memory=found.needed).refused == 0


@pytest.mark.parametrize("memory", [2_000_000, None])
def test_with_time_between_requests_it_is_the_clock_order(memory: int | None) -> None:
    requests = generate("chat", 14, seed=5, block_tokens=64)
    slow = replay_trace(requests, ReplayConfig(HYBRID, memory, timing=Timing(SLOW, speed=1e-3)))
    order = replay_trace(requests, ReplayConfig(HYBRID, memory))
    check(requests, replay_trace(requests, ReplayConfig(HYBRID, memory, timing=Timing(SLOW)), clairvoyant=True))
    assert abs(slow.whole.token_hit_rate - order.whole.token_hit_rate) < (0.03 if memory else 1e-9)
    assert slow.latency is not None
    assert slow.latency.queue.p99 == pytest.approx(0.0)


def test_requests_that_overlap_cannot_reuse_what_is_not_answered_yet() -> None:
    """The second prompt contains the first's answer, and arrives before that is known."""
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks([1], 64, 128, 0.0)
    builder.add_blocks([1, 2, 3, 4], 256, 1, 0.1)
    found = replay_trace(builder.build(), ReplayConfig(HYBRID, None, outputs="continuation", timing=Timing(SLOW)))
    assert found.whole.lost["still_computing"] > 0
    late = replay_trace(builder.build(), ReplayConfig(HYBRID, None, outputs="continuation", timing=Timing(SLOW, 0.1)))
    assert late.whole.hit_tokens == 192
    assert "still_computing" not in late.whole.lost


@pytest.mark.parametrize("preset", ["vllm", "sglang"])
def test_presets_have_no_clock(preset: str) -> None:
    with pytest.raises(ConfigError, match="no clock"):
        replay_trace(trace(0.0), ReplayConfig(HYBRID, None, preset=preset, timing=Timing(SLOW)))
    marconi = ReplayConfig(HYBRID, None, preset="marconi,alpha=1", timing=Timing(SLOW))
    assert replay_trace(trace(0.0), marconi).latency is not None


def test_what_a_clock_needs() -> None:
    layout = ParallelLayout()
    known, unknown = model_of("kimi-linear", layout), model_of("qwen3-next", layout)
    hardware, clock = Hardware(gpu="h200"), ClockChoice("trace")
    assert timing_of(ClockChoice(), hardware, unknown, layout) is None
    found = timing_of(ClockChoice("trace", efficiency="0.25,0.5"), hardware, known, layout)
    assert found is not None
    assert found.roofline.flops == gpu_of("h200").bf16_flops * 0.25
    assert found.roofline.weight_bytes == 2 * 49.1e9
    with pytest.raises(ConfigError, match="name the GPU"):
        timing_of(clock, Hardware(memory="9GB"), known, layout)
    with pytest.raises(ConfigError, match="--active-parameters"):
        timing_of(clock, hardware, unknown, layout)
    with pytest.raises(ConfigError, match="--weights"):
        timing_of(clock, hardware, with_active(unknown, "3B"), layout)
    given = timing_of(clock, Hardware(gpu="h200", weights="163GB"), with_active(unknown, "3B"), layout)
    assert given is not None
    assert given.roofline.cost.linear == 6e9
    assert given.roofline.active == pytest.approx(3e9 / 81.5e9)
    with pytest.raises(ConfigError, match="--gpus 3"):
        timing_of(clock, Hardware(memory="9GB", gpu="h200", gpus=3), known, layout)
    with pytest.raises(ConfigError, match="need --clock trace"):
        timing_of(ClockChoice(speed=2.0), hardware, known, layout)
    with pytest.raises(ConfigError, match="clock 'wall'"):
        timing_of(ClockChoice("wall"), hardware, known, layout)
    with pytest.raises(ConfigError, match="two shares"):
        timing_of(ClockChoice("trace", efficiency="half"), hardware, known, layout)
    with pytest.raises(ConfigError, match="active"):
        with_active(known, "many")
    for wrong in ({"speed": 0.0}, {"max_running": 0}, {"step_tokens": 10}):
        with pytest.raises(ConfigError, match=r"speed|max_running"):
            Timing(SLOW, **wrong)  # type: ignore[arg-type]


def test_active_parameters_keep_what_is_known_of_attention() -> None:
    known, unknown = model_of("kimi-linear", ParallelLayout()), model_of("qwen3-next", ParallelLayout())
    assert with_active(known, "4B").cost == ComputeCost(8e9, known.cost.quadratic)
    assert with_active(unknown, "4B").cost == ComputeCost(8e9, 8e4), "level with the rest at 100,000 tokens"
    assert with_active(known, None) is known


def test_memory_beside_a_gpu() -> None:
    model = model_of("kimi-linear", ParallelLayout())
    both = Hardware(memory="9GB", gpu="h200")
    assert memory_of(both, model, ParallelLayout()) == 9 * 10**9
    both.check()
