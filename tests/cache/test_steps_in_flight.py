"""Two steps of a lease under way: the second is planned before the first is committed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CacheConfig, Lease, Prompt, SlidingWindow, Step
from headway.errors import ConfigError, LeaseError

WAYS = pytest.mark.parametrize("plain", [True, False], ids=["numbers", "arrays"])


def engine_of(*groups: Any, plain: bool = True, **options: Any) -> Engine:
    """An engine whose leases may have two steps under way; `plain=False`: it goes the way of large batches."""
    engine = Engine.of(*groups, steps_in_flight=2, **options)
    engine.cache._leases.plain = plain
    return engine


def plan(engine: Engine, *leases: Lease, count: int) -> Step:
    return engine.cache.extend([lease.row for lease in leases], count)


def said(*answer: int) -> np.ndarray:
    return np.array(answer, dtype=np.int32)


@WAYS
def test_the_second_step_starts_where_the_first_ends(plain: bool) -> None:
    engine = engine_of(ATTENTION, plain=plain)
    lease = engine.start(tokens((1, 20)))
    first, second = plan(engine, lease, count=8), plan(engine, lease, count=12)
    assert (second.starts.tolist(), second.counts.tolist()) == ([8], [12])
    assert (lease.computed, lease.planned) == (0, 20)
    engine.cache.commit(first)
    assert (lease.computed, engine.hit(tokens((1, 20)))) == (8, 8)
    engine.cache.commit(second, sampled=said(7))
    assert (lease.computed, lease.tokens) == (20, 21)
    assert engine.hit(tokens((1, 20))) == 19


@WAYS
def test_decoding_goes_on_before_the_token_is_known(plain: bool) -> None:
    engine = engine_of(ATTENTION, plain=plain)
    lease = engine.start(tokens((1, 8)))
    steps = [plan(engine, lease, count=8), plan(engine, lease, count=1)]
    for answer in range(500, 520):
        engine.cache.commit(steps.pop(0), sampled=said(answer))
        steps.append(plan(engine, lease, count=1))
    assert (lease.tokens, lease.computed, lease.planned) == (28, 27, 29)
    for answer in (520, 521):
        engine.cache.commit(steps.pop(0), sampled=said(answer))
    engine.cache.finish([lease.row])
    assert engine.hit(np.concatenate([tokens((1, 8)), np.arange(500, 530, dtype=np.int32)])) == 29


@WAYS
def test_a_lease_fails_alone_and_its_newer_step_is_undone(plain: bool) -> None:
    engine = engine_of(ATTENTION, STATE, plain=plain, placement=("interval:8",), exports_inside=True)
    bad, good = engine.start(tokens((1, 30))), engine.start(tokens((2, 30)))
    first, second = plan(engine, bad, good, count=8), plan(engine, bad, good, count=8)
    engine.cache.fail(first, [bad.row])
    assert (first.counts.tolist(), second.counts.tolist()) == ([0, 8], [0, 8])
    assert {export.row for export in (*first.exports, *second.exports)} == {good.row}
    engine.cache.commit(first)
    engine.cache.abort([bad.row])
    engine.cache.commit(second)
    engine.cache.check()
    assert (engine.hit(tokens((1, 30))), engine.hit(tokens((2, 30)))) == (0, 16)


@WAYS
def test_a_third_step_is_refused_and_so_is_the_newer_before_the_older(plain: bool) -> None:
    engine = engine_of(ATTENTION, plain=plain)
    lease = engine.start(tokens((1, 20)))
    first, second = plan(engine, lease, count=4), plan(engine, lease, count=4)
    for wrong in (
        lambda: plan(engine, lease, count=4),
        lambda: engine.cache.commit(second),
        lambda: engine.cache.fail(second),
        lambda: engine.cache.finish([lease.row]),
        lambda: engine.cache.abort([lease.row]),
    ):
        with pytest.raises(LeaseError):
            wrong()
    engine.cache.commit(first)
    with pytest.raises(LeaseError):
        engine.cache.commit(first)
    engine.cache.commit(second)
    assert lease.computed == 8


def test_one_step_under_way_is_the_default() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 20)))
    plan(engine, lease, count=4)
    with pytest.raises(LeaseError, match="commit or fail it first"):
        plan(engine, lease, count=4)
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match="steps_in_flight"):
            CacheConfig([ATTENTION], 10, steps_in_flight=wrong)


@WAYS
def test_a_shortened_step_undoes_the_next_for_its_lease_alone(plain: bool) -> None:
    engine = engine_of(ATTENTION, plain=plain)
    short, whole = engine.start(tokens((1, 20))), engine.start(tokens((2, 20)))
    first, second = plan(engine, short, whole, count=8), plan(engine, short, whole, count=8)
    engine.cache.commit(first, counts=[5, 8])
    assert second.counts.tolist() == [0, 8]
    assert (short.computed, short.planned, whole.planned) == (5, 5, 16)
    again = plan(engine, short, count=8)
    assert again.starts.tolist() == [5]
    engine.cache.commit(second)
    engine.cache.commit(again)
    assert (short.computed, whole.computed) == (13, 16)


@WAYS
def test_blocks_of_an_undone_step_stay_with_the_lease(plain: bool) -> None:
    engine = engine_of(ATTENTION, plain=plain)
    lease = engine.start(tokens((1, 40)))
    first, _ = plan(engine, lease, count=8), plan(engine, lease, count=16)
    free = engine.cache.free_blocks
    engine.cache.commit(first, counts=[4])
    assert engine.cache.free_blocks == free
    plan(engine, lease, count=20)
    assert engine.cache.free_blocks == free


@WAYS
def test_a_failed_step_undoes_the_next_for_its_leases_alone(plain: bool) -> None:
    engine = engine_of(ATTENTION, STATE, plain=plain)
    bad, good = engine.start(tokens((1, 20)), breakpoints=(8,)), engine.start(tokens((2, 20)), breakpoints=(8,))
    first, second = plan(engine, bad, count=4), plan(engine, bad, good, count=4)
    assert [export.row for export in second.exports] == [bad.row]
    engine.cache.fail(first)
    assert second.counts.tolist() == [0, 4]
    assert second.exports == ()
    engine.cache.abort([bad.row])
    engine.cache.commit(second)
    assert good.computed == 4
    engine.cache.abort([good.row])
    assert engine.cache.stats().leased == 0
    assert not engine.cache._leases.under_way


def test_a_step_of_which_nothing_is_left_need_not_be_committed() -> None:
    engine = engine_of(ATTENTION)
    lease = engine.start(tokens((1, 20)))
    first, second = plan(engine, lease, count=4), plan(engine, lease, count=4)
    engine.cache.fail(first)
    engine.cache.abort([lease.row])
    assert not engine.cache._leases.under_way
    engine.cache.commit(second)
    assert engine.cache.leases == 0


def test_what_the_first_step_copies_and_zeroes_is_asked_for_once() -> None:
    engine = engine_of(ATTENTION, STATE)
    engine.run(tokens((1, 10)))
    back, fresh = engine.start(tokens((1, 20))), engine.start(tokens((2, 20)))
    first, second = plan(engine, back, fresh, count=4), plan(engine, back, fresh, count=4)
    assert len(first.copies) > 0
    assert first.fresh.tolist() == [fresh.row]
    assert (len(second.copies), len(second.fresh)) == (0, 0)
    engine.cache.commit(first)
    engine.cache.commit(second)


@pytest.mark.parametrize("inside", [False, True])
def test_each_step_exports_the_checkpoints_behind_the_one_before(inside: bool) -> None:
    engine = engine_of(ATTENTION, STATE, exports_inside=inside)
    lease = engine.start(tokens((1, 30)), breakpoints=(12, 20))
    assert lease.next_stop == 12
    first = plan(engine, lease, count=14 if inside else 30)
    assert lease.next_stop == 20
    second = plan(engine, lease, count=16 if inside else 30)
    assert [export.position for export in first.exports] == [12]
    assert [export.position for export in second.exports] == ([20, 29] if inside else [20])
    engine.cache.commit(first)
    assert engine.hit(tokens((1, 12), (2, 9))) == 12
    engine.cache.commit(second)
    assert engine.hit(tokens((1, 20), (2, 9))) == 20
    engine.compute(lease)
    assert engine.hit(tokens((1, 30))) == 29


def test_an_undone_export_is_made_by_the_step_that_comes_instead() -> None:
    engine = engine_of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 30)), breakpoints=(12,))
    first, second = plan(engine, lease, count=8), plan(engine, lease, count=4)
    assert len(second.exports) == 1
    free = engine.cache.free_blocks
    engine.cache.commit(first, counts=[6])
    assert engine.cache.free_blocks == free + 2
    again = plan(engine, lease, count=6)
    assert [export.position for export in again.exports] == [12]
    engine.cache.commit(again)
    assert engine.hit(tokens((1, 12), (2, 9))) == 12


@pytest.mark.parametrize("interval", [1, 4])
def test_an_interval_behind_a_step_under_way_is_exported_too(interval: int) -> None:
    engine = engine_of(ATTENTION, STATE, placement=(f"interval:{interval}",), blocks=300)
    lease = engine.start(tokens((1, 5)))
    engine.compute(lease)
    steps, exported = [plan(engine, lease, count=1)], []
    for answer in range(40):
        steps.append(plan(engine, lease, count=1))
        done = steps.pop(0)
        exported += [export.position for export in done.exports]
        engine.cache.commit(done, sampled=said(answer + 50))
    engine.cache.commit(steps.pop(), sampled=said(99))
    assert exported == [position for position in range(6, lease.computed) if position % interval == 0]


@WAYS
def test_a_window_keeps_what_the_first_of_two_steps_reads(plain: bool) -> None:
    """Window of 6 in blocks of 4: the step from 16 on reads from 11 on, and is under way when the next is planned."""
    engine = engine_of(SlidingWindow("w", 64, 6), placement=(), plain=plain)
    lease = engine.start(tokens((1, 60)))
    engine.cache.commit(plan(engine, lease, count=16))
    first = plan(engine, lease, count=16)
    held = engine.cache.tables[0][lease.row][2:8].tolist()
    second = plan(engine, lease, count=16)
    assert engine.cache.tables[0][lease.row][2:8].tolist() == held
    engine.cache.commit(first)
    assert engine.cache.tables[0][lease.row][2:6].tolist() == [-1] * 4
    engine.cache.commit(second)


def test_one_row_at_a_time_goes_two_steps_ahead_too() -> None:
    engine = engine_of(ATTENTION)
    lease = engine.start(tokens((1, 4)))
    engine.step(lease)
    first, second = engine.cache.extend_one(lease.row, 1), engine.cache.extend_one(lease.row, 1)
    assert (first.starts.tolist(), second.starts.tolist()) == ([4], [5])
    engine.cache.commit(first, counts=[0])
    assert second.counts.tolist() == [0]
    assert lease.planned == 4


def test_the_arrays_that_a_step_was_asked_with_can_be_used_again() -> None:
    engine = engine_of(ATTENTION)
    leases = [engine.start(tokens((stream, 20))) for stream in (1, 2)]
    rows = np.array([leases[0].row])
    first = engine.cache.extend(rows, 4)
    rows[0] = leases[1].row
    engine.cache.extend(rows, 4)
    engine.cache.commit(first)
    assert [lease.computed for lease in leases] == [4, 0]


def test_a_lease_detached_between_two_steps_goes_on_alone() -> None:
    engine = engine_of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 20)), breakpoints=(8,))
    first, second = plan(engine, lease, count=4), plan(engine, lease, count=4)
    engine.cache.reset()
    engine.cache.commit(first)
    engine.cache.commit(second)
    assert (lease.computed, engine.hit(tokens((1, 20)))) == (8, 0)
    engine.cache.finish([lease.row])
    assert engine.cache.free_blocks == 100


def test_a_hit_can_be_made_while_two_steps_are_under_way() -> None:
    engine = engine_of(ATTENTION)
    lease = engine.start(tokens((1, 40)))
    first, second = plan(engine, lease, count=16), plan(engine, lease, count=16)
    engine.cache.commit(first)
    twin = engine.cache.lease(Prompt(tokens((1, 40))))
    assert twin.computed == 16
    third = plan(engine, twin, count=24)
    engine.cache.commit(second)
    engine.cache.commit(third)
    engine.compute(lease)
    assert engine.cache.free_blocks == 90
