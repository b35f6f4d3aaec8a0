"""What the trace alone says, against a plain set of prefixes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.replay import Trace, TraceBuilder, endless_matches, read_outputs
from headway.replay.trace.prefixes import continuations, number_prefixes

Prompts = list[list[int]]
few_symbols = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=30)


def trace_of(prompts: Prompts, width: int = 10, rest: int = 3, answer: int = 4) -> Trace:
    """Whole blocks named by position-free ids, and a tail of `rest` tokens that no other prompt has."""
    builder = TraceBuilder("made", "test", width)
    for time, prompt in enumerate(prompts):
        builder.add_blocks(prompt, len(prompt) * width + rest, answer, time)
    return builder.build()


@given(few_symbols)
def test_matches_are_the_longest_known_prefix(prompts: Prompts) -> None:
    known: set[tuple[int, ...]] = set()
    expected = []
    for prompt in prompts:
        heads = [tuple(prompt[:n]) for n in range(1, len(prompt) + 1)]
        expected.append(sum(head in known for head in heads) * 10)
        known.update(heads)
    assert endless_matches(trace_of(prompts)).tolist() == expected


@given(few_symbols)
def test_numbers_are_equal_exactly_for_equal_prefixes(prompts: Prompts) -> None:
    trace = trace_of(prompts)
    prefixes = number_prefixes(trace.symbols, trace.offsets)
    named: dict[tuple[int, ...], int] = {}
    for i in range(len(trace)):
        for n in range(1, len(trace.prompt(i)) + 1):
            head = tuple(trace.prompt(i)[:n].tolist())
            number = int(prefixes.ids[trace.offsets[i] + n - 1])
            assert named.setdefault(head, number) == number
    assert len(set(named.values())) == len(named) == prefixes.count


def test_tokens_are_exact() -> None:
    builder = TraceBuilder("made", "test", 1, "recorded")
    builder.add_tokens([1, 2, 3], [4, 5], 0.0)
    builder.add_tokens([1, 2, 3, 4, 5, 6], [], 1.0)
    builder.add_tokens([1, 2, 3], [], 2.0)
    trace = builder.build()
    assert endless_matches(trace).tolist() == [0, 5, 2]
    assert endless_matches(trace, read_outputs(trace, "never")).tolist() == [0, 3, 2]


def test_the_first_prompt_that_goes_on_contains_the_answer() -> None:
    builder = TraceBuilder("made", "test", 10)
    builder.add_blocks([1, 2], 23, 20, 0.0)  # prompt and answer fill four blocks
    builder.add_blocks([9], 15, 4, 1.0)
    builder.add_blocks([1, 2, 3, 4, 5], 57, 4, 2.0)  # goes on
    builder.add_blocks([1, 2, 6, 7], 44, 4, 3.0)  # forks
    builder.add_blocks([1, 2, 3, 4, 8], 51, 4, 4.0)
    trace = builder.build()
    linked = continuations(trace)
    assert linked.child.tolist() == [2, -1, -1, -1, -1]
    assert linked.stop[0] == 4
    assert endless_matches(trace, read_outputs(trace, "continuation")).tolist() == [0, 0, 40, 20, 40]
    assert endless_matches(trace, read_outputs(trace, "never")).tolist() == [0, 0, 20, 20, 40]


@given(few_symbols)
def test_continuations_go_forward_and_agree(prompts: Prompts) -> None:
    trace = trace_of(prompts, answer=25)
    linked = continuations(trace)
    for i, child in enumerate(linked.child.tolist()):
        if child >= 0:
            assert child > i
            assert prompts[child][: len(prompts[i])] == prompts[i]
            assert len(prompts[i]) <= linked.stop[i] <= len(prompts[child])
    never = endless_matches(trace, read_outputs(trace, "never"))
    assert (endless_matches(trace, read_outputs(trace, "continuation")) >= never).all()


def test_large_ids_and_texts_are_symbols_too() -> None:
    builder = TraceBuilder("made", "test", 10)
    for ids in ([1 << 60, -5], [1 << 60, -6], ["a", "b"], ["a", "c"], [0, 1], [0, 2]):
        builder.add_blocks(ids, 25, 0, 0.0)
    assert endless_matches(builder.build()).tolist() == [0, 10, 0, 10, 0, 10]
    assert (np.diff(builder.build().offsets) == 3).all()
