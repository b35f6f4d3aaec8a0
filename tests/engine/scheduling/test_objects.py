"""Disks and stores below a device: what was computed once is read back, by another server too, and nothing wrong is."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.engine.bench import WORLDS, Bench
from tests.engine.fakes import VOCAB

from headway.cache import Reason
from headway.engine import EngineConfig
from headway.engine.executor import BlockRange
from headway.tiers import TierConfig
from headway.tiers.faults import Fault, FaultyStore
from headway.tiers.memory import MemoryStore

CONFIG = EngineConfig(max_batched_tokens=16, max_running=4)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def bench_of(world: str, store: MemoryStore, blocks: int = 120, **options: object) -> Bench:
    return Bench(WORLDS[world], blocks=blocks, config=CONFIG, stores=[(TierConfig("disk"), store)], **options)


def served(bench: Bench, *seeds: int) -> list[object]:
    """One after another, everything of theirs written."""
    requests = []
    for seed in seeds:
        requests.append(bench.add(prompt(40, seed), 4))
        bench.run()
    bench.lower.work()
    assert bench.lower.objects.flush(10)
    return requests


def written(store: MemoryStore) -> list[str]:
    """What is there besides the description of the layout."""
    return [name for name in store.objects if not name.endswith("/about")]


def check_nothing_is_staged(bench: Bench) -> None:
    """Memory for loads is given back by another thread, soon."""
    ended, left = threading.Event(), bench.lower.objects.stats
    for _ in range(1000):
        if not left().staging_bytes:
            return
        ended.wait(0.01)
    raise AssertionError(f"{left().staging_bytes} bytes are staged for nobody")


@pytest.mark.parametrize("world", WORLDS)
def test_a_server_that_starts_finds_what_another_wrote(world: str):
    store = MemoryStore()
    first = bench_of(world, store)
    served(first, 0, 1)
    second = bench_of(world, store)
    again = second.add(prompt(40, 1), 4)
    second.run()
    second.check_right(again)
    assert again.cached_tokens == 39
    assert again.loaded == {"disk": 39}
    second.check_nothing_leaks()
    check_nothing_is_staged(second)


@pytest.mark.parametrize("world", WORLDS)
def test_an_answer_is_continued_from_a_store(world: str):
    store = MemoryStore()
    first = bench_of(world, store)
    [before] = served(first, 0)
    second = bench_of(world, store)
    talk = [*prompt(40, 0), *before.answer.tolist(), *prompt(9, 5)]
    turn = second.add(talk, 4)
    second.run()
    second.check_right(turn)
    assert turn.cached_tokens == 40 + len(before.answer) - 1


@pytest.mark.parametrize("world", WORLDS)
def test_what_the_device_has_is_not_read_again(world: str):
    """The hit lies inside a block and inside a stretch, and other requests share the block."""
    store = MemoryStore()
    first = bench_of(world, store)
    served(first, 0)
    second = bench_of(world, store)
    short = second.add(prompt(40, 0)[:21], 2, breakpoints=())
    second.run()
    whole = second.add(prompt(40, 0), 4)
    second.run()
    second.check_right(short, whole)
    assert whole.cached_tokens == 39
    again = second.add(prompt(40, 0)[:21], 4)
    second.run()
    second.check_right(again)
    second.check_nothing_leaks()


@pytest.mark.parametrize("write", ["selective", "back"])
def test_what_is_written_when(write: str):
    store = MemoryStore()
    bench = bench_of("hybrid", store, blocks=34, write=write)
    served(bench, 0)
    assert not written(store)
    if write == "selective":
        served(bench, 0)
    else:
        served(bench, *range(1, 8))
    assert written(store)
    second = bench_of("hybrid", store)
    request = second.add(prompt(40, 0), 4)
    second.run()
    second.check_right(request)
    assert request.cached_tokens == 39


def test_a_server_that_stops_writes_what_it_has():
    store = MemoryStore()
    bench = bench_of("hybrid", store, write="back")
    served(bench, 0, 1)
    bench.lower.close(10)
    second = bench_of("hybrid", store)
    request = second.add(prompt(40, 1), 4)
    second.run()
    assert request.cached_tokens == 39


def test_a_server_that_stops_waits_until_what_is_written_has_room():
    store = MemoryStore()
    bench = bench_of("hybrid", store, blocks=400, write="back")
    bench.lower.objects._backlog.capacity = 1500
    served(bench, *range(8))
    bench.lower.close(30)
    second = bench_of("hybrid", store, blocks=400)
    again = served(second, *range(8))
    assert [request.cached_tokens for request in again] == [39] * 8


@pytest.mark.parametrize("world", WORLDS)
def test_t24_an_object_that_is_gone_is_a_miss_with_its_reason(world: str):
    store = MemoryStore()
    served(bench_of(world, store), 0)
    second = bench_of(world, store)
    objects = [name for name in store.objects if not name.endswith((".s", ".m", ".i", "/about"))]
    for name in objects:
        del store.objects[name]
    request = second.add(prompt(40, 0), 4)
    second.run()
    second.check_right(request)
    assert request.cached_tokens == 0
    [loss] = [loss for loss in request.explanation.losses if loss.reason is Reason.TIER_MISSED]
    assert (loss.start, loss.stop) == (0, 39)
    assert "in tier disk, group " in str(loss.detail)
    second.check_nothing_leaks()


def test_altered_bytes_are_not_used_and_the_group_is_named():
    store = MemoryStore()
    served(bench_of("all", store), 0)
    second = bench_of("all", store)
    for name, data in store.objects.items():
        if not name.endswith((".s", ".m", ".i", "/about")):
            store.objects[name] = bytes([data[0] ^ 1]) + data[1:]
    request = second.add(prompt(40, 0), 4)
    second.run()
    second.check_right(request)
    assert request.cached_tokens == 0
    [loss] = [loss for loss in request.explanation.losses if loss.reason is Reason.TIER_FAILED]
    assert str(loss.detail).endswith("what came is not what was written")


def test_a_write_to_blocks_that_fails_is_a_miss():
    store = MemoryStore()
    served(bench_of("all", store), 0)
    second = bench_of("all", store)
    failures = iter([OSError("no")])
    second.device.fail_write = lambda: next(failures, None)
    request = second.add(prompt(40, 0), 4)
    second.run()
    second.check_right(request)
    assert request.cached_tokens == 0
    assert request.explanation.reasons >= {Reason.TIER_FAILED}
    second.check_nothing_leaks()


def test_t02_t03_a_request_that_is_aborted_while_it_waits_leaves_nothing():
    store = MemoryStore()
    served(bench_of("hybrid", store), 0)
    second = bench_of("hybrid", store)
    request = second.add(prompt(40, 0), 4)
    assert second.scheduler.schedule() is None
    assert second.scheduler.loading == 1
    second.scheduler.abort(request)
    assert second.scheduler.loading == 0
    assert second.scheduler.waiting == 0
    later = second.add(prompt(40, 0), 4)
    second.run()
    second.check_right(later)
    second.check_nothing_leaks()
    check_nothing_is_staged(second)


def test_t10_t12_two_loads_on_a_pool_for_one_both_end():
    store = MemoryStore()
    served(bench_of("hybrid", store), 0, 1, 2, 3)
    second = bench_of("hybrid", store, blocks=18)
    requests = [second.add(prompt(40, seed), 4) for seed in range(4)]
    second.run()
    second.check_right(*requests)
    assert [request.cached_tokens for request in requests] == [39] * 4


def test_t01_a_held_source_outlives_eviction_and_reset():
    bench = bench_of("hybrid", MemoryStore())
    request = bench.add(prompt(40, 0), 4)
    bench.run()
    found = bench.cache.lookup(request.cache_prompt(0))
    held = bench.cache.hold_hit(found)
    bench.cache.reset()
    free = set(range(bench.blocks)) - set(bench.cache.held_blocks.tolist())
    assert all(free.isdisjoint(part.ids.tolist()) for part in held.parts)
    bench.cache.release_hit(held)
    assert bench.cache.free_blocks == bench.blocks


@pytest.mark.parametrize("world", ["full", "hybrid", "all"])
def test_t06_who_gives_way_gives_its_blocks_at_once_whatever_is_written_of_them(world: str):
    """A fence around blocks that are read must not make others give way in vain."""
    preemptions = []
    for tiers in ({}, {"host_blocks": 400, "stores": [(TierConfig("disk"), MemoryStore())]}):
        blocks = {"full": 30, "hybrid": 36, "all": 60}[world]
        bench = Bench(WORLDS[world], blocks=blocks, config=CONFIG, **tiers)
        requests = [bench.add(prompt(20, seed), 40, ignore_eos=True) for seed in range(3)]
        bench.run()
        bench.check_right(*requests)
        preemptions.append(bench.scheduler.counters.preemptions)
    assert 0 < preemptions[1] <= preemptions[0]


@pytest.mark.parametrize("world", WORLDS)
def test_t07_nothing_is_read_for_a_store_that_a_step_has_yet_to_write(world: str):
    """Tiers are at work while every step is planned and has not run."""
    store = MemoryStore()
    first = bench_of(world, store, host_blocks=100)
    seen: list[int] = []

    def at_work(work: object) -> None:
        first.lower.work()
        assert first.lower.objects.flush(10)
        seen.append(len(written(store)))

    first.device.before_step = at_work
    served(first, 0, 1)
    assert seen[0] == 0 < seen[-1]
    second = bench_of(world, store)
    again = served(second, 0, 1)
    second.check_right(*again)
    assert [request.cached_tokens for request in again] == [39, 39]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("fails", [False, True])
def test_t09_one_tier_is_not_given_what_another_has_not_loaded_yet(world: str, fails: bool):
    """The device is being filled from the disk while host memory and a store take what is there."""
    disk, store = MemoryStore(), MemoryStore()
    served(bench_of(world, disk), 0)
    stores = [(TierConfig("disk"), disk), (TierConfig("store"), store)]
    second = Bench(WORLDS[world], blocks=60, config=CONFIG, stores=stores, host_blocks=100)
    write = second.device.write_objects

    def half_done(ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        write(ranges[:1], objects[:1])
        second.lower.work()
        assert second.lower.objects.flush(10)
        assert not written(store)
        if fails:
            raise OSError("no")
        write(ranges, objects)

    second.device.write_objects = half_done  # type: ignore[method-assign]
    second.check_right(*served(second, 0))
    for name in list(disk.objects):
        del disk.objects[name]
    third = bench_of(world, store)
    again = served(third, 0)
    third.check_right(*again)
    assert again[0].cached_tokens == 39


def test_t14_who_waits_for_a_load_takes_no_place_of_those_that_run_and_gets_none_beyond():
    store = MemoryStore()
    served(bench_of("hybrid", store), 0, 1)
    config = replace(CONFIG, max_running=2)
    second = Bench(WORLDS["hybrid"], blocks=120, config=config, stores=[(TierConfig("disk"), store)])
    requests = [second.add(prompt(40, seed), 4) for seed in range(4)]
    scheduled = second.scheduler.schedule()
    assert scheduled is not None
    assert (second.scheduler.loading, second.scheduler.waiting) == (2, 2)
    assert second.scheduler.running == requests[2:]
    second.scheduler.complete(scheduled, second.device.run(scheduled.work))
    while second.step():
        assert len(second.scheduler.running) <= 2
    second.check_right(*requests)
    assert [request.cached_tokens for request in requests] == [39, 39, 0, 0]


def test_nothing_is_stored_of_requests_that_ask_for_it():
    store = MemoryStore()
    bench = bench_of("hybrid", store)
    bench.add(prompt(40, 0), 4, no_store=True)
    bench.run()
    bench.lower.close(10)
    assert not written(store)


def test_t18_t19_another_salt_is_another_namespace():
    store = MemoryStore()
    first = bench_of("hybrid", store)
    first.add(prompt(40, 0), 4, salt="alice")
    first.run()
    first.lower.close(10)
    second = bench_of("hybrid", store)
    other, same = second.add(prompt(40, 0), 4, salt="bob"), second.add(prompt(40, 0), 4, salt="alice")
    second.run()
    assert (other.cached_tokens, same.cached_tokens) == (0, 39)


def test_t18_t19_an_adapter_is_in_every_name_and_never_like_a_salt():
    parts = [("", "", ""), ("a", "", ""), ("", "a", ""), ("", "", "a"), ("a", "a", ""), ("", "aa", ""), ("", "a", "a")]
    told = []
    for _ in range(2):
        bench = bench_of("hybrid", MemoryStore())
        told.append([bench.lower._writer.name(bench.cache.namespace(*each)) for each in parts])
    assert len(set(told[0])) == len(parts)
    assert told[0] == told[1], "each server has the same"


def test_a_reset_reaches_the_tiers():
    store = MemoryStore()
    bench = bench_of("hybrid", store)
    served(bench, 0)
    bench.cache.reset()
    bench.lower.reset().result(10)
    second = bench_of("hybrid", store)
    request = second.add(prompt(40, 0), 4)
    second.run()
    assert request.cached_tokens == 0


@pytest.mark.parametrize("world", WORLDS)
def test_conversations_over_all_tiers_are_right_whatever_fails(world: str):
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rnd = random.Random(seed)
    store = MemoryStore()
    blocks = {"full": 24, "hybrid": 34, "window": 36, "chunk": 40, "all": 42, "state": 6}[world]
    loaded: set[str] = set()
    talks = [prompt(rnd.randrange(8, 20), rnd.randrange(100)) for _ in range(5)]
    for server in range(3):
        bench = bench_of(world, store, blocks=blocks, host_blocks=blocks, write=rnd.choice(["through", "back"]))
        bench.device.fail_move = lambda out, back: OSError("flaky") if rnd.random() < 0.05 else None
        bench.device.fail_write = lambda: OSError("flaky") if rnd.random() < 0.05 else None
        running: dict[int, object] = {}
        for turn in range(50):
            which = rnd.randrange(len(talks))
            if which not in running:
                if len(talks[which]) > 44:
                    talks[which] = prompt(rnd.randrange(8, 20), rnd.randrange(100))
                talks[which] = [*talks[which], *prompt(rnd.randrange(1, 6), 1000 * server + turn + 1000)]
                running[which] = bench.add(talks[which], rnd.randrange(1, 5))
            for _ in range(rnd.randrange(3)):
                bench.step()
            for name in [name for name in store.objects if rnd.random() < 0.005]:
                store.objects.pop(name, None)
            for number, request in list(running.items()):
                if request.finish_reason is None and rnd.random() < 0.05:
                    bench.scheduler.abort(request)
                if request.finish_reason is not None:
                    if request.finish_reason != "abort":
                        bench.check_right(request)
                        talks[number] = [*talks[number], *request.answer.tolist()]
                    loaded |= set(request.loaded)
                    del running[number]
        bench.run()
        bench.lower.close(10)
        bench.lower.host.host.check()
        bench.check_nothing_leaks()
    assert loaded == {"host", "disk"}, "the test has no point"


def test_what_was_fetched_before_a_reset_is_not_used_after_it():
    store = MemoryStore()
    served(bench_of("hybrid", store), 0)
    second = bench_of("hybrid", store)
    request = second.add(prompt(40, 0), 4)
    assert second.scheduler.schedule() is None
    second.inbox.get(timeout=10)()
    assert second.scheduler.loading == 0
    assert request.fetched.position == 39
    second.cache.reset()
    second.lower.reset().result(10)
    second.run()
    second.check_right(request)
    assert request.cached_tokens == 0
    check_nothing_is_staged(second)


def test_what_the_device_gave_up_during_a_load_is_fetched_too():
    store = MemoryStore()
    served(bench_of("full", store), 0)
    second = bench_of("full", store)
    second.add(prompt(40, 0)[:21], 2)
    second.run()
    request = second.add(prompt(40, 0), 4)
    assert second.scheduler.schedule() is None
    assert second.scheduler.loading == 1
    second.cache.reset()
    second.run()
    second.check_right(request)
    assert request.loaded == {"disk": 39}
    second.check_nothing_leaks()
    check_nothing_is_staged(second)


def test_log_probabilities_of_a_prompt_are_not_hidden_by_what_is_below():
    store = MemoryStore()
    served(bench_of("hybrid", store), 0)
    second = bench_of("hybrid", store)
    request = second.add(prompt(40, 0), 4, prompt_logprobs=1)
    second.run()
    assert request.cached_tokens == 0


def test_a_load_that_is_not_made_is_told_after_a_reset_as_well():
    store = MemoryStore()
    second = bench_of("hybrid", store)
    second.lower.reset().result(10)
    served(second, 0)
    second.cache.reset()
    second.lower.rates.computed(second.cache.config.cost.between(0, 39), 1e-9)
    request = second.add(prompt(40, 0), 4)
    second.run()
    assert request.cached_tokens == 0
    assert Reason.COMPUTED_ANEW in request.explanation.reasons


def test_a_tier_that_was_slow_is_tried_again():
    """It is slower than computing by what is known of it, and nothing else would ever measure it."""
    store = MemoryStore()
    served(bench_of("hybrid", store), *range(40))
    second = bench_of("hybrid", store, blocks=600)
    second.lower.rates.computed(second.cache.config.cost.between(0, 39), 1e-9)
    requests = [second.add(prompt(40, seed), 1) for seed in range(40)]
    second.run()
    second.check_right(*requests)
    assert [request.cached_tokens for request in requests].count(39) == 4


def test_nobody_waits_for_a_store_that_answers_more_slowly_than_this_computes():
    shared = lambda store: Bench(  # noqa: E731
        WORLDS["hybrid"], blocks=120, config=CONFIG, stores=[(TierConfig("store", shared=True), store)]
    )
    store = MemoryStore()
    served(shared(store), 0, 1)
    second = shared(FaultyStore(store, [Fault("delay", "read_small", seconds=0.005)]))
    first = second.add(prompt(40, 0), 4)
    second.run()
    assert first.cached_tokens == 39
    second.lower.rates.computed(second.cache.config.cost.between(0, 39), 1e-3)
    other = second.add(prompt(40, 1), 4)
    assert second.scheduler.schedule() is not None
    assert second.scheduler.loading == 0
    assert second.scheduler.running == [other]


def test_a_store_that_is_slower_than_computing_is_waited_for_a_few_times_alone():
    store = MemoryStore()
    served(bench_of("hybrid", store), *range(8))
    slow = FaultyStore(store, [Fault("delay", "read", seconds=0.2)])
    second = Bench(WORLDS["hybrid"], blocks=400, config=CONFIG, stores=[(TierConfig("disk"), slow)])
    second.lower.rates.computed(second.cache.config.cost.between(0, 39), 0.02)
    reasons = []
    for seed in range(8):
        request = second.add(prompt(40, seed), 1)
        second.run()
        second.check_right(request)
        reasons.append(request.explanation.reasons & {Reason.TIER_FAILED, Reason.COMPUTED_ANEW})
    assert reasons[:4] == [{Reason.TIER_FAILED}] * 3 + [{Reason.COMPUTED_ANEW}]
    assert reasons.count({Reason.COMPUTED_ANEW}) == 4, "one of five is tried"
