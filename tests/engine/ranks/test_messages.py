"""Messages between the driver and its ranks."""

from __future__ import annotations

import pickle
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache import CacheGeometry, FullAttention, Recurrent, StateExport, Step
from headway.engine import RowAnswer, StepCosts, StepWork, TokenLogprob
from headway.engine.ranks.drafting import DraftSource, ReadyDrafter
from headway.engine.ranks.messages import Answer, Load, Loaded, Prepared, RankFault, StepDone, compact, decode, encode
from headway.errors import ConfigError
from headway.runtime.forward.batch import batch_of
from headway.runtime.interface import Constraint, SampleRow, SamplingParams, StoredTypes
from headway.runtime.parallel.distributed import Rendezvous
from headway.runtime.quality import Quality
from headway.runtime.selfcheck import SelfCheck, Verdict

FP8 = StoredTypes("fp8_e4m3")
LOAD = Load("model", "fp32", 2, 2, 1, Rendezvous(host="a", port=5), "a2a", 3.0, DraftSource("mtp", 3, "match"), 2, FP8)
CHECK = SelfCheck(Verdict.STEPS_ONLY, 96, 1e-7, float("inf"), 0.0, 1e-6, "is off")
LOADED = Loaded(1 << 40, (1, 2), CHECK, Quality(FP8, 9, 2.0, float("inf"), 0.5))
DTYPES = ("<i4", "<i8")


@pytest.mark.parametrize("message", [LOAD, Answer(LOADED, 3), Answer(RankFault("ConfigError", "too small"), 0)])
def test_records_come_back(message: Load | Answer) -> None:
    assert decode(encode(message)) == message


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 9), st.floats(allow_nan=False), st.just(())), max_size=3),
    st.none() | st.lists(st.floats(0, 1, width=32), max_size=5),
)
def test_what_a_step_did_for_a_row_comes_back(
    tokens: list[int], kept: int, records: list[tuple[int, float, tuple[()]]], confidence: list[float] | None
) -> None:
    logprobs = tuple(TokenLogprob(*record) for record in records)
    row = RowAnswer(tuple(tokens), kept, logprobs, 4, 3, None if confidence is None else np.array(confidence, "<f4"))
    answer = decode(encode(Answer(StepDone((row, RowAnswer())), 7)))
    assert isinstance(answer, Answer)
    assert isinstance(answer.result, StepDone)
    back, empty = answer.result.rows
    assert empty == RowAnswer()
    assert replace(back, confidence=None) == replace(row, confidence=None)
    assert (back.confidence is None) == (confidence is None)
    assert back.confidence is None or back.confidence.tolist() == confidence


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=2, max_size=2)), max_size=5))
def test_arrays_come_back_and_may_be_written(kinds: list[tuple[str, list[int]]]) -> None:
    arrays = [(np.arange(np.prod(shape)) % 7).astype(dtype).reshape(shape) for dtype, shape in kinds]
    work = msgspec.structs.replace(work_of([0, 1], [0, 0], [1, 1], [None, None]), tables=[a[:, ::-1] for a in arrays])
    back = decode(encode(work))
    assert isinstance(back, StepWork)
    for before, after in zip(arrays, back.tables, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert np.array_equal(before[:, ::-1], after)
        assert after.flags.writeable


def test_what_drafting_costs_comes_back() -> None:
    ints = np.array([1, 8])
    costs = StepCosts(ints, ints, np.ones((2, 2)), np.array([0.1, 0.2]))
    answer = decode(encode(Answer(Prepared(5, ReadyDrafter("mtp", 3, costs)), 0)))
    assert isinstance(answer, Answer)
    assert isinstance(answer.result, Prepared)
    assert answer.result.drafter is not None
    assert answer.result.drafter.costs.forward(4, 4) == costs.forward(4, 4)


def test_what_is_not_plain_is_not_sent() -> None:
    for strange in (object(), np.array([print], dtype=object)):
        with pytest.raises(TypeError, match="no plain record"):
            encode(msgspec.structs.replace(LOAD, source=strange))


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"12345678", pickle.dumps(print)),
        *map(msgspec.msgpack.encode, ([], {"type": "Box"}, {"type": "Load", "source": 5})),
        encode(StepWork(None, (np.zeros(2),), (), ())).replace(b"<f8", b"|O8"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        decode(message)


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
    small = decode(encode(compact(work, geometry)))
    assert isinstance(small, StepWork)
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
    work = work_of([0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 1], [*params, params[0]])
    assert work.samples[3] is not None
    form = Constraint("regex", "a+")
    bound = msgspec.structs.replace(work, samples=[*work.samples[:3], replace(work.samples[3], constraint=form)])
    small = decode(encode(compact(bound, geometry)))
    assert isinstance(small, StepWork)
    sizes = [(len(s.prompt), len(s.output)) for s in small.samples if s is not None]
    assert sizes == [(0, 0), (0, 3), (40, 3), (0, 3)], "an answer seeds its next random number, and has got so far"
    assert [s.constraint for s in small.samples if s is not None] == [None, None, None, form]
