"""Marconi's rules on our cache."""

import pytest

from headway.cache import Candidate, FullAttention, Recurrent
from headway.replay import MarconiPreset, ReplayConfig, generate, replay_trace
from headway.replay.imitate.marconi import ALPHAS, MarconiUtility

HYBRID = [FullAttention("attention", 1000), Recurrent("state", 200_000)]


def candidate(used: int, saved: float, blocks: int = 1) -> Candidate:
    return Candidate("junction", 100, 0, 0.01, saved, blocks, used, 0.0)


def test_without_alpha_it_is_lru() -> None:
    trace = generate("mixed", 150, seed=3)
    ours = replay_trace(trace, ReplayConfig(HYBRID, 8_000_000, preset=MarconiPreset(alpha=0.0)))
    lru = ReplayConfig(HYBRID, 8_000_000, placement=("junction", "answer_end"), eviction="lru")
    assert ours.whole == replay_trace(trace, lru).whole
    assert set(ours.kinds) <= {"junction", "answer_end", "abort"}, "and where a request found no memory to go on"


def test_utility_weighs_efficiency_against_recency() -> None:
    """Ten ticks of recency span, alpha 1: the most efficient state is worth ten ticks, one of half of it five."""
    utility = MarconiUtility(1.0)
    utility.priority(candidate(used=10, saved=8.0))
    utility.evicted(candidate(used=0, saved=1.0))
    assert utility.priority(candidate(used=4, saved=8.0)) == pytest.approx(14.0)
    assert utility.priority(candidate(used=4, saved=8.0, blocks=2)) == pytest.approx(9.0)


def test_alpha_is_tuned_on_the_first_part() -> None:
    trace = generate("mixed", 150, seed=3)
    found = replay_trace(trace, ReplayConfig(HYBRID, 8_000_000, preset="marconi,bootstrap=1"))
    by_hand = [
        replay_trace(trace, ReplayConfig(HYBRID, 8_000_000, preset=MarconiPreset(alpha))).whole.hit_tokens
        for alpha in ALPHAS
    ]
    assert found.whole.hit_tokens == max(by_hand)
    assert f"alpha={ALPHAS[by_hand.index(max(by_hand))]}" in found.preset
