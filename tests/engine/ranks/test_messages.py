"""Messages between the driver and its ranks."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache import CacheGeometry, FullAttention, Recurrent, StateExport, Step
from headway.engine import StepWork
from headway.engine.ranks.drafting import DraftSource
from headway.engine.ranks.messages import CODEC, Load, RankFault, compact
from headway.engine.ranks.wire import Codec
from headway.errors import ConfigError
from headway.runtime.forward.batch import batch_of
from headway.runtime.interface import SampleRow, SamplingParams
from headway.runtime.parallel.distributed import Rendezvous


@dataclass(frozen=True)
class Box:
    value: Any


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner).map(tuple)
        | st.frozensets(st.integers(-9, 9))
        | st.dictionaries(st.text(), inner)
        | st.builds(Box, inner)
    ),
    max_leaves=8,
)
DTYPES = ("<i4", "<i8", "<f4", "|b1", "|u1")


@given(PLAIN)
def test_plain_values_come_back(value: object) -> None:
    codec = Codec([Box])
    assert codec.decode(codec.encode(Box(value))) == Box(value)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5))
def test_arrays_come_back_and_may_be_written(kinds: list[tuple[str, list[int]]]) -> None:
    arrays = tuple((np.arange(np.prod(shape)) % 7).astype(dtype).reshape(shape) for dtype, shape in kinds)
    codec = Codec([Box])
    back = codec.decode(codec.encode(Box(arrays))).value
    for before, after in zip(arrays, back, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert np.array_equal(before, after)
        assert after.flags.writeable


def test_views_of_larger_arrays_are_sent_as_they_look() -> None:
    codec = Codec([Box])
    whole = np.arange(24).reshape(4, 6)
    assert np.array_equal(codec.decode(codec.encode(Box(whole[1:3, ::2]))).value, whole[1:3, ::2])


@pytest.mark.parametrize(
    "value",
    [
        (Box(1), Box(2), Box("three")),
        (None, Box(1), None, Box(2)),
        (None, None),
        (Box(Box(1)), Box(Box(2))),
        (Box(()), Box((None, 5))),
    ],
)
def test_sequences_of_records_travel_as_columns(value: object) -> None:
    codec = Codec([Box])
    assert codec.decode(codec.encode(Box(value))) == Box(value)


def test_sequences_of_arrays_travel_as_one() -> None:
    codec = Codec([Box])
    arrays = [np.arange(n, dtype=np.int32) for n in (3, 0, 5)]
    for value in (arrays, [None, *arrays], [*arrays, np.ones((2, 2), np.int32)], [*arrays, np.arange(3.0)]):
        back = codec.decode(codec.encode(Box(value))).value
        assert len(back) == len(value)
        for before, after in zip(value, back, strict=True):
            assert (before is None) == (after is None)
            assert before is None or (before.dtype == after.dtype and np.array_equal(before, after))
    many = codec.encode(Box([np.ones(1, dtype=np.int32)] * 1000))
    assert len(many) < 1000 * (4 + 2) + 200


def test_what_is_not_plain_is_not_sent() -> None:
    codec = Codec([Box])
    with pytest.raises(TypeError, match="no plain record"):
        codec.encode(Box({1, 2}))
    with pytest.raises(TypeError, match="no plain record"):
        codec.encode(Rendezvous("x"))


@pytest.mark.parametrize("message", [b"", b"12345678", pickle.dumps(print), CODEC.encode(Rendezvous("x"))])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Codec([Box]).decode(message)


def test_nested_records_with_defaults() -> None:
    load = Load("model", "fp32", 2, 2, 1, Rendezvous(host="a", port=5), "a2a", 3.0, DraftSource("mtp", 3, "match"))
    assert CODEC.decode(CODEC.encode(load)) == load
    params = SamplingParams(temperature=0.5, logit_bias={3: -1.0}, seed=-(2**62))
    assert CODEC.decode(CODEC.encode(params)) == params


def test_faults_become_the_exceptions_that_they_were() -> None:
    assert isinstance(RankFault("ConfigError", "too small").as_exception(1), ConfigError)
    found = RankFault("OutOfMemoryError", "too large").as_exception(1)
    assert type(found) is RuntimeError
    assert str(found) == "rank 1: OutOfMemoryError: too large"


def work_of(rows: list[int], starts: list[int], counts: list[int], params: list[SamplingParams | None]) -> StepWork:
    tokens = [np.arange(count, dtype=np.int32) for count in counts]
    table = np.arange(10 * 50, dtype=np.int32).reshape(10, 50)
    export = StateExport(rows[1], 9, np.array([3, 4], dtype=np.int32), np.array([7, 8], dtype=np.int32))
    step = Step(
        rows=np.array(rows),
        starts=np.array(starts),
        counts=np.array(counts),
        copies=np.array([[1, 2]], dtype=np.int32),
        fresh=np.array([rows[0]]),
        exports=(export,),
        serial=3,
    )
    prompt = np.arange(40, dtype=np.int32)
    samples = [None if p is None else SampleRow(p, 5, prompt, prompt[:3]) for p in params]
    return StepWork(step, [table, table + 1000], tokens, samples)


def test_a_compact_step_is_the_same_batch() -> None:
    geometry = CacheGeometry([FullAttention("full", 4), Recurrent("state", 100)], block_tokens=16)
    work = work_of([7, 2, 5], [0, 70, 20], [5, 1, 0], [None, SamplingParams(temperature=0.0), None])
    small = CODEC.decode(CODEC.encode(compact(work, geometry)))
    before, _ = batch_of(work.step, work.tables, work.tokens)
    after, _ = batch_of(small.step, small.tables, small.tokens)
    assert [table.shape[1] for table in after.tables] == [5, geometry.tables[1].state_blocks]
    for left, right in zip(before.tables, after.tables, strict=True):
        assert np.array_equal(left[:, : right.shape[1]], right)
    for name in ("tokens", "starts", "counts", "fresh", "copies"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
    assert [m.source.tolist() for m in after.exports] == [[3, 4]]


def test_prompts_travel_only_where_a_penalty_reads_them() -> None:
    geometry = CacheGeometry([FullAttention("full", 4), Recurrent("state", 100)], block_tokens=16)
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(repetition_penalty=1.1)]
    work = work_of([0, 1, 2], [0, 0, 0], [1, 1, 1], [*params])
    samples = compact(work, geometry).samples
    sizes = [(len(s.prompt), len(s.output)) for s in samples if s is not None]
    assert sizes == [(0, 0), (0, 3), (40, 3)], "the length of an answer seeds its next random number"
