"""Host memory below the device: what both learn together, and what moves with a checkpoint."""

import numpy as np
import pytest

from headway.cache import (
    CacheConfig,
    FullAttention,
    LayerSpec,
    Lease,
    PrefixCache,
    Prompt,
    Recurrent,
    SlidingWindow,
    Step,
)
from headway.errors import LeaseError
from headway.tiers import HostTier

HYBRID: list[LayerSpec] = [FullAttention("attention", 10), Recurrent("state", 160)]
PLAIN: list[LayerSpec] = [FullAttention("attention", 10)]
WINDOW: list[LayerSpec] = [*PLAIN, SlidingWindow("window", 10, window=20)]


def pair(groups: list[LayerSpec], blocks: int, below: int, eviction: str = "value") -> HostTier:
    """A device and a host of so many blocks of 16 tokens; a state is a block."""
    config = CacheConfig(groups, blocks, block_tokens=16, exports_inside=True, eviction=eviction, check=True)
    device = PrefixCache(config)
    return HostTier.beside(device, below, lambda out, back: None)


def prompt(number: int, tokens: int = 64) -> Prompt:
    return Prompt(np.arange(number * 1000, number * 1000 + tokens, dtype=np.int32))


def serve(tier: HostTier, asked: Prompt) -> int:
    """One request from its beginning to its end. Returns the tokens that it read back."""
    device, hit = tier.device, tier.device.lookup(asked)
    found = tier.find(asked, hit)
    lease = device.lease(asked, hit) if found is None else tier.load(asked, found, hit)[0]
    loaded = lease.explanation.loaded_tokens
    if lease.computed < lease.tokens:
        device.commit(device.extend([lease.row], [lease.tokens - lease.computed]))
    device.finish([lease.row])
    return loaded


def uses(cache: PrefixCache, asked: Prompt) -> list[int]:
    return [kept.uses for part in cache.path(asked).parts for kept in part.checkpoints]


def lent(tier: HostTier, asked: Prompt) -> bool:
    """Whether what the host has of a prompt counts for nothing there, as the device has a copy."""
    checkpoint = tier.host.lookup(asked).checkpoint
    assert checkpoint is not None
    return checkpoint.elsewhere


@pytest.mark.parametrize("groups", [HYBRID, PLAIN])
def test_what_grows_again_is_told_again_when_it_goes(groups: list[LayerSpec]) -> None:
    """What was read back and goes again is not lost with the copy that it came from."""
    tier = pair(groups, 8, 60, "lru")
    for again in range(3):
        assert (serve(tier, prompt(0)) > 0) == (again > 0)
        assert again == 0 or lent(tier, prompt(0))
        for number in range(1, 4):
            serve(tier, prompt(number))
        assert tier.device.lookup(prompt(0)).tokens == 0
        assert not lent(tier, prompt(0))


def test_a_checkpoint_takes_its_uses_along() -> None:
    tier = pair(HYBRID, 12, 60, "lru")
    serve(tier, prompt(0))
    serve(tier, prompt(0))
    before = max(uses(tier.device, prompt(0)))
    assert before == 1
    for number in range(1, 4):
        serve(tier, prompt(number))
    assert tier.device.lookup(prompt(0)).tokens == 0
    assert max(uses(tier.host, prompt(0))) == before
    assert serve(tier, prompt(0)) > 0
    assert max(uses(tier.device, prompt(0))) == before + 1


def test_a_move_teaches_nothing_and_time_goes_on() -> None:
    """Both memories have one clock. Moving there and back is no birth and no use but the request's own."""
    tier = pair(HYBRID, 12, 60)
    device, host = tier.device._index.usage, tier.host._index.usage
    assert device.learned is host.learned
    for number in range(4):
        serve(tier, prompt(number))
    taken, ticks = sum(device.counters.taken.values()), device.learned.ticks
    moved = sum(host.counters.taken.values())
    assert moved > 0
    kinds = device.learned.reuse._kinds
    assert sum(seen.taken for kind, seen in kinds.items() if kind != "path") == taken, "moved ones are not counted"
    for checkpoint in [one for edge in tier.host._index.tree.edges() for one in edge.checkpoints]:
        assert 0 < checkpoint.born <= checkpoint.used <= ticks


def test_what_a_checkpoint_saves_counts_from_what_the_device_had() -> None:
    """The deeper of two checkpoints of a path goes; the host is told where a request resumes without it."""
    tier = pair(HYBRID, 14, 60)
    shared = prompt(0, 32)
    serve(tier, shared)
    serve(tier, shared)
    longer = Prompt(np.concatenate([shared.tokens, np.arange(9000, 9064, dtype=np.int32)]))
    serve(tier, longer)
    for number in range(1, 3):
        serve(tier, prompt(number))
    found = [one for edge in tier.host._index.tree.edges() for one in edge.checkpoints if one.position > 80]
    assert found
    assert any(0 < one.base < one.position for one in found)


def planned(device: PrefixCache, lease: Lease, count: int) -> tuple[Step, set[int]]:
    """A step, and the blocks that it reads and writes."""
    step, used = device.extend([lease.row], count), set[int]()
    for table in device.geometry.tables:
        reads = slice(0, table.state_blocks)
        if table.span:
            reads = slice(table.first_needed(step.starts.item()) // table.span, -(-lease.planned // table.span))
        used.update(device.tables[table.index][lease.row, reads].tolist())
    return step, used


@pytest.mark.parametrize("groups", [HYBRID, WINDOW], ids=["hybrid", "window"])
def test_t05_t08_a_load_gets_no_block_that_a_step_under_way_reads_or_writes(groups: list[LayerSpec]) -> None:
    """Nor can its request end before: blocks are given back when the last step that was planned is committed."""
    loads, targets = 0, list[int]()
    for blocks in range(20, 34, 2):
        device = PrefixCache(CacheConfig(groups, blocks, block_tokens=16, steps_in_flight=2, check=True))
        tier = HostTier.beside(device, 60, lambda out, back: targets.extend(back[:, 1].tolist()))
        for number in range(6):
            serve(tier, prompt(number))
        lease = device.lease(Prompt(prompt(9, 160).tokens, no_store=True))  # nobody else holds its blocks
        under_way = [planned(device, lease, 128)]
        for wanted, more in enumerate((16, 16, 0)):
            if more:
                under_way.append(planned(device, lease, more))
            for end in (device.finish, device.abort):
                with pytest.raises(LeaseError, match="under way"):
                    end([lease.row])
            targets.clear()
            loads += serve(tier, prompt(wanted)) > 0
            assert set.union(*(used for _, used in under_way)).isdisjoint(targets)
            device.commit(under_way.pop(0)[0])
        device.finish([lease.row])
    assert loads > 10, "the test has no point"
