from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiers.world import ATTENTION, HYBRID, World, tier, tokens, until

from headway.tiers.disk import DiskStore
from headway.tiers.memory import MemoryStore
from headway.tiers.store import Store


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "tier")


def test_what_was_put_is_found_and_loaded(store: Store) -> None:
    data = tokens(60)
    with World((tier("disk"), store)) as t:
        assert t.positions(data) == []
        assert t.put(data, 21)
        t.put(data, 43)
        assert t.positions(data) == [21, 43]
        assert t.positions(data, 21) == [43]
        assert t.positions(data, 0, 42) == [21]
        assert t.positions(tokens(60, 1)) == []
        assert t.positions(data[: 4 * 42]) == [21]
        loaded = t.load(data)
        assert (loaded.position, loaded.kind, loaded.failures) == (43, "end", ())
        loaded.release()
        loaded = t.load(data, 21)
        assert {p.first for p in loaded.pieces if p.group == "full"} == {16, 24, 32, 40}
        loaded.release()
        assert not t.put(data, 43)


def test_a_restarted_server_finds_it(store: Store) -> None:
    data = tokens(60)
    with World((tier("disk"), store)) as t:
        t.put(data, 43)
        used = t.tiers.stats().tiers[0].used_bytes
    with World((tier("disk"), store)) as t:
        assert t.positions(data) == [43]
        assert t.load(data).position == 43
        assert t.tiers.stats().tiers[0].used_bytes == used


def test_attention_alone_resumes_at_every_stretch_and_inside(store: Store) -> None:
    data = tokens(60)
    with World((tier("disk"), store), layout=ATTENTION) as t:
        t.put(data, 44)
        assert t.positions(data) == [8, 16, 24, 32, 40, 44]
        assert t.positions(data, 0, 30) == [8, 16, 24, 30]
        assert t.load(data, 9, 30).position == 30
        t.put(data, 46)
        assert t.positions(data, 0, 42) == [8, 16, 24, 32, 40, 42]  # inside the rest of a checkpoint behind it
        assert t.load(data, 9, 42).position == 42
        assert t.positions(data, 42, 42) == []
    assert HYBRID.resumes_anywhere is False


def test_a_search_goes_as_far_as_the_store_has_the_path_and_asks_little_for_what_it_has_not() -> None:
    class Asked(MemoryStore):
        asked: list[int]

        def read_small(self, names: Sequence[str]) -> list[bytes | None]:
            self.asked.append(len(names))
            return super().read_small(names)

    data, store = tokens(3000), Asked()
    store.asked = []
    with World((tier("store", shared=True), store)) as t:
        for position in (100, 1000, 2900):
            t.put(data, position)
    store.asked.clear()
    with World((tier("store", shared=True), store)) as t:
        until(lambda: 1 in store.asked)  # the server's introduction
        store.asked.clear()
        assert t.search(tokens(3000, 1)) == []
        assert store.asked == [31]
        store.asked.clear()
        assert t.search(data, 0, 2000) == [100, 1000]
        assert t.search(data, 1500) == [2900]
        assert t.load(data, 1500).position == 2900
        store.asked.clear()
        assert t.search(data) == [100, 1000, 2900]
        assert sum(store.asked) == 376 + 13  # all indexes, and the stretches behind the last checkpoint
