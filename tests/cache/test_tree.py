"""What lies on an edge of the tree stays with its tokens when the edge is split, cut or grown."""

from __future__ import annotations

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import Loss, Path, Prompt, Reason
from headway.cache.index.edge import LostCheckpoint, Match, Trim
from headway.cache.index.pool import BlockPool
from headway.cache.index.tree import PrefixTree

PARTINGS = (1, 9, 10, 11, 19)


def tree(*, floats: bool = False) -> PrefixTree:
    return PrefixTree(0, (), BlockPool(1), floats=floats)


def path(engine: Engine, text: object) -> Path:
    return engine.cache.path(Prompt(text))  # type: ignore[arg-type]


def first_loss(engine: Engine, text: object) -> Loss:
    return engine.cache.explain(Prompt(text)).losses[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("parting", PARTINGS)
def test_lost_checkpoints_stay_with_their_positions(parting: int) -> None:
    known = tree()
    at = known.enter(Match(known.root(0), 0), tokens((1, 20)).tobytes())
    for position in (1, 10, 11, 20):
        known.remember(at.edge, LostCheckpoint(position, "junction", 0.0, "evicted", 0, position))
    upper = known.split(at.edge, parting)
    assert sorted(upper.lost) == [p for p in (1, 10, 11, 20) if p <= parting]
    assert sorted(at.edge.lost) == [p for p in (1, 10, 11, 20) if p > parting]


@pytest.mark.parametrize("parting", PARTINGS)
def test_being_computed_stays_with_its_positions(parting: int) -> None:
    known = tree()
    at = known.enter(Match(known.root(0), 0), tokens((1, 20)).tobytes())
    known.mark_computed(at.edge, 0, 10)
    upper = known.split(at.edge, parting)
    assert upper.computed == min(10, parting)
    assert at.edge.computed == max(10, parting)


@pytest.mark.parametrize("parting", PARTINGS)
def test_when_a_path_was_trimmed_stays_where_something_is_missing(parting: int) -> None:
    """Computed to 15, resident to 10, the rest was trimmed."""
    known = tree(floats=True)
    at = known.enter(Match(known.root(0), 0), tokens((1, 20)).tobytes())
    known.mark_computed(at.edge, 0, 15)
    at.edge.move_resident(10)
    at.edge.trim = trim = Trim(3.0, "evicted")
    upper = known.split(at.edge, parting)
    assert upper.trim == (trim if min(15, parting) > 10 else None)
    assert at.edge.trim == (trim if parting < 15 else None)


def test_both_halves_of_a_path_go_on_with_its_uses() -> None:
    known = tree(floats=True)
    at = known.enter(Match(known.root(0), 0), tokens((1, 20)).tobytes())
    at.edge.move_resident(20)
    one = at.edge.checkpoints[0]
    one.hits, one.missed, one.used, one.age = 3, 2, 7, 0.5
    upper = known.split(at.edge, 10)
    for edge in (upper, at.edge):
        half = edge.checkpoints[0]
        assert (half.hits, half.missed, half.used, half.age) == (3, 2, 7, 0.5)
    assert [edge.checkpoints[0].position for edge in (upper, at.edge)] == [10, 20]


def test_what_is_cut_off_takes_along_what_lay_there() -> None:
    known = tree()
    at = known.enter(Match(known.root(0), 0), tokens((1, 20)).tobytes())
    known.mark_computed(at.edge, 0, 20)
    for position in (5, 15):
        known.remember(at.edge, LostCheckpoint(position, "junction", 0.0, "evicted", 0, 0))
    nbytes = known.nbytes
    assert not known.cut(at.edge, 10)
    assert (at.edge.end, at.edge.computed, sorted(at.edge.lost)) == (10, 10, [5])
    assert known.nbytes < nbytes - 40
    at = known.enter(Match(at.edge, 10), tokens((2, 10)).tobytes())
    assert (at.edge.end, at.edge.computed) == (20, 10), "other tokens there are not computed"


def test_a_conversation_is_one_edge() -> None:
    engine = Engine.of(ATTENTION, STATE)
    for turn in range(1, 6):
        engine.run(tokens((1, 20 * turn)), answer=[int(tokens((1, 20 * turn + 1))[-1])])
    assert len(path(engine, tokens((1, 100))).parts) == 1


def test_a_path_says_what_is_kept_what_went_and_who_runs() -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=60, placement=("breakpoint",), eviction="lru")
    engine.run(tokens((1, 40)), breakpoints=(20, 39), pin=20)
    engine.run(tokens((2, 190)))
    lease = engine.start(tokens((1, 30), (3, 10)))
    upper, lower = path(engine, tokens((1, 40))).parts
    assert (upper.start, upper.stop, upper.end, upper.resident, upper.computed) == (0, 30, 30, 20, 30)
    assert [(one.position, one.kind, one.uses, one.pinned) for one in upper.checkpoints] == [
        (20, "breakpoint", 1, True)
    ]
    assert (upper.lost, upper.pins, upper.leases, upper.branches) == ((), (20,), 0, 2)
    assert (lower.start, lower.stop, lower.resident, lower.computed, lower.leases) == (30, 40, 30, 40, 0)
    assert [(one.position, one.kind, one.cause) for one in lower.lost] == [(39, "breakpoint", "evicted")]
    mine = path(engine, tokens((1, 30), (3, 10))).parts[-1]
    assert (mine.start, mine.stop, mine.computed, mine.leases) == (30, 40, 30, 1)
    engine.cache.abort([lease.row])
    assert path(engine, tokens((9, 5))) == (0, ())


# History.


def test_history_is_bounded_and_the_oldest_goes_first() -> None:
    """A ghost of 200 tokens takes 2,000 bytes; 12,000 bytes hold five and the one that is kept."""
    engine = Engine.of(ATTENTION, blocks=50, history_tokens=1_200)
    for stream in range(1, 21):
        engine.run(tokens((10 * stream, 200)))
    known = [stream for stream in range(1, 21) if path(engine, tokens((10 * stream, 200))).matched]
    assert known == list(range(known[0], 21)), "the latest are known"
    assert 4 <= len(known) <= 7


def test_a_trunk_is_forgotten_when_its_branches_are() -> None:
    engine = Engine.of(ATTENTION, blocks=50, history_tokens=0)
    for stream in (2, 3, 4):
        engine.run(tokens((1, 100), (10 * stream, 100)))
    engine.run(tokens((50, 200)))
    engine.run(tokens((60, 4)))
    assert path(engine, tokens((1, 100))).matched == 0
    assert first_loss(engine, tokens((1, 100))).reason is Reason.NOTHING_MATCHED


def test_what_runs_is_not_forgotten() -> None:
    engine = Engine.of(ATTENTION, blocks=100, history_tokens=0)
    engine.run(tokens((1, 100)))
    lease = engine.start(tokens((1, 100), (2, 100)))
    for stream in range(5, 10):
        other = engine.start(tokens((10 * stream, 50)))
        engine.cache.abort([other.row])
    assert path(engine, tokens((1, 100), (2, 100))).matched == 200
    engine.cache.abort([lease.row])
