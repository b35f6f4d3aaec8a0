"""What is forgotten on purpose: one prefix, one namespace, or everything; and what leases there do then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import Outcome, Prompt, Reason, ResetReport

BOTH = pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])


def known(engine: Engine, *parts: tuple[int, int], **options: Any) -> int:
    return engine.cache.lookup(Prompt(tokens(*parts), **options)).matched


@BOTH
def test_a_prefix_is_forgotten_with_all_that_begins_with_it(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups)
    engine.run(tokens((1, 20), (2, 20)))
    engine.run(tokens((1, 20), (2, 10), (3, 20)))
    engine.run(tokens((1, 20), (4, 20)))
    free = engine.cache.free_blocks
    report = engine.cache.forget(Prompt(tokens((1, 20), (2, 5))))
    assert report.blocks_freed == engine.cache.free_blocks - free > 0
    assert known(engine, (1, 20), (2, 20)) == known(engine, (1, 20), (2, 10), (3, 20)) == 20
    assert known(engine, (1, 20), (4, 20)) == 40
    assert engine.hit(tokens((1, 20), (4, 20))) == 39


@BOTH
def test_what_no_other_shares_is_forgotten_from_its_first_token_on(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups)
    engine.run(tokens((1, 40)))
    engine.run(tokens((2, 40)))
    engine.cache.forget(Prompt(tokens((1, 30))))
    assert known(engine, (1, 40)) == 0
    story = engine.cache.explain(Prompt(tokens((1, 40))))
    assert story.reasons == {Reason.NOTHING_MATCHED}
    assert engine.hit(tokens((2, 40))) == 39


def test_a_prefix_that_is_not_known_whole_is_not_forgotten() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    assert engine.cache.forget(Prompt(tokens((1, 20), (2, 1)))) == ResetReport(0, 0, 0)
    assert engine.cache.forget(Prompt(tokens((3, 5)))) == ResetReport(0, 0, 0)
    assert engine.hit(tokens((1, 20))) == 19


def test_what_was_forgotten_is_computed_and_kept_again() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    engine.cache.forget(Prompt(tokens((1, 20))))
    assert engine.run(tokens((1, 20))) == 0
    assert engine.run(tokens((1, 20))) == 19


@BOTH
@pytest.mark.parametrize(
    "forget",
    [
        lambda engine: engine.cache.forget(Prompt(tokens((1, 10)))),
        lambda engine: engine.cache.forget_namespace(0),
        lambda engine: engine.cache.reset(),
    ],
    ids=["prefix", "namespace", "all"],
)
def test_a_running_lease_goes_on_and_publishes_nothing_more(
    groups: tuple[object, ...], forget: Callable[[Engine], ResetReport]
) -> None:
    engine = Engine.of(*groups)
    lease = engine.start(tokens((1, 40)), pin=30)
    engine.step(lease, count=20)
    assert forget(engine).leases_detached == 1
    assert lease.wishes[0].outcome is Outcome.NOT_STORED
    engine.compute(lease)
    engine.cache.finish([lease.row])
    assert known(engine, (1, 40)) == 0
    assert engine.cache.free_blocks == 100


def test_a_lease_elsewhere_is_left_alone() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((2, 40)))
    engine.step(lease, count=20)
    engine.run(tokens((1, 40)))
    assert engine.cache.forget(Prompt(tokens((1, 10)))).leases_detached == 0
    engine.compute(lease)
    engine.cache.finish([lease.row])
    assert engine.hit(tokens((2, 40))) == 39


@BOTH
def test_pins_are_forgotten_with_what_they_protect(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups)
    engine.run(tokens((1, 40), (2, 5)), pin=40)
    engine.run(tokens((1, 40), (3, 5)))
    engine.cache.forget(Prompt(tokens((1, 40), (3, 2))))
    assert engine.cache.stats().pinned > 0
    engine.cache.forget(Prompt(tokens((1, 10))))
    stats = engine.cache.stats()
    assert (stats.pinned, stats.free) == (0, 100)


def test_one_namespace_is_forgotten() -> None:
    engine = Engine.of(ATTENTION, STATE)
    first, second = (engine.cache.namespace(salt=salt) for salt in "ab")
    for namespace in (first, second):
        engine.run(tokens((1, 20)), namespace=namespace)
    report = engine.cache.forget_namespace(first)
    assert (report.checkpoints, report.leases_detached) == (2, 0)
    assert known(engine, (1, 20), namespace=first) == 0
    assert engine.hit(tokens((1, 20)), namespace=second) == 19
    assert engine.cache.forget_namespace(first) == engine.cache.forget_namespace(99) == ResetReport(0, 0, 0)
