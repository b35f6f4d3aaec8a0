"""Servers on a store that fails at random, by a seed: whatever happens, what is restored is whole and right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.world import ATTENTION, HYBRID, NAME, SECONDS, World, tier, tokens, until

from headway.tiers import IncompleteError, ObjectLayout, TierConfig
from headway.tiers.disk import DiskStore
from headway.tiers.faults import FaultyStore
from headway.tiers.memory import MemoryStore

RATES = {"drop": 0.02, "delay": 0.02, "truncate": 0.02, "corrupt": 0.02, "fail": 0.02, "full": 0.02, "lie": 0.2}
LAYOUTS = [HYBRID, ATTENTION, ObjectLayout(HYBRID.identity, HYBRID.groups, lookahead=2, stretch=5)]


def branches(random: np.random.Generator) -> bytes:
    """Paths that part at a few places."""
    first, second = random.integers(3, size=2)
    return (tokens(20) + tokens(20, 10 + int(first)) + tokens(20, 20 + int(second)))[: 4 * int(random.integers(10, 60))]


def live(t: World, random: np.random.Generator, steps: int) -> None:
    """Some life of a server: writing, looking up, loading, cancelling, forgetting."""
    waiting: list[tuple[bytes, int, Future]] = []
    for _ in range(steps):
        data, action = branches(random), random.random()
        length = len(data) // 4
        if action < 0.45:
            t.put(data, int(random.integers(1, length + 1)), worth=float(random.random()), wait=False)
        elif action < 0.9:
            floor = int(random.integers(0, length)) if random.random() < 0.3 else 0
            t.search(data, floor)
            places = t.tiers.find(NAME, data, floor, int(random.integers(1, length + 1)))
            if places:
                future: Future = Future()
                load = t.tiers.load(places[int(random.integers(len(places)))], floor, future.set_result, SECONDS)
                waiting.append((data, floor, future))
                if random.random() < 0.1:
                    load.cancel()
        elif action < 0.95:
            try:
                t.tiers.forget(NAME, data).result(SECONDS)
            except IncompleteError:
                continue
        while len(waiting) > 3 or (waiting and action > 0.95):
            data, floor, future = waiting.pop(0)
            loaded = future.result(SECONDS)
            t.check(data, loaded, floor)
            loaded.release()
    for data, floor, future in waiting:
        loaded = future.result(SECONDS)
        t.check(data, loaded, floor)
        loaded.release()


def settled(t: World) -> None:
    """Nothing is left over."""
    assert t.tiers.flush(SECONDS)
    until(lambda: t.tiers.stats().staging_bytes == 0)
    stats = t.tiers.stats()
    assert (stats.loads, stats.backlog_bytes) == (0, 0)
    for each in t.tiers._tiers:
        assert all(not entry.holds and entry.whole for entry in each.catalogue.entries())
        assert each.catalogue.used == sum(e.record.size for e in each.catalogue.entries() if e.own)


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_of_a_disk_and_a_store(seed: int) -> None:
    random = np.random.default_rng(seed)
    disk, shared = MemoryStore(), MemoryStore()
    layout = LAYOUTS[seed % len(LAYOUTS)]

    def tiers(number: int) -> list[tuple[TierConfig, FaultyStore]]:
        quick = {"patience": 5.0, "pause": 0.01, "retry": 0.05, "rescan": 0.05, "grace": 0.1}
        return [
            (tier("disk", capacity=6000, **quick), FaultyStore(disk, seed=number, rates=RATES)),
            (tier("store", shared=True, **quick), FaultyStore(shared, seed=number + 50, rates=RATES)),
        ]

    for restart in range(2):
        made = tiers(100 * seed + 10 * restart)
        with (
            World(*made, layout=layout, staging=2000, backlog=4000) as t,
            World(tiers(100 * seed + 10 * restart + 1)[1], layout=layout, staging=2000) as u,
        ):
            for _ in range(4):
                live(t, random, 10)
                live(u, random, 5)
            settled(t)
            settled(u)
        assert sum(made[0][1].struck.values()) > 0
    clean = [(tier("disk"), disk), (tier("store", shared=True), shared)]
    with World(*clean, layout=layout) as t:  # and what is left is right, too
        for first in range(3):
            for second in range(3):
                data = tokens(20) + tokens(20, 10 + first) + tokens(20, 20 + second)
                t.search(data)
                for position in t.positions(data):
                    t.load(data, limit=position).release()
        t.tiers.reset().result(SECONDS)
        assert [name for name in (*disk.objects, *shared.objects) if not name.endswith("/about")] == []


KILLED = """
import sys
import numpy as np
from tests.tiers.world import tier
from headway.tiers.disk import DiskStore
from tests.tiers.test_machine import live
from tests.tiers.world import World
t = World((tier("disk", capacity=9000), DiskStore(sys.argv[1])))
print("up", flush=True)
live(t, np.random.default_rng(int(sys.argv[2])), 1_000_000)
"""


def killed(folder: Path, times: int, seed: int) -> None:
    """A writer that is killed at random moments, and what the next one finds."""
    random = np.random.default_rng(seed)
    for number in range(times):
        command = [sys.executable, "-c", KILLED, str(folder), str(seed + number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(float(random.random()) * 0.2)
            os.kill(process.pid, signal.SIGKILL)
        with World((tier("disk", grace=0.0), DiskStore(folder))) as t:
            assert t.tiers.flush(SECONDS)
            live(t, np.random.default_rng(number), 20)
            settled(t)
            entries = t.tiers._tiers[0].catalogue.entries()
            named = {name.rpartition("/")[2] for name in t.tiers._tiers[0].names(entries)}
            files = {path.name for path in folder.rglob("*") if path.is_file()} - {"about"}
            assert named <= files
            assert t.tiers.stats().tiers[0].failures.get("corrupt", 0) == 0
        with World((tier("disk", grace=0.0), DiskStore(folder))) as t:
            assert t.tiers.flush(SECONDS)
            entries = t.tiers._tiers[0].catalogue.entries()
            named = {name.rpartition("/")[2] for name in t.tiers._tiers[0].names(entries)}
            files = {path.name for path in folder.rglob("*") if path.is_file()} - {"about"}
            assert files == named  # nothing is left that no checkpoint needs


def test_t32_a_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    killed(tmp_path, 2, 0)


@pytest.mark.slow
def test_a_writer_killed_two_hundred_times(tmp_path: Path) -> None:
    killed(tmp_path, 200, 1000)
