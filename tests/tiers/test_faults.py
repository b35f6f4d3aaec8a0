"""Real faults of other systems, by their numbers, against `ObjectTiers` over a store that can be made to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiers import servers
from tests.tiers.world import ATTENTION, HYBRID, NAME, SECONDS, World, tier, tokens, until

from headway.errors import ConfigError
from headway.tiers import Failure, ObjectLayout, Span
from headway.tiers.disk import DiskStore
from headway.tiers.faults import Fault, FaultyStore
from headway.tiers.memory import MemoryStore
from headway.tiers.store import Store, StoreFullError


class Make:
    """Makes empty stores of one kind that can be made to fail.

    Attributes:
        quick: A tier that loses its patience soon, but not over what is healthy.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.quick = tier("disk", patience={"memory": 0.15, "seaweed": 5.0}.get(kind, 1.0), pause=0.1)
        self.made: list[Store] = []

    def __call__(self, *rules: Fault) -> FaultyStore:
        make: dict[str, Callable[[], Store]] = {
            "memory": MemoryStore,
            "disk": lambda: DiskStore(self._folder / str(len(self.made))),
            "valkey": lambda: servers.valkey_store(len(self.made)),
            "moto": lambda: servers.s3_store(servers.moto()),
            "seaweed": lambda: servers.s3_store(servers.seaweed()),
        }
        self.made.append(make[self._kind]())
        return FaultyStore(servers.Unclosed(self.made[-1]), rules)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("moto", "seaweed")]


@pytest.fixture(params=["memory", "disk", "valkey", *SLOW])
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Every fault is tried on real tiers."""
    make = Make(request.param, tmp_path)
    yield make
    for store in make.made:
        store.close()


def only(store: FaultyStore, part: str) -> str:
    """The one name that has a part in it."""
    [name] = [item.name for item in store.names("") if part in item.name]
    return name


def test_t02_a_late_read_never_writes_into_memory_that_others_got(faulty: Make) -> None:
    data, other = tokens(40), tokens(40, 1)
    store = faulty()
    with World((faulty.quick, store)) as t:
        t.put(data, 20)
        t.put(other, 20)
        store.rules.append(Fault("stall", "read", times=1))
        loaded = t.load(data)
        assert loaded.position == 0
        assert next(failure.reason for failure in loaded.failures) == "late"
        loaded.release()
        held = t.tiers.stats().staging_bytes
        assert held > 0  # the stalled read still has its buffer
        until(lambda: t.tiers.stats().tiers[0].circuit == "closed")
        second = t.load(other)
        assert second.position == 20
        store.released.set()
        until(lambda: t.tiers.stats().staging_bytes < held + sum(len(p.data) for p in second.pieces))
        t.check(other, second)
        second.release()
        until(lambda: t.tiers.stats().staging_bytes == 0)


def test_t03_cancelling_a_load_leaks_nothing_and_is_told(faulty: Make) -> None:
    data = tokens(40)
    store = faulty()
    with World((tier("disk"), store)) as t:
        t.put(data, 20)
        store.rules.append(Fault("stall", "read"))
        place, told = t.deepest(data), []
        ended = threading.Event()
        load = t.tiers.load(place, 0, lambda loaded: (told.append(loaded), ended.set()))
        until(lambda: store.stalled > 0)
        load.cancel()
        assert ended.wait(SECONDS)
        [loaded] = told
        assert (loaded.position, loaded.pieces) == (0, ())
        assert {failure.reason for failure in loaded.failures} == {"cancelled"}
        store.released.set()
        until(lambda: t.tiers.stats().staging_bytes == 0)
        assert t.tiers.stats().loads == 0


def test_t04_cancelling_and_ending_at_once_tell_once_and_free_once(faulty: Make) -> None:
    data = tokens(40)
    with World((tier("disk"), faulty())) as t:
        t.put(data, 20)
        for _ in range(50):
            told: list[object] = []
            ended = threading.Event()

            def done(loaded: object, told: list[object] = told, ended: threading.Event = ended) -> None:
                told.append(loaded)
                ended.set()

            load = t.tiers.load(t.deepest(data), 0, done)
            load.cancel()
            assert ended.wait(SECONDS)
            load.cancel()
            told[0].release()  # type: ignore[attr-defined]
            told[0].release()  # type: ignore[attr-defined]
            assert len(told) == 1
        until(lambda: t.tiers.stats().staging_bytes == 0)


def test_t10_loads_that_do_not_fit_together_come_one_after_another(faulty: Make) -> None:
    paths = [tokens(40, seed) for seed in range(4)]
    with World((tier("disk"), faulty()), staging=600) as t:
        for data in paths:
            t.put(data, 33)
        futures = [t.start(t.deepest(data)) for data in paths]
        for data, future in zip(paths, futures, strict=True):
            loaded = future.result(SECONDS)
            t.check(data, loaded)
            assert loaded.position == 33
            assert t.tiers.stats().staging_bytes <= 600
            loaded.release()


def test_t10_a_load_that_waits_too_long_for_memory_ends_with_nothing(faulty: Make) -> None:
    data, other = tokens(40), tokens(40, 1)
    with World((tier("disk"), faulty()), staging=600) as t:
        t.put(data, 33)
        t.put(other, 33)
        first = t.load(data)
        second = t.start(t.deepest(other), seconds=0.05).result(SECONDS)
        assert (second.position, [failure.reason for failure in second.failures]) == (0, ["memory"])
        first.release()


def test_a_load_larger_than_the_memory_is_lowered_to_what_fits(faulty: Make) -> None:
    data = tokens(90)
    with World((tier("disk"), faulty()), staging=600) as t:
        t.put(data, 20)
        t.put(data, 80)
        loaded = t.load(data)
        assert loaded.position == 20
        assert [failure.reason for failure in loaded.failures] == ["memory"]


def test_t13_a_backlog_that_is_full_refuses_and_holds_nobody_up(faulty: Make) -> None:
    store = faulty(Fault("stall", "write", "."))
    with World((tier("disk"), store), backlog=700) as t:
        t.put(tokens(40), 33, wait=False)
        t.put(tokens(40, 1), 33, wait=False)
        stats = t.tiers.stats()
        assert stats.refused_writes == 1
        assert 0 < stats.backlog_bytes <= 700
        store.released.set()
        assert t.tiers.flush(SECONDS)
        assert t.tiers.stats().backlog_bytes == 0
        assert t.positions(tokens(40)) == [33]


def test_t17_every_restorable_position_is_told_not_the_deepest_alone(faulty: Make) -> None:
    data = tokens(90)
    with World((tier("disk"), faulty())) as t:
        for position in (5, 16, 31, 80):
            t.put(data, position)
        assert t.positions(data) == [5, 16, 31, 80]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(("model", "adapter", ""), id="t18_adapter"),
        pytest.param(("model", "", "adapter"), id="t19_salt_like_an_adapter"),
        pytest.param(("modeladapter", "", ""), id="t19_run_together"),
        pytest.param(("model", "\0", ""), id="t19_separators"),
        pytest.param(("", "model", ""), id="t19_shifted"),
    ],
)
def test_t18_t19_no_namespace_reads_another(faulty: Make, name: tuple[str, str, str]) -> None:
    data = tokens(40)
    with World((tier("disk"), faulty())) as t:
        for each in [("model", "adapter", "x"), ("model", "", ""), ("mode", "ladapter", "")]:
            t.put(data, 20, each)
        assert t.positions(data, name=name) == []


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(HYBRID, identity=b"weights 1b"), id="t20_weights"),
        pytest.param(replace(HYBRID, family="tp2"), id="layout_family"),
        pytest.param(replace(HYBRID, lookahead=1), id="lookahead"),
        pytest.param(replace(HYBRID, groups=(replace(HYBRID.groups[0], bytes=4), *HYBRID.groups[1:])), id="t21_dtype"),
        pytest.param(replace(HYBRID, groups=(replace(HYBRID.groups[0], name="b"), *HYBRID.groups[1:])), id="group"),
        pytest.param(replace(HYBRID, groups=(*HYBRID.groups[:3], replace(HYBRID.groups[3], bytes=65))), id="t21_state"),
    ],
)
def test_t20_t21_other_weights_and_other_bytes_are_never_read(faulty: Make, layout: ObjectLayout) -> None:
    data, store = tokens(40), faulty()
    with World((tier("disk"), store)) as t:
        t.put(data, 20)
    with World((tier("disk"), store), layout=layout) as t:
        assert t.positions(data) == []
        t.put(data, 20)
        assert t.load(data).position == 20
    with World((tier("disk"), store)) as t:
        assert t.load(data).position == 20


def test_t22_bytes_of_another_length_are_refused(faulty: Make) -> None:
    data = tokens(40)
    with World((tier("disk"), faulty())) as t:
        pieces = dict(t.pieces(data, t.tiers.wants(("", "", ""), data, 20)))
        pieces[Span("state", 20, 20)] += b"x"
        with pytest.raises(ConfigError, match="state"):
            t.tiers.put(("", "", ""), data, 20, "end", 1.0, pieces)


def test_t23_nothing_is_offered_behind_the_limit(faulty: Make) -> None:
    data = tokens(40)
    with World((tier("disk"), faulty())) as t:
        t.put(data, 40)
        assert t.positions(data, limit=39) == []
        assert t.positions(data, floor=40) == []


@pytest.mark.parametrize("group", ["full", "window-6", "chunk-5", "state"])
@pytest.mark.parametrize("kind", ["drop", "truncate", "corrupt", "fail"])
def test_t24_t28_an_object_of_any_group_that_is_lost_lowers_the_load_and_is_named(
    faulty: Make, group: str, kind: str
) -> None:
    """Both T24 (gone between the lookup and the read) and T28 (one group fails silently)."""
    data = tokens(60)
    store = faulty()
    with World((tier("disk"), store)) as t:
        t.put(data, 21)
        t.put(data, 43)
        place = t.deepest(data)
        bad = next(w for w in place.own if w.reference.group == group)
        store.rules.append(Fault(kind, "read", bad.key[1]))  # type: ignore[arg-type]
        loaded = t.start(place).result(SECONDS)
        t.check(data, loaded)
        reason = {"drop": "missing", "truncate": "corrupt", "corrupt": "corrupt", "fail": "failed"}[kind]
        span = Span(bad.reference.group, bad.reference.first, bad.reference.stop)
        assert loaded.position == 21
        assert loaded.failures == (Failure("disk", span, reason),)
        assert t.tiers.stats().tiers[0].failures[reason] == 1
        assert t.positions(data) == [21]  # not tried again at once


def test_what_is_left_of_a_checkpoint_is_not_removed_under_the_reads_of_others(faulty: Make) -> None:
    data, store = tokens(60), faulty()
    with World((tier("disk"), store)) as t:
        t.put(data, 43)
        place = t.deepest(data)
        lost, *kept = (wanted.key[1] for wanted in place.own)
        store.rules.append(Fault("drop", "read", lost))
        store.rules += [Fault("stall", "read", name) for name in kept]
        assert t.start(place).result(SECONDS).position == 0
        assert t.tiers.flush(SECONDS)
        store.released.set()
        until(lambda: t.tiers.stats().staging_bytes == 0)
        assert t.tiers.stats().tiers[0].failures == {"missing": 1}
        assert t.tiers.flush(SECONDS)
        assert not {lost, *kept} & {item.name for item in store.names("")}


def test_a_stretch_that_is_lost_lowers_to_the_checkpoint_before_it_and_can_be_mended(faulty: Make) -> None:
    data = tokens(60)
    store = faulty()
    with World((tier("disk"), store)) as t:
        t.put(data, 21)
        t.put(data, 43)
        place = t.deepest(data)
        lost = next(w for w in place.chain if w.reference.first == 24)
        store.remove([lost.key[1]])
        loaded = t.start(place).result(SECONDS)
        t.check(data, loaded)
        assert loaded.position == 21
        assert t.positions(data) == [21]
        assert t.positions(data, 32) == [43]  # who has the tokens before needs no more
        assert t.put(data, 43) == [Span("full", 24, 32)]
        assert t.load(data).position == 43


def test_another_tier_stands_in_for_an_object_that_is_lost(faulty: Make) -> None:
    data = tokens(60)
    first, second = faulty(), faulty()
    with World((tier("disk"), first), (tier("store"), second)) as t:
        t.put(data, 43)
        first.rules.append(Fault("drop", "read", only(first, t.deepest(data).own[-1].key[1][-32:])))
        loaded = t.load(data)
        assert loaded.position == 43
        assert {moved.tier for moved in loaded.moved} == {"disk", "store"}
        assert [failure.tier for failure in loaded.failures] == ["disk"]


def test_t26_what_one_request_wrote_in_steps_another_finds_whole(faulty: Make) -> None:
    data = tokens(90)
    for layout in (HYBRID, replace(HYBRID, lookahead=3), replace(ATTENTION, lookahead=1)):
        with World((tier("disk"), faulty()), layout=layout) as t:
            for position in (3, 8, 17, 30, 64, 80):
                t.put(data[: 4 * (position + layout.lookahead)], position)
            assert {3, 8, 17, 30, 64, 80} <= set(t.positions(data))
            for position in (3, 8, 17, 30, 64, 80):
                assert t.load(data, limit=position).position == position
            longer = data + tokens(10, 9)
            assert t.load(longer, 30).position == 80


def test_t27_a_prefix_is_not_evicted_before_what_builds_on_it_is_written(faulty: Make) -> None:
    data, store = tokens(200), faulty()
    with World((replace(faulty.quick, patience=20.0, capacity=6000), store)) as t:
        t.put(data, 40)
        store.rules.append(Fault("stall", "write", times=1))
        t.put(data, 100, wait=False)
        for seed in range(1, 9):
            t.put(tokens(200, seed), 100, wait=False)
        store.released.set()
        assert t.tiers.flush(SECONDS)
        until(lambda: t.tiers.stats().backlog_bytes == 0)
        for seed in range(9):
            path = data if seed == 0 else tokens(200, seed)
            for position in t.positions(path):
                assert t.load(path, limit=position).position == position


def held(world: World) -> int:
    return sum(entry.holds for tier in world.tiers._tiers for entry in tier.catalogue.entries())


@pytest.mark.parametrize("waits", ["thread", "memory"])
def test_what_a_load_is_going_to_read_is_not_evicted_before_it_begins(faulty: Make, waits: str) -> None:
    """Neither while the thread of loads has other things to do, nor while the load waits for memory."""
    data, other = tokens(60), tokens(60, 99)
    with World((tier("disk", capacity=4000), faulty()), staging=700) as t:
        t.put(data, 43)
        t.put(other, 43, worth=1e9)
        first, go = t.load(other), threading.Event()
        if waits == "thread":
            first.release()
            t.tiers._loader.post(go.wait)  # type: ignore[arg-type]
        future = t.start(t.deepest(data))
        for seed in range(1, 12):
            t.put(tokens(60, seed), 43, worth=100.0)
        assert t.tiers.stats().tiers[0].evictions > 5
        go.set()
        first.release()
        loaded = future.result(SECONDS)
        t.check(data, loaded)
        assert (loaded.position, loaded.failures) == (43, ())
        loaded.release()
        until(lambda: not held(t))
        t.put(tokens(60, 12), 43, worth=100.0)
        t.put(tokens(60, 13), 43, worth=100.0)
        assert t.positions(data) == [], "it can be evicted again"


def test_what_was_evicted_since_it_was_found_is_not_read(faulty: Make) -> None:
    data, store = tokens(60), faulty()
    with World((tier("disk", capacity=4000), store)) as t:
        t.put(data, 21, worth=1e9)
        t.put(data, 43)
        place = t.deepest(data)
        for seed in range(1, 12):
            t.put(tokens(60, seed), 43, worth=100.0)
        assert t.positions(data) == [21]
        loaded = t.start(place).result(SECONDS)
        t.check(data, loaded)
        assert loaded.position == 21
        assert [failure.reason for failure in loaded.failures] == ["missing"]
        assert not t.tiers.stats().tiers[0].failures, "no call has failed"
        until(lambda: not held(t))


@pytest.mark.parametrize("how", ["cancel", "late", "forgotten", "drop"])
def test_what_a_load_held_can_be_evicted_however_it_ends(faulty: Make, how: str) -> None:
    data, store = tokens(60), faulty()
    with World((tier("disk"), store)) as t:
        t.put(data, 21)
        t.put(data, 43)
        store.rules.append(Fault("drop" if how == "drop" else "stall", "read"))
        ended = threading.Event()
        load = t.tiers.load(t.deepest(data), 0, lambda loaded: ended.set(), 0.05 if how == "late" else SECONDS)
        if how == "cancel":
            load.cancel()
        if how == "forgotten":
            t.tiers.forget(NAME, data)
        assert ended.wait(SECONDS)
        store.released.set()
        until(lambda: not held(t))


def test_t29_a_disk_that_is_full_before_its_budget_evicts_and_writes_again() -> None:
    class Full(MemoryStore):
        room = 4000

        def write(self, name: str, data: bytes | bytearray | memoryview) -> None:
            if sum(map(len, self.objects.values())) + len(data) > self.room:
                raise StoreFullError("no space left on device")
            super().write(name, data)

    with World((tier("disk", capacity=1 << 30), Full())) as t:
        for seed in range(20):
            t.put(tokens(60, seed), 43)
            assert t.positions(tokens(60, seed)) == [43]
        stats = t.tiers.stats().tiers[0]
        assert stats.evictions > 5
        assert stats.circuit == "closed"


def test_t30_a_stalled_mount_holds_nobody_up_and_is_switched_off(faulty: Make) -> None:
    data = tokens(60)
    store, before = faulty(), threading.active_count()
    with World((faulty.quick, store)) as t:
        for seed in range(12):
            t.put(tokens(60, seed), 43)
        store.rules += [Fault("stall", "read"), Fault("stall", "read_small", times=1), Fault("stall", "write")]
        futures = [t.start(t.deepest(tokens(60, seed))) for seed in range(12)]
        for future in futures:
            assert future.result(SECONDS).position == 0
        assert t.tiers.stats().tiers[0].circuit == "open"
        assert t.positions(data) == []
        assert t.tiers.wants(("", "", ""), data, 20) == []
        assert threading.active_count() < before + 80
        store.rules.clear()
        store.released.set()
        until(lambda: t.tiers.stats().tiers[0].circuit == "closed")
        until(lambda: t.tiers.stats().staging_bytes == 0)
        assert t.tiers.stats().tiers[0].openings >= 1


def test_t30_closing_does_not_wait_for_a_stalled_mount(faulty: Make) -> None:
    store = faulty()
    world = World((faulty.quick, store))
    world.put(tokens(40), 20)
    store.rules += [Fault("stall", "read"), Fault("stall", "write")]
    future = world.start(world.deepest(tokens(40)))
    until(lambda: store.stalled > 0)
    world.put(tokens(40, 1), 20, wait=False)
    world.tiers.close(0.1)
    assert future.result(SECONDS).position == 0
    store.released.set()


def test_failures_in_a_row_switch_a_tier_off_and_an_answer_switches_it_on(faulty: Make) -> None:
    store = faulty(Fault("fail", "write", "."), Fault("fail", "read_small", "probe", times=2))
    with World((replace(faulty.quick, pause=0.02), store)) as t:
        t.put(tokens(40, 1), 20)
        until(lambda: t.tiers.stats().tiers[0].openings == 1)
        assert t.positions(tokens(40, 1)) == []
        store.rules.pop(0)
        until(lambda: t.tiers.stats().tiers[0].circuit == "closed")
        assert store.rules[0].times == 2
        t.put(tokens(40), 20)
        assert t.positions(tokens(40)) == [20]


def test_t32_a_killed_writer_leaves_nothing_that_the_next_start_does_not_remove(tmp_path: Path) -> None:
    program = """
import sys, threading
from headway.tiers.disk import DiskStore
store, go = DiskStore(sys.argv[1]), threading.Event()
class Slow(bytes):
    pass
import os
write = os.write
def slow(handle, data):
    write(handle, bytes(data)[:10]); print("writing", flush=True); go.wait()
os.write = slow
store.write("a" * 32 + "/" + "b" * 32 + "/" + "c" * 32 + ".0." + "d" * 32, b"x" * 100)
"""
    folder = tmp_path / "tier"
    with subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        store = DiskStore(folder)
        assert list(store.names("")) == []
        assert [path for path in folder.rglob("*") if path.is_file()], "the writer lives: its file stays"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert list(store.names("")) == []
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_t33_a_file_that_another_process_deleted_is_a_miss(tmp_path: Path) -> None:
    data = tokens(60)
    with World((tier("disk"), DiskStore(tmp_path))) as t, World((tier("disk"), DiskStore(tmp_path))) as u:
        t.put(data, 43)
        u.tiers.close(0)
        with World((tier("disk"), DiskStore(tmp_path))) as v:
            assert v.positions(data) == [43]
            t.tiers.reset().result(SECONDS)
            loaded = v.load(data)
            assert loaded.position == 0
            assert {failure.reason for failure in loaded.failures} == {"missing"}
            assert v.positions(data) == []
            for _ in range(8):  # what a lowered load did not come to read is found gone by the next
                until(lambda: v.tiers.stats().staging_bytes == 0)  # all of its reads have ended
                v.put(data, 43)
                if (loaded := v.load(data)).position == 43:
                    break
                assert {failure.reason for failure in loaded.failures} == {"missing"}
            assert loaded.position == 43


def test_t34_names_are_the_same_in_every_process(tmp_path: Path) -> None:
    program = """
from tests.tiers.world import *
from headway.tiers.objects import PathDigests
digests = PathDigests(HYBRID, KEY, HYBRID.namespace_digest(KEY, NAME), tokens(60))
print(HYBRID.digest(KEY).hex(), digests.boundary(3).hex(), digests.manifest(43).hex(), hash("x"))
"""
    told = []
    for seed in ("1", "2"):
        given = {**os.environ, "PYTHONHASHSEED": seed}
        told.append(subprocess.check_output([sys.executable, "-c", program], env=given, text=True).split())
    assert told[0][:3] == told[1][:3]
    assert told[0][3] != told[1][3]
