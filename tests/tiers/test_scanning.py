import os
import threading
import time
from pathlib import Path

import pytest
from tests.tiers.world import HYBRID, KEY, NAME, SECONDS, World, tier, tokens, until

from headway.errors import ConfigError
from headway.tiers import store_key
from headway.tiers.disk import DiskStore
from headway.tiers.faults import Fault, FaultyStore
from headway.tiers.memory import MemoryStore
from headway.tiers.objects import record_name

DISK = tier("disk")


def files(folder: Path, end: str = "") -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name.endswith(end)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with World((DISK, DiskStore(tmp_path))) as t:
        t.put(tokens(60), 21)
        t.put(tokens(60), 43)
        t.put(tokens(60, 1), 43)
    return tmp_path


@pytest.mark.parametrize("end", [".m", ".s"])
@pytest.mark.parametrize("how", ["cut", "altered", "swapped", "emptied"])
def test_a_damaged_record_is_found_and_removed_at_the_start(folder: Path, end: str, how: str) -> None:
    victim, other, *_ = files(folder, end)
    data = victim.read_bytes()
    changed = {"cut": data[:-3], "altered": data[:-3] + b"xyz", "swapped": other.read_bytes(), "emptied": b""}
    victim.write_bytes(changed[how])
    with World((DISK, DiskStore(folder))) as t:
        assert t.tiers.stats().tiers[0].failures == {"corrupt": 1}
        assert not victim.exists()
        for seed in (0, 1):
            for position in t.positions(tokens(60, seed)):
                assert t.load(tokens(60, seed), limit=position).position == position
        assert sum(len(t.positions(tokens(60, seed))) for seed in (0, 1)) < 3


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_half_written_object_is_found_and_removed_at_the_start(folder: Path, how: str) -> None:
    with World((DISK, DiskStore(folder))) as t:
        name = t.deepest(tokens(60)).own[-1].key[1]
    [victim] = [path for path in files(folder) if path.name == name.rpartition("/")[2]]
    victim.write_bytes(victim.read_bytes()[:-1])
    if how == "gone":
        victim.unlink()
    with World((DISK, DiskStore(folder))) as t:
        assert t.positions(tokens(60)) == [21]
        assert t.positions(tokens(60, 1)) == [43]
        assert t.tiers.flush(SECONDS)
        assert not victim.exists()


def test_an_altered_object_is_found_by_verifying_and_removed(folder: Path) -> None:
    with World((DISK, DiskStore(folder))) as t:
        name = t.deepest(tokens(60)).own[-1].key[1]
    [victim] = [path for path in files(folder) if path.name == name.rpartition("/")[2]]
    data = bytearray(victim.read_bytes())
    data[3] ^= 1
    victim.write_bytes(data)
    with World((tier("disk", verify=1e9), DiskStore(folder))) as t:
        until(lambda: not victim.exists())
        assert t.positions(tokens(60)) == [21]
        assert t.positions(tokens(60, 1)) == [43]


def test_objects_that_nothing_names_are_collected_once_they_are_old(folder: Path) -> None:
    for record in files(folder, ".m"):
        record.unlink()
    before = len(files(folder))
    with World((tier("disk", grace=3600), DiskStore(folder))) as t:
        assert t.tiers.flush(SECONDS)
        assert len(files(folder)) == before
    for path in files(folder):
        os.utime(path, (time.time() - 7200,) * 2)
    with World((tier("disk", grace=3600), DiskStore(folder))) as t:
        assert t.tiers.flush(SECONDS)
        assert [path.name for path in files(folder)] == ["about"]
        assert t.tiers.stats().tiers[0].used_bytes == 0


def test_a_store_without_a_clock_is_collected_by_how_long_we_saw_it() -> None:
    store = MemoryStore()
    with World((DISK, store)) as t:
        t.put(tokens(60), 43)
    [manifest] = [name for name in store.objects if name.endswith(".m")]
    del store.objects[manifest]
    with World((tier("disk", grace=0.05, rescan=0.05), store)) as t:
        until(lambda: list(store.objects) == [name for name in store.objects if name.endswith("about")])
        t.put(tokens(60), 43)
        assert t.load(tokens(60)).position == 43


def test_a_disk_that_was_given_less_room_is_emptied_to_it_at_the_start(folder: Path) -> None:
    with World((tier("disk", capacity=2600), DiskStore(folder))) as t:
        assert t.tiers.flush(SECONDS)
        stats = t.tiers.stats().tiers[0]
        assert stats.evictions > 0
        assert 0 < stats.used_bytes <= 2600
        assert len(files(folder, ".m")) == stats.checkpoints > 0


def test_indexes_that_lead_nowhere_are_collected_and_others_stay() -> None:
    store = MemoryStore()
    with World((tier("store", shared=True, grace=0.05, rescan=0.05), store)) as t:
        t.put(tokens(60), 21)
        t.put(tokens(60), 43)
        [gone] = [name for name in store.objects if name.endswith(".i") and name in _index_of(t, 43)]
        place = t.deepest(tokens(60))
        store.remove([place.own[-1].key[1]])
        assert t.load(tokens(60)).position == 21
        until(lambda: gone not in store.objects)
        assert [name for name in store.objects if name.endswith(".i")] == [_index_of(t, 21)]


def _index_of(t: World, position: int) -> str:
    folder, digests = t.tiers._path(NAME, tokens(60))
    return record_name(folder, digests.boundary(position // 8), "i")


def test_what_others_removed_is_withdrawn_by_the_next_scan(folder: Path) -> None:
    with World((tier("disk", rescan=0.05), DiskStore(folder))) as t:
        assert t.positions(tokens(60)) == [21, 43]
        for path in files(folder):
            path.unlink()
        until(lambda: t.positions(tokens(60)) == [] and t.tiers.stats().tiers[0].checkpoints == 0)
        assert t.tiers.stats().tiers[0].used_bytes == 0


def test_tiers_are_used_while_they_are_scanned(folder: Path) -> None:
    store = FaultyStore(DiskStore(folder), [Fault("stall", "names", times=1)])
    world = World.__new__(World)
    world.layout = HYBRID
    from headway.tiers import ObjectTiers

    world.tiers = ObjectTiers(HYBRID, KEY, [(DISK, store)])
    with world as t:
        assert t.tiers.stats().tiers[0].scanning
        assert t.put(tokens(60, 2), 43)
        assert t.load(tokens(60, 2)).position == 43
        assert t.positions(tokens(60)) == []
        store.released.set()
        assert t.tiers.scanned(SECONDS)
        assert t.positions(tokens(60)) == [21, 43]
        assert not t.tiers.stats().tiers[0].scanning


def test_two_servers_on_one_folder_survive_each_other(tmp_path: Path) -> None:
    """Both write and evict in the same small folder: every load is right, and misses are all that fails."""
    small = tier("disk", capacity=9000, rescan=0.2)
    with World((small, DiskStore(tmp_path))) as t, World((small, DiskStore(tmp_path))) as u:
        for number in range(30):
            for each in (t, u):
                data = tokens(60, number % 7)
                each.put(data, 20 + number)
                for position in each.positions(data):
                    loaded = each.load(data, limit=position)
                    assert {failure.reason for failure in loaded.failures} <= {"missing"}
                    loaded.release()
        for each in (t, u):
            until(lambda each=each: each.tiers.stats().staging_bytes == 0)  # type: ignore[misc]
            assert each.tiers.stats().tiers[0].evictions > 0, each.tiers.stats().tiers[0]


# ---- loads that share


def test_loads_of_the_same_at_the_same_time_share_one_read() -> None:
    store = FaultyStore(MemoryStore())
    with World((DISK, store)) as t:
        t.put(tokens(60), 43)
        store.rules.append(Fault("stall", "read"))
        futures = [t.start(t.deepest(tokens(60))) for _ in range(5)]
        until(lambda: t.tiers.stats().loads == 5 and store.stalled > 0)
        store.released.set()
        loads = [future.result(SECONDS) for future in futures]
        objects = len(t.deepest(tokens(60)).wanted)
        assert t.tiers.stats().tiers[0].loads == objects
        for loaded in loads:
            t.check(tokens(60), loaded)
        loads[0].release()
        t.check(tokens(60), loads[1])
        for loaded in loads:
            loaded.release()
        until(lambda: t.tiers.stats().staging_bytes == 0)
        assert t.tiers._loader._staging._idle_bytes > 0  # for the next load


def test_memory_that_somebody_still_looks_at_is_not_used_again() -> None:
    import numpy as np

    with World((DISK, MemoryStore())) as t:
        t.put(tokens(60), 43)
        t.put(tokens(60, 1), 43)
        loaded = t.load(tokens(60))
        seen = [np.frombuffer(piece.data, np.uint8) for piece in loaded.pieces]
        copies = [array.copy() for array in seen]
        loaded.release()
        until(lambda: t.tiers.stats().staging_bytes == 0)
        t.load(tokens(60, 1)).release()
        assert all((array == copy).all() for array, copy in zip(seen, copies, strict=True))


# ---- the key


def test_the_key_is_made_once_beside_the_folder_and_is_its_owners_alone(tmp_path: Path) -> None:
    folder, keys = tmp_path / "tier", list[bytes]()
    threads = [threading.Thread(target=lambda: keys.append(store_key(None, folder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert (tmp_path / "tier.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["tier.key"]
    assert store_key(None, Path(f"{folder}/")) == keys[0]


def test_a_key_file_is_read_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    assert store_key(file, tmp_path / "tier") == b"0123456789abcdef"
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 to 64"):
        store_key(file, None)
    with pytest.raises(ConfigError, match="--store-key FILE"):
        store_key(tmp_path / "nothing", None)
    with pytest.raises(ConfigError, match="--store-key FILE"):
        store_key(None, None)


def test_another_key_finds_nothing(folder: Path) -> None:
    from headway.tiers import ObjectTiers

    tiers = ObjectTiers(HYBRID, b"another key of this store", [(DISK, DiskStore(folder))])
    assert tiers.scanned(SECONDS)
    assert tiers.find(NAME, tokens(60), 0, 60) == []
    tiers.close(0)
