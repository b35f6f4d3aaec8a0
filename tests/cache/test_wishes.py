"""Pins and breakpoints have results: each is kept at exactly its position, or the lease says why not."""

from __future__ import annotations

import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens

from headway.cache import Lease, Outcome, SlidingWindow

SYSTEM = (1, 40)


def outcomes(lease: Lease) -> list[tuple[str, int, int, Outcome]]:
    return [(wish.kind, wish.asked, wish.position, wish.outcome) for wish in lease.wishes]


def serve(engine: Engine, *parts: tuple[int, int], **options: object) -> Lease:
    """Serve a prompt and return its lease, which has ended."""
    lease = engine.start(tokens(*parts), **options)
    engine.compute(lease)
    engine.cache.finish([lease.row])
    return lease


def flood(engine: Engine, first: int = 50) -> None:
    """Six prompts that nobody repeats, each larger than half the pool."""
    for i in range(6):
        engine.run(tokens((first + i, 70)))


def test_a_pin_is_pending_until_its_position_is_computed() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens(SYSTEM, (2, 5)), pin=40)
    assert outcomes(lease) == [("pin", 40, 40, Outcome.PENDING)]
    engine.step(lease, count=20)
    assert outcomes(lease) == [("pin", 40, 40, Outcome.PENDING)]
    engine.compute(lease)
    assert outcomes(lease) == [("pin", 40, 40, Outcome.KEPT)]


def test_a_pin_before_the_place_where_a_prompt_resumes_says_that_no_checkpoint_is_there() -> None:
    engine = Engine.of(ATTENTION, STATE)
    serve(engine, SYSTEM, (2, 3))
    lease = serve(engine, SYSTEM, (2, 3), pin=40)
    assert lease.hit.tokens == 42
    assert outcomes(lease) == [("pin", 40, 40, Outcome.NO_CHECKPOINT)]
    assert engine.cache.stats().pinned == 0
    assert engine.cache.counters.refused == {"pin:no_checkpoint": 1}


def test_a_pin_before_the_place_where_a_prompt_resumes_pins_the_checkpoint_that_is_there() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=40, eviction="lru")
    serve(engine, SYSTEM, (2, 3), breakpoints=(40,))
    lease = serve(engine, SYSTEM, (2, 3), pin=40)
    assert lease.hit.tokens == 42
    assert outcomes(lease) == [("pin", 40, 40, Outcome.KEPT)]
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 40


def test_no_shallower_checkpoint_is_pinned_instead() -> None:
    """There are checkpoints at 20 and at the end, and none at 30, where the pin is wanted."""
    engine = Engine.of(ATTENTION, STATE)
    serve(engine, SYSTEM, (2, 3), breakpoints=(20,))
    lease = serve(engine, SYSTEM, (2, 3), pin=30)
    assert outcomes(lease) == [("pin", 30, 30, Outcome.NO_CHECKPOINT)]
    assert engine.cache.stats().pinned == 0


def test_a_model_without_checkpoints_pins_the_entries_of_a_known_path() -> None:
    engine = Engine.of(ATTENTION)
    serve(engine, SYSTEM, (2, 3))
    lease = serve(engine, SYSTEM, (2, 3), pin=38)
    assert outcomes(lease) == [("pin", 38, 38, Outcome.KEPT)]
    assert engine.cache.stats().pinned == 10, "blocks of four that hold 38 tokens"


def test_a_breakpoint_before_the_place_where_a_prompt_resumes_says_that_no_checkpoint_is_there() -> None:
    engine = Engine.of(ATTENTION, STATE)
    serve(engine, SYSTEM, (2, 3))
    lease = serve(engine, SYSTEM, (2, 3), breakpoints=(40,))
    assert outcomes(lease) == [("breakpoint", 40, 40, Outcome.NO_CHECKPOINT)]
    assert engine.hit(tokens(SYSTEM, (3, 2))) == 0
    assert engine.cache.counters.refused == {"breakpoint:no_checkpoint": 1}


def test_a_breakpoint_where_one_is_kept_is_kept() -> None:
    engine = Engine.of(ATTENTION, STATE)
    serve(engine, SYSTEM, (2, 3), breakpoints=(40,))
    lease = serve(engine, SYSTEM, (2, 3), breakpoints=(40,))
    assert outcomes(lease) == [("breakpoint", 40, 40, Outcome.KEPT)]


def test_wishes_are_cut_to_where_a_state_can_be_exported() -> None:
    engine = Engine.of(ATTENTION, STATE, checkpoint_alignment=8)
    lease = serve(engine, SYSTEM, (2, 6), breakpoints=(30,), pin=46)
    assert outcomes(lease) == [("breakpoint", 30, 24, Outcome.KEPT), ("pin", 46, 40, Outcome.KEPT)]
    assert engine.hit(tokens((1, 24), (3, 5))) == 24


def test_a_pin_is_cut_to_the_grid_and_to_what_can_be_resumed_at() -> None:
    """All 46 tokens are asked for; the last one, or the last three under lookahead, can never be resumed behind."""
    engine = Engine.of(ATTENTION, DRAFT, STATE, blocks=60, checkpoint_alignment=4, eviction="lru")
    lease = serve(engine, SYSTEM, (2, 6), pin=46)
    assert outcomes(lease) == [("pin", 46, 40, Outcome.KEPT)]
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (2, 6))) >= 40
    engine = Engine.of(ATTENTION)
    assert outcomes(serve(engine, SYSTEM, pin=40)) == [("pin", 40, 39, Outcome.KEPT)]


def test_a_pin_over_the_share_is_refused_and_counted() -> None:
    engine = Engine.of(ATTENTION, STATE, pin_share=0.0)
    lease = serve(engine, SYSTEM, (2, 3), pin=40)
    assert outcomes(lease) == [("pin", 40, 40, Outcome.PIN_SHARE)]
    assert engine.cache.counters.refused == {"pin:pin_share": 1}
    assert engine.cache.stats().pinned == 0


def test_a_wish_without_storing_is_refused() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = serve(engine, SYSTEM, (2, 3), no_store=True, pin=40, breakpoints=(20,))
    assert {outcome for *_, outcome in outcomes(lease)} == {Outcome.NOT_STORED}
    assert engine.cache.counters.refused == {"pin:not_stored": 1, "breakpoint:not_stored": 1}


def test_a_wish_of_a_lease_that_ends_before_is_not_kept() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens(SYSTEM, (2, 3)), pin=40)
    engine.step(lease, count=20)
    engine.cache.abort([lease.row])
    assert outcomes(lease) == [("pin", 40, 40, Outcome.ENDED)]
    assert engine.cache.counters.refused == {"pin:ended": 1}


def test_a_breakpoint_without_memory_for_its_state_says_so() -> None:
    """Ten tokens take three blocks and the running state two: no two are left for a snapshot at 8."""
    engine = Engine.of(ATTENTION, STATE, blocks=5)
    lease = serve(engine, (1, 10), breakpoints=(8,))
    assert outcomes(lease) == [("breakpoint", 8, 8, Outcome.NO_ROOM)]


def test_a_breakpoint_that_is_kept_can_be_resumed_at_when_it_is_told() -> None:
    """The same commit makes known more of another answer than the index may know, so that something goes."""
    engine = Engine.of(ATTENTION, STATE, index_bytes=5000, answer_stretch=4)
    old = engine.start(tokens((5, 6)))
    engine.compute(old)
    new = engine.start(tokens((1, 20)), breakpoints=(12,))
    while new.computed < 12:
        engine.step(new, old, count=1)
    assert outcomes(new) == [("breakpoint", 12, 12, Outcome.KEPT)]
    assert engine.hit(tokens((1, 12), (2, 2))) == 12


def test_a_lease_without_wishes_has_none() -> None:
    engine = Engine.of(ATTENTION, STATE)
    assert engine.start(tokens(SYSTEM)).wishes == ()


# How long a pin holds.


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_a_pin_holds_as_long_as_its_prompt_says(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups, blocks=60, eviction="lru", pin_seconds=1000.0)
    serve(engine, SYSTEM, (2, 3), pin=40, pin_seconds=10.0)
    engine.now[0] = 9.0
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 40
    engine.now[0] = 10.5
    flood(engine, first=60)
    assert engine.hit(tokens(SYSTEM, (3, 5))) < 40
    assert engine.cache.stats().pinned == 0


def test_a_pin_that_is_renewed_holds_until_the_later_end() -> None:
    engine = Engine.of(ATTENTION, blocks=60, eviction="lru")
    serve(engine, SYSTEM, (2, 3), pin=40, pin_seconds=20.0)
    engine.now[0] = 5.0
    serve(engine, SYSTEM, (2, 3), pin=40, pin_seconds=1.0)
    engine.now[0] = 19.0
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 40
    engine.now[0] = 21.0
    assert engine.cache.stats().pinned == 0


def test_a_pin_that_is_renewed_holds_longer() -> None:
    engine = Engine.of(ATTENTION, blocks=60, eviction="lru")
    serve(engine, SYSTEM, (2, 3), pin=40, pin_seconds=5.0)
    engine.now[0] = 4.0
    serve(engine, SYSTEM, (2, 3), pin=40, pin_seconds=20.0)
    engine.now[0] = 23.0
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 40
    engine.now[0] = 25.0
    assert engine.cache.stats().pinned == 0


def test_a_pin_goes_with_its_half_when_its_edge_is_split() -> None:
    """Pinned are 40 of 60 tokens; others part before the pin, at it, and behind it."""
    engine = Engine.of(ATTENTION, blocks=80, eviction="lru", pin_seconds=10.0)
    serve(engine, (1, 60), pin=40)
    for stream, parting in enumerate((50, 20, 40, 30), start=10):
        serve(engine, (1, parting), (stream, 6))
        assert engine.cache.stats().pinned == 10
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 40
    engine.now[0] = 11.0
    assert engine.cache.stats().pinned == 0
    flood(engine, first=60)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 0


def test_unpin_lifts_the_pins_of_a_path_and_says_how_many() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=80, eviction="lru")
    serve(engine, SYSTEM, (2, 3), pin=40)
    serve(engine, SYSTEM, (2, 3), (4, 5), pin=45)
    serve(engine, SYSTEM, (5, 8), pin=47)
    assert engine.cache.unpin(engine.prompt(tokens((9, 9)))) == 0
    assert engine.cache.unpin(engine.prompt(tokens(SYSTEM, (2, 3), (4, 5))), exactly=True) == 0
    assert engine.cache.unpin(engine.prompt(tokens(SYSTEM, (2, 3), (4, 5)))) == 2
    assert engine.cache.unpin(engine.prompt(tokens(SYSTEM, (2, 3), (4, 5)))) == 0
    assert engine.cache.unpin(engine.prompt(tokens(SYSTEM, (5, 8)))) == 1
    assert engine.cache.stats().pinned == 0
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 5))) == 0


# What pins count for.


def test_a_shorter_pin_on_a_pinned_path_counts_nothing_more() -> None:
    engine = Engine.of(ATTENTION, blocks=40, pin_share=0.3)
    serve(engine, (1, 48), pin=48)
    lease = serve(engine, (1, 48), (2, 1), pin=32)
    assert outcomes(lease)[0][3] is Outcome.KEPT
    assert engine.cache.stats().pinned == 12


def test_what_two_pins_share_counts_once() -> None:
    """Each of 48 tokens takes twelve blocks; 40 are shared, so both together take fourteen of at most fifteen."""
    engine = Engine.of(ATTENTION, blocks=60, pin_share=0.25)
    first = serve(engine, SYSTEM, (2, 9), pin=48)
    second = serve(engine, SYSTEM, (3, 9), pin=48)
    assert [outcomes(lease)[0][3] for lease in (first, second)] == [Outcome.KEPT] * 2
    assert engine.cache.stats().pinned == 14
    third = serve(engine, SYSTEM, (4, 9), pin=48)
    assert outcomes(third)[0][3] is Outcome.PIN_SHARE


def test_two_pins_in_one_block_share_it_when_its_path_grows() -> None:
    """Whoever goes on with the longer path writes to a copy of the block, which then takes its place for both."""
    engine = Engine.of(ATTENTION, blocks=7, block_tokens=8, pin_share=0.17)
    serve(engine, (1, 5), pin=4)
    serve(engine, (1, 2), (3, 1), pin=2)
    assert engine.cache.stats().pinned == 1
    serve(engine, (1, 5), (5, 2))
    assert engine.cache.stats().pinned == 1


def test_lifting_one_of_two_pins_that_share_keeps_what_they_shared() -> None:
    engine = Engine.of(ATTENTION, blocks=60, eviction="lru", pin_seconds=10.0)
    serve(engine, SYSTEM, (2, 9), pin=48, pin_seconds=5.0)
    serve(engine, SYSTEM, (3, 9), pin=48)
    engine.now[0] = 6.0
    assert engine.cache.stats().pinned == 12
    flood(engine)
    assert engine.hit(tokens(SYSTEM, (3, 9))) == 48
    assert engine.hit(tokens(SYSTEM, (2, 9))) == 40


@pytest.mark.parametrize("groups", [(ATTENTION, STATE), (ATTENTION, SlidingWindow("w", 64, 6)), (ATTENTION,)])
def test_a_pinned_prefix_survives_whatever_comes(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups, blocks=60, eviction="lru")
    serve(engine, SYSTEM, (2, 3), pin=40)
    for first in (50, 60, 70):
        flood(engine, first)
        assert engine.hit(tokens(SYSTEM, (first, 5))) == 40
