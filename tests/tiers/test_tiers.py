from pathlib import Path

import pytest
from tests.tiers.world import ATTENTION, HYBRID, World, tier, tokens

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
    assert HYBRID.resumes_anywhere is False
