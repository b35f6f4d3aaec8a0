import threading
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.world import ATTENTION, HYBRID, NAME, SECONDS, World, tier, tokens, until

from headway.tiers import IncompleteError
from headway.tiers.disk import DiskStore
from headway.tiers.faults import Fault, FaultyStore
from headway.tiers.memory import MemoryStore
from headway.tiers.store import Store

DISK = tier("disk")


def left(store: Store) -> list[str]:
    return [item.name for item in store.names("") if not item.name.endswith("/about")]


@pytest.mark.parametrize("layout", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
@pytest.mark.parametrize("length", [1, 8, 11, 16, 20, 21])
def test_all_that_begins_with_a_prefix_goes_wherever_it_ends(length: int, layout) -> None:
    """A prefix may end inside a stretch, at its end, behind the last checkpoint; other paths keep what is theirs."""
    data, store = tokens(60), MemoryStore()
    other = data[: 4 * length - 4] + tokens(60, 1)
    with World((DISK, store), layout=layout) as t:
        for position in (4, 21, 43):
            t.put(data, position)
            t.put(other, position)
        before = t.positions(other)
        t.tiers.forget(NAME, data[: 4 * length]).result(SECONDS)
        assert [p for p in t.positions(data) if p >= length] == []
        assert t.positions(other) == before
        for position in before:
            assert t.load(other, limit=position).position == position
    with World((DISK, store), layout=layout) as t:
        assert [p for p in t.positions(data) if p >= length] == []
        assert t.positions(other) == before


def test_what_nobody_else_shares_goes_too_and_the_store_is_empty_then(tmp_path: Path) -> None:
    data, store = tokens(60), DiskStore(tmp_path)
    with World((DISK, store)) as t:
        t.put(data, 21)
        t.put(data, 43)
        t.tiers.forget(NAME, data[: 4 * 30]).result(SECONDS)
        assert t.positions(data) == []
        assert left(store) == []
        assert t.tiers.stats().tiers[0].used_bytes == 0


def test_a_prefix_that_is_not_known_forgets_nothing_of_others() -> None:
    data = tokens(60)
    with World((DISK, MemoryStore())) as t:
        t.put(data, 43)
        t.tiers.forget(NAME, tokens(60, 1)).result(SECONDS)
        t.tiers.forget(("other", "", ""), data).result(SECONDS)
        assert t.positions(data) == [43]


def test_a_namespace_and_everything_reach_every_tier_and_other_servers_objects() -> None:
    data, first, second = tokens(60), MemoryStore(), MemoryStore()
    mine, theirs = ("m", "", "secret"), ("m", "", "other")
    with World((DISK, first), (tier("store", shared=True), second)) as t:
        with World((tier("store", shared=True), second)) as u:
            u.put(tokens(60, 5), 43, mine)
            u.put(tokens(60, 5), 43, theirs)
        t.put(data, 43, mine)
        t.put(data, 43, theirs)
        t.tiers.forget_namespace(mine).result(SECONDS)
        assert t.positions(data, name=mine) == []
        assert t.positions(data, name=theirs) == [43]
        assert t.search(tokens(60, 5), name=mine) == []
        assert t.search(tokens(60, 5), name=theirs) == [43]
        assert all("secret" not in name for name in left(first) + left(second))
        t.tiers.reset().result(SECONDS)
        assert left(first) == left(second) == []
        assert t.positions(data, name=theirs) == []


def test_what_a_layout_is_called_outlives_a_reset() -> None:
    store = MemoryStore()
    with World((DISK, store)) as t:
        t.put(tokens(60), 21)
        until(lambda: any(name.endswith("/about") for name in store.objects))
        t.tiers.reset().result(SECONDS)
        assert left(store) == []
        assert any(name.endswith("/about") for name in store.objects)


def test_what_another_server_wrote_under_a_prefix_is_forgotten_though_it_was_never_looked_up() -> None:
    data, store, shared = tokens(60), MemoryStore(), tier("store", shared=True)
    with World((shared, store)) as t, World((shared, store)) as u:
        u.put(data, 43)
        u.put(tokens(60, 1), 43)
        t.tiers.forget(NAME, data[: 4 * 11]).result(SECONDS)
        assert t.search(data) == []
        assert t.search(tokens(60, 1)) == [43]
        loaded = u.load(data)
        assert loaded.position == 0
        assert {failure.reason for failure in loaded.failures} == {"missing"}


def test_a_tier_that_does_not_answer_makes_forgetting_incomplete_and_says_so() -> None:
    data, store = tokens(60), FaultyStore(MemoryStore())
    with World((DISK, MemoryStore()), (tier("store", patience=0.1, pause=0.05), store)) as t:
        t.put(data, 43)
        store.rules.append(Fault("fail", "remove"))
        with pytest.raises(IncompleteError, match="store: "):
            t.tiers.forget(NAME, data).result(SECONDS)
        assert t.positions(data) == []
        store.rules.clear()
        t.tiers.forget(NAME, data).result(SECONDS)
        assert left(store) == []


def test_what_is_being_written_does_not_come_back() -> None:
    data, store = tokens(60), FaultyStore(MemoryStore(), [Fault("stall", "write", ".0.")])
    with World((DISK, store)) as t:
        t.put(data, 43, wait=False)
        until(lambda: store.stalled > 0)
        forgotten = t.tiers.forget(NAME, data[:40])
        assert t.positions(data) == []
        assert not forgotten.done()
        store.released.set()
        forgotten.result(SECONDS)
        assert left(store) == []
        assert t.tiers.stats().backlog_bytes == 0
        assert not [name for (operation, name) in store._asked if operation == "write" and name.endswith((".s", ".m"))]


def test_what_was_kept_for_a_write_that_failed_is_forgotten_by_this_server_too() -> None:
    """Known here and gone there would be a miss for whoever asks."""
    data, store = tokens(60), FaultyStore(MemoryStore())
    other = data[: 4 * 30] + tokens(30, 1)
    with World((DISK, store)) as t:
        t.put(data, 21)
        store.rules.append(Fault("stall", "write", times=1))
        t.put(data, 43, wait=False)
        until(lambda: store.stalled > 0)
        t.put(other, 43, wait=False)  # shares 30 tokens with what is forgotten, and will fail
        store.rules = [Fault("fail", "write", ".m", times=1)]
        forgotten = t.tiers.forget(NAME, data)
        assert t.positions(data) == [21]
        store.released.set()
        forgotten.result(SECONDS)
        assert t.positions(data) == []
        assert left(store) == []


def test_a_late_removal_spares_what_was_written_again_under_the_same_names() -> None:
    data = tokens(60)
    with World((DISK, MemoryStore())) as t:
        t.put(data, 43)
        [one], [writer] = t.tiers._tiers, t.tiers._writers.values()
        writer.remove(one.names(one.catalogue.entries()))
        assert t.tiers.flush(SECONDS)
        assert t.load(data).position == 43


def test_loads_under_way_of_what_is_forgotten_end_with_nothing() -> None:
    data, store = tokens(60), FaultyStore(MemoryStore())
    with World((DISK, store)) as t:
        t.put(data, 43)
        t.put(tokens(60, 1), 43)
        store.rules.append(Fault("stall", "read"))
        mine, other = t.start(t.deepest(data)), t.start(t.deepest(tokens(60, 1)))
        until(lambda: store.stalled > 0)
        t.tiers.forget(NAME, data)
        loaded = mine.result(SECONDS)
        assert loaded.position == 0
        assert {failure.reason for failure in loaded.failures} == {"forgotten"}
        store.released.set()
        assert other.result(SECONDS).position == 43


def test_media_never_reach_a_tier() -> None:
    numbers = np.arange(60, dtype=np.int32)
    numbers[30] = -7
    with World((DISK, MemoryStore())) as t:
        assert t.put(numbers.tobytes(), 43) == []
        assert t.put(numbers.tobytes(), 30)
        assert t.positions(numbers.tobytes()) == [30]


def test_calls_from_many_threads() -> None:
    """Writers, readers and whoever forgets at once: every load is whole and right, and nothing is left over."""
    store = MemoryStore()
    with World((tier("disk", capacity=20_000), store), staging=3000) as t:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    data, position = tokens(60, int(random.integers(6))), int(random.integers(1, 60))
                    action = random.random()
                    if action < 0.5:
                        t.put(data, position, wait=False)
                    elif action < 0.95:
                        places = t.tiers.find(NAME, data, 0, 60)
                        if places:
                            loaded = t.start(places[int(random.integers(len(places)))]).result(SECONDS)
                            t.check(data, loaded)
                            loaded.release()
                    else:
                        t.tiers.forget(NAME, data[: 4 * position]).result(SECONDS)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert t.tiers.flush(SECONDS)
        until(lambda: t.tiers.stats().staging_bytes == 0)
        t.tiers.reset().result(SECONDS)
        stats = t.tiers.stats()
        assert (stats.tiers[0].used_bytes, stats.backlog_bytes, left(store)) == (0, 0, [])
