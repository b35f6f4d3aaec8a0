"""A trace in memory: its columns, its head, and what a builder refuses."""

import numpy as np
import pytest

from headway.errors import TraceError
from headway.formats import Trace, TraceBuilder


def made() -> Trace:
    builder = TraceBuilder("made", "test", 10)
    builder.add_blocks([1, 2], 25, 4, 5.0, answer=[7], boundaries=[10, 25])
    builder.add_blocks([1, 3, 9], 25, 40, 2.0)
    builder.add_unknown(30, 1, 9.0)
    return builder.build()


def test_columns_are_in_order_of_arrival() -> None:
    trace = made()
    assert len(trace) == 3
    assert trace.times.tolist() == [2.0, 5.0, 9.0]
    assert trace.prompt_tokens.tolist() == [25, 25, 30]
    assert trace.answer_tokens.tolist() == [40, 4, 1]
    assert trace.tokens == 80
    assert trace.prompt(1).tolist()[:2] == [1, 2]
    assert len(trace.prompt(0)) == 3, "whole blocks, and a tail"
    assert int(trace.prompt(0)[-1]) >= 1 << 30, "apart from every block"
    assert [len(trace.answer(i)) for i in range(3)] == [0, 1, 0]
    assert trace.marks(1).tolist() == [10, 25]


def test_a_head_is_a_trace_of_its_own() -> None:
    trace, head = made(), made().head(2)
    assert len(head) == 2
    assert head.prompt(1).tolist() == trace.prompt(1).tolist()
    assert head.answer(1).tolist() == trace.answer(1).tolist()
    assert head.marks(1).tolist() == [10, 25]
    assert len(trace.head(99)) == 3


def test_what_is_unknown_shares_nothing_and_scopes_are_apart() -> None:
    builder = TraceBuilder("made", "test", 10)
    for scope in (None, "a", "b"):
        builder.add_blocks([1, 2], 20, 0, 0.0, scope=scope)
    builder.add_unknown(20, 0, 0.0)
    builder.add_unknown(20, 0, 0.0)
    trace = builder.build()
    blocks = [trace.prompt(i)[:2].tolist() for i in range(5)]
    assert len(np.unique(blocks)) == 10


def test_equal_tails_are_equal_only_where_they_have_an_id() -> None:
    builder = TraceBuilder("made", "test", 10)
    for ids in ([1, 9], [1, 9], [1], [1]):
        builder.add_blocks(ids, 15, 0, 0.0)
    tails = [int(builder.build().prompt(i)[-1]) for i in range(4)]
    assert tails[0] == tails[1]
    assert len(set(tails)) == 3


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([1], 0, "a prompt of 0 tokens"),
        ([1], 30, "1 block ids do not fit 30 tokens in blocks of 10: 3 whole blocks"),
        ([1, 2, 3], 15, "3 block ids do not fit"),
        ([1, "b"], 20, "block ids must be of one type, found int and str"),
    ],
)
def test_what_a_builder_refuses(ids: list[int | str], tokens: int, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        TraceBuilder("made", "test", 10).add_blocks(ids, tokens, 0, 0.0)


def test_an_empty_trace_is_none() -> None:
    with pytest.raises(TraceError, match="made: no request"):
        TraceBuilder("made", "test", 10).build()
