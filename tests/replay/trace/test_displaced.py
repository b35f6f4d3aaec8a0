"""Changes in front of known text, found in whole traces."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.replay import Trace, TraceBuilder, generate
from headway.replay.trace.displaced import Change, find_changes

TEXT = [random.Random(n).randrange(1000, 30_000) for n in range(400)]


def trace(*prompts: Sequence[int]) -> Trace:
    builder = TraceBuilder("made", "test", 1)
    for time, prompt in enumerate(prompts):
        builder.add_tokens(list(prompt), (), float(time))
    return builder.build()


def test_a_clock_in_front() -> None:
    found = find_changes(trace([1, 2, 3, *TEXT], [1, 2, 4, *TEXT], [1, 2, 5, 6, *TEXT, 7]))
    assert found == [Change(1, 0, 2, 3, 3, 400, 400), Change(2, 0, 2, 4, 3, 400, 400)]


def test_something_missing_and_something_more() -> None:
    assert find_changes(trace([1, *TEXT], [1, *TEXT[200:]])) == [Change(1, 0, 1, 1, 201, 200, 200)]
    assert find_changes(trace([1, *TEXT], [1, 8, 9, *TEXT])) == [Change(1, 0, 1, 3, 1, 400, 400)]


@pytest.mark.parametrize(
    "prompts",
    [
        [TEXT, TEXT],
        [TEXT, [*TEXT, 1, 2, 3]],
        [TEXT, TEXT[:200]],
        [TEXT, [n + 1 for n in TEXT]],
        [[1, *TEXT[:63]], [2, *TEXT[:63]]],
        [[1, *TEXT[:100]], [*TEXT[200:400], *TEXT[:100]]],
        [[1], [2]],
    ],
    ids=["resent", "continued", "shortened", "others", "short", "change longer than text", "tiny"],
)
def test_what_is_no_change_in_front_of_known_text(prompts: list[list[int]]) -> None:
    assert find_changes(trace(*prompts)) == []


def test_hashes_of_blocks_show_nothing() -> None:
    assert find_changes(generate("mixed", 20, seed=1)) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 80), st.integers(70, 130)),
        min_size=2,
        max_size=8,
    )
)
def test_what_is_said_to_be_the_same_is(parts: list[tuple[int, int, int, int]]) -> None:
    prompts = [[a] * b + TEXT[c : c + d] for a, b, c, d in parts]
    made = trace(*(prompt or [1] for prompt in prompts))
    for change in find_changes(made):
        ours, theirs = made.prompt(change.request).tolist(), made.prompt(change.source).tolist()
        assert change.source < change.request
        assert ours[: change.start] == theirs[: change.start]
        assert ours[change.stop : change.stop + change.same] == theirs[change.before : change.before + change.same]
        assert change.start <= min(change.stop, change.before)
        assert 64 <= change.same <= change.known + 64
