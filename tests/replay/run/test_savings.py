"""What reuse saves in time agrees with the steps that the roofline prices one by one."""

import numpy as np
import pytest

from headway.cache import ComputeCost
from headway.replay import ReplayConfig, TraceBuilder, generate, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.replay.config import Roofline
from headway.replay.run.savings import AT_ONCE, time_saved
from headway.tell.latency import Percentiles, TimeSaved
from headway.tell.sentences import on_savings

PRICES = Roofline(ComputeCost(1e9, 1e5), 1e15, 3e12, 4e10, 0.1, 5e4, 1e8, [(3e4, 700)], "a toy", "toy")


def test_prefill_is_the_sum_of_its_chunks_and_decoding_that_of_its_steps() -> None:
    builder = TraceBuilder("made", "test", 64)
    for time, tokens in enumerate((64, 20_000, 9_000)):
        builder.add_unknown(tokens, 100 * time, float(time))
    hits = np.array([0, 8_192, 6_400])
    found = time_saved(builder.build(), PRICES, hits)

    def step(start: int, count: int, rows: int = 1) -> float:
        return PRICES.seconds(np.full(rows, start), np.full(rows, count))

    whole = [step(0, 64), step(0, 8192) + step(8192, 8192) + step(16384, 3616), step(0, 8192) + step(8192, 808)]
    rest = [step(0, 64), step(8192, 8192) + step(16384, 3616), step(6400, 2600)]
    assert found.prefill == pytest.approx(sum(whole))
    assert found.saved == pytest.approx(sum(whole) - sum(rest))
    assert found.first_token.p99 == pytest.approx(np.percentile(rest, 99))
    assert found.first_token_before.p50 == pytest.approx(np.percentile(whole, 50))
    decoding = [100 * step(20_049, 1, AT_ONCE) / AT_ONCE, 200 * step(9_099, 1, AT_ONCE) / AT_ONCE]
    assert found.decoding == pytest.approx(sum(decoding), rel=1e-3)


def saved(prefill: float, saved: float, decoding: float) -> TimeSaved:
    times = Percentiles(1.0, 2.0, 3.0, 4.0, 1.5)
    return TimeSaved(prefill, saved, decoding, 16, times, Percentiles(2.0, 4.0, 6.0, 8.0, 3.0), "a toy")


def test_a_high_hit_rate_that_gives_little_throughput_is_told_as_that() -> None:
    """95% of prefill saved, and answers take sixteen times as long as prompts."""
    little = saved(3600.0, 3420.0, 57_600.0)
    assert little.throughput_gain == pytest.approx(0.059, abs=1e-3)
    text = on_savings(little)
    assert "prefill takes 60 min without reuse, of which reuse saves 57 min" in text
    assert "their first token within 1 s instead of 2 s, and 95% within 3 s instead of 6 s" in text
    assert "decoding takes 16.0 h, so throughput rises by 6%: most of the time goes into answers" in text
    much = on_savings(saved(3600.0, 1800.0, 1800.0))
    assert much.endswith("so throughput rises by 50%.")
    assert "most of the time goes into answers" not in much


def test_times_stand_in_a_result_where_the_roofline_is_known() -> None:
    model, trace = model_of("kimi-linear", ReplayConfig((), None).layout), generate("chat", 30, seed=2)
    config = ReplayConfig(model.groups, 10**9, cost=model.cost)
    assert replay_trace(trace, config).times is None
    found = replay_trace(trace, ReplayConfig(model.groups, 10**9, cost=model.cost, roofline=PRICES)).times
    assert found is not None
    assert 0 < found.saved < found.prefill
