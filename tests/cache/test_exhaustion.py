"""Batches, and memory that runs out: who gets what, who is refused, and what is given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CacheConfig, PrefixCache, SlidingWindow
from headway.errors import UnservableError


def test_a_batch_gets_what_there_is_and_the_rest_is_unchanged() -> None:
    """Ten blocks, three prompts that want four each: two get theirs, the third at most the two that are left."""
    engine = Engine.of(ATTENTION, blocks=10)
    leases = [engine.start(tokens((stream, 16))) for stream in (1, 2, 3)]
    granted = engine.step(*leases)
    assert granted[:2] == [16, 16]
    assert 0 <= granted[2] <= 8
    assert [lease.computed for lease in leases] == granted
    engine.cache.abort([leases[0].row])
    while leases[2].computed < 16:
        assert engine.step(leases[2])[0] > 0


def test_exhaustion_is_a_result() -> None:
    engine = Engine.of(ATTENTION, blocks=4)
    first, second = engine.start(tokens((1, 16))), engine.start(tokens((2, 4)))
    assert engine.step(first) == [16]
    step = engine.cache.extend([second.row], [4])
    assert step.exhausted.tolist() == [True]
    assert second.computed == 0
    engine.cache.commit(step)
    engine.cache.preempt([first.row])
    assert engine.step(second) == [4]


@pytest.mark.parametrize("end", ["commit", "fail"])
@pytest.mark.parametrize("many", [1, 3, 9])
def test_a_step_that_got_nothing_can_be_landed(many: int, end: str) -> None:
    engine = Engine.of(ATTENTION, blocks=4)
    first = engine.start(tokens((1, 16)))
    assert engine.step(first) == [16]
    others = [engine.start(tokens((2 + i, 4))) for i in range(many)]
    step = engine.cache.extend([lease.row for lease in others], 4)
    assert step.exhausted.all()
    if end == "fail":
        engine.cache.fail(step)
    else:
        engine.cache.commit(step, sampled=np.zeros(many, dtype=np.int32))
    engine.cache.finish([first.row])
    assert engine.step(others[0]) == [4]


def test_a_snapshot_is_left_out_before_a_request_has_to_wait() -> None:
    """Ten tokens take three blocks and the running state two: five blocks, none for a snapshot of two."""
    engine = Engine.of(ATTENTION, STATE, blocks=5)
    lease = engine.start(tokens((1, 10)))
    engine.compute(lease)
    engine.cache.finish([lease.row])
    assert engine.cache.stats().leased == 0


@pytest.mark.parametrize(("blocks", "fits"), [(7, True), (6, False)])
def test_what_can_never_fit_is_refused_at_once(blocks: int, fits: bool) -> None:
    """17 tokens take five blocks and the state two."""
    engine = Engine.of(ATTENTION, STATE, blocks=blocks)
    if fits:
        assert engine.run(tokens((1, 17))) == 0
        return
    with pytest.raises(UnservableError, match="7 blocks") as error:
        engine.start(tokens((1, 17)))
    assert (error.value.needed_blocks, error.value.total_blocks) == (7, 6)
    assert engine.cache.leases == 0
    assert engine.cache.free_blocks == 6


def test_a_request_that_fits_exactly_is_not_starved_by_what_it_parted_from() -> None:
    """47 tokens fill the pool of 12 blocks of 4. They share 19 with what came before, and part inside a block.

    The shared part has its own copy of that block. While the request is alone nobody needs that copy, so it has to go.
    """
    engine = Engine.of(ATTENTION, blocks=12)
    engine.run(tokens((1, 19), (2, 3)))
    lease = engine.start(tokens((1, 19), (3, 28)))
    while lease.computed < 47:
        assert engine.step(lease, count=1)[0] > 0, f"stuck at {lease.computed}"


def test_rows_are_given_again_and_grow_in_number() -> None:
    engine = Engine.of(ATTENTION, max_leases=1)
    leases = [engine.start(tokens((stream, 8))) for stream in range(1, 6)]
    assert len({lease.row for lease in leases}) == 5
    engine.step(*leases)
    engine.cache.finish([lease.row for lease in leases[:3]])
    again = engine.start(tokens((9, 8)))
    assert again.row in {lease.row for lease in leases[:3]}
    engine.step(again, *leases[3:], count=1)


def test_only_what_a_window_still_sees_is_held() -> None:
    """Window of 6 in blocks of 4: at 40 tokens it needs [35, 40), two blocks of the ten."""
    engine = Engine.of(SlidingWindow("w", 64, 6), placement=())
    lease = engine.start(tokens((1, 40)))
    while lease.computed < 40:
        engine.step(lease, count=4)
    engine.step(lease, count=1)
    row = engine.cache.tables[0][lease.row]
    assert (row[:8] < 0).all()
    assert (row[9:11] >= 0).all()
    assert engine.cache.free_blocks >= 100 - 3


# Block tables.


def test_wide_block_tables_take_memory_only_where_they_are_used() -> None:
    """One request of a million tokens in a table of 1,024 rows: if all of it took memory it would be 250 MB."""
    engine = Engine(PrefixCache(CacheConfig([ATTENTION], blocks=1000, max_leases=1024, block_tokens=16)))
    leases = [engine.start(tokens((stream, 20))) for stream in range(1, 301)]
    before, resident = engine.cache._leases.nbytes, _resident()
    engine.cache._leases.widen(0, 62_500)
    assert engine.cache.tables[0].nbytes > 250e6
    for lease in leases:
        engine.step(lease)
    assert engine.cache._leases.nbytes - before < 10e6
    assert _resident() - resident < 30e6


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_rows_keep_their_blocks_when_tables_grow() -> None:
    engine = Engine.of(ATTENTION, STATE, SlidingWindow("w", 64, 6), blocks=900, max_leases=2)
    leases = [engine.start(tokens((stream, 12))) for stream in (1, 2)]
    engine.step(*leases)
    held = [[table[lease.row, :2].tolist() for table in engine.cache.tables] for lease in leases]
    longer = [engine.start(tokens((stream, 600))) for stream in (3, 4)]
    assert engine.cache.tables[0].shape[1] > 150
    assert len(engine.cache.tables[0]) == 4
    assert [[table[lease.row, :2].tolist() for table in engine.cache.tables] for lease in leases] == held
    engine.cache.abort([lease.row for lease in (*leases, *longer)])
    assert engine.cache.stats().leased == 0
