"""Knowing the future: reaches the ceiling with enough memory, and picks what a person would pick."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache import FullAttention, LayerSpec, Recurrent
from headway.replay import ReplayConfig, Trace, TraceBuilder, clairvoyant_hits, endless_matches, generate

GROUPS: list[LayerSpec] = [FullAttention("attention", 1), Recurrent("state", 100)]


def hits(trace: Trace, memory: int | None, groups: Sequence[LayerSpec] = GROUPS) -> list[int]:
    return clairvoyant_hits(trace, ReplayConfig(groups, memory), endless_matches(trace)).tolist()


def trace_of(prompts: Sequence[Sequence[int]]) -> Trace:
    builder = TraceBuilder("made", "test", 10)
    for time, prompt in enumerate(prompts):
        builder.add_blocks(prompt, len(prompt) * 10 + 5, 0, time)
    return builder.build()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30),
    st.sampled_from([150, 300, 500, 1000, 5000]),
    st.booleans(),
)
def test_it_stays_between_nothing_and_the_ceiling(prompts: list[list[int]], memory: int, states: bool) -> None:
    trace = trace_of(prompts)
    groups = GROUPS if states else GROUPS[:1]
    endless = endless_matches(trace).tolist()
    limited = hits(trace, memory, groups)
    assert all(0 <= hit <= most for hit, most in zip(limited, endless, strict=True))
    assert limited == hits(trace, memory, groups)
    assert hits(trace, None, groups) == endless
    assert hits(trace, 10**6, groups) == endless


def test_it_takes_only_what_comes_back() -> None:
    never = [[100 + i, 200 + i] for i in range(50)]
    trace = trace_of([[1, 2], *never, [1, 2, 3]])
    assert hits(trace, 270)[-1] == 20  # room for the one checkpoint and for the request that runs
    assert hits(trace, 240)[-1] == 0  # not enough for both


def test_it_keeps_what_comes_back_sooner() -> None:
    first, second = [1, 2], [5, 6]
    soon_then_late = trace_of([first, second, [9], [*second, 7], [8], [*first, 3]])
    assert hits(soon_then_late, 270) == [0, 0, 0, 20, 0, 0]
    assert hits(soon_then_late, 420) == [0, 0, 0, 20, 0, 20]


def test_a_shallower_checkpoint_serves_where_the_wanted_one_went() -> None:
    trace = trace_of([[1, 2, 3, 4], [1, 9], [1, 2, 3, 4, 5], [1, 8]])
    endless = endless_matches(trace).tolist()
    assert endless == [0, 10, 40, 10]
    assert hits(trace, 290)[2] in (10, 40)


@pytest.mark.parametrize("workload", ["mixed", "agents", "search"])
def test_workloads(workload: str) -> None:
    trace = generate(workload, 200)
    groups: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 5_000_000)]
    endless = endless_matches(trace)
    rates = [sum(hits(trace, memory, groups)) / endless.sum() for memory in (50_000_000, 500_000_000, 10**11)]
    assert rates == sorted(rates)
    assert rates[-1] == 1.0
