"""Which positions get a checkpoint, and which of several kinds it counts as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens

from headway.cache import CheckpointStored, ComputeCost, Prompt, Reason
from headway.cache.policy.placement import Place, Placement


def test_every_multiple_of_the_interval_is_rounded_down_to_the_grid() -> None:
    """Multiples of 7 are 7, 14, 21 ... 49; at or before them on a grid of 4 lie 4, 12, 20, 28, 32, 40 and 48."""
    placement = Placement(("interval:7",), alignment=4, lookahead=0)
    places, position = [], 0
    while (place := placement.next_interval(position)) is not None and place < 50:
        places.append(place)
        position = place
    assert places == [4, 12, 20, 28, 32, 40, 48]


def stored(engine: Engine, text: Any, **options: Any) -> list[tuple[int, str]]:
    """Position and kind of the checkpoints that serving a prompt leaves, in order."""
    heard: list[CheckpointStored] = []
    end = engine.cache.subscribe(lambda event: heard.append(event) if isinstance(event, CheckpointStored) else None)
    engine.run(text, **options)
    end()
    return [(event.position, event.kind) for event in heard]


def planned(
    placement: Placement,
    length: int,
    hit: int = 0,
    junction: int | None = None,
    boundaries: tuple[int, ...] = (),
    **options: Any,
) -> list[Place]:
    """What is planned for a prompt of that length; `options` are the prompt's."""
    return placement.plan(Prompt(range(length), **options), hit, junction, placement.telling(boundaries))


ALL = ("prompt_end", "junction", "breakpoint", "boundary", "interval:10")


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"breakpoints": (20,)}, "breakpoint"),
        ({"breakpoints": (20,), "boundaries": (20,)}, "breakpoint"),
        ({"junction": 20, "breakpoints": (20,)}, "breakpoint"),
        ({"junction": 20, "boundaries": (20,)}, "junction"),
        ({"boundaries": (20,)}, "interval:10"),
        ({"junction": 20}, "junction"),
        ({"pin": 20}, "breakpoint"),
        ({"junction": 20, "pin": 20}, "breakpoint"),
    ],
)
def test_where_several_kinds_meet_the_one_that_says_most_counts(options: dict[str, Any], right: str) -> None:
    plan = planned(Placement(ALL, alignment=1, lookahead=0), 60, **options)
    assert [place.kind for place in plan if place.position == 20] == [right]


@pytest.mark.parametrize(("length", "right"), [(60, (59, "prompt_end")), (61, (60, "prompt_end"))])
def test_a_prompt_end_is_told_from_what_else_lies_there(length: int, right: tuple[int, str]) -> None:
    """At 60 there is an interval too, and a message ends there."""
    plan = planned(Placement(ALL, alignment=1, lookahead=0), length, boundaries=(59, 60))
    assert (plan[-1].position, plan[-1].kind) == right


def test_everything_lies_on_the_grid_and_leaves_what_lookahead_needs() -> None:
    """A grid of 8, and three later tokens that entries depend on: of 50 tokens at most 47 can be resumed behind."""
    placement = Placement(ALL, alignment=8, lookahead=3)
    plan = planned(placement, 50, junction=21, breakpoints=(30, 50), boundaries=(13,), pin=45)
    assert [place.position for place in plan] == [8, 16, 24, 40]
    plan = planned(Placement(("prompt_end",), alignment=1, lookahead=3), 50, pin=50)
    assert plan == [Place(47, "breakpoint")]


def test_nothing_is_planned_before_the_hit() -> None:
    placement = Placement(ALL, alignment=1, lookahead=0)
    plan = planned(placement, 60, 30, junction=30, breakpoints=(10, 30, 40), boundaries=(5,), pin=20)
    assert [place.position for place in plan] == [40, 50, 59]


@pytest.mark.parametrize(
    ("boundaries", "right"),
    [
        ((), []),
        ((5,), [(5, "boundary")]),
        ((5, 9), [(5, "boundary"), (9, "boundary:-1")]),
        ((9, 5, 7, 5), [(5, "boundary"), (9, "boundary:-1"), (7, "boundary:-2")]),
        (range(1, 9), [(1, "boundary"), *((9 - i, f"boundary:-{i}") for i in range(1, 5))]),
    ],
)
def test_of_all_message_boundaries_the_first_and_the_last_ones_tell(boundaries: Any, right: Any) -> None:
    assert Placement(ALL, alignment=1, lookahead=0).telling(boundaries) == right
    assert Placement(("prompt_end",), alignment=1, lookahead=0).telling(boundaries) == []


CHAT = (10, 20, 50, 60, 90)
"""Ends of the messages of a prompt of 100 tokens, the question last."""


def test_the_first_and_the_last_two_message_boundaries_get_a_checkpoint_as_long_as_nothing_is_known() -> None:
    engine = Engine.of(ATTENTION, STATE, placement=("boundary",))
    right = [(10, "boundary"), (60, "boundary:-2"), (90, "boundary:-1")]
    assert stored(engine, tokens((1, 100)), boundaries=CHAT) == right


def test_another_question_behind_the_same_messages_resumes_before_it() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 100)), boundaries=CHAT)
    assert engine.hit(tokens((1, 62), (2, 40))) == 60


def test_a_message_that_begins_just_behind_the_hit_gets_no_checkpoint() -> None:
    """The turn before left its state at 51, where its answer ended; the message is closed at 53, within a block."""
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 50)), answer=[8, 9])
    text = np.concatenate([tokens((1, 50)), [8], tokens((2, 47))])
    assert stored(engine, text, boundaries=(10, 20, 53, 96))[:2] == [(96, "boundary:-1"), (97, "prompt_end")]


def test_the_message_boundaries_that_requests_come_back_to_are_learned() -> None:
    """What comes with a question is new each turn: requests part two messages before the end, where no state is kept
    at first. That they do is seen, and some turns later it is one of the places that are taken."""
    engine = Engine.of(ATTENTION, STATE, placement=("boundary",), blocks=4000)
    hits = []
    for turn in range(12):
        start = tokens((100 + turn, 60))
        engine.run(np.concatenate([start, tokens((500 + turn, 60))]), boundaries=(4, 20, 40, 60, 80, 100))
        hits.append(engine.hit(np.concatenate([start, tokens((900 + turn, 60))])))
        engine.run(np.concatenate([start, tokens((900 + turn, 60))]))
    assert (hits[0], hits[-1]) == (4, 60)


def test_a_message_boundary_that_was_passed_over_and_wanted_is_seen() -> None:
    engine = Engine.of(ATTENTION, STATE, placement=("boundary",))
    engine.run(tokens((1, 120)), boundaries=(4, 20, 40, 60, 80, 100))
    lease = engine.start(tokens((1, 65), (2, 9)))
    assert lease.hit.tokens == 4
    assert Reason.EVICTED not in lease.explanation.reasons, "nothing was taken there"
    assert engine.cache._index.usage.reuse._kinds["boundary:-3"].wanted == 1
    assert engine.cache._index.usage.reuse._kinds["boundary:-4"].wanted == 0, "the deepest would have served"


def test_a_message_boundary_at_the_last_token_is_taken_before_it_and_counted_once() -> None:
    """The drafter's entries depend on three tokens more: the boundary at 59 of 60 gets its checkpoint at 57."""
    engine = Engine.of(ATTENTION, DRAFT, STATE, placement=("boundary",), answer_stretch=8)
    assert stored(engine, tokens((1, 60)), answer=range(1, 20), boundaries=(4, 30, 59))[:3] == [
        (4, "boundary"),
        (30, "boundary:-2"),
        (57, "boundary:-1"),
    ]
    kinds = engine.cache._index.usage.reuse._kinds
    assert {kind: kinds[kind].taken for kind in ("boundary:-1", "boundary:-2")} == {"boundary:-1": 1, "boundary:-2": 1}


def test_boundaries_are_left_out_where_their_memory_is_worth_more() -> None:
    """Ten prompts of which each is used many times pass through a pool for two: a block is worth more than a guess."""
    cost = ComputeCost(linear=1.0, quadratic=0.0)
    engine = Engine.of(ATTENTION, STATE, blocks=44, placement=("prompt_end", "boundary"), cost=cost)
    assert (2, "boundary") in stored(engine, tokens((1, 20)), boundaries=(2,))
    for stream in range(10, 20):
        for _ in range(6):
            engine.run(tokens((stream, 80)))
    assert engine.cache._index.reclaim.keep.policy.price > 0
    assert (2, "boundary") not in stored(engine, tokens((2, 20)), boundaries=(2,))


def test_a_junction_inside_an_edge_gets_a_checkpoint() -> None:
    engine = Engine.of(ATTENTION, STATE, placement=("junction",))
    engine.run(tokens((1, 40)))
    assert stored(engine, tokens((1, 20), (2, 20))) == [(20, "junction")]


def test_a_junction_where_others_have_parted_gets_a_checkpoint() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=27, placement=("junction",))
    engine.run(tokens((1, 40)))
    engine.run(tokens((1, 20), (2, 20)))
    engine.run(tokens((9, 90)))  # the checkpoint at 20 has to go; that two parted there stays known
    assert engine.hit(tokens((1, 20), (3, 20))) == 0
    assert stored(engine, tokens((1, 20), (3, 20))) == [(20, "junction")]


def test_a_prompt_that_goes_on_behind_the_end_of_another_has_no_junction() -> None:
    engine = Engine.of(ATTENTION, STATE, placement=("junction",))
    engine.run(tokens((1, 20)))
    assert stored(engine, tokens((1, 20), (2, 20))) == []


def test_a_pinned_position_on_a_coarse_grid_gets_its_checkpoint_on_the_grid() -> None:
    engine = Engine.of(ATTENTION, DRAFT, STATE, placement=(), checkpoint_alignment=8)
    assert stored(engine, tokens((1, 60)), pin=30) == [(24, "breakpoint")]
