"""Lower tiers of memory in a replay: what is read back, what moves take, and when computing is faster."""

from dataclasses import replace

import pytest
from tests.replay.run.test_order import MODELS, check
from tests.replay.run.test_timed import HYBRID, SLOW, trace

from headway.cache import ComputeCost, FullAttention, Recurrent
from headway.errors import ConfigError
from headway.replay import ReplayConfig, ReplayResult, Timing, Trace, TraceBuilder, generate, replay_trace
from headway.replay.config import Tier

MB = 10**6
HOST, DISK = Tier("host", 100 * MB, 1e9, 1e9), Tier("disk", 100 * MB, 1e6, 1e6)


def visits(*prompts: int, gap: float = 1000.0) -> Trace:
    """Requests of ten blocks each, 640 tokens, by the number of their prompt; answers of one token."""
    builder = TraceBuilder("made", "test", 64)
    for number, prompt in enumerate(prompts):
        builder.add_blocks(range(10 * prompt, 10 * prompt + 10), 640, 1, gap * number)
    return builder.build()


def run(found: Trace, *tiers: Tier, memory: int = 1_500_000, **options: object) -> ReplayResult:
    cost = ComputeCost(1.0, 0.0)
    return replay_trace(found, ReplayConfig(HYBRID, memory, cost=cost, tiers=tiers, **options))  # type: ignore[arg-type]


def test_what_was_evicted_comes_back_from_the_host() -> None:
    """The memory has room for one prompt. The third request reads back nine blocks, and a state."""
    alone, below = run(visits(1, 2, 1)), run(visits(1, 2, 1), HOST)
    assert (alone.whole.hit_tokens, alone.whole.loaded_tokens, alone.tiers) == (0, 0, [])
    assert (below.whole.hit_tokens, below.whole.loaded_tokens) == (639, 639)
    assert below.whole.hit_tokens + sum(below.whole.lost.values()) == below.whole.prompt_tokens
    (host,) = below.tiers
    assert (host.requests, host.tokens, host.declined, host.skipped) == (1, 640, 0, 0)
    assert host.bytes_in >= 640 * 1000 + 200_000
    assert host.seconds_in == pytest.approx(host.bytes_in / 1e9)
    assert host.bytes_out > host.bytes_in
    assert host.prefill_seconds is None
    assert host.saved_seconds is None


def test_a_tier_takes_what_the_one_above_gives_up() -> None:
    """Host memory as small as the device's: what it has no room for is on the disk."""
    small = replace(HOST, memory=1_500_000)
    found = run(visits(1, 2, 3, 1), small, DISK)
    assert [tier.requests for tier in found.tiers] == [0, 1]
    assert found.whole.hit_tokens == 639
    assert run(visits(1, 2, 3, 1), small).whole.hit_tokens == 0


def test_reading_back_is_left_where_computing_is_faster() -> None:
    """A prompt takes 0.64 s to compute. Its 840 kB come in 0.84 s from the disk, and in no time from the host."""
    slow, fast = (run(visits(1, 2, 1), tier, roofline=SLOW) for tier in (DISK, HOST))
    assert (slow.whole.loaded_tokens, slow.whole.lost["computed_anew"]) == (0, 640)
    assert slow.tiers[0].declined == 1
    assert slow.tiers[0].saved_seconds == 0.0
    assert (fast.whole.loaded_tokens, fast.tiers[0].declined) == (639, 0)
    host = fast.tiers[0]
    assert host.prefill_seconds == pytest.approx(0.64)
    assert host.saved_seconds == pytest.approx(0.64 - host.seconds_in - host.seconds_out)


def test_the_faster_of_two_tiers_is_read() -> None:
    """The host has the shorter part in no time; the disk has more, and is slow."""
    found = run(visits(1, 2, 1), HOST, replace(DISK, read=1e12))
    assert [tier.requests for tier in found.tiers] == [1, 0]


def test_a_disk_that_falls_behind_leaves_out_what_comes() -> None:
    """A checkpoint takes 8 s to write, and each request, a second after the last, brings one or two."""
    slow = replace(DISK, write=1e5)
    behind = run(visits(*range(1, 9), gap=1.0), slow)
    assert behind.tiers[0].skipped > 3
    assert run(visits(*range(1, 9), gap=1000.0), slow).tiers[0].skipped == 0
    assert run(visits(*range(1, 9), gap=0.0), slow).tiers[0].skipped == 0, "a trace without times has no speed"


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_with_tiers_below(model: str) -> None:
    found = generate("mixed", 80, seed=3, block_tokens=64)
    tiers = [replace(HOST, memory=20 * MB), DISK]
    result = replay_trace(found, ReplayConfig(MODELS[model], 3 * MB, tiers=tiers), clairvoyant=True)
    check(found, result)
    assert result.whole.loaded_tokens > 0
    assert result.whole.hit_tokens > replay_trace(found, ReplayConfig(MODELS[model], 3 * MB)).whole.hit_tokens


def test_memory_and_host_are_worth_nearly_as_much_as_one_memory() -> None:
    """Prompts are up to a half of the device's memory here, so more of it is held twice than with larger memories."""
    found, groups = generate("mixed", 800, seed=6, block_tokens=64), [FullAttention("a", 100), Recurrent("s", 100_000)]
    tiers = [replace(HOST, memory=24 * MB)]
    one, two, alone = (
        replay_trace(found, ReplayConfig(groups, size * MB, cost=ComputeCost(1.0, 1e-5), tiers=below)).whole
        for size, below in ((32, []), (8, tiers), (8, []))
    )
    assert one.token_hit_rate > alone.token_hit_rate + 0.3
    assert two.token_hit_rate > one.token_hit_rate - 0.03


# ---- with a clock


def timed(found: Trace, *tiers: Tier, **options: object) -> ReplayResult:
    timing = Timing(SLOW, **options)  # type: ignore[arg-type]
    cost = ComputeCost(1.0, 0.0)
    return replay_trace(found, ReplayConfig(HYBRID, 1_500_000, cost=cost, timing=timing, tiers=tiers))


def test_moves_of_the_host_take_the_time_of_steps() -> None:
    """The third request computes its last 64 tokens; before that its bytes come at 10 MB/s, and others go."""
    found = timed(visits(1, 2, 1, gap=10.0), replace(HOST, read=1e7, write=1e7))
    assert found.latency is not None
    (host,) = found.tiers
    assert (host.requests, found.whole.loaded_tokens) == (1, 576)
    assert host.seconds_in == pytest.approx(host.bytes_in / 1e7)
    total = 3 * found.latency.first_token.mean
    assert total == pytest.approx(2 * 0.640 + 0.064 + host.seconds_in + host.seconds_out, rel=0.01)


def test_who_waits_for_a_disk_holds_nobody_up() -> None:
    """The third request waits for 0.4 s or more; the fourth, which comes with it, is computed meanwhile."""
    builder = TraceBuilder("made", "test", 64)
    for prompt, time in ((1, 0.0), (2, 10.0), (1, 20.0), (3, 20.0)):
        length = 10 if prompt < 3 else 2
        builder.add_blocks(range(10 * prompt, 10 * prompt + length), 64 * length, 1, time)
    found = timed(builder.build(), replace(DISK, read=2e6))
    assert found.latency is not None
    (disk,) = found.tiers
    assert disk.requests == 1
    assert disk.seconds_in > 0.35
    total = 4 * found.latency.first_token.mean
    assert total == pytest.approx(2 * 0.640 + disk.seconds_in + 0.064 + 0.128, rel=0.02)


def test_requests_wait_for_a_disk_one_after_another() -> None:
    """Two prompts of 320 tokens, long evicted, come at once. Each loads 4 blocks and a state, and computes the last."""
    builder = TraceBuilder("made", "test", 64)
    for prompt, time in ((1, 0.0), (2, 10.0), (3, 20.0), (4, 30.0), (5, 40.0), (1, 90.0), (2, 90.0)):
        builder.add_blocks(range(10 * prompt, 10 * prompt + 5), 320, 1, time)
    found = timed(builder.build(), replace(DISK, read=2e6))
    assert found.latency is not None
    (disk,) = found.tiers
    assert (disk.requests, found.whole.loaded_tokens) == (2, 2 * 256)
    each = disk.seconds_in / 2
    total = 7 * found.latency.first_token.mean - 5 * 0.320
    assert total == pytest.approx(each + 2 * each + 2 * 0.064, rel=0.05)


def test_what_the_device_has_needs_no_tier() -> None:
    assert timed(trace(0.0, 10.0, shared=True), DISK).tiers[0].requests == 0


# ---- what cannot work


def test_tiers_that_cannot_work_are_refused() -> None:
    for wrong, match in (
        ({"memory": None, "tiers": [HOST]}, "endless"),
        ({"tiers": [DISK, HOST]}, "in that order"),
        ({"tiers": [HOST, HOST]}, "once at most"),
        ({"tiers": [replace(HOST, read=0.0)]}, "host: .* positive"),
        ({"tiers": [replace(HOST, memory=0)]}, "host: .* positive"),
        ({"tiers": [HOST], "preset": "sglang"}, "no lower tiers"),
    ):
        with pytest.raises(ConfigError, match=match):
            ReplayConfig(HYBRID, **{"memory": 1_500_000} | wrong)  # type: ignore[arg-type]
