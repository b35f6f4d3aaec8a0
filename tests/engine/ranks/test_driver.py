"""The driver's side of a group of ranks, without any: answers, faults and losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from tests.engine.bench import WORLDS

from headway.cache import CacheConfig, CacheGeometry, PrefixCache, Prompt
from headway.engine import (
    ParallelConfig,
    RanksLostError,
    RowAnswer,
    StepWork,
)
from headway.engine.ranks.drafting import DraftSource
from headway.engine.ranks.driver import RankedExecutor
from headway.engine.ranks.messages import (
    Answer,
    FaultSite,
    Load,
    Loaded,
    MoveBlocks,
    Moved,
    Prepare,
    Prepared,
    RankFault,
    ReadPortions,
    StepDone,
    WritePortions,
    decode,
    encode,
)
from headway.errors import ConfigError
from headway.runtime.forward.canonical import FieldShare, GroupShare, Piece
from headway.runtime.interface import BlockRange, CanonicalGroup, RowFault
from headway.runtime.parallel.distributed import Rendezvous

NOBODY = DraftSource("none", None, "match")
ROOM = Prepare(blocks=10, block_tokens=4, tp=2, dcp=2, interleave=1, single_steps=False, max_running=1)
OUTPUT = StepDone((RowAnswer((5,), 1),))
STATE = CanonicalGroup("state", "state", 8, 0, 0, 0, True, "halves")


def half(rank: int, claims: bool = True) -> GroupShare:
    """A rank's half of two fields of four bytes."""
    piece = Piece(0, 2 * rank, 2)
    mine = (piece,) if claims else ()
    return GroupShare(STATE, 0, tuple(FieldShare(1, 2 * i, 0, 2, 4 * i, 0, 4, (piece,), mine) for i in range(2)))


SHARES = ((half(0),), (half(1),))
SOMEWHERE = BlockRange("state", 9, 9, np.array([3, 4], dtype=np.int32))


class ScriptedRanks:
    """A group of two that answers what the test says; an answer may be an exception, or `None` for silence.

    `collectives` is how many each says that it has begun.
    """

    meeting = Rendezvous("somewhere")
    size = 2

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.script: dict[type, list[object]] = {
            Load: [Loaded(100, (1,), None), Loaded(90, (1,), None)],
            Prepare: [Prepared(40, None, SHARES[0]), Prepared(40, None, SHARES[1])],
            StepWork: [OUTPUT, StepDone()],
            MoveBlocks: [Moved(), Moved()],
            ReadPortions: [Moved([memoryview(b"aacc")]), Moved([memoryview(b"bbdd")])],
            WritePortions: [Moved(), Moved()],
        }
        self.answers: deque[tuple[int, object]] = deque()
        self.killed = False
        self.gone: str | None = None
        self.collectives = [7, 7]

    def send(self, messages: Sequence[bytes], timeout: float) -> None:
        self.sent += [decode(message) for message in messages]
        answers = self.script[type(self.sent[-1])]
        self.answers = deque(reversed([(rank, answer) for rank, answer in enumerate(answers) if answer is not None]))

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        if not self.answers:
            return None
        rank, answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return rank, answer if isinstance(answer, bytes) else encode(Answer(answer, self.collectives[rank]))

    def stopped(self) -> Sequence[int]:
        return ()

    def check(self) -> None:
        if self.gone is not None:
            raise RanksLostError(self.gone)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def launched() -> list[ScriptedRanks]:
    return []


@pytest.fixture
def executor(launched: list[ScriptedRanks]) -> RankedExecutor:
    def launch() -> ScriptedRanks:
        launched.append(ScriptedRanks())
        return launched[-1]

    built = RankedExecutor(launch, "model", "fp32", ParallelConfig(dcp=2, rank_timeout=5.0), NOBODY)
    assert [each.memory for each in built.load()] == [100, 90]
    built.prepare(CacheGeometry(WORLDS["hybrid"], block_tokens=4), ROOM)
    return built


def some_work() -> StepWork:
    cache = PrefixCache(CacheConfig(WORLDS["hybrid"], 40, block_tokens=4))
    tokens = np.arange(1, 9, dtype=np.int32)
    step = cache.extend([cache.lease(Prompt(tokens)).row], 3)
    return StepWork(step, cache.tables, [tokens[:3]], [None])


def test_every_rank_is_sent_the_step_and_rank_0_says_the_tokens(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    sent = launched[0].sent
    done_meanwhile: list[type] = []
    executor.meanwhile = lambda: done_meanwhile.append(type(sent[-1]))
    assert executor.run(some_work())[0].tokens == (5,)
    assert [type(message) for message in sent] == [Load, Prepare, StepWork]
    assert done_meanwhile == [StepWork], "other work is done once the ranks have theirs"


def test_objects_are_put_together_of_what_the_ranks_have(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    assert executor.canonical == {"state": STATE}
    assert [bytes(each) for each in executor.read_objects([SOMEWHERE])] == [b"aabbccdd"]
    executor.write_objects([SOMEWHERE], [memoryview(b"12345678")])
    asked, *written = launched[0].sent[2:]
    assert isinstance(asked, ReadPortions)
    assert [each.data for each in written] == [[b"1256"], [b"3478"]]  # type: ignore[attr-defined]
    assert all(each.portions[0].range.blocks.tolist() == [3, 4] for each in (asked, *written))  # type: ignore[attr-defined]
    pairs = np.array([[1, 2], [3, 4]], dtype=np.int32)
    executor.move_blocks(pairs, pairs[:0])
    moved = launched[0].sent[-1]
    assert isinstance(moved, MoveBlocks)
    assert (moved.out.tolist(), moved.back.tolist()) == ([[1, 2], [3, 4]], [])


def test_objects_with_holes_are_never_made(executor: RankedExecutor, launched: list[ScriptedRanks]) -> None:
    launched[0].script[Prepare] = [Prepared(40, None, (half(0),)), Prepared(40, None, (half(1, claims=False),))]
    with pytest.raises(AssertionError, match="ranks have 2 of 4 bytes of state"):
        executor.prepare(CacheGeometry(WORLDS["hybrid"], block_tokens=4), ROOM)


def test_a_rank_that_cannot_move_is_heard_and_one_that_is_silent_is_lost(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    nothing = np.empty((0, 2), dtype=np.int32)
    launched[0].script[MoveBlocks] = [Moved(), RankFault("MemoryError", "no copy")]
    with pytest.raises(RuntimeError, match="rank 1: MemoryError: no copy"):
        executor.move_blocks(nothing, nothing)
    assert not launched[0].killed
    launched[0].script[ReadPortions] = [Moved([memoryview(b"aacc")]), None]
    with pytest.raises(RanksLostError, match="no answer from rank 1"):
        executor.read_objects([SOMEWHERE])
    assert launched[0].killed


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([{}, {0: RowFault(9)}], RowFault(9)),
        ([{0: RowFault()}, {0: RowFault()}], RowFault()),
        ([{0: RowFault(form="no way")}, {}], RowFault(form="no way")),
        ([{0: RowFault(form="no way")}, {0: RowFault(4)}], RowFault(4)),
    ],
)
def test_a_row_that_is_not_finite_on_one_rank_has_failed(
    executor: RankedExecutor, launched: list[ScriptedRanks], faults: list[dict[int, RowFault]], told: RowFault
) -> None:
    launched[0].script[StepWork] = [StepDone(OUTPUT.rows, faults[0]), StepDone((), faults[1])]
    assert executor.run(some_work()) == [RowAnswer(fault=told)]


@pytest.mark.parametrize("answers", [[OUTPUT, None], [None, StepDone()], [RankFault("ValueError", "bad"), None]])
def test_a_rank_that_does_not_answer_is_lost_with_all_others(
    executor: RankedExecutor, launched: list[ScriptedRanks], answers: list[object]
) -> None:
    launched[0].script[StepWork] = answers
    with pytest.raises(RanksLostError, match=rf"rank {answers.index(None)}\b"):
        executor.run(some_work())
    assert launched[0].killed
    with pytest.raises(RanksLostError, match="no ranks"):
        executor.run(some_work())
    executor.restart()
    assert executor.run(some_work())[0].tokens == (5,)
    assert [type(message) for message in launched[1].sent] == [Load, Prepare, StepWork]
    assert launched[1].sent[1] == ROOM


@pytest.mark.parametrize(
    ("garbage", "text"),
    [(b"garbage", "what is no message"), (encode(ROOM), "Prepare, which is no answer")],
)
def test_a_rank_that_answers_with_garbage_is_lost(
    executor: RankedExecutor, launched: list[ScriptedRanks], garbage: bytes, text: str
) -> None:
    launched[0].script[StepWork] = [OUTPUT, garbage]
    with pytest.raises(RanksLostError, match=f"rank 1 answered with .*{text}"):
        executor.run(some_work())
    assert launched[0].killed


def test_a_rank_that_is_gone(executor: RankedExecutor, launched: list[ScriptedRanks]) -> None:
    launched[0].script[StepWork] = [OUTPUT, RanksLostError("rank 1 was ended by SIGKILL")]
    with pytest.raises(RanksLostError, match="SIGKILL"):
        executor.run(some_work())
    assert launched[0].killed


def test_a_fault_that_all_ranks_survive_is_a_failed_step(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    launched[0].script[StepWork] = [OUTPUT, RankFault("OutOfMemoryError", "for a moment")]
    with pytest.raises(RuntimeError, match="rank 1: OutOfMemoryError: for a moment"):
        executor.run(some_work())
    launched[0].script[StepWork] = [OUTPUT, StepDone()]
    assert executor.run(some_work())[0].tokens == (5,)
    assert not launched[0].killed


OUT_OF_MEMORY = RankFault("OutOfMemoryError", "for a moment")


@pytest.mark.parametrize("answers", [[OUT_OF_MEMORY, OUT_OF_MEMORY], [OUT_OF_MEMORY, StepDone()], [OUTPUT, StepDone()]])
def test_ranks_that_have_begun_different_numbers_of_collectives_are_lost(
    executor: RankedExecutor, launched: list[ScriptedRanks], answers: list[object]
) -> None:
    """Their next collectives would pair wrongly, whether they failed or not."""
    launched[0].script[StepWork], launched[0].collectives = answers, [9, 12]
    with pytest.raises(RanksLostError, match="out of step, they have begun 9, 12 collectives"):
        executor.run(some_work())
    assert launched[0].killed


IN_MODEL = RankFault("ValueError", "bad shape", FaultSite.FORWARD)


@pytest.mark.parametrize(
    "answers",
    [
        [IN_MODEL, StepDone()],
        [OUTPUT, IN_MODEL],
        [IN_MODEL, RankFault("ValueError", "another shape", FaultSite.FORWARD)],
        [IN_MODEL, RankFault("ValueError", "bad shape")],
        [RankFault("CollectiveError", "timed out", FaultSite.COLLECTIVE)] * 2,
    ],
)
def test_ranks_of_which_nobody_knows_whether_they_are_in_step_are_lost(
    executor: RankedExecutor, launched: list[ScriptedRanks], answers: list[object]
) -> None:
    """Inside a forward there may be collectives that are not counted; a collective that failed leaves no group."""
    launched[0].script[StepWork] = answers
    with pytest.raises(RanksLostError, match=r"may be out of step; rank \d failed in a"):
        executor.run(some_work())
    assert launched[0].killed


def test_a_fault_of_the_model_itself_is_the_same_on_all_ranks_and_a_failed_step(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    launched[0].script[StepWork] = [IN_MODEL, IN_MODEL]
    with pytest.raises(RuntimeError, match="rank 0: ValueError: bad shape"):
        executor.run(some_work())
    assert not launched[0].killed


def test_a_start_that_the_user_can_mend_says_how_though_other_ranks_wait(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    launched[0].script[Prepare] = [None, RankFault("ConfigError", "lower --memory")]
    with pytest.raises(ConfigError, match="lower --memory"):
        executor.prepare(CacheGeometry(WORLDS["hybrid"]), ROOM)
    assert launched[0].killed


def test_a_rank_that_is_gone_between_steps(executor: RankedExecutor, launched: list[ScriptedRanks]) -> None:
    executor.check()
    launched[0].gone = "rank 1 was ended by SIGKILL"
    for text in ("SIGKILL", "no ranks"):
        with pytest.raises(RanksLostError, match=text):
            executor.check()
    assert launched[0].killed
    executor.restart()
    executor.check()


@pytest.mark.parametrize(("deaths", "survives"), [(2, True), (3, False)])
def test_ranks_that_are_lost_while_they_start_are_started_again_but_not_for_ever(
    executor: RankedExecutor, launched: list[ScriptedRanks], deaths: int, survives: bool
) -> None:
    def send(ranks: ScriptedRanks, messages: Sequence[bytes], timeout: float) -> None:
        if len(launched) <= 1 + deaths:  # the first group is that of the fixture
            raise RanksLostError("rank 0 was ended by SIGKILL")
        ScriptedRanks.send(ranks, messages, timeout)

    launch = executor._launch

    def launch_dying() -> ScriptedRanks:
        ranks = launch()
        assert isinstance(ranks, ScriptedRanks)
        ranks.send = partial(send, ranks)  # type: ignore[method-assign]
        return ranks

    executor._launch = launch_dying
    if survives:
        executor.restart()
        assert executor.run(some_work())[0].tokens == (5,)
    else:
        with pytest.raises(RanksLostError, match="SIGKILL"):
            executor.restart()
    assert [ranks.killed for ranks in launched] == [*[True] * (1 + deaths), *[False] * survives]


def test_a_model_that_a_rank_refuses_is_refused_as_if_it_were_here(
    executor: RankedExecutor, launched: list[ScriptedRanks]
) -> None:
    launched[0].script[Prepare] = [RankFault("ConfigError", "too small"), RankFault("ConfigError", "too small")]
    with pytest.raises(ConfigError, match="too small"):
        executor.prepare(CacheGeometry(WORLDS["hybrid"]), ROOM)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp": 4, "dcp": 3}, "dcp=3 does not divide tp=4"),
        ({"dcp": 0}, "at least 1"),
        ({"dcp": 2, "executor": "local"}, "one process"),
        ({"executor": "threads"}, "local, processes or ray"),
        ({"communication": "mail"}, "ag_rs or a2a"),
        ({"on_rank_failure": "ignore"}, "restart or exit"),
        ({"rank_timeout": 0.0}, "more than 0"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ParallelConfig(**options)  # type: ignore[arg-type]


def test_who_computes() -> None:
    kinds = [ParallelConfig(dcp=dcp, executor=kind).kind for dcp, kind in ((1, "auto"), (2, "auto"), (1, "ray"))]
    assert kinds == ["local", "processes", "ray"]
