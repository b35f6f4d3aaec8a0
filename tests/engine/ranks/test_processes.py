"""Real ranks: processes that talk through gloo, killed, stopped and left alone."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.runtime.tiny_configs import COMMON, MODELS
from tests.server import tiny
from transformers import AutoModelForCausalLM

from headway.cache import CacheGeometry
from headway.engine import EngineConfig, GenerationRequest, ParallelConfig, RanksLostError, RequestFailedError
from headway.engine.build import BuiltEngine, build_engine, engine_of
from headway.engine.executor import BlockRange
from headway.engine.ranks.driver import RankedExecutor
from headway.engine.ranks.processes import ProcessRanks, devices_of_ranks
from headway.errors import ConfigError, ModelError
from headway.runtime.forward.canonical import shares_of
from headway.runtime.loading import load_model
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.memory import row_bytes

MEMORY = 8 << 20
PATIENCE = 300.0
"""Seconds until a test gives up: the machine may have other things to do."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(source: Path) -> Iterator[BuiltEngine]:
    parallel = ParallelConfig(dcp=2, interleave=4, communication="a2a", rank_timeout=PATIENCE)
    built = build_engine(str(source), EngineConfig(memory=MEMORY, max_batched_tokens=64, parallel=parallel))
    built.engine.start()
    yield built
    built.engine.close()


def executor_of(built: BuiltEngine) -> RankedExecutor:
    executor = built.engine._executor
    assert isinstance(executor, RankedExecutor)
    return executor


def restart_of(executor: RankedExecutor) -> threading.Event:
    """What is set once the executor has started new ranks."""
    done, restart = threading.Event(), executor.restart

    def told() -> None:
        restart()
        done.set()

    executor.restart = told  # type: ignore[method-assign]
    return done


def processes_of(built: BuiltEngine) -> list[subprocess.Popen[bytes]]:
    group = executor_of(built)._group
    assert isinstance(group, ProcessRanks)
    return group.processes


def prompt(seed: int, length: int = 150) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def asked(tokens: list[int], count: int) -> GenerationRequest:
    return GenerationRequest(np.array(tokens, dtype=np.int32), count, ignore_eos=True)


def greedy(source: Path, tokens: list[int], count: int) -> list[int]:
    """Greedy answer by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    text = torch.tensor([tokens])
    done = model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return done[0, len(tokens) :].tolist()


def test_two_ranks_answer_as_one_and_reuse_as_one(built: BuiltEngine, source: Path) -> None:
    tokens = prompt(1)
    expected = greedy(source, tokens, 12)
    results = [built.engine.submit(asked(tokens, 12)).result(PATIENCE) for _ in range(2)]
    assert [list(result.tokens) for result in results] == [expected, expected]
    assert [result.cached_tokens for result in results] == [0, 149]
    one = engine_of(load_model(str(source)), EngineConfig(memory=MEMORY))
    assert built.capacity.bytes == one.capacity.bytes
    assert built.capacity.tokens == 2 * one.capacity.tokens
    assert built.check.reuse
    one.engine.close()


SHARING = [
    *(pytest.param("KimiLinear", 4, 2, 1, marks=pytest.mark.slow), ("Qwen3_5", 2, 2, 1)),
    *(("KimiLinear", 1, 1, 2), pytest.param("Qwen3_5", 2, 1, 2, marks=pytest.mark.slow)),
]
"""A latent that is whole on every rank (`test_matrix` has it in one process); and split heads, with mixers that
transformers would cut in other places. Both with ranks that share the tokens of long forwards as well."""


@pytest.mark.parametrize(("name", "tp", "dcp", "pcp"), SHARING)
def test_t15_ranks_that_share_weights_or_tokens_answer_and_refuse_as_one(
    name: str, tp: int, dcp: int, pcp: int, tmp_path: Path
) -> None:
    """They read their shares, check themselves, draft, reuse, and hold as many bytes as was planned."""
    kind, arguments = MODELS[name]
    folder = tiny.save_model(tmp_path, getattr(transformers, kind)(**(COMMON | arguments | {"vocab_size": 262})))
    parallel = ParallelConfig(tp=tp, dcp=dcp, pcp=pcp, interleave=4, rank_timeout=PATIENCE)
    config = EngineConfig(memory=MEMORY, max_batched_tokens=64, draft="lookup", parallel=parallel)
    built = build_engine(str(folder), config)
    try:
        assert built.check.reuse
        assert len(processes_of(built)) == tp * pcp
        _refuse(executor_of(built), processes_of(built)[-1].pid)
        _move(executor_of(built), folder)
        built.engine.start()
        tokens = prompt(1)
        results = [built.engine.submit(asked(tokens, 12)).result(PATIENCE) for _ in range(2)]
        assert [list(result.tokens) for result in results] == [greedy(folder, tokens, 12)] * 2
        assert [result.cached_tokens for result in results] == [0, 149]
        whole = inspect_model(load_model(str(folder)).model)
        assert built.layout.group("state").state_bytes == whole.group("state").state_bytes // tp
        assert (built.layout.parameters, built.layout.cost) == (whole.parameters, whole.cost)
    finally:
        built.engine.close()


def _refuse(executor: RankedExecutor, pid: int) -> None:
    """Host memory that one rank cannot have: it says so, none goes on without it, and all can go on with less."""
    assert executor._room is not None
    assert executor._geometry is not None
    if not hasattr(resource, "prlimit"):
        return
    soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (taken + (256 << 20), hard))
    blocks = (512 << 20) // row_bytes(executor._geometry)
    with pytest.raises(ConfigError, match=r"no room for a cache of 5\d\d\.\d MiB on cpu: lower --host-memory"):
        executor.prepare(executor._geometry, msgspec.structs.replace(executor._room, host_blocks=blocks))
    resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))


def _move(executor: RankedExecutor, folder: Path) -> None:
    """Objects and blocks, of ranks whose memory is not in use yet: as one rank has them, and back as they went."""
    assert executor._room is not None
    assert executor._geometry is not None
    executor.prepare(executor._geometry, msgspec.structs.replace(executor._room, host_blocks=8))
    loaded = load_model(str(folder))
    geometry = CacheGeometry(loaded.layout.groups, block_tokens=16)
    alone = {share.group.name: share.group for share in shares_of(loaded.layout, geometry)}
    assert executor.canonical == alone
    state = executor._geometry.state_blocks
    blocks = np.arange(1, 1 + max(3, state), dtype=np.int32)
    ranges = [BlockRange("full", 3, 90, blocks[:3]), BlockRange("state", 90, 90, blocks[:state] + 20)]
    rng = np.random.default_rng(2)
    objects = [rng.integers(0, 256, alone[each.group].bytes * each.tokens, dtype=np.uint8).data for each in ranges]
    executor.write_objects(ranges, objects)
    out = np.stack([blocks[:3], np.array([5, 0, 7], dtype=np.int32)], axis=1)
    executor.move_blocks(out, np.stack([out[:, 1], blocks[:3] + 40], axis=1))
    ranges[0] = BlockRange("full", 3, 90, blocks[:3] + 40)
    assert executor.read_objects(ranges) == objects


def test_a_late_rank_is_waited_for(built: BuiltEngine, source: Path) -> None:
    tokens, late = prompt(2), processes_of(built)[1]
    handle = built.engine.submit(asked(tokens, 12))
    late.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    late.send_signal(signal.SIGCONT)
    assert list(handle.result(PATIENCE).tokens) == greedy(source, tokens, 12)


def test_a_killed_rank_ends_what_runs_and_the_next_request_is_right(built: BuiltEngine, source: Path) -> None:
    """Rank 1 is stopped first, so that it dies in the middle of a step: rank 0 waits for it in a collective."""
    tokens, victim, before = prompt(3), processes_of(built)[1], processes_of(built)
    expected = greedy(source, tokens, 100)
    told: list[int] = []
    stream = iter(built.engine.submit(asked(tokens, 100)))
    told += next(stream).tokens
    victim.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    victim.kill()
    with pytest.raises(RequestFailedError, match="rank 1 was ended by SIGKILL"):
        told += [token for delta in stream for token in delta.tokens]
    assert told == expected[: len(told)], "no wrong token reaches a client"
    result = built.engine.submit(asked(tokens, 12)).result(PATIENCE)
    assert list(result.tokens) == expected[:12]
    assert result.cached_tokens == 0
    assert all(process.poll() is not None for process in before)
    stats = built.engine.snapshot(PATIENCE).cache
    assert (stats.leases, stats.leased) == (0, 0)


def test_a_rank_that_is_killed_while_nothing_is_asked_is_replaced(built: BuiltEngine, source: Path) -> None:
    before = processes_of(built)
    losses = built.engine.snapshot(PATIENCE).counters.rank_losses
    restarted = restart_of(executor_of(built))
    before[0].kill()
    assert restarted.wait(PATIENCE), "nobody notices"
    assert built.engine.snapshot(PATIENCE).counters.rank_losses == losses + 1
    tokens = prompt(5)
    assert list(built.engine.submit(asked(tokens, 12)).result(PATIENCE).tokens) == greedy(source, tokens, 12)
    assert all(process.poll() is not None for process in before)
    assert not any(process.poll() is not None for process in processes_of(built))


def test_a_stuck_rank_is_noticed_in_time(built: BuiltEngine) -> None:
    """It ends this engine instead of restarting it a second time, which the test before has shown."""
    executor = executor_of(built)
    executor._config = replace(executor._config, rank_timeout=1.0)
    built.engine.config = replace(built.engine.config, parallel=ParallelConfig(on_rank_failure="exit"))
    stuck = processes_of(built)
    stuck[1].send_signal(signal.SIGSTOP)
    with pytest.raises(RequestFailedError, match=r"no answer within 1 seconds: rank 1 is stopped"):
        built.engine.submit(asked(prompt(4), 12)).result(PATIENCE)
    built.engine.join()
    assert all(process.poll() is not None for process in stuck)


def test_a_driver_does_not_wait_for_ever_for_a_rank_that_takes_no_message() -> None:
    """More than the socket holds, to a rank that is stopped before it reads anything."""
    ranks = ProcessRanks(["cpu"])
    try:
        ranks.processes[0].send_signal(signal.SIGSTOP)
        with pytest.raises(RanksLostError, match="rank 0 has taken no message for 1 seconds"):
            ranks.send([bytes(64 << 20)], 1.0)
        assert ranks.receive(0.0) is None
    finally:
        ranks.kill()
    with pytest.raises(OSError, match="closed"):
        ranks.receive(0.0)


DRIVER = """
import time
from headway.engine.ranks.processes import ProcessRanks
ranks = ProcessRanks(["cpu", "cpu"])
print(ranks._directory, *(process.pid for process in ranks.processes), flush=True)
time.sleep(600)
"""


def test_ranks_leave_with_their_driver() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    folder, *written = driver.stdout.readline().split()
    pids = [int(pid) for pid in written]
    assert len(pids) == 2
    assert Path(folder).is_dir()
    ends = [os.pidfd_open(pid) for pid in pids]  # readable once the process has ended
    driver.kill()
    driver.wait()
    driver.stdout.close()
    for end in ends:
        assert select.select([end], [], [], PATIENCE)[0], "a rank outlives its driver"
        os.close(end)
    assert not Path(folder).exists(), "nothing is left of them"


def test_what_cannot_work_is_refused_before_anything_starts(source: Path) -> None:
    for options, error, text in (
        ({"device": "cuda:0"}, ConfigError, "names one GPU for 2 ranks"),
        ({"parallel": ParallelConfig(tp=8)}, ConfigError, "tp=8 does not divide the 4 heads of KimiLinearDelta"),
        ({"block_tokens": 10, "parallel": ParallelConfig(dcp=2, interleave=4)}, ConfigError, "interleave"),
    ):
        config = EngineConfig(memory=MEMORY, parallel=ParallelConfig(dcp=2))
        with pytest.raises(error, match=text):
            build_engine(str(source), replace(config, **options))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no directory"):
        build_engine("./no/such/model", EngineConfig(parallel=ParallelConfig(dcp=2)))
    loaded = load_model(str(source))
    with pytest.raises(ConfigError, match="name it to `build_engine`"):
        engine_of(loaded, EngineConfig(parallel=ParallelConfig(dcp=2)))


def test_devices_of_ranks() -> None:
    assert devices_of_ranks("cpu", 3) == ["cpu"] * 3
    assert devices_of_ranks("cuda:1", 1) == ["cuda:1"]
    if torch.cuda.device_count() < 64:
        with pytest.raises(ConfigError, match="64 ranks need a GPU each"):
            devices_of_ranks("cuda", 64)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see what memory is resident")
def test_memory_of_a_rank_is_what_was_planned(source: Path) -> None:
    """Two ranks of 96 MiB each: what a rank's process grows by when every block has been written."""
    from tests.runtime.parallel.rank_threads import Ranks, layout_of

    from headway.cache import CacheGeometry
    from headway.runtime.forward.runner import ModelRunner
    from headway.runtime.model.memory import blocks_that_fit, capacity

    loaded = load_model(str(source))
    geometry = CacheGeometry(loaded.layout.groups, layout_of(2, 1), block_tokens=16)
    planned = capacity(blocks_that_fit(96 << 20, geometry), geometry)
    _give_back_memory()
    before = _resident()
    runner = ModelRunner(loaded.model, loaded.layout, geometry, planned.blocks, merge=Ranks(2).merges[1])
    runner.arena.data.fill_(1)
    assert abs(_resident() - before - planned.bytes) < 0.02 * planned.bytes


def _give_back_memory() -> None:
    """Give to the system what other tests have freed: an arena made of it would not make the process grow."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
