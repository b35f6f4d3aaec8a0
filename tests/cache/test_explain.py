"""Saying why: small stories whose every lost token has one right line."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens

from headway.cache import Evicted, Prompt, Reason

Lines = list[tuple[Reason, int, int]]


def lines(engine: Engine, text: object, **options: object) -> Lines:
    story = engine.cache.explain(Prompt(text, **options))  # type: ignore[arg-type]
    return [(loss.reason, loss.start, loss.stop) for loss in story.losses]


def test_nothing_matched() -> None:
    engine = Engine.of(ATTENTION)
    assert lines(engine, tokens((1, 20))) == [(Reason.NOTHING_MATCHED, 0, 20)]
    engine.run(tokens((2, 20)))
    assert lines(engine, tokens((1, 20))) == [(Reason.NOTHING_MATCHED, 0, 20)]


def test_parted() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 20)))
    assert lines(engine, tokens((1, 12), (2, 8))) == [(Reason.PARTED, 12, 20)]


def test_a_known_path_that_ends_is_parted_from_too() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 20)))
    assert lines(engine, tokens((1, 20), (2, 5))) == [(Reason.PARTED, 20, 25)]


def test_last_token() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 20)))
    assert lines(engine, tokens((1, 20))) == [(Reason.LAST_TOKEN, 19, 20)]


def test_state_never_taken() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    right = [(Reason.STATE_NEVER_TAKEN, 0, 12), (Reason.PARTED, 12, 20)]
    assert lines(engine, tokens((1, 12), (2, 8))) == right


def test_state_never_taken_behind_one_that_was() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)), breakpoints=(8,))
    right = [(Reason.STATE_NEVER_TAKEN, 8, 12), (Reason.PARTED, 12, 20)]
    assert lines(engine, tokens((1, 12), (2, 8))) == right


def test_lookahead() -> None:
    engine = Engine.of(ATTENTION, DRAFT)
    engine.run(tokens((1, 20)))
    right = [(Reason.LOOKAHEAD, 9, 12), (Reason.PARTED, 12, 20)]
    assert lines(engine, tokens((1, 12), (2, 8))) == right


def test_lookahead_and_last_token_of_a_resend() -> None:
    """All but 3 of 20 tokens are reused; the very last one would have to be computed anyway."""
    engine = Engine.of(ATTENTION, DRAFT)
    engine.run(tokens((1, 20)))
    assert lines(engine, tokens((1, 20))) == [(Reason.LOOKAHEAD, 17, 19), (Reason.LAST_TOKEN, 19, 20)]


def test_evicted_path() -> None:
    """Ten blocks of 4: a prompt of 32 tokens takes 8, the next one needs all ten."""
    engine = Engine.of(ATTENTION, blocks=10)
    engine.run(tokens((1, 32)))
    engine.now[0] = 5.0
    engine.run(tokens((2, 40)))
    engine.now[0] = 7.0
    story = engine.cache.explain(Prompt(tokens((1, 32))))
    assert [(loss.reason, loss.start, loss.stop) for loss in story.losses] == [
        (Reason.EVICTED, 0, 31),
        (Reason.LAST_TOKEN, 31, 32),
    ]
    assert "2.0 s ago" in str(story.losses[0].detail)


def test_evicted_checkpoint_is_named() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=14, placement=("breakpoint",))
    engine.run(tokens((1, 16)), breakpoints=(12,))
    engine.run(tokens((2, 48)))
    story = engine.cache.explain(Prompt(tokens((1, 16))))
    assert [(loss.reason, loss.start, loss.stop) for loss in story.losses] == [
        (Reason.EVICTED, 0, 12),
        (Reason.STATE_NEVER_TAKEN, 12, 15),
        (Reason.LAST_TOKEN, 15, 16),
    ]
    assert "breakpoint checkpoint at 12" in str(story.losses[0].detail)


def test_other_namespace() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 20)), namespace=engine.cache.namespace(salt="a"))
    other = engine.cache.namespace(salt="b")
    assert lines(engine, tokens((1, 12), (2, 8)), namespace=other) == [
        (Reason.OTHER_NAMESPACE, 0, 12),
        (Reason.NOTHING_MATCHED, 12, 20),
    ]


def test_other_namespace_counts_tokens_and_not_entries() -> None:
    """Behind 12 known tokens the entries of 9 are known, as a draft looks ahead by three."""
    engine = Engine.of(ATTENTION, DRAFT)
    engine.run(tokens((1, 20)), namespace=engine.cache.namespace(salt="a"))
    other = engine.cache.namespace(salt="b")
    assert lines(engine, tokens((1, 12), (2, 8)), namespace=other)[0] == (Reason.OTHER_NAMESPACE, 0, 12)


def test_still_computing() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 20)))
    engine.step(lease, count=8)
    assert lines(engine, tokens((1, 20))) == [(Reason.STILL_COMPUTING, 8, 19), (Reason.LAST_TOKEN, 19, 20)]
    assert lines(engine, tokens((1, 12), (2, 2))) == [(Reason.STILL_COMPUTING, 8, 12), (Reason.PARTED, 12, 14)]


def test_still_computing_with_states() -> None:
    """The running request has passed 8 tokens without leaving a state there; behind them it still computes."""
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 20)))
    engine.step(lease, count=8)
    assert lines(engine, tokens((1, 20))) == [
        (Reason.STATE_NEVER_TAKEN, 0, 8),
        (Reason.STILL_COMPUTING, 8, 19),
        (Reason.LAST_TOKEN, 19, 20),
    ]


def test_no_line_where_everything_is_reused() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    story = engine.cache.explain(Prompt(tokens((1, 20))))
    assert (story.hit_tokens, story.matched) == (19, 20)
    assert story.reasons == {Reason.LAST_TOKEN}


# What belongs to an edge of the tree moves with the tokens that it is about.


def test_every_evicted_checkpoint_of_a_long_conversation_is_told() -> None:
    """Checkpoints at 50, 100 ... 2,000 of one conversation have all gone: each prefix lost the one before it."""
    engine = Engine.of(ATTENTION, STATE, blocks=620, eviction="lru", placement=("interval:50",))
    engine.run(tokens((1, 2000)))
    engine.now[0] = 3.0
    for stream in (3, 5, 7):
        engine.run(tokens((stream, 2000)))
    engine.now[0] = 4.0
    assert engine.hit(tokens((1, 2000))) == 0
    for length in (51, 900, 1999):
        story = engine.cache.explain(Prompt(tokens((1, length))))
        deepest = (length - 1) // 50 * 50
        assert story.losses[0][:3] == (Reason.EVICTED, 0, deepest)
        assert isinstance(story.losses[0].detail, Evicted)
        assert story.losses[0].detail[:3] == (deepest, "interval:50", "evicted")
        assert 1.0 <= story.losses[0].detail.age <= 4.0


def test_a_prompt_is_not_told_of_the_eviction_of_another() -> None:
    """A's checkpoint behind their common ten tokens went. B goes on with tokens of its own from there."""
    engine = Engine.of(
        ATTENTION, STATE, blocks=40, history_tokens=0, eviction="lru", placement=("prompt_end", "breakpoint")
    )
    engine.run(tokens((1, 10), (2, 30)), pin=10)
    for stream in range(10, 22):
        engine.run(tokens((stream, 60)))
    lease = engine.start(tokens((1, 10), (3, 40)))
    engine.step(lease, count=35)
    assert lines(engine, tokens((1, 10), (3, 38))) == [
        (Reason.STATE_NEVER_TAKEN, 10, 45),
        (Reason.STILL_COMPUTING, 45, 47),
        (Reason.LAST_TOKEN, 47, 48),
    ]


def test_nobody_computes_what_a_request_left_that_went_away() -> None:
    engine = Engine.of(ATTENTION)
    long, short = engine.start(tokens((1, 60))), engine.start(tokens((1, 10)))
    engine.cache.abort([long.row])
    assert lines(engine, tokens((1, 60), (2, 1))) == [(Reason.STILL_COMPUTING, 0, 10), (Reason.PARTED, 10, 61)]
    engine.cache.abort([short.row])
    assert lines(engine, tokens((1, 60), (2, 1))) == [(Reason.NOTHING_MATCHED, 0, 61)]


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_what_nobody_computed_is_not_known_for_computed(end: str) -> None:
    """Two requests share 30 tokens; the one that goes 30 further ends before it has computed anything."""
    engine = Engine.of(ATTENTION, STATE)
    long, other = engine.start(tokens((1, 60))), engine.start(tokens((1, 30), (2, 3)))
    while other.computed < 33:
        engine.step(other)
    if end == "abort":
        engine.cache.abort([long.row])
    else:
        engine.cache.fail(engine.cache.extend([long.row], [5]))
    story = lines(engine, tokens((1, 60), (3, 1)))
    assert (Reason.PARTED, 30, 61) in story
    assert {reason for reason, _, _ in story} <= {Reason.PARTED, Reason.STATE_NEVER_TAKEN}


def test_being_computed_belongs_to_positions() -> None:
    """The short request has passed its 20 tokens; of the 40 that follow in the long one nobody has computed any."""
    engine = Engine.of(ATTENTION, STATE, placement=())
    engine.start(tokens((1, 60)))
    short = engine.start(tokens((1, 20)))
    engine.compute(short)
    engine.cache.finish([short.row])
    assert lines(engine, tokens((1, 60))) == [
        (Reason.STATE_NEVER_TAKEN, 0, 20),
        (Reason.STILL_COMPUTING, 20, 59),
        (Reason.LAST_TOKEN, 59, 60),
    ]


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE), (ATTENTION, DRAFT)])
def test_an_answer_is_known_as_far_as_it_is_computed(groups: tuple[object, ...]) -> None:
    """The last token of an answer is told before it is computed; entries under lookahead need even later ones."""
    engine = Engine.of(*groups, answer_stretch=4, placement=("interval:2",))
    lease = engine.start(tokens((1, 8)))
    engine.compute(lease)
    told = [7]
    for token in range(5000, 5020):
        engine.step(lease, sampled=token)
        told.append(token)
        text = np.concatenate([tokens((1, 8)), np.array(told, dtype=np.int32), tokens((9, 1))])
        known = engine.cache.lookup(Prompt(text)).matched
        assert known <= lease.computed + engine.cache.geometry.lookahead
        assert engine.cache.path(Prompt(text)).matched <= lease.computed
        assert Reason.STILL_COMPUTING not in engine.cache.explain(Prompt(text)).reasons


def test_a_hit_that_is_given_up_for_want_of_room_is_told_so() -> None:
    """Five blocks of four: 20 tokens need them all, and resuming at 19, inside a block, a copy of that one."""
    engine = Engine.of(ATTENTION, blocks=5)
    engine.run(tokens((1, 20)))
    prompt = Prompt(tokens((1, 20)))
    assert engine.cache.lookup(prompt).tokens == 19
    lease = engine.cache.lease(prompt)
    assert (lease.computed, lease.hit.tokens) == (0, 0)
    told = [(loss.reason, loss.start, loss.stop) for loss in lease.explanation.losses]
    assert told == [(Reason.NO_ROOM, 0, 19), (Reason.LAST_TOKEN, 19, 20)]
    assert engine.cache.waterfall.lost[Reason.NO_ROOM] == 19


def test_a_hit_that_is_shorter_than_asked_for_is_given_up() -> None:
    engine = Engine.of(ATTENTION, blocks=50)
    engine.run(tokens((1, 20)))
    prompt = Prompt(tokens((1, 20)))
    assert engine.cache.lease(prompt, least_hit=19).hit.tokens == 19
    lease = engine.cache.lease(prompt, least_hit=20)
    assert (lease.computed, lease.hit.tokens) == (0, 0)
    assert [(loss.reason, loss.start, loss.stop) for loss in lease.explanation.losses] == [
        (Reason.COMPUTED_ANEW, 0, 19),
        (Reason.LAST_TOKEN, 19, 20),
    ]


def test_a_common_first_token_does_not_hide_another_namespace() -> None:
    engine = Engine.of(ATTENTION)
    first, second = (engine.cache.namespace(salt=salt) for salt in "ab")
    begin = np.array([999], dtype=np.int32)
    engine.run(np.concatenate([begin, tokens((1, 20))]), namespace=first)
    engine.run(np.concatenate([begin, tokens((2, 20))]), namespace=second)
    assert lines(engine, np.concatenate([begin, tokens((1, 20), (3, 2))]), namespace=second) == [
        (Reason.OTHER_NAMESPACE, 1, 21),
        (Reason.PARTED, 21, 23),
    ]


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE), (ATTENTION, DRAFT), (STATE,)])
def test_the_waterfall_sums_to_all_prompt_tokens(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups, blocks=24)
    prompts = [
        tokens((1, 20)),
        tokens((1, 12), (2, 8)),
        tokens((1, 12), (2, 8), (3, 4)),
        tokens((4, 40)),
        tokens((1, 20)),
        tokens((5, 1)),
    ]
    for prompt in prompts:
        engine.cache.lookup(Prompt(prompt))
        engine.run(prompt)
    falls = engine.cache.waterfall
    assert falls.requests == len(prompts)
    assert falls.prompt_tokens == sum(map(len, prompts))
    assert falls.reused + sum(falls.lost.values()) == falls.prompt_tokens


def test_looking_up_is_not_counted() -> None:
    """A request that waits and is looked up five times counts once, when it is admitted."""
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 20)))
    for _ in range(5):
        engine.cache.lookup(Prompt(tokens((1, 20))))
        engine.cache.explain(Prompt(tokens((1, 20))))
    engine.run(tokens((1, 20)))
    assert engine.cache.waterfall.prompt_tokens == 40
    assert engine.cache.waterfall.reused == 19


def test_a_lease_keeps_its_explanation() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 20)))
    lease = engine.start(tokens((1, 20)))
    assert lease.explanation.hit_tokens == lease.hit.tokens == 19
    assert "19 of 20" in str(lease.explanation)
