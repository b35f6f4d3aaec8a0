"""What the engine makes of ranks that are lost, in a step or between steps: who is told what, and who is served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.engine.bench import WORLDS
from tests.engine.fakes import FakeDevice, expected_answer, model_facts
from tests.engine.test_engine import asked, prompt

from headway.cache import CacheConfig, PrefixCache
from headway.engine import (
    Engine,
    EngineConfig,
    EngineStoppedError,
    ParallelConfig,
    RanksLostError,
    RequestFailedError,
    StepWork,
)
from headway.errors import ConfigError


@contextmanager
def engine(policy: str) -> Iterator[tuple[Engine, FakeDevice]]:
    config = EngineConfig(
        max_batched_tokens=32,
        max_running=2,
        max_model_len=200,
        parallel=ParallelConfig(on_rank_failure=policy),
    )
    cache = PrefixCache(CacheConfig(WORLDS["hybrid"], 200, block_tokens=4, check=True))
    device = FakeDevice(cache.geometry, 200)
    built = Engine(cache, device, config, model_facts()).start()
    try:
        yield built, device
    finally:
        built.close()


def lose(device: FakeDevice, at_step: int) -> None:
    """Lose the ranks in the middle of one step, after its entries were written."""

    def fail(work: StepWork) -> bool:
        if len(device.steps) == at_step:
            raise RanksLostError("rank 1 was ended by SIGKILL")
        return False

    device.fail_when = fail


def test_lost_ranks_end_what_runs_and_what_waits_is_served_by_new_ones() -> None:
    """Three requests, two places: after the loss the third runs, and nothing is reused of what was lost."""
    with engine("restart") as (built, device):
        go = threading.Event()
        device.before_step = lambda work: go.wait(60) and None
        lose(device, at_step=5)
        requests = [asked(prompt(30, seed=i), 40, ignore_eos=True) for i in range(3)]
        handles = [built.submit(request) for request in requests]
        go.set()
        for handle in handles[:2]:
            with pytest.raises(RequestFailedError, match=r"send the request again: rank 1 was ended by SIGKILL"):
                handle.result(60)
        geometry = built.cache.geometry
        expected = [tuple(expected_answer(geometry, r.tokens.tolist(), 40, ignore_eos=True)) for r in requests]
        assert handles[2].result(60).tokens == expected[2]
        again = [built.submit(request).result(60) for request in requests]
        assert [result.tokens for result in again] == expected
        assert [result.cached_tokens for result in again] == [0, 0, 29], "memory of lost ranks is not reused"
        assert device.restarts == 1
        stats = built.snapshot(60)
        assert (stats.cache.leases, stats.cache.leased) == (0, 0)
        assert (stats.counters.failed_steps, stats.counters.finished["error"]) == (1, 2)
        assert stats.counters.rank_losses == 1
        assert built.healthy


def test_no_token_of_the_lost_step_reaches_a_client() -> None:
    with engine("restart") as (built, device):
        lose(device, at_step=6)
        request = asked(prompt(30), 40, ignore_eos=True)
        handle = built.submit(request)
        told: list[int] = []
        with pytest.raises(RequestFailedError):
            told += [token for delta in handle for token in delta.tokens]
        whole = expected_answer(built.cache.geometry, request.tokens.tolist(), 40, ignore_eos=True)
        assert len(told) < 40
        assert told == whole[: len(told)]


def lose_between_steps(device: FakeDevice) -> tuple[threading.Event, threading.Event]:
    """Lose the ranks of an engine that has nothing to do. Returns what says that it is so, and lets new ones start."""
    lost, start = threading.Event(), threading.Event()
    restart = device.restart

    def check() -> None:
        if not start.is_set():
            raise RanksLostError("rank 1 was ended by SIGKILL")

    def wait() -> None:
        lost.set()
        assert start.wait(60)
        restart()

    device.check, device.restart = check, wait  # type: ignore[method-assign]
    return lost, start


def test_ranks_that_are_lost_between_steps_are_replaced_before_anybody_asks() -> None:
    with engine("restart") as (built, device):
        assert built.unavailable is None
        before = built.submit(asked(prompt(30), 8, ignore_eos=True)).result(60)
        lost, start = lose_between_steps(device)
        assert lost.wait(60)
        assert built.unavailable == "ranks are lost, new ones start: rank 1 was ended by SIGKILL"
        assert not built.healthy
        assert built.snapshot(0.01).counters.rank_losses == 1
        handle = built.submit(asked(prompt(30), 8, ignore_eos=True))
        start.set()
        result = handle.result(60)
        assert (result.tokens, result.cached_tokens) == (before.tokens, 0)
        assert built.healthy
        counters = built.snapshot(60).counters
        assert (device.restarts, counters.rank_losses, counters.failed_steps) == (1, 1, 0)


def test_an_engine_that_is_to_end_with_its_ranks_ends_between_steps_too() -> None:
    with engine("exit") as (built, device):
        lose_between_steps(device)
        built.join()
        assert isinstance(built.failure, RanksLostError)
        assert built.unavailable == "the engine has failed: rank 1 was ended by SIGKILL"


def test_no_ranks_are_started_for_an_engine_that_is_to_stop() -> None:
    with engine("restart") as (built, device):
        entered, go = threading.Event(), threading.Event()

        def hold(work: StepWork) -> None:
            entered.set()
            assert go.wait(60)

        device.before_step = hold
        lose(device, at_step=1)
        handles = [built.submit(asked(prompt(30, seed=i), 8)) for i in range(3)]
        assert entered.wait(60)
        assert not built.close(0.0), "the step goes on"
        go.set()
        assert built.close(60)
        for handle in handles:
            with pytest.raises((RequestFailedError, EngineStoppedError)):
                handle.result(60)
        assert (device.restarts, built.failure) == (0, None)


def test_the_engine_ends_where_that_is_asked_for() -> None:
    with engine("exit") as (built, device):
        lose(device, at_step=3)
        handle = built.submit(asked(prompt(30), 40, ignore_eos=True))
        with pytest.raises(RequestFailedError, match="SIGKILL"):
            handle.result(60)
        built.join()
        assert isinstance(built.failure, RanksLostError)
        assert not built.healthy
        assert device.restarts == 0
        with pytest.raises(EngineStoppedError, match="SIGKILL"):
            built.submit(asked(prompt(30)))


def test_ranks_that_cannot_be_restarted_end_the_engine() -> None:
    with engine("restart") as (built, device):
        lose(device, at_step=3)

        def refuse() -> None:
            raise ConfigError("the cluster has no room")

        go = threading.Event()
        device.before_step = lambda work: go.wait(60) and None
        device.restart = refuse  # type: ignore[method-assign]
        handles = [built.submit(asked(prompt(30, seed=i), 40, ignore_eos=True)) for i in range(3)]
        go.set()
        for handle in handles:
            with pytest.raises((RequestFailedError, EngineStoppedError)):
                handle.result(60)
        built.join()
        assert isinstance(built.failure, ConfigError)
