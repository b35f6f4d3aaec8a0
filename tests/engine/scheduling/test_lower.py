"""What lies in host memory below a device: the answers of a scheduler stay right, and what was evicted comes back."""

import random

import numpy as np
import pytest
from tests.engine.bench import WORLDS, Bench
from tests.engine.fakes import VOCAB

from headway.cache import Reason
from headway.engine import EngineConfig
from headway.engine.errors import RanksLostError

DEVICE = {"full": 24, "hybrid": 34, "window": 36, "chunk": 40, "all": 42, "state": 6}
"""Blocks that hold about two of the prompts below."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def bench_of(world: str, host: int = 400) -> Bench:
    config = EngineConfig(max_batched_tokens=16, max_running=4)
    return Bench(WORLDS[world], blocks=DEVICE[world], config=config, host_blocks=host)


@pytest.mark.parametrize("world", WORLDS)
def test_t23_what_had_to_go_is_read_back(world: str):
    bench = bench_of(world)
    first = []
    for seed in range(8):
        first.append(bench.add(prompt(40, seed), 4))
        bench.run()
    again = [bench.add(prompt(40, seed), 4) for seed in range(8)]
    bench.run()
    bench.check_right(*first, *again)
    assert [request.cached_tokens for request in again] == [39] * 8
    assert sum(request.loaded.get("host", 0) > 0 for request in again) >= 5, "the device holds two or three of them"
    assert bench.cache.waterfall.loaded == sum(request.loaded.get("host", 0) for request in again)
    bench.check_nothing_leaks()


def test_a_request_that_reads_back_says_so_and_lost_nothing():
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    request = bench.add(prompt(40, 0), 1)
    bench.run()
    told = request.explanation
    assert (told.hit_tokens, told.loaded_tokens, told.reasons) == (0, 39, {Reason.LAST_TOKEN})
    assert str(told).startswith("0 of 40 tokens reused, 39 read back from lower tiers")
    assert request.resumed_from == "prompt_end"


@pytest.mark.parametrize("world", WORLDS)
def test_a_copy_that_fails_on_the_way_back_is_a_miss_with_its_reason(world: str):
    bench = bench_of(world)
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    failures = iter([OSError("no such memory")])
    bench.device.fail_move = lambda out, back: next(failures, None) if back else None
    request = bench.add(prompt(40, 0), 4)
    bench.run()
    bench.check_right(request)
    assert request.cached_tokens == 0
    losses = {loss.reason: loss for loss in request.explanation.losses}
    assert losses[Reason.TIER_FAILED].stop == 39
    assert str(losses[Reason.TIER_FAILED].detail) == "the checkpoint at 39 in tier host: the copy failed (OSError)"
    later = bench.add(prompt(40, 0), 4)
    bench.run()
    bench.check_right(later)
    assert later.cached_tokens == 39
    bench.check_nothing_leaks()


def test_a_copy_that_fails_on_the_way_out_is_kept_from_nobody():
    bench = bench_of("hybrid")
    bench.device.fail_move = lambda out, back: OSError("no such memory")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    assert bench.lower.host.counters.failed > 0
    assert bench.lower.host.host.stats().checkpoints == 0
    request = bench.add(prompt(40, 0), 4)
    bench.run()
    bench.check_right(request)
    assert request.cached_tokens == 0
    bench.check_nothing_leaks()


def test_ranks_that_are_lost_during_a_copy_take_the_request_with_them_and_no_block():
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    failures = iter([RanksLostError("rank 1 is gone")])
    bench.device.fail_move = lambda out, back: next(failures, None) if back else None
    request = bench.add(prompt(40, 0), 4)
    with pytest.raises(RanksLostError):
        bench.step()
    bench.cache.reset()
    bench.lower.ranks_lost()
    bench.run()
    bench.check_right(request)
    assert request.cached_tokens == 0
    bench.check_nothing_leaks()


def test_a_load_that_costs_more_than_it_saves_is_not_made():
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    cost = bench.cache.config.cost.between(0, 39)
    bench.lower.rates.computed(cost, 0.001)
    bench.lower.rates.moves.clear()
    for _ in range(3):
        bench.lower.rates.moved("host", 1, 1.0)
    request = bench.add(prompt(40, 0), 4)
    bench.run()
    bench.check_right(request)
    assert request.cached_tokens == 0
    assert request.explanation.reasons == {Reason.COMPUTED_ANEW, Reason.LAST_TOKEN}


def test_slow_copies_do_not_switch_the_host_off_for_ever():
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    bench.lower.rates.computed(bench.cache.config.cost.between(0, 39), 0.1)
    bench.lower.rates.moves.clear()
    for _ in range(3):
        bench.lower.rates.moved("host", 1, 1.0)
    first = bench.add(prompt(40, 0), 1)
    bench.run()
    assert not first.loaded
    for seed in range(8, 58):
        bench.add(prompt(40, seed), 1)
    bench.run()
    then = [bench.add(prompt(40, seed), 1) for seed in range(8, 58, 5)]
    bench.run()
    assert any(request.loaded for request in then), "some of them are not on the device"


def test_a_host_that_was_slow_is_tried_again_until_it_is_known_to_be_quick():
    """Nothing is copied out meanwhile that would tell."""
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    bench.lower.host.copy = bench.device.move_blocks  # not measured
    bench.lower.rates.computed(bench.cache.config.cost.between(0, 39), 0.5)
    bench.lower.rates.moves.clear()
    for _ in range(3):
        bench.lower.rates.moved("host", 1, 1.0)
    loaded = []
    for turn in range(32):
        request = bench.add(prompt(40, turn % 8), 1)
        bench.run()
        bench.check_right(request)
        if request.loaded or Reason.COMPUTED_ANEW in request.explanation.reasons:
            loaded.append(bool(request.loaded))
    assert [number for number, made in enumerate(loaded[:14], 1) if made] == [2, 6, 14]
    assert all(loaded[14:])
    assert len(loaded) > 18


def test_log_probabilities_of_a_prompt_are_not_hidden_by_the_host():
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    request = bench.add(prompt(40, 0), 1, prompt_logprobs=1)
    bench.run()
    assert request.cached_tokens == 0


def test_a_reset_reaches_the_host():
    bench = bench_of("hybrid")
    for seed in range(8):
        bench.add(prompt(40, seed), 1)
    bench.run()
    bench.cache.reset()
    bench.lower.reset()
    request = bench.add(prompt(40, 0), 1)
    bench.run()
    assert request.cached_tokens == 0


@pytest.mark.parametrize("world", WORLDS)
def test_conversations_on_a_small_device_are_right_whatever_is_moved(world: str):
    """Several run at once, some are aborted, copies fail now and then, and the host is too small as well."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rnd = random.Random(seed)
    bench = bench_of(world, host=3 * DEVICE[world])
    bench.device.fail_move = lambda out, back: OSError("flaky") if rnd.random() < 0.1 else None
    talks = [prompt(rnd.randrange(8, 20), rnd.randrange(100)) for _ in range(5)]
    running: dict[int, object] = {}
    loaded = 0
    for turn in range(120):
        which = rnd.randrange(len(talks))
        if which not in running:
            if len(talks[which]) > 44:
                talks[which] = prompt(rnd.randrange(8, 20), rnd.randrange(100))
            talks[which] = [*talks[which], *prompt(rnd.randrange(1, 6), turn + 1000)]
            running[which] = bench.add(talks[which], rnd.randrange(1, 5))
        for _ in range(rnd.randrange(3)):
            bench.step()
        for number, request in list(running.items()):
            if request.finish_reason is None and rnd.random() < 0.05:
                bench.scheduler.abort(request)
            if request.finish_reason is not None:
                if request.finish_reason != "abort":
                    bench.check_right(request)
                    talks[number] = [*talks[number], *request.answer.tolist()]
                loaded += bool(request.loaded)
                del running[number]
    bench.run()
    bench.lower.host.host.check()
    bench.check_nothing_leaks()
    assert loaded > 3, "nothing was read back: the test has no point"
