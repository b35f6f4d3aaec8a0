"""Known text behind a change: told where it stands, never told where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens

from headway.cache import Displaced, Prompt, SlidingWindow

WINDOW = SlidingWindow("window", 16, window=7)
WORLDS = {"full": [ATTENTION], "hybrid": [ATTENTION, STATE], "window": [ATTENTION, WINDOW], "draft": [ATTENTION, DRAFT]}


@pytest.fixture(params=WORLDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine.of(*WORLDS[request.param], blocks=1000)


def found(engine: Engine, text: np.ndarray, **options: Any) -> Displaced | None:
    return engine.cache.explain(Prompt(text, **options)).displaced


def close(got: Displaced | None, right: Displaced, engine: Engine) -> bool:
    """Whether it is the right one; entries of a draft are told of only where the tokens that they look at match."""
    return (
        got is not None and got[:3] == right[:3] and 0 <= right.tokens - got.tokens <= engine.cache.geometry.lookahead
    )


def clock(minute: int, n: int = 100) -> np.ndarray:
    """An opening of 28 tokens, a minute of two digits, and the same text in every prompt."""
    return np.concatenate([tokens((1, 28)), [5000 + minute // 10, 6000 + minute % 10], tokens((2, n))]).astype(np.int32)


def test_a_clock_in_front_of_the_same_text(engine: Engine) -> None:
    for minute in range(12, 31):
        engine.run(clock(minute))
    assert close(found(engine, clock(31)), Displaced(29, 30, 1, 100), engine)
    assert close(found(engine, clock(40)), Displaced(28, 29, 1, 101), engine), "the second digit is one of before"
    last = np.append(clock(31), np.int32(9999))
    assert close(found(engine, last), Displaced(29, 30, 1, 100), engine), "what follows the same text is new"


@pytest.mark.parametrize("ours", [0, 1, 5, 90])
@pytest.mark.parametrize("theirs", [0, 1, 5, 90])
@pytest.mark.parametrize("front", [0, 1, 28, 300])
def test_what_is_inserted_left_out_or_put_in_the_place_of_other_text(
    engine: Engine, front: int, ours: int, theirs: int
) -> None:
    engine.run(tokens((1, front), (3, theirs), (2, 100)))
    got = found(engine, tokens((1, front), (4, ours), (2, 100), (5, 9)))
    if ours == theirs == 0:
        assert got is None, "the same text in the same place is a match"
    else:
        assert close(got, Displaced(front, front + ours, theirs, 100), engine)


def test_nothing_is_told_where_nothing_is_the_same(engine: Engine) -> None:
    engine.run(tokens((1, 28), (3, 5), (2, 100)))
    assert found(engine, tokens((1, 28), (3, 5), (2, 100))) is None, "all of it matches"
    assert found(engine, tokens((1, 28), (4, 200))) is None, "new text"
    assert found(engine, tokens((1, 28), (4, 5), (2, 15))) is None, "a few tokens in common"
    assert found(engine, tokens((1, 28), (4, 110), (2, 100))) is None, "the change is longer than what follows it"
    assert found(engine, tokens((1, 28), (4, 600), (2, 100))) is None, "not near the change"
    assert found(engine, tokens((6, 28), (4, 30), (1, 28))) is None, "other text in another place"


def test_nothing_is_told_of_a_change_behind_which_all_matches(engine: Engine) -> None:
    """The clock went on once, and the chat went on behind it."""
    for minute in (30, 31):
        engine.run(clock(minute))
    assert found(engine, np.concatenate([clock(31), tokens((7, 40))])) is None


def test_each_namespace_is_its_own(engine: Engine) -> None:
    other = engine.cache.namespace(salt="other")
    engine.run(clock(30), namespace=other)
    assert found(engine, clock(31)) is None
    assert found(engine, clock(31), namespace=other) is not None


def test_it_is_gone_with_the_path(engine: Engine) -> None:
    engine.run(clock(30))
    engine.cache.reset()
    assert found(engine, clock(31)) is None


def test_the_change_may_lie_before_the_last_sequence_parted(engine: Engine) -> None:
    """The prompt follows a stranger with the same clock and another text; its own text stood behind another clock."""
    engine.run(clock(30))
    engine.run(np.concatenate([clock(31)[:30], tokens((4, 80))]))
    assert close(found(engine, clock(31)), Displaced(29, 30, 1, 100), engine)


def test_known_text_may_be_cut_into_short_edges(engine: Engine) -> None:
    engine.run(clock(30))
    for n in range(10, 100, 10):
        engine.run(np.concatenate([clock(30, n), tokens((n, 30))]))
    assert close(found(engine, clock(31)), Displaced(29, 30, 1, 100), engine)


def test_a_lease_does_not_look_for_it() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(clock(30))
    assert engine.start(clock(31)).explanation.displaced is None


def test_the_sentence() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(clock(30))
    text = str(engine.cache.explain(Prompt(clock(31))))
    assert text.endswith("\n  changed in [29, 30); 100 tokens behind are the same as before")
    assert "[29, 130) parted: 101 tokens" in text


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_told_is_true(seed: int) -> None:
    """Few different tokens, so that texts resemble each other everywhere. The claim is read from the texts alone."""
    dice = np.random.default_rng(seed)
    engine = Engine.of(*WORLDS[list(WORLDS)[seed % 4]], blocks=4000)
    letters = int(dice.integers(2, 6))
    shared, known, told = dice.integers(0, letters, 150).astype(np.int32), [], 0
    for _ in range(25):
        parts = [shared[: dice.integers(0, 60)], dice.integers(0, letters, dice.integers(0, 9)).astype(np.int32)]
        text = np.concatenate([*parts, shared[dice.integers(0, 80) :], [0]]).astype(np.int32)
        claim = found(engine, text)
        if claim is not None:
            told += 1
            start, stop, before, same = claim
            assert same >= 32
            assert max(stop - start, before) <= same
            assert (stop - start, before) != (0, 0)
            right = (text[:start].tobytes(), text[stop : stop + same].tobytes())
            assert any(
                (one[:start].tobytes(), one[start + before : start + before + same].tobytes()) == right for one in known
            ), f"seed {seed}: {claim}"
        engine.run(text)
        known.append(np.append(text, np.int32(7)))
    assert told > 5, f"seed {seed}"
