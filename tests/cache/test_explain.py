"""Saying why: small stories whose every lost token has one right line."""

from __future__ import annotations

import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens

from headway.cache import Prompt, Reason

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
