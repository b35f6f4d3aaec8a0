"""What is learned of how long moves and answers take, and what is not done because it would not pay."""

import math
from pathlib import Path

import pytest
from tests.tiers.world import SECONDS, World, tier, tokens, until

from headway.tiers import MoveRate, Rates, tiers
from headway.tiers.disk import DiskStore
from headway.tiers.faults import Fault, FaultyStore
from headway.tiers.memory import MemoryStore

MIB = 1 << 20


def test_one_slow_move_is_not_believed_and_some_in_a_row_are() -> None:
    rate = MoveRate()
    for seconds in (9.0, 0.01, 0.01):
        assert rate.seconds(MIB) is None
        rate.measured(MIB, seconds)
    assert rate.seconds(2 * MIB) == pytest.approx(0.02)
    rate.measured(MIB, 9.0)
    assert rate.seconds(MIB) == pytest.approx(0.01)
    for _ in range(3):
        rate.measured(MIB, 9.0)
    assert rate.seconds(MIB) == pytest.approx(9.0)
    for _ in range(3):
        rate.measured(MIB, 0.01)
    assert rate.seconds(MIB) == pytest.approx(0.01), "it recovers as quickly"


def test_small_moves_are_latency_and_large_ones_are_bytes_behind_it() -> None:
    rate = MoveRate()
    for _ in range(3):
        rate.measured(1000, 0.5)
    assert rate.seconds(MIB) == pytest.approx(0.5)
    rate.measured(MIB, 1.5)
    assert rate.seconds(2 * MIB) == pytest.approx(2.5)
    assert rate.error > 0


def test_a_tier_that_does_not_seem_to_pay_is_tried_soon_and_then_ever_more_rarely() -> None:
    rates = Rates()
    rates.computed(1.0, 1.0)
    assert rates.gain("host", MIB, 1.0) == math.inf
    for _ in range(3):
        rates.moved("host", MIB, 2.0)
    assert rates.gain("host", MIB, 1.0) == pytest.approx(-1.0)
    made = [number for number in range(1, 200) if rates.makes("host", -1.0)]
    assert made == [2, 6, 14, 30, 62, 94, 126, 158, 190]
    assert not rates.makes("disk", -1.0), "each tier has its own turn"
    assert rates.makes("host", 1.0)
    assert [rates.makes("host", -1.0) for _ in range(2)] == [False, True]


def test_a_store_whose_answers_take_longer_than_computing_is_not_asked_until_it_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for the few lookups that ask it all the same."""
    monkeypatch.setattr(tiers, "_TRIED", 2)
    data, store = tokens(60), MemoryStore()
    with World((tier("store", shared=True), store)) as t:
        t.put(data, 43)
    slow = FaultyStore(store)
    with World((tier("store", shared=True), slow)) as t:
        until(lambda: slow.struck["none"] > 0)  # the server's introduction
        slow.rules.append(Fault("delay", "read_small", seconds=0.02))
        asks = lambda: t.tiers.search(("model", "", ""), data, 0, 59, lambda: None, SECONDS, 0.01)  # noqa: E731
        stats = lambda: t.tiers.stats().tiers[0]  # noqa: E731
        assert asks()
        until(lambda: stats().answer_seconds > 0.02)
        assert [asks() for _ in range(4)] == [False] * 4
        assert stats().unasked == 4
        assert t.search(data) == [43], "who would compute for long asks"
        slow.rules.clear()
        for _ in range(20):
            before = slow.struck["none"]
            if asks():
                break
            if stats().unasked % 2 == 0:
                until(lambda before=before: slow.struck["none"] >= before + 2)
        assert stats().answer_seconds < 0.01
        assert stats().unasked < 16


def test_a_store_that_never_has_anything_is_asked_for_what_takes_long_to_compute_alone() -> None:
    with World(
        (tier("store", shared=True), FaultyStore(MemoryStore(), [Fault("delay", "read_small", seconds=0.001)]))
    ) as t:
        ask = lambda computing: t.tiers.search(  # noqa: E731
            ("model", "", ""), tokens(60), 0, 59, lambda: None, SECONDS, computing
        )
        for number in range(1, 21):
            assert ask(math.inf)
            until(lambda number=number: t.tiers._tiers[0]._answers.count == number)
        assert not ask(0.05)
        assert ask(100.0)


def test_a_load_that_gives_up_gives_back_the_memory_of_all_reads_that_have_not_begun() -> None:
    data, store = tokens(60), FaultyStore(MemoryStore())
    with World((tier("disk", threads=1), store)) as t:
        t.put(data, 43)
        place = t.deepest(data)
        store.rules.append(Fault("stall", "read", times=1))
        loaded = t.start(place, seconds=0.05).result(SECONDS)
        assert loaded.position == 0
        until(lambda: t.tiers.stats().staging_bytes <= max(w.reference.length for w in place.wanted))
        assert store.stalled == 1
        store.released.set()
        until(lambda: not t.tiers.stats().staging_bytes)
        assert t.load(data).position == 43


def test_loads_that_are_given_up_tell_how_slow_a_tier_is() -> None:
    """Nothing else would: they never end."""
    data, store = tokens(60), FaultyStore(MemoryStore())
    with World((tier("disk"), store)) as t:
        t.put(data, 43)
        assert t.deepest(data).seconds < 0.01
        store.rules.append(Fault("stall", "read"))
        for _ in range(3):
            assert t.start(t.deepest(data), seconds=0.02).result(SECONDS).position == 0
        assert t.deepest(data).seconds >= 0.02
        store.released.set()


def test_a_read_that_stalls_is_known_early_and_only_some_in_a_row_switch_the_tier_off(tmp_path: Path) -> None:
    store = FaultyStore(DiskStore(tmp_path))
    with World((tier("disk", patience=5.0), store)) as t:
        [one] = t.tiers._tiers
        for seed in range(4):
            t.put(tokens(60, seed), 43)
        assert one._reading_deadline(1000) == one.deadline(1000)
        for _ in range(3):
            t.load(tokens(60)).release()
        assert 1.0 <= one._reading_deadline(1000) < 2.0 < one.deadline(1000)
        store.rules.append(Fault("stall", "read", times=1))
        assert t.load(tokens(60, 1)).position == 0
        assert t.tiers.stats().tiers[0].circuit == "closed"
        store.rules.append(Fault("stall", "read", times=3))
        assert t.load(tokens(60, 2)).position == 0
        assert t.tiers.stats().tiers[0].circuit == "open"
        store.released.set()
