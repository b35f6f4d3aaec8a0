"""The capacity curve against runs at its sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cache import EVICTIONS, FullAttention, Recurrent
from headway.replay import ReplayConfig, generate, replay_trace
from headway.replay.run.curve import capacity_curve, sizes_around

STATES = [FullAttention("attention", 8_064), Recurrent("state", 43_417_600)]


@pytest.mark.parametrize("groups", [STATES, STATES[:1]])
def test_the_curve_of_least_recently_used_is_what_runs_find(groups: list[FullAttention | Recurrent]) -> None:
    trace = generate("chat", 600, seed=5)
    config = ReplayConfig(groups, None)
    sizes = [2 * 10**9, 8 * 10**9, 32 * 10**9] if len(groups) > 1 else [10**9, 3 * 10**9]
    points = capacity_curve(trace, config, sizes, adaptive=False)
    for size, point in zip(sizes, points, strict=True):
        whole = replay_trace(trace, replace(config, memory=size, eviction="lru")).whole
        assert point.memory == size
        assert point.tokens is None
        assert point.lru_tokens == pytest.approx(whole.token_hit_rate, abs=0.02)
        assert point.lru_compute == pytest.approx(whole.compute_saved, abs=0.02)
    assert points[0].lru_tokens < points[-1].lru_tokens


def test_the_curve_of_the_default_reuses_at_least_as_much_at_every_size() -> None:
    trace = generate("chat", 400, seed=6)
    for point in capacity_curve(trace, ReplayConfig(STATES, None), sizes_around(2 * 10**9)[2:9:3]):
        assert point.tokens is not None
        assert point.tokens > point.lru_tokens - 0.02


def test_no_run_is_above_the_estimate_of_knowing_the_future() -> None:
    trace = generate("mixed", 250, seed=9)
    for memory in (600_000_000, 2 * 10**9):
        for name in EVICTIONS:
            result = replay_trace(trace, ReplayConfig(STATES, memory, eviction=name), clairvoyant=True)
            assert result.clairvoyant is not None
            assert result.clairvoyant.compute_saved >= result.whole.compute_saved, name
