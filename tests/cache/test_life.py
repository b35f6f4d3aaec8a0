"""The life of a request, step by step: blocks, copies, states, drafts and ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens

from headway.cache import (
    CheckpointRemoved,
    CheckpointStored,
    ChunkedLocal,
    Event,
    FullAttention,
    Prompt,
    Recurrent,
    SlidingWindow,
    TableKind,
)
from headway.errors import LeaseError


def test_a_prefill_takes_blocks_as_it_goes_and_gives_them_back() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 10)))
    assert engine.cache.free_blocks == 100
    engine.step(lease, count=5)
    assert engine.cache.free_blocks == 98
    engine.step(lease)
    assert engine.cache.free_blocks == 97
    engine.cache.finish([lease.row])
    assert engine.cache.leases == 0
    assert engine.cache.stats().leased == 0


def test_next_stop_is_the_next_checkpoint_and_then_the_end() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 30)), breakpoints=(12,))
    stops = []
    while lease.computed < 30:
        stops.append(lease.next_stop)
        engine.step(lease)
    assert stops == [12, 29, 30]


def test_a_step_beyond_a_checkpoint_is_cut_there() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 30)), breakpoints=(12,))
    step = engine.cache.extend([lease.row], [30])
    assert step.counts.tolist() == [12]
    assert [export.position for export in step.exports] == [12]


def test_a_model_that_exports_inside_a_chunk_is_not_cut() -> None:
    engine = Engine.of(ATTENTION, STATE, exports_inside=True)
    lease = engine.start(tokens((1, 30)), breakpoints=(12,))
    step = engine.cache.extend([lease.row], [30])
    assert step.counts.tolist() == [30]
    assert [export.position for export in step.exports] == [12, 29]
    engine.cache.commit(step)
    assert engine.hit(tokens((1, 12), (2, 5))) == 12
    assert engine.hit(tokens((1, 30))) == 29


def test_a_window_alone_does_not_cut_a_step() -> None:
    engine = Engine.of(ATTENTION, SlidingWindow("w", 64, 6))
    lease = engine.start(tokens((1, 30)), breakpoints=(12,))
    assert engine.cache.extend([lease.row], [30]).counts.tolist() == [30]


def test_a_state_starts_from_zero_or_from_a_copy() -> None:
    engine = Engine.of(STATE, blocks=9)
    first = engine.start(tokens((1, 9)))
    step = engine.cache.extend([first.row], [8])
    assert step.fresh.tolist() == [first.row]
    assert len(step.copies) == 0
    engine.cache.commit(step)
    second = engine.start(tokens((1, 9)))
    assert second.computed == 8
    step = engine.cache.extend([second.row], [1])
    assert step.fresh.tolist() == []
    assert step.copies[:, 1].tolist() == engine.cache.tables[0][second.row].tolist()


def test_resuming_inside_a_block_writes_to_a_copy() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 10)))
    lease = engine.start(tokens((1, 10), (2, 4)))
    assert lease.computed == 10
    shared = engine.cache.lookup(Prompt(tokens((1, 10), (2, 4)))).blocks(0).tolist()
    step = engine.cache.extend([lease.row], [4])
    row = engine.cache.tables[0][lease.row]
    assert row[:2].tolist() == shared[:2]
    assert step.copies.tolist() == [[shared[2], row[2]]]
    assert row[2] != shared[2]


def test_resuming_at_the_end_of_a_block_copies_nothing() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 8)))
    lease = engine.start(tokens((1, 8), (2, 4)))
    assert len(engine.cache.extend([lease.row], [4]).copies) == 0


def test_two_of_the_same_leave_one_copy() -> None:
    engine = Engine.of(ATTENTION)
    twins = [engine.start(tokens((1, 40))) for _ in range(2)]
    engine.step(*twins, count=20)
    assert engine.cache.free_blocks == 95
    engine.step(*twins)
    assert engine.cache.free_blocks == 90
    engine.cache.finish([twin.row for twin in twins])
    assert engine.cache.free_blocks == 90


def test_a_running_request_serves_others_what_it_has_committed() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 40)))
    step = engine.cache.extend([lease.row], [20])
    assert engine.hit(tokens((1, 40))) == 0
    engine.cache.commit(step)
    assert engine.hit(tokens((1, 40))) == 20


def test_an_answer_serves_others_once_a_stretch_has_gathered() -> None:
    engine = Engine.of(ATTENTION, answer_stretch=64)
    lease = engine.start(tokens((1, 8)))
    for token in range(70):
        engine.step(lease, sampled=5000 + token)
    told = np.concatenate([tokens((1, 8)), np.arange(5000, 5040, dtype=np.int32)])
    assert engine.hit(told) == 47
    told = np.concatenate([tokens((1, 8)), np.arange(5000, 5070, dtype=np.int32)])
    assert 8 + 63 <= engine.hit(told) <= 77


def test_the_answer_is_known_when_the_request_ends() -> None:
    engine = Engine.of(ATTENTION)
    engine.run(tokens((1, 8)), answer=[50, 51, 52])
    told = np.concatenate([tokens((1, 8)), np.array([50, 51, 52, 53], dtype=np.int32)])
    assert engine.hit(told) == 10  # the last of the answer was never computed


def test_preempted_work_comes_back_and_a_failed_step_does_not() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 40)))
    engine.step(lease, count=16)
    engine.cache.preempt([lease.row])
    lease = engine.start(tokens((1, 40)))
    assert lease.computed == 16
    step = engine.cache.extend([lease.row], [10])
    engine.cache.fail(step)
    with pytest.raises(LeaseError):
        engine.cache.extend([lease.row], [1])
    with pytest.raises(LeaseError):
        engine.cache.finish([lease.row])
    engine.cache.abort([lease.row])
    assert engine.hit(tokens((1, 40))) == 16
    assert engine.cache.stats().leased == 0


def test_a_failed_step_of_attention_alone_publishes_nothing() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 40)))
    engine.step(lease, count=16)
    engine.cache.fail(engine.cache.extend([lease.row], [10]))
    assert engine.hit(tokens((1, 40))) == 16
    engine.cache.abort([lease.row])
    assert engine.hit(tokens((1, 40))) == 16


def test_what_a_given_up_request_has_committed_serves_its_retry() -> None:
    """A client whose deadline is shorter than the prefill sends its request again and again: it must come to an end."""
    engine = Engine.of(FullAttention("attn", 8064), Recurrent("state", 43_417_600), blocks=2000, block_tokens=16)
    prompt, computed = tokens((1, 3000)), []
    while not computed or computed[-1] < 3000:
        lease = engine.start(prompt)
        computed.append(lease.computed)
        for _ in range(4):
            if lease.computed < 3000:
                engine.step(lease, count=min(512, lease.next_stop - lease.computed))
        if lease.tokens > 3000:
            break
        engine.cache.abort([lease.row])
    assert computed == [0, 2048]


def test_nothing_of_a_step_that_was_not_committed_is_kept() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 40)))
    engine.step(lease, count=16)
    engine.cache.fail(engine.cache.extend([lease.row], [8]))
    engine.cache.abort([lease.row])
    assert engine.hit(tokens((1, 40))) == 0, "the state is the failed step's, and no other was kept"


def test_no_store_keeps_nothing_of_a_given_up_request() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 40)), no_store=True)
    engine.step(lease, count=16)
    engine.cache.abort([lease.row])
    assert engine.cache.free_blocks == 100


WINDOW, CHUNK = SlidingWindow("window", 64, window=6), ChunkedLocal("chunk", 64, chunk=8)


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        ((ATTENTION, STATE), 22),
        ((ATTENTION, WINDOW), 23),
        ((ATTENTION, CHUNK), 23),
        ((ATTENTION, WINDOW, CHUNK, STATE), 22),
        ((ATTENTION,), 23),
    ],
)
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_lease_that_is_to_end_before_where_it_stands_ends_at_its_bookmark(groups: Any, kept: int, end: str) -> None:
    """Bookmarked at 22, computed to 26, and others come to 23: a state is that of 22, windows serve 23 themselves."""
    engine = Engine.of(*groups, placement=("answer_end",))
    lease = engine.start(tokens((1, 20)))
    while lease.computed < 26:
        if lease.computed == 22:
            engine.cache.bookmark([lease.row])
        assert engine.step(lease, sampled=50 + lease.tokens)[0]
    getattr(engine.cache, end)([lease.row], [23])
    said = np.array([50 + i for i in range(20, 23)], dtype=np.int32)
    assert engine.hit(np.concatenate([tokens((1, 20)), said, tokens((2, 5))])) == kept
    assert engine.cache.stats().leased == 0


def test_a_bookmark_takes_the_place_of_the_one_before() -> None:
    engine = Engine.of(ATTENTION, STATE, placement=("answer_end",))
    lease = engine.start(tokens((1, 8)))
    used = []
    for _ in range(6):
        engine.step(lease, sampled=9)
        engine.cache.bookmark([lease.row])
        used.append(100 - engine.cache.free_blocks)
    assert used[-1] - used[0] <= 2, "one state, and the blocks of the answer"
    engine.cache.finish([lease.row], [lease.computed])
    assert engine.hit(np.concatenate([tokens((1, 8)), np.full(9, 9, dtype=np.int32)])) == 13


def test_a_bookmark_that_is_let_go_holds_nothing_more() -> None:
    def leased(*, mark: bool, lift: bool) -> int:
        engine = Engine.of(ATTENTION, WINDOW, STATE, placement=())
        lease = engine.start(tokens((1, 8)))
        engine.step(lease)
        if mark:
            engine.cache.bookmark([lease.row])
        for _ in range(24):
            engine.step(lease, sampled=9)
        if lift:
            engine.cache.unmark([lease.row])
        engine.step(lease, sampled=9)
        return engine.cache.stats().leased

    assert leased(mark=True, lift=True) == leased(mark=False, lift=False) < leased(mark=True, lift=False)


def test_the_step_behind_a_bookmark_copies_the_state_first() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 8)))
    engine.step(lease)
    engine.cache.bookmark([lease.row])
    [state] = [t.index for t in engine.cache.geometry.tables if t.kind is TableKind.STATE]
    running = engine.cache.tables[state][lease.row, :2].tolist()
    step = engine.cache.extend([lease.row], [1])
    assert step.copies[:, 0].tolist() == running
    assert not set(step.copies[:, 1].tolist()) & set(running)
    engine.cache.commit(step, sampled=[9])
    assert len(engine.cache.extend([lease.row], [1]).copies) == 0, "once"


def test_a_bookmark_gives_way_where_its_lease_has_no_room() -> None:
    """Six blocks: two of the state, two of its copy, and two of entries; the ninth token needs a third."""
    engine = Engine.of(ATTENTION, STATE, blocks=6, placement=("answer_end",))
    lease = engine.start(tokens((1, 6)))
    engine.step(lease)
    engine.cache.bookmark([lease.row])
    while lease.computed < 12:
        assert engine.step(lease)[0], "the lease is alone and has no room"


def test_bookmarks_of_what_is_no_running_lease_are_refused() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 6)))
    engine.cache.extend([lease.row], [3])
    for rows in ([lease.row], [5]):
        with pytest.raises(LeaseError):
            engine.cache.bookmark(rows)
    with pytest.raises(LeaseError, match="reach"):
        engine.cache.finish([lease.row], [1, 2])


def test_aborting_before_the_first_step_leaves_nothing() -> None:
    engine = Engine.of(ATTENTION, STATE)
    lease = engine.start(tokens((1, 40)))
    engine.cache.abort([lease.row])
    assert engine.cache.free_blocks == 100
    assert engine.hit(tokens((1, 40))) == 0


def test_no_store_reads_and_leaves_nothing() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((1, 20)))
    before = engine.cache.free_blocks
    assert engine.run(tokens((1, 20), (2, 9)), no_store=True) == 20 - 0
    assert engine.cache.free_blocks == before
    assert engine.hit(tokens((1, 20), (2, 9))) == 20


def test_reset_with_running_requests() -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.run(tokens((2, 20)))
    lease = engine.start(tokens((1, 20)))
    engine.step(lease, count=10)
    report = engine.cache.reset()
    assert report.leases_detached == 1
    assert report.checkpoints == 2
    assert report.blocks_freed > 0
    assert engine.hit(tokens((2, 20))) == 0
    engine.compute(lease)
    assert engine.hit(tokens((1, 20))) == 0
    engine.cache.finish([lease.row])
    assert engine.cache.free_blocks == 100
    assert engine.run(tokens((1, 20))) == 0
    assert engine.hit(tokens((1, 20))) == 19


# First steps of which nothing counts.


@pytest.mark.parametrize("plain", [True, False], ids=["numbers", "arrays"])
def test_a_first_step_of_which_nothing_counts_is_asked_for_again(plain: bool) -> None:
    engine = Engine.of(ATTENTION, STATE)
    engine.cache._leases.plain = plain
    engine.run(tokens((1, 10)))
    lease = engine.start(tokens((1, 10), (2, 10)))
    first = engine.cache.extend([lease.row], [6])
    rows, free = [table[lease.row, :4].tolist() for table in engine.cache.tables], engine.cache.free_blocks
    for _ in range(3):
        engine.cache.commit(first, counts=[0])
        assert lease.computed == 10
        again = engine.cache.extend([lease.row], [6])
        assert again.copies.tolist() == first.copies.tolist()
        assert [table[lease.row, :4].tolist() for table in engine.cache.tables] == rows
        assert engine.cache.free_blocks == free
        first = again
    engine.cache.commit(first)
    step = engine.cache.extend([lease.row], [3])
    assert len(step.copies) == 0
    engine.cache.commit(step)
    engine.cache.finish([lease.row])
    assert engine.cache.stats().leased == 0


@pytest.mark.parametrize("plain", [True, False], ids=["numbers", "arrays"])
def test_a_state_starts_from_zero_until_a_token_counts(plain: bool) -> None:
    engine = Engine.of(ATTENTION, STATE, blocks=11)
    engine.cache._leases.plain = plain
    lease = engine.start(tokens((1, 20)), no_store=True)
    for counted in (0, 0, 4):
        step = engine.cache.extend([lease.row], [8])
        assert step.fresh.tolist() == [lease.row]
        engine.cache.commit(step, counts=[counted])
    assert engine.cache.extend([lease.row], [4]).fresh.tolist() == []


def test_what_a_hit_copies_from_stays_until_a_token_counts() -> None:
    engine = Engine.of(ATTENTION, blocks=12)
    engine.run(tokens((1, 10)))
    lease = engine.start(tokens((1, 10), (2, 2)))
    step = engine.cache.extend([lease.row], [2])
    source = step.copies[0, 0]
    engine.cache.commit(step, counts=[0])
    engine.run(tokens((3, 32)))  # takes all that can be had
    again = engine.cache.extend([lease.row], [2])
    assert again.copies[0, 0] == source
    assert engine.hit(tokens((1, 10), (4, 2))) == 10


# Tokens told without being computed.


@pytest.mark.parametrize("plain", [True, False], ids=["numbers", "arrays"])
@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE), (ATTENTION, DRAFT)])
@pytest.mark.parametrize("store", [True, False])
def test_any_number_of_tokens_can_be_told_before_they_are_computed(plain: bool, groups: Any, store: bool) -> None:
    engine = Engine.of(*groups, blocks=400, answer_stretch=16)
    engine.cache._leases.plain = plain
    lease = engine.start(tokens((1, 8)), no_store=not store)
    engine.compute(lease)
    told = [7]
    for round_ in range(9):
        more = list(range(5000 + 64 * round_, 5064 + 64 * round_))
        step = engine.cache.extend([lease.row], [1])
        engine.cache.commit(step, counts=[0], sampled=[more], sampled_counts=[64])
        told += more
    assert (lease.computed, lease.tokens) == (8, 8 + len(told))
    while lease.computed < lease.tokens - 1:
        engine.cache.commit(engine.cache.extend([lease.row], [min(3, lease.next_stop - lease.computed)]))
    engine.cache.finish([lease.row])
    text = np.concatenate([tokens((1, 8)), np.array(told, dtype=np.int32), tokens((9, 1))])
    assert (engine.hit(text) > 500) == store


def test_what_is_told_first_and_computed_later_counts_as_computed_without_a_gap() -> None:
    """Told tokens are known, so another prompt can part among them before they are computed."""
    engine = Engine.of(ATTENTION, answer_stretch=16)
    lease = engine.start(tokens((1, 8)))
    engine.compute(lease)
    step = engine.cache.extend([lease.row], [1])
    engine.cache.commit(step, counts=[0], sampled=[list(range(5000, 5064))], sampled_counts=[64])
    text = np.concatenate([tokens((1, 8)), np.array([7], dtype=np.int32), np.arange(5000, 5021, dtype=np.int32)])
    other = engine.start(np.concatenate([text, tokens((2, 9))]))
    for _ in range(20):
        engine.cache.commit(engine.cache.extend([lease.row], [3]))
        assert engine.hit(np.concatenate([text, tokens((3, 9))])) == min(30, lease.computed)
    engine.cache.abort([other.row])


# One row at a time.


def test_a_step_of_one_lease_is_a_step() -> None:
    engine = Engine.of(ATTENTION, STATE, answer_stretch=8)
    one, many = engine.start(tokens((1, 10))), engine.start(tokens((2, 10)))
    for count in (9, 1, *[1] * 30):
        left = engine.cache.extend_one(one.row, count)
        right = engine.cache.extend([many.row], [count])
        for name in ("starts", "counts"):
            assert getattr(left, name).tolist() == getattr(right, name).tolist()
            assert getattr(left, name).dtype == getattr(right, name).dtype
        assert (len(left.copies), len(left.fresh), len(left.exports)) == (
            len(right.copies),
            len(right.fresh),
            len(right.exports),
        )
        done = left.starts[0] + left.counts[0] == one.tokens
        for step in (left, right):
            engine.cache.commit(step, sampled=[5000] if done else None)
    assert (one.computed, one.tokens) == (many.computed, many.tokens)


def test_a_step_of_one_lease_refuses_what_extend_refuses() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 20)))
    for wrong in ((lease.row, 0), (lease.row, -1), (99, 1), (-1, 1), (lease.row, 1.5)):
        with pytest.raises(LeaseError):
            engine.cache.extend_one(*wrong)
    engine.cache.extend_one(lease.row, 20)
    with pytest.raises(LeaseError, match="under way"):
        engine.cache.extend_one(lease.row, 1)


# Speculation.


def test_rejected_drafts_do_not_count() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 6)))
    engine.step(lease, sampled=50)
    step = engine.cache.extend([lease.row], [4])
    assert step.counts.tolist() == [4]
    engine.cache.commit(step, counts=[2], sampled=[[51, 52, 0, 0]], sampled_counts=[2])
    assert (lease.tokens, lease.computed) == (9, 8)
    engine.cache.finish([lease.row])
    told = np.concatenate([tokens((1, 6)), np.array([50, 51, 52, 53], dtype=np.int32)])
    assert engine.hit(told) == 8


def test_more_computed_than_known_is_refused() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 6)))
    engine.step(lease, sampled=50)
    step = engine.cache.extend([lease.row], [4])
    with pytest.raises(LeaseError, match="sampled"):
        engine.cache.commit(step, sampled=[51])
    engine.cache.commit(step, counts=[1], sampled=[51])
    assert (lease.tokens, lease.computed) == (8, 7)


def test_a_hit_under_lookahead_needs_the_same_later_tokens() -> None:
    engine = Engine.of(ATTENTION, DRAFT)
    engine.run(tokens((1, 20)))
    assert engine.hit(tokens((1, 12), (2, 8))) == 9
    engine.run(tokens((1, 12), (2, 8)))
    assert engine.hit(tokens((1, 12), (2, 8))) == 17
    assert engine.hit(tokens((1, 20))) == 17
    assert engine.hit(tokens((1, 12), (2, 1), (3, 4))) == 10


def test_a_state_exported_behind_rejected_drafts_is_freed_at_once() -> None:
    engine = Engine.of(ATTENTION, STATE, placement=("interval:8",))
    lease = engine.start(tokens((1, 5)))
    engine.step(lease)
    free = engine.cache.free_blocks
    for _ in range(3):
        step = engine.cache.extend([lease.row], [5])
        assert [export.position for export in step.exports] == [8]
        engine.cache.commit(step, counts=[0], sampled=[7], sampled_counts=[1])
        assert engine.cache.free_blocks == free
    engine.cache.finish([lease.row])
    assert engine.cache.stats().leased == 0


# Events.


def test_events_tell_what_is_stored_and_removed_until_they_are_ended() -> None:
    engine = Engine.of(ATTENTION, STATE)
    heard: list[Event] = []
    stop = engine.cache.subscribe(heard.append)
    engine.run(tokens((1, 20)))
    stored = [event for event in heard if isinstance(event, CheckpointStored)]
    assert [(event.position, event.kind) for event in stored] == [(19, "prompt_end"), (20, "answer_end")]
    assert stored[0].prefix.tolist() == tokens((1, 19)).tolist()
    stop()
    engine.cache.reset()
    assert not [event for event in heard if isinstance(event, CheckpointRemoved)]


# Long prompts.


@pytest.mark.parametrize("parting", [1, 32767, 32768, 32769, 65535, 65536, 65537, 69999])
def test_long_prompts_part_exactly_where_they_differ(parting: int) -> None:
    engine = Engine.of(Recurrent("s", 8), ATTENTION, blocks=200, block_tokens=1024)
    engine.run(tokens((1, 70000)), breakpoints=(parting,))
    other = tokens((1, 70000)).copy()
    other[parting] = 7
    hit = engine.cache.lookup(Prompt(other))
    assert hit.matched == parting
    assert hit.tokens == parting


@pytest.mark.parametrize(("tail", "right"), [((), 20), ((STATE,), 0), ((SlidingWindow("window", 8, window=6),), 20)])
def test_a_step_under_way_exports_no_state_that_is_asked_for_later(tail: tuple[Any, ...], right: int) -> None:
    engine = Engine.of(ATTENTION, *tail)
    running, other = engine.start(tokens((1, 30))), Prompt(tokens((1, 20), (100, 30)))
    step = engine.cache.extend([running.row], 25)
    position = engine.cache.reach(engine.cache.lookup(other), running.row)
    assert position == right
    if right:
        engine.cache.keep_at(running.row, 20)
    else:
        with pytest.raises(LeaseError, match="will not stand at position 20"):
            engine.cache.keep_at(running.row, 20)
    engine.cache.commit(step)
    assert engine.cache.lookup(other).tokens == right


@pytest.mark.parametrize("tail", [(), (STATE,), (SlidingWindow("window", 8, window=6),), (DRAFT, STATE)])
def test_where_a_prompt_could_resume_if_it_waited_for_a_running_one(tail: tuple[Any, ...]) -> None:
    """They part at 20; the running one plans the end of its prompt, and takes the junction if it is asked to."""
    engine = Engine.of(ATTENTION, *tail)
    ahead = engine.cache.geometry.lookahead
    running, other = engine.start(tokens((1, 30))), Prompt(tokens((1, 20), (100, 30)))
    hit, same = engine.cache.lookup(other), engine.cache.lookup(Prompt(tokens((1, 30))))
    assert (hit.tokens, engine.cache.reach(hit, running.row)) == (0, 20 - ahead)
    assert engine.cache.reach(same, running.row) == 30 - max(1, ahead)
    engine.step(running, count=5)
    engine.cache.keep_at(running.row, 20 - ahead)
    while running.computed < 30:
        engine.step(running)
    assert engine.cache.reach(hit, running.row) == 0, "the lease has passed it"
    assert engine.cache.lookup(other).tokens == 20 - ahead
    for position in (0, 20 - ahead, 30, 31, 99):
        with pytest.raises(LeaseError, match="will not stand at position"):
            engine.cache.keep_at(running.row, position)
    follower = engine.cache.lease(other)
    assert engine.cache.reach(engine.cache.lookup(Prompt(tokens((7, 30)))), follower.row) == 0
    elsewhere = Engine.of(ATTENTION)
    stranger = elsewhere.start(tokens((1, 30)))
    with pytest.raises(LeaseError, match="another cache"):
        elsewhere.cache.reach(hit, stranger.row)


def test_no_junction_is_asked_for_where_none_would_be_kept() -> None:
    for placement, options in ((["prompt_end"], {}), (["prompt_end", "junction"], {"no_store": True})):
        engine = Engine.of(ATTENTION, STATE, placement=placement)
        running = engine.start(tokens((1, 30)))
        hit = engine.cache.lookup(Prompt(tokens((1, 29), (100, 30)), **options))
        assert engine.cache.reach(hit, running.row) == 29, "the end of the running prompt is planned in any case"
        hit = engine.cache.lookup(Prompt(tokens((1, 20), (100, 30)), **options))
        assert engine.cache.reach(hit, running.row) == 0
    engine = Engine.of(ATTENTION, STATE)
    hidden = engine.start(tokens((1, 30)), no_store=True)
    assert engine.cache.reach(engine.cache.lookup(Prompt(tokens((1, 30)))), hidden.row) == 0
    with pytest.raises(LeaseError, match="keeps nothing"):
        engine.cache.keep_at(hidden.row, 20)


def test_a_junction_is_kept_only_where_a_state_can_be_exported() -> None:
    engine = Engine.of(ATTENTION, STATE, checkpoint_alignment=8)
    running = engine.start(tokens((1, 30)))
    with pytest.raises(LeaseError, match="will not stand at position 20"):
        engine.cache.keep_at(running.row, 20)
    engine.cache.keep_at(running.row, 16)
    engine.cache.keep_at(running.row, 16)
    while running.computed < 30:
        engine.step(running)
    assert engine.cache.lookup(Prompt(tokens((1, 20), (100, 30)))).tokens == 16
