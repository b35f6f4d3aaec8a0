import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.engine.bench import WORLDS
from tests.engine.fakes import EOS, VOCAB, FakeDevice, expected_answer, model_facts

from headway.cache import CacheConfig, FullAttention, LayerSpec, PrefixCache
from headway.engine import (
    Engine,
    EngineConfig,
    EngineStoppedError,
    GenerationRequest,
    NotFiniteError,
    QueueFullError,
    RequestFailedError,
    RequestHandle,
    RequestResult,
    StepWork,
    longest_servable,
)
from headway.engine.scheduling.lower import LowerTiers
from headway.errors import ConfigError, RequestError
from headway.runtime.interface import RowFault


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def asked(tokens: Sequence[int], max_tokens: int = 6, **options: object) -> GenerationRequest:
    return GenerationRequest(np.array(tokens, dtype=np.int32), max_tokens, **options)  # type: ignore[arg-type]


class Watcher:
    def __init__(self) -> None:
        self.finished: list[RequestResult] = []
        self.tokens = 0
        self.forgot: list[str | None] = []

    def request_finished(self, result: RequestResult) -> None:
        self.finished.append(result)

    def step_done(self, seconds: float, tokens: int) -> None:
        self.tokens += tokens

    def forgotten(self, salt: str | None) -> None:
        self.forgot.append(salt)


@contextmanager
def engine(
    groups: Sequence[LayerSpec] = WORLDS["hybrid"], blocks: int = 200, **options: int
) -> Iterator[tuple[Engine, FakeDevice]]:
    config = EngineConfig(**({"max_batched_tokens": 32, "max_running": 8, "max_model_len": 200} | options))
    cache = PrefixCache(CacheConfig(groups, blocks, block_tokens=4, check=True))
    device = FakeDevice(cache.geometry, blocks)
    built = Engine(cache, device, config, model_facts(), Watcher())
    built.start()
    try:
        yield built, device
    finally:
        built.close()
    assert device.closed.is_set()
    assert cache.leases == 0 or built.failure is not None


def right(engine: Engine, request: GenerationRequest) -> tuple[int, ...]:
    return tuple(expected_answer(engine.cache.geometry, request.tokens.tolist(), request.max_tokens))


def test_results_from_many_threads_are_right():
    with engine() as (built, _):
        requests = [asked(prompt(20 + i % 7, seed=i % 5), 5 + i % 9) for i in range(60)]
        results: dict[int, RequestResult] = {}

        def ask(i: int) -> None:
            results[i] = built.submit(requests[i]).result(60)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {i: results[i].tokens for i in results} == {i: right(built, r) for i, r in enumerate(requests)}
        assert isinstance(built.observer, Watcher)
        assert len(built.observer.finished) == 60
        assert built.observer.tokens == built.snapshot().counters.computed_tokens


def test_an_event_loop_is_woken_once_per_step_however_many_streams_it_reads():
    with engine() as (built, device):

        async def read_all() -> tuple[int, list[RequestResult]]:
            loop, woken = asyncio.get_running_loop(), 0
            wake = loop.call_soon_threadsafe

            def count(*arguments: Any) -> asyncio.Handle:
                nonlocal woken
                woken += 1
                return wake(*arguments)

            loop.call_soon_threadsafe = count  # type: ignore[method-assign]

            async def read(handle: RequestHandle) -> RequestResult:
                *_, last = [delta async for delta in handle]
                assert last.result is not None
                return last.result

            go = threading.Event()
            device.before_step = lambda work: go.wait(60) and None
            reading = [
                asyncio.create_task(read(built.submit(asked(prompt(9, seed=i), 30, ignore_eos=True)))) for i in range(8)
            ]
            await asyncio.sleep(0)
            go.set()
            results = await asyncio.gather(*reading)
            return woken, results

        woken, results = asyncio.run(read_all())
        assert sum(len(result.tokens) for result in results) == 8 * 30
        assert woken <= len(device.steps), "one wake-up per step at most"


def test_a_stream_in_a_thread_and_one_in_asyncio_say_the_same():
    with engine() as (built, _):
        request = asked(prompt(20), 30)

        async def collect(handle: RequestHandle) -> list[int]:
            return [token async for delta in handle for token in delta.tokens]

        threaded = [token for delta in built.submit(request) for token in delta.tokens]
        assert tuple(threaded) == right(built, request)
        assert asyncio.run(collect(built.submit(request))) == threaded
        done = built.submit(request)
        done.result(60)
        assert asyncio.run(collect(done)) == threaded, "deltas wait for a reader that comes late"


def test_the_last_delta_carries_the_result_and_its_times():
    with engine() as (built, _):
        *_, last = built.submit(asked(prompt(20), 5))
        result = last.result
        assert result is not None
        times = result.timings
        assert times.arrived <= times.admitted <= times.first_token <= times.finished
        assert result.prompt_tokens == 20
        assert result.explanation.prompt_tokens == 20
        assert result.text == built.model.decode([t for t in result.tokens if t != EOS])


def test_a_closed_event_loop_does_not_hurt_the_engine():
    with engine() as (built, _):

        async def leave() -> RequestHandle:
            handle = built.submit(asked(prompt(20), 150, ignore_eos=True))
            await anext(aiter(handle))
            return handle

        handle = asyncio.run(leave())
        assert len(handle.result(60).tokens) == 150


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        (asked([]), "prompt", "empty_prompt"),
        (asked([1, 2, VOCAB]), "prompt", "invalid_token"),
        (asked([1, -2]), "prompt", "invalid_token"),
        (asked([1], 0), "max_tokens", None),
        (asked(prompt(150), 51), "prompt", "context_length_exceeded"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(request_: GenerationRequest, param: str, code: str | None):
    with engine() as (built, _):
        with pytest.raises(RequestError) as error:
            built.submit(request_)
        assert (error.value.param, error.value.code) == (param, code)


def test_the_length_limit_is_what_the_pool_holds():
    """PRE-08: start-up and run time use one bound, and the longest request that is accepted runs to its end."""
    with engine(WORLDS["full"], blocks=20, max_batched_tokens=64, max_model_len=None) as (built, _):  # type: ignore[arg-type]
        limit = built.max_model_len
        assert 70 <= limit <= 80
        assert limit == longest_servable(built.cache.geometry, 20, 10_000)
        request = asked(prompt(limit - 40), 40, ignore_eos=True)
        for _ in range(3):
            assert len(built.submit(request).result(60).tokens) == 40
        with pytest.raises(RequestError, match="shorten the prompt"):
            built.submit(asked(prompt(limit - 40), 41))


def test_a_pool_that_is_too_small_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="--memory"), engine(blocks=1):
        pass
    with pytest.raises(ConfigError, match="--max-model-len"), engine(blocks=20, max_model_len=200):
        pass


def test_a_full_queue_refuses_without_changing_anything():
    go = threading.Event()
    with engine(max_running=1, max_waiting=2) as (built, device):
        device.before_step = lambda work: go.wait(60) and None
        handles = [built.submit(asked(prompt(8, seed=i), 3)) for i in range(2)]
        with pytest.raises(QueueFullError, match="try again"):
            built.submit_group([asked(prompt(8), 3)] * 2)
        go.set()
        assert all(len(handle.result(60).tokens) for handle in handles)
        assert built.snapshot(60).counters.refused["queue_full"] == 2


def test_abort_ends_a_stream():
    entered = threading.Event()
    with engine() as (built, device):
        device.before_step = lambda work: entered.set()
        handle = built.submit(asked(prompt(20), 150, ignore_eos=True))
        assert entered.wait(60)
        handle.abort()
        result = handle.result(60)
        if result.finish_reason == "abort":
            assert len(result.tokens) < 150
        handle.abort()
        assert built.snapshot(60).cache.leased == 0


def test_reset_from_another_thread_while_requests_run():
    with engine() as (built, _):
        requests = [asked(prompt(20, seed=i), 100, ignore_eos=True) for i in range(4)]
        handles = [built.submit(request) for request in requests]
        report = built.reset(60)
        assert report.leases_detached <= 4
        for request, handle in zip(requests, handles, strict=True):
            assert handle.result(60).tokens == tuple(
                expected_answer(built.cache.geometry, request.tokens.tolist(), 100, ignore_eos=True)
            )


def test_observers_hear_whose_prefixes_were_forgotten_on_purpose():
    with engine() as (built, device):
        run = device.run
        device.run = lambda work: [replace(answer, fault=RowFault(damaged=4)) for answer in run(work)]
        with pytest.raises(NotFiniteError, match="has been forgotten"):
            built.submit(asked(prompt(20), salt="mine")).result(60)
        assert built.observer.forgot == ["mine"]
        device.run = run
        built.reset(60)
        assert built.observer.forgot == ["mine", None]


def test_drain_refuses_new_requests_and_lets_old_ones_end():
    with engine() as (built, _):
        handle = built.submit(asked(prompt(20), 100, ignore_eos=True))
        assert built.healthy
        assert built.drain(60)
        assert len(handle.result(1).tokens) == 100
        assert not built.healthy
        with pytest.raises(EngineStoppedError, match="shutting down"):
            built.submit(asked(prompt(20)))


def test_close_fails_what_is_left():
    go = threading.Event()
    with engine(max_running=1) as (built, device):
        device.before_step = lambda work: go.wait(60) and None
        handles = [built.submit(asked(prompt(20, seed=i), 100, ignore_eos=True)) for i in range(3)]
        assert not built.drain(0.0)
        closing = threading.Thread(target=built.close)
        closing.start()
        go.set()
        closing.join(60)
        for handle in handles:
            with pytest.raises(EngineStoppedError):
                handle.result(60)
        assert built.snapshot().waiting + built.snapshot().running >= 0
        with pytest.raises(EngineStoppedError):
            built.reset()


def test_a_request_that_always_fails_raises_in_its_reader():
    with engine() as (built, device):
        device.fail_when = lambda work: True
        with pytest.raises(RequestFailedError, match="the device says no"):
            list(built.submit(asked(prompt(20))))
        device.fail_when = lambda work: False
        request = asked(prompt(20))
        assert built.submit(request).result(60).tokens == right(built, request)


def test_a_fault_of_the_engine_fails_everybody_and_is_seen():
    with engine() as (built, device):

        def broken(work: StepWork) -> None:
            raise KeyboardInterrupt

        device.before_step = broken
        with pytest.raises(EngineStoppedError, match="has failed"):
            built.submit(asked(prompt(20))).result(60)
        built.close()
        assert not built.healthy
        with pytest.raises(EngineStoppedError, match="has failed"):
            built.submit(asked(prompt(20)))


def test_a_step_that_hangs_does_not_hold_up_a_close_with_a_limit():
    go, stuck = threading.Event(), threading.Event()

    def hang(work: StepWork) -> None:
        stuck.set()
        go.wait(60)

    with engine() as (built, device):
        device.before_step = hang
        handle = built.submit(asked(prompt(20)))
        assert stuck.wait(60)
        assert not built.close(timeout=0.01)
        go.set()
        assert built.close()
        with pytest.raises(EngineStoppedError):
            handle.result(60)


def test_an_engine_that_never_started_can_be_closed_twice():
    cache = PrefixCache(CacheConfig([FullAttention("full", 8)], 50, block_tokens=4))
    device = FakeDevice(cache.geometry, 50)
    closed: list[float] = []
    lower = LowerTiers(cache)
    lower.close = closed.append  # type: ignore[method-assign]
    built = Engine(cache, device, EngineConfig(), model_facts(200), lower=lower)
    built.close()
    assert closed == [0.0]
    device.close = lambda: pytest.fail("closed twice")  # type: ignore[method-assign]
    built.close()
    assert device.closed.is_set()


def test_prefix_reuse_can_be_switched_off():
    with engine(prefix_reuse=False) as (built, _):
        request = asked(prompt(20), 4)
        results = [built.submit(request).result(60) for _ in range(2)]
        assert [result.cached_tokens for result in results] == [0, 0]
        assert results[0].tokens == right(built, request)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_running": 0}, "max_running is 0"),
        ({"max_batched_tokens": 4, "max_running": 8}, "raise the first or lower the second"),
        ({"placement": ("somewhere",)}, "placement='somewhere' is unknown"),
        ({"eviction": "random"}, "eviction"),
        ({"memory": 0}, "memory is 0"),
        ({"step_price": 0.5}, "step_price is 0.5"),
        ({"step_price": 2.0, "draft": "lookup"}, "a model with step_price"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], text: str):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**options)  # type: ignore[arg-type]
