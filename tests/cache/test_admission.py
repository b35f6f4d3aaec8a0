"""Who is let in: whatever `lease` admits runs to its end alone in the pool, and what it refuses could not."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from headway.cache import (
    CacheConfig,
    CacheGeometry,
    ChunkedLocal,
    FullAttention,
    LayerSpec,
    Lease,
    ParallelLayout,
    PrefixCache,
    Prompt,
    Recurrent,
    SlidingWindow,
    TableKind,
)
from headway.errors import ConfigError, UnservableError

LONGEST = 50
PLACEMENTS: list[tuple[str, ...]] = [
    (),
    ("prompt_end", "answer_end", "junction", "breakpoint", "boundary"),
    ("interval:4", "breakpoint"),
    ("answer_end",),
]


def some_groups(rng: random.Random) -> list[LayerSpec]:
    """One to five groups with blocks of unlike sizes."""
    groups: list[LayerSpec] = []
    if rng.random() < 0.8:
        groups.append(FullAttention("full", rng.choice([2, 4, 6]), lookahead=rng.choice([0, 0, 0, 1, 2])))
    if rng.random() < 0.3:
        groups.append(FullAttention("draft", rng.choice([1, 2, 3]), sharded=False))
    if rng.random() < 0.4:
        groups.append(SlidingWindow("window", rng.choice([1, 2, 3]), rng.randrange(1, 20)))
    if rng.random() < 0.4:
        groups.append(ChunkedLocal("chunk", rng.choice([1, 2, 3]), rng.randrange(1, 20)))
    if rng.random() < 0.4 or not groups:
        groups.append(Recurrent("state", rng.choice([10, 50])))
    return groups


def held_at(geometry: CacheGeometry, position: int) -> int:
    """Blocks that hold what the token at `position` sees, counted token by token."""
    total = 0
    for table in geometry.tables:
        if table.kind is TableKind.STATE:
            total += table.state_blocks
            continue
        seen = range(position + 1)
        if table.kind is TableKind.WINDOW:
            seen = range(max(0, position - table.window + 1), position + 1)
        elif table.kind is TableKind.CHUNK:
            seen = range(position - position % table.chunk, position + 1)
        total += len({token // table.span for token in seen})
    return total


def geometry_of(rng: random.Random) -> CacheGeometry | None:
    """A small geometry, None where a block is too small for its groups."""
    groups, layout = some_groups(rng), ParallelLayout(tp=2, dcp=rng.choice([1, 1, 2]))
    try:
        return CacheGeometry(groups, layout, block_tokens=rng.choice([1, 3, 4]))
    except ConfigError:
        return None


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_the_largest_need_of_all_positions(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        geometry = geometry_of(rng)
        if geometry is None:
            continue
        length = rng.randrange(1, 120)
        start = rng.choice([0, rng.randrange(length)])
        needs = [held_at(geometry, position) for position in range(start, length)]
        assert [sum(t.blocks_at(p) for t in geometry.tables) for p in range(start, length)] == needs
        assert geometry.peak_blocks(length, start) == max(needs)
        assert geometry.peak_blocks(length, start) == max(needs), "remembered"
        assert not geometry.fits(max(needs) - 1, length, start)
        assert geometry.fits(max(needs), length, start)


def test_a_sequence_without_tokens_needs_nothing() -> None:
    assert CacheGeometry([FullAttention("full", 4)]).peak_blocks(0) == 0
    assert CacheGeometry([Recurrent("state", 4)]).peak_blocks(5, 5) == 0


@pytest.mark.parametrize(
    "groups",
    [
        [FullAttention("full", 1024), ChunkedLocal("chunk", 3072, 8192)],
        [FullAttention("full", 1024), ChunkedLocal("chunk", 3072, 8192), SlidingWindow("window", 700, 4096)],
        [SlidingWindow("short", 1000, 1024), SlidingWindow("long", 3072, 4096), Recurrent("state", 100_000)],
    ],
)
def test_the_peak_of_four_million_tokens_takes_a_few_milliseconds(groups: list[LayerSpec]) -> None:
    geometry = CacheGeometry(groups, ParallelLayout(8, 8))
    start = time.process_time()
    peak = geometry.peak_blocks(4_000_000)
    assert time.process_time() - start < 0.02
    last = range(4_000_000 - 20_000, 4_000_000)  # two chunks, so that the true peak is among them
    assert peak == max(sum(t.blocks_at(p) for t in geometry.tables) for p in last)


def test_a_chunk_is_largest_before_the_next_one_begins() -> None:
    """Shaped like Llama 4: 16 tokens of full attention in a block, or 5 of the chunked layers.

    The 8,200 tokens of the prompt end 8 tokens into the second chunk. At their end they need 513 + 3 blocks, at the
    end of the first chunk 512 + 1,639.
    """
    groups = [FullAttention("full", 1024), ChunkedLocal("local", 3072, 8192)]
    prompt = Prompt(np.arange(8200, dtype=np.int32))
    with pytest.raises(UnservableError, match="2151 blocks at once") as refused:
        PrefixCache(CacheConfig(groups, 1600)).lease(prompt)
    assert refused.value.needed_blocks == 512 + 1639
    cache = PrefixCache(CacheConfig(groups, 2151))
    lease = cache.lease(prompt)
    while lease.computed < 8200:
        step = cache.extend([lease.row], [min(2048, lease.next_stop - lease.computed)])
        assert not step.exhausted.any(), f"stuck at {lease.computed}"
        cache.commit(step, sampled=[1])


def cache_of(geometry: CacheGeometry, blocks: int) -> PrefixCache:
    """A cache of this geometry."""
    groups = [group.spec for group in geometry.groups]
    return PrefixCache(CacheConfig(groups, blocks, block_bytes=geometry.block_bytes, layout=geometry.layout))


@pytest.mark.parametrize(("spare", "resumed"), [(0, 0), (1, 10)])
def test_a_hit_is_given_up_where_the_copy_does_not_fit(spare: int, resumed: int) -> None:
    """Two tables, blocks of 2 and of 6 tokens. What is shared ends at 10, inside a block of the second.

    A sequence of 34 tokens needs 17 + 6 blocks, and resumed at 10 it has a copy beside what the index keeps.
    """
    geometry = CacheGeometry([FullAttention("a", 6), FullAttention("b", 2, sharded=False)], block_tokens=2)
    assert [table.span for table in geometry.tables] == [2, 6]
    cache, rng = cache_of(geometry, 17 + 6 + spare), random.Random(0)
    first = cache.lease(Prompt(list(range(12))))
    assert run_alone(cache, first, rng)
    cache.finish([first.row])
    lease = cache.lease(Prompt([*range(10), *range(100, 124)]))
    assert lease.hit.tokens == resumed
    assert run_alone(cache, lease, rng)


@pytest.mark.parametrize("pin", [0, 8])
def test_a_state_that_a_pin_keeps_is_not_counted_again(pin: int) -> None:
    """12 tokens take three blocks and the running state two; the state they resume from takes two more."""
    geometry = CacheGeometry([FullAttention("full", 64), Recurrent("state", 512)], block_tokens=4)
    cache, rng = cache_of(geometry, 8), random.Random(0)
    first = cache.lease(Prompt(list(range(9)), pin=pin, breakpoints=[8]))
    while first.computed < 9:
        cache.commit(cache.extend([first.row], [1]), sampled=[1])
    cache.finish([first.row])
    lease = cache.lease(Prompt([*range(8), 20, 21, 22, 23]))
    assert lease.hit.tokens == 8
    assert run_alone(cache, lease, rng)


def run_alone(cache: PrefixCache, lease: Lease, rng: random.Random) -> bool:
    """Compute the prompt, mostly in steps of one token. Returns whether it came to its end."""
    length = len(lease.prompt.tokens)
    while lease.computed < length:
        most = 1 if rng.random() < 0.8 else rng.randrange(1, 5)
        step = cache.extend([lease.row], [min(most, length - lease.computed)])
        if step.exhausted[0]:
            return False
        cache.commit(step, sampled=[rng.randrange(3)])
    return True


def answer(cache: PrefixCache, lease: Lease, rng: random.Random) -> None:
    """Compute a few tokens of an answer, as far as there is memory."""
    for _ in range(rng.randrange(6)):
        step = cache.extend([lease.row], [1])
        if step.exhausted[0]:
            return
        cache.commit(step, sampled=[rng.randrange(3)])


def live(seed: int, *, pins: bool) -> tuple[int, int, int]:
    """Requests one after another in a small pool; the first may pin.

    Returns:
        How many were served, how many of them resumed from a hit, and how many were refused.
    """
    rng = random.Random(seed)
    geometry = geometry_of(rng)
    if geometry is None:
        return 0, 0, 0
    longest, now = rng.randrange(2, LONGEST), [0.0]
    blocks = geometry.peak_blocks(longest) + rng.choice([0, 0, 0, 1, 2, 3, 8])
    config = CacheConfig(
        [group.spec for group in geometry.groups],
        blocks,
        block_bytes=geometry.block_bytes,
        layout=geometry.layout,
        placement=rng.choice(PLACEMENTS),
        exports_inside=rng.random() < 0.5,
        check=True,
        answer_stretch=rng.choice([1, 4, 256]),
        pin_share=1.0,
    )
    cache = PrefixCache(config, clock=lambda: now[0])
    texts = [[rng.randrange(3) for _ in range(LONGEST)] for _ in range(2)]
    served = hits = refused = 0
    for i in range(rng.randrange(1, 7)):
        own = [5 + rng.randrange(2) for _ in range(LONGEST)]
        text = (rng.choice(texts)[: rng.randrange(LONGEST)] + own)[: longest if i == 0 else rng.randrange(1, longest)]
        prompt = Prompt(
            np.array(text, dtype=np.int32),
            no_store=rng.random() < 0.15,
            pin=rng.randrange(len(text)) if pins else 0,
            breakpoints=sorted({rng.randrange(1, len(text) + 1) for _ in range(rng.randrange(3))}),
        )
        try:
            lease = cache.lease(prompt)
        except UnservableError:
            assert cache.stats().pinned or max(held_at(geometry, p) for p in range(len(text))) > blocks, f"seed {seed}"
            refused += 1
            continue
        if not run_alone(cache, lease, rng):
            pytest.fail(f"seed {seed}: request {i} is stuck at {lease.computed} of {len(text)}")
        else:
            served, hits = served + 1, hits + (lease.hit.tokens > 0)
            answer(cache, lease, rng)
        rng.choice([cache.finish, cache.preempt, cache.abort])([lease.row])
        now[0] += rng.choice([0, 0, 2000])
    return served, hits, refused


@pytest.mark.parametrize("pins", [False, True])
def test_whoever_is_admitted_comes_to_the_end_alone(pins: bool) -> None:
    lives = [live(seed, pins=pins) for seed in range(250)]
    served, hits, refused = (sum(column) for column in zip(*lives, strict=True))
    assert served > 600
    assert hits > 60, "resumed in a pool that hardly holds the prompt"
    assert (refused > 0) is pins


def test_a_pool_of_the_blocks_that_the_refusal_names_is_enough() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        geometry = geometry_of(rng)
        if geometry is None:
            continue
        prompt = Prompt([rng.randrange(9) for _ in range(rng.randrange(2, LONGEST))])

        needed = max(held_at(geometry, p) for p in range(len(prompt.tokens)))
        if needed > 1:
            with pytest.raises(UnservableError) as refused:
                cache_of(geometry, needed - 1).lease(prompt)
            assert refused.value.needed_blocks == needed
        cache = cache_of(geometry, needed)
        assert run_alone(cache, cache.lease(prompt), rng), f"seed {seed}"
