"""The oracle and the shadow device themselves, on small examples: a judge that never objects would prove nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.model.oracle import Names, Oracle, due_positions
from tests.model.shadow import Lane, Shadow

from headway.cache import (
    CacheGeometry,
    Evicted,
    Explanation,
    FullAttention,
    KeptCheckpoint,
    Loss,
    ParallelLayout,
    Path,
    PathPart,
    Reason,
    Recurrent,
    SlidingWindow,
)


def event(name: str, position: int, tokens: list[int], **more: object) -> object:
    made = type(name, (SimpleNamespace,), {"first": position})
    return made(namespace=0, position=position, prefix=np.array(tokens, dtype=np.int32), **more)


def test_names_are_equal_for_equal_prefixes_only() -> None:
    names = Names()
    a, b = names.path(0, [1, 2, 3]), names.path(0, [1, 2, 4])
    assert a[:3] == b[:3]
    assert a[3] != b[3]
    assert names.path(1, [1, 2, 3])[3] != a[3]
    assert set(names.below(a[2])) == {a[2], a[3], b[3]}


def test_oracle_finds_the_deepest_checkpoint_below_the_last_token() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=True, ghosts_kept=True)
    path = oracle.names.path(0, range(10))
    oracle.commit(path, 10)
    for position in (4, 9, 10):
        oracle.on_event(event("CheckpointStored", position, list(range(position)), kind="breakpoint"))
    assert oracle.best_hit(path) == 9
    assert oracle.best_hit(path[:10]) == 4
    assert oracle.best_hit(oracle.names.path(0, [0, 1, 2, 3, 99, 5])) == 4
    oracle.on_event(event("CheckpointRemoved", 9, list(range(9)), kind="breakpoint", cause="evicted"))
    assert oracle.best_hit(path) == 4
    assert oracle.evictions == [("checkpoint", path[9])]


def test_oracle_asks_for_equal_later_tokens_under_lookahead() -> None:
    oracle = Oracle(Names(), lookahead=2, tails=True, ghosts_kept=True)
    path = oracle.names.path(0, range(10))
    oracle.commit(path, 8)
    oracle.on_event(event("CheckpointStored", 4, [0, 1, 2, 3, 4, 5], kind="breakpoint"))
    assert oracle.best_hit(oracle.names.path(0, [0, 1, 2, 3, 4, 5])) == 4
    assert oracle.best_hit(oracle.names.path(0, [0, 1, 2, 3, 4, 6, 7, 8])) == 0


def test_oracle_objects_to_what_nobody_computed() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=True, ghosts_kept=True)
    oracle.commit(oracle.names.path(0, range(5)), 3)
    with pytest.raises(AssertionError, match="nobody computed"):
        oracle.on_event(event("CheckpointStored", 4, [0, 1, 2, 3], kind="breakpoint"))
    with pytest.raises(AssertionError, match="not all of that was computed"):
        oracle.on_event(event("ResidentGrown", 4, [0, 1, 2, 3], start=0))


def test_oracle_follows_the_resident_end() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=False, ghosts_kept=True)
    path = oracle.names.path(0, range(8))
    oracle.commit(path, 8)
    oracle.on_event(event("ResidentGrown", 8, list(range(8)), start=0))
    assert oracle.best_hit(path) == 7
    oracle.on_event(event("ResidentShrunk", 8, list(range(8)), keep=3, cause="evicted"))
    assert oracle.best_hit(path) == 3


def test_oracle_objects_to_a_hit_that_is_too_shallow_or_too_deep() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=False, ghosts_kept=True)
    path = oracle.names.path(0, range(8))
    oracle.commit(path, 8)
    oracle.must_know(path, 8)
    oracle.on_event(event("ResidentGrown", 5, list(range(5)), start=0))
    oracle.judge_hit(path, 5, 8, [])
    for wrong in (4, 6):
        with pytest.raises(AssertionError, match="right is 5"):
            oracle.judge_hit(path, wrong, 8, [])
    with pytest.raises(AssertionError, match="matched"):
        oracle.judge_hit(path, 5, 7, [])


def story(path: list[int], hit: int, matched: int, *losses: Loss) -> Explanation:
    return Explanation(len(path) - 1, hit, matched, losses)


def judge(oracle: Oracle, path: list[int], told: Explanation, *, running: object = (), elsewhere: object = ()) -> None:
    oracle.judge_story(path, told, running, elsewhere)  # type: ignore[arg-type]


def test_oracle_objects_to_an_eviction_that_was_not() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=True, ghosts_kept=True, clock=lambda: 5.0)
    path = oracle.names.path(0, range(10))
    oracle.commit(path, 10)
    for position in (4, 6):
        oracle.on_event(event("CheckpointStored", position, list(range(position)), kind="breakpoint"))
    oracle.on_event(event("CheckpointRemoved", 6, list(range(6)), kind="breakpoint", cause="evicted"))
    last = Loss(Reason.LAST_TOKEN, 9, 10)
    never = Loss(Reason.STATE_NEVER_TAKEN, 6, 9)
    right = Loss(Reason.EVICTED, 4, 6, Evicted(6, "breakpoint", "evicted", 0.0))
    judge(oracle, path, story(path, 4, 10, right, never, last))
    for line, rest, wrong in (
        (Loss(Reason.EVICTED, 4, 7, Evicted(7, "breakpoint", "evicted", 0.0)), 7, "no checkpoint was evicted at 7"),
        (Loss(Reason.EVICTED, 4, 6, Evicted(6, "junction", "evicted", 0.0)), 6, "right is one of"),
        (Loss(Reason.EVICTED, 4, 6, Evicted(6, "breakpoint", "evicted", 20.0)), 6, "right is one of"),
        (Loss(Reason.STATE_NEVER_TAKEN, 4, 9), 9, "the breakpoint checkpoint at 6 was evicted"),
        (Loss(Reason.STILL_COMPUTING, 4, 9), 9, "nobody who runs has 4 in its prompt"),
        (Loss(Reason.LOOKAHEAD, 4, 9), 9, "right is"),
        (Loss(Reason.OTHER_NAMESPACE, 4, 9), 9, "10 tokens are known in its own"),
        (Loss(Reason.PARTED, 4, 9), 9, "10 tokens are known"),
        (Loss(Reason.NO_ROOM, 4, 9), 9, "4 tokens are there"),
    ):
        lines = (line, *(never._replace(start=rest),) * (rest < 9), last)
        with pytest.raises(AssertionError, match=wrong):
            judge(oracle, path, story(path, 4, 10, *lines))


def test_oracle_objects_to_what_nobody_computes() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=True, ghosts_kept=True)
    path = oracle.names.path(0, range(10))
    oracle.commit(path, 4)
    oracle.must_know(path, 4)
    last = Loss(Reason.LAST_TOKEN, 9, 10)

    def told(computed: int) -> Explanation:
        lines = Loss(Reason.STATE_NEVER_TAKEN, 0, computed), Loss(Reason.STILL_COMPUTING, computed, 9)
        return story(path, 0, 10, *(line for line in lines if line.start < line.stop), last)

    judge(oracle, path, told(4), running=[path])
    with pytest.raises(AssertionError, match="nobody who runs has 7 in its prompt"):
        judge(oracle, path, told(4), running=[path[:8]])
    with pytest.raises(AssertionError, match="3 has been computed"):
        judge(oracle, path, told(3), running=[path])
    with pytest.raises(AssertionError, match="nobody computed 4"):
        judge(oracle, path, told(9), running=[path])


def test_oracle_objects_to_lines_that_do_not_cover() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=True, ghosts_kept=True)
    path = oracle.names.path(0, range(10))
    for lines in ((Loss(Reason.NOTHING_MATCHED, 0, 9),), (Loss(Reason.NOTHING_MATCHED, 1, 10),), ()):
        with pytest.raises(AssertionError, match="losses do not"):
            judge(oracle, path, story(path, 0, 0, *lines))


def test_oracle_asks_for_another_namespace_that_knows_more() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=False, ghosts_kept=True)
    path, other = (oracle.names.path(namespace, range(10)) for namespace in (0, 1))
    oracle.commit(other, 6)
    oracle.must_know(other, 6)

    def told(elsewhere: int) -> Explanation:
        lines = Loss(Reason.OTHER_NAMESPACE, 0, elsewhere), Loss(Reason.NOTHING_MATCHED, elsewhere, 10)
        return story(path, 0, 0, *(line for line in lines if line.start < line.stop))

    judge(oracle, path, told(6), elsewhere=[other])
    with pytest.raises(AssertionError, match="another namespace knows 6 tokens"):
        judge(oracle, path, told(0), elsewhere=[other])
    with pytest.raises(AssertionError, match="others know 6 tokens"):
        judge(oracle, path, told(7), elsewhere=[other])


def test_oracle_objects_to_a_path_that_is_told_wrongly() -> None:
    oracle = Oracle(Names(), lookahead=0, tails=True, ghosts_kept=True)
    path = oracle.names.path(0, range(10))
    oracle.want(path)
    oracle.commit(path, 8)
    oracle.on_event(event("ResidentGrown", 4, [0, 1, 2, 3], start=0))
    oracle.on_event(event("CheckpointStored", 4, [0, 1, 2, 3], kind="breakpoint"))
    kept = KeptCheckpoint(4, "breakpoint", 1, False)
    right = PathPart(0, 8, 8, 4, 8, (kept,), (), (), 0, 0)
    oracle.judge_path(path, Path(8, (right,)), 8)
    for wrong in (
        right._replace(resident=5),
        right._replace(computed=9, stop=9),
        right._replace(checkpoints=()),
        right._replace(checkpoints=(kept._replace(kind="junction"),)),
        right._replace(checkpoints=(kept._replace(uses=2),)),
        right._replace(lost=(Evicted(6, "junction", "evicted", 0.0, 0),)),
    ):
        with pytest.raises(AssertionError):
            oracle.judge_path(path, Path(wrong.stop, (wrong,)), wrong.stop)


@pytest.mark.parametrize(
    ("placement", "lookahead", "alignment", "right"),
    [
        (["prompt_end"], 0, 1, {99}),
        (["prompt_end"], 3, 1, {97}),
        (["prompt_end"], 0, 16, {96}),
        (["junction"], 1, 1, {59}),
        (["breakpoint"], 0, 1, {40, 99}),
        (["interval:30"], 0, 1, {30, 60, 90}),
        (["answer_end"], 0, 1, set()),
    ],
)
def test_due_positions(placement: list[str], lookahead: int, alignment: int, right: set[int]) -> None:
    due = due_positions(
        length=100,
        hit=20,
        parted=60,
        breakpoints=[10, 40, 100],
        placement=placement,
        lookahead=lookahead,
        alignment=alignment,
    )
    assert due == right


# The shadow device.


def device(*groups: object, layout: ParallelLayout | None = None) -> tuple[Shadow, Names]:
    names = Names()
    return Shadow(CacheGeometry(groups, layout, block_tokens=4), 20, names), names


def step(counts: list[int], starts: list[int], rows: list[int], **more: object) -> SimpleNamespace:
    base = {"copies": np.empty((0, 2), dtype=np.int32), "fresh": np.array([], dtype=np.int64), "exports": ()}
    return SimpleNamespace(counts=np.array(counts), starts=np.array(starts), rows=np.array(rows), **(base | more))


def test_a_read_finds_what_was_written_on_every_rank() -> None:
    shadow, names = device(FullAttention("a", 4), layout=ParallelLayout(2, 2))
    path = names.path(0, range(12))
    tables = [np.array([[3, 5]], dtype=np.int32)]
    shadow.forward(0, 0, 10, path, Lane(0, path, 0, 0), tables)
    shadow.forward(0, 10, 12, path, Lane(0, path, 10, 0), tables)
    other = names.path(0, [*range(9), 77, 78])
    with pytest.raises(AssertionError, match="wrong entry at 9"):
        shadow.forward(0, 10, 11, [*other, 0], Lane(0, other, 10, 0), tables)


def test_a_read_of_the_wrong_block_is_found() -> None:
    shadow, names = device(FullAttention("a", 4))
    path = names.path(0, range(8))
    shadow.forward(0, 0, 8, path, Lane(0, path, 0, 0), [np.array([[3, 5]], dtype=np.int32)])
    with pytest.raises(AssertionError, match="wrong entry at 4"):
        shadow.check_read(shadow.geometry.tables[0], np.array([3, 6]), path, 8, "hit")


def test_a_window_needs_its_tail_and_nothing_more() -> None:
    shadow, names = device(SlidingWindow("w", 4, window=3))
    path = names.path(0, range(9))
    shadow.forward(0, 0, 9, path, Lane(0, path, 0, 0), [np.array([[0, 1, 2]], dtype=np.int32)])
    table = shadow.geometry.tables[0]
    shadow.check_read(table, np.array([-1, 1, 2]), path, 9, "hit")
    with pytest.raises(AssertionError, match="no block"):
        shadow.check_read(table, np.array([-1, 1, -1]), path, 9, "hit")


def test_a_state_must_be_that_after_exactly_the_prefix() -> None:
    shadow, names = device(Recurrent("s", 8))
    path = names.path(0, range(9))
    tables = [np.array([[7]], dtype=np.int32)]
    lane = Lane(0, path, 0, 0)
    with pytest.raises(AssertionError, match="not zeroed"):
        shadow.prepare(step([4], [0], [0]), {0: lane}, tables)
    shadow.prepare(step([4], [0], [0], fresh=np.array([0])), {0: lane}, tables)
    shadow.forward(0, 0, 4, path, lane, tables)
    shadow.check_state(np.array([7]), path[4], "hit")
    with pytest.raises(AssertionError, match="not that after this prefix"):
        shadow.check_state(np.array([7]), path[3], "hit")


def test_a_copy_takes_everything_along() -> None:
    shadow, names = device(FullAttention("a", 4))
    path = names.path(0, range(8))
    shadow.forward(0, 0, 6, path, Lane(0, path, 0, 0), [np.array([[3, 5]], dtype=np.int32)])
    shadow.copy(np.array([[5, 9]]))
    shadow.check_read(shadow.geometry.tables[0], np.array([3, 9]), path, 6, "hit")
    with pytest.raises(AssertionError, match="never written"):
        shadow.copy(np.array([[11, 12]]))
    with pytest.raises(AssertionError, match="another copy"):
        shadow.copy(np.array([[3, 5], [5, 9]]))


def test_a_block_that_changes_hands_forgets() -> None:
    shadow, names = device(FullAttention("a", 4), SlidingWindow("w", 4, window=3))
    path = names.path(0, range(4))
    tables = [np.array([[1]], dtype=np.int32), np.array([[2]], dtype=np.int32)]
    shadow.forward(0, 0, 4, path, Lane(0, path, 0, 0), tables)
    shadow.forward(1, 0, 4, path, Lane(1, path, 0, 0), [np.array([[3], [3]]), np.array([[1], [1]])])
    with pytest.raises(AssertionError, match="wrong entry"):
        shadow.check_read(shadow.geometry.tables[0], np.array([1]), path, 4, "hit")


def test_entries_made_with_other_later_tokens_are_found() -> None:
    shadow, names = device(FullAttention("draft", 4, lookahead=1))
    path = names.path(0, range(8))
    row = np.array([[3, 5]], dtype=np.int32)
    shadow.forward(0, 0, 6, path, Lane(0, path, 0, 0), [row])
    other = names.path(0, [0, 1, 2, 3, 77])
    shadow.check_read(shadow.geometry.tables[0], row[0], path, 4, "hit")
    with pytest.raises(AssertionError, match="later tokens that differ"):
        shadow.check_read(shadow.geometry.tables[0], row[0], other, 4, "hit")


def test_two_writers_of_one_block_are_found() -> None:
    shadow, names = device(FullAttention("a", 4))
    path = names.path(0, range(8))
    lanes = {0: Lane(0, path, 2, 0, 2), 1: Lane(1, path, 3, 0, 3)}
    tables = [np.array([[3], [3]], dtype=np.int32)]
    with pytest.raises(AssertionError, match="is written at"):
        shadow.check_writers([0], {0: (2, 3)}, lanes, tables)
    lanes[1].computed, lanes[1].wrote = 2, {3}
    with pytest.raises(AssertionError, match="both write"):
        shadow.check_writers([0], {0: (2, 3)}, lanes, tables)
