"""What the cache refuses to do, changing nothing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import Candidate, EvictionPolicy, Prompt
from headway.errors import LeaseError, ThreadError


def test_misuse_is_refused_and_changes_nothing() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 20)))
    step = engine.cache.extend([lease.row], [8])
    for wrong in (
        lambda: engine.cache.extend([lease.row], [1]),
        lambda: engine.cache.finish([lease.row]),
        lambda: engine.cache.preempt([lease.row]),
        lambda: engine.cache.commit(step, counts=[9]),
        lambda: engine.cache.commit(step, counts=[-1]),
        lambda: engine.cache.extend([99], [1]),
    ):
        with pytest.raises(LeaseError):
            wrong()
    engine.cache.commit(step)
    assert lease.computed == 8
    for wrong in (
        lambda: engine.cache.commit(step),
        lambda: engine.cache.fail(step),
        lambda: engine.cache.extend([lease.row, lease.row], [1, 1]),
        lambda: engine.cache.extend([lease.row], [-1]),
    ):
        with pytest.raises(LeaseError):
            wrong()
    engine.cache.finish([lease.row])
    with pytest.raises(LeaseError):
        engine.cache.extend([lease.row], [1])
    with pytest.raises(LeaseError):
        engine.cache.finish([lease.row])
    assert engine.cache.stats().leased == 0


@pytest.mark.parametrize(
    "options",
    [{"breakpoints": (0,)}, {"breakpoints": (21,)}, {"boundaries": (21,)}, {"pin": -1}],
)
def test_a_prompt_with_marks_outside_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(LeaseError):
        Prompt(tokens((1, 20)), **options)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(LeaseError):
        Prompt(np.empty(0, dtype=np.int32))


# Hits.


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_a_hit_of_another_cache_is_refused_though_the_versions_agree(groups: tuple[object, ...]) -> None:
    first, second = Engine.of(*groups), Engine.of(*groups)
    first.run(tokens((1, 40)))
    second.run(tokens((2, 40)))
    prompt = Prompt(tokens((1, 40)))
    hit = first.cache.lookup(prompt)
    assert (hit.tokens, hit.version) == (39, second.cache.lookup(prompt).version)
    before = second.cache.stats()
    with pytest.raises(LeaseError, match="another cache"):
        second.cache.lease(prompt, hit)
    assert second.cache.stats() == before
    assert first.cache.lease(prompt, hit).computed == 39


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_a_hit_that_has_grown_old_is_looked_up_again(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups, blocks=30)
    engine.run(tokens((1, 40)))
    prompt = Prompt(tokens((1, 40)))
    hit = engine.cache.lookup(prompt)
    assert hit.tokens == 39
    engine.run(tokens((2, 100)))
    lease = engine.cache.lease(prompt, hit)
    assert lease.computed == lease.hit.tokens < 39
    engine.compute(lease)


def test_a_hit_of_an_equal_prompt_is_looked_up_again() -> None:
    """What belongs to a prompt beside its tokens is not the hit's: here, to leave nothing behind."""
    engine = Engine.of(ATTENTION)
    hit = engine.cache.lookup(Prompt(tokens((1, 40))))
    lease = engine.cache.lease(Prompt(tokens((1, 40)), no_store=True), hit)
    engine.compute(lease)
    engine.cache.finish([lease.row])
    assert engine.hit(tokens((1, 40))) == 0


# Threads.


class Waiting(EvictionPolicy):
    """Waits in the middle of an eviction until it may go on."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def evicted(self, candidate: Candidate) -> None:
        self.inside.set()
        assert self.go_on.wait(60)

    def priority(self, candidate: Candidate) -> float:
        return float(candidate.used)


def test_a_second_thread_inside_a_call_is_refused_and_nothing_breaks() -> None:
    policy = Waiting()
    engine = Engine.of(ATTENTION, blocks=20, eviction=policy)
    engine.run(tokens((1, 60)))
    other = engine.start(tokens((2, 60)))
    steps: list[Any] = []
    thread = threading.Thread(target=lambda: steps.append(engine.cache.extend([other.row], [60])))
    thread.start()
    assert policy.inside.wait(60)
    prompt = Prompt(tokens((3, 10)))
    for call in (
        lambda: engine.cache.lookup(prompt),
        lambda: engine.cache.lease(prompt),
        lambda: engine.cache.extend([other.row], [1]),
        lambda: engine.cache.abort([other.row]),
        engine.cache.reset,
        engine.cache.check,
        engine.cache.stats,
    ):
        with pytest.raises(ThreadError, match="belongs to one thread"):
            call()
    policy.go_on.set()
    thread.join()
    engine.cache.commit(steps[0], sampled=[1])
    engine.cache.check()
    engine.cache.finish([other.row])
    assert engine.hit(tokens((2, 60))) == 59


def test_threads_may_take_turns() -> None:
    engine = Engine.of(ATTENTION)
    for stream in range(1, 4):
        thread = threading.Thread(target=engine.run, args=(tokens((stream, 20)),))
        thread.start()
        thread.join()
    assert [engine.hit(tokens((stream, 20))) for stream in range(1, 4)] == [19] * 3


@pytest.mark.parametrize("call", ["lookup", "explain", "path", "lease", "forget", "unpin"])
def test_what_is_no_prompt_is_refused_by_name(call: str) -> None:
    with pytest.raises(LeaseError, match="give a Prompt, such as"):
        getattr(Engine.of(ATTENTION).cache, call)([1, 2, 3])


def test_a_salt_is_no_namespace_and_nothing_is_no_listener() -> None:
    cache = Engine.of(ATTENTION).cache
    with pytest.raises(LeaseError, match="the id that"):
        cache.forget_namespace("salt")  # type: ignore[arg-type]
    with pytest.raises(LeaseError, match="cannot be called"):
        cache.subscribe(None)  # type: ignore[arg-type]
    with pytest.raises(LeaseError, match="media must be Media"):
        cache.symbols([7, 7], [(0, 1, "a")])  # type: ignore[list-item]
    with pytest.raises(LeaseError, match="pin is True"):
        Prompt([1, 2, 3], pin=True)
