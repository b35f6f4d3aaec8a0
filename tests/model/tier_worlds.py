"""Random servers for the machine of the tiers: one model, and stores, pools, layouts and faults that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from tests.model.worlds import LAYOUTS, fits, tight, worlds

from headway.cache import DEFAULT_PLACEMENT, CacheConfig, CacheGeometry, ParallelLayout
from headway.tiers.faults import Kind

__all__ = ["LONGEST", "ServerPlan", "TierWorld", "server_plans", "tier_worlds"]

LONGEST = 48
"""Most tokens of a prompt."""
_MOST = LONGEST + 12


@dataclass(frozen=True)
class TierWorld:
    """What all servers of an example share.

    Attributes:
        config: The cache of the first server; the others have another layout of the same groups.
        disk: Servers have a tier of their own, whose folder they share.
        store: Servers have a tier that others write to.
        files: The first of them is a folder of files, and no dictionary.
        store_bytes: Bytes that each store has room for; None for no bound.
    """

    config: CacheConfig
    disk: bool
    store: bool
    files: bool
    store_bytes: int | None


@dataclass(frozen=True)
class ServerPlan:
    """How a server is started.

    Attributes:
        layout: Its ranks.
        block_tokens: Tokens of a block on one rank, before it is made to fit.
        blocks: Blocks of the pool, in quarters of what one request needs.
        host: Blocks of host memory, in quarters of the same; 0 for none.
        write: When objects are written.
        capacity: Bytes of each object tier; None for no bound.
        staging: Bytes of memory for loads.
        rates: What fails at random in its stores.
        seed: And when.
        stalls: A call may stall, so answers are not waited for long.
        wait_tokens: Requests wait for a running prefill that computes so many tokens of theirs; 0 for never.
    """

    layout: ParallelLayout
    block_tokens: int
    blocks: int
    host: int
    write: str
    capacity: int | None
    staging: int
    rates: Mapping[Kind, float]
    seed: int
    stalls: bool
    wait_tokens: int

    def cache_config(self, world: TierWorld) -> CacheConfig:
        """The cache of this server."""
        groups, block_tokens = list(world.config.groups), self.block_tokens * self.layout.interleave
        while not fits(groups, self.layout, block_tokens):
            block_tokens *= 2
        geometry = CacheGeometry(groups, self.layout, block_tokens=block_tokens)
        least = max(geometry.peak_blocks(_MOST) + geometry.state_blocks, tight(groups, self.layout, block_tokens))
        return replace(
            world.config, blocks=least * self.blocks // 4 + 1, block_tokens=block_tokens, layout=self.layout, check=True
        )


@st.composite
def tier_worlds(draw: st.DrawFn) -> TierWorld:
    """A model and its stores."""
    kinds, config = draw(st.integers(0, 3)), draw(worlds()).config
    if draw(st.booleans()):
        config = replace(config, placement=DEFAULT_PLACEMENT, checkpoint_alignment=1)
    return TierWorld(
        config=config,
        disk=kinds != 1,
        store=kinds in (1, 2),
        files=draw(st.integers(0, 3)) == 0,
        store_bytes=draw(st.sampled_from([None, None, None, 6_000, 20_000])),
    )


_RATES: list[dict[Kind, float]] = [
    {},
    {},
    {},
    {},
    {"drop": 0.03, "corrupt": 0.02, "truncate": 0.02},
    {"fail": 0.05, "delay": 0.01},
    {"full": 0.1, "lie": 0.2, "drop": 0.02},
    {"stall": 0.02, "drop": 0.02},
]


@st.composite
def server_plans(draw: st.DrawFn) -> ServerPlan:
    """A server to be."""
    rates = draw(st.sampled_from(_RATES))
    return ServerPlan(
        layout=ParallelLayout(*draw(st.sampled_from(LAYOUTS))),
        block_tokens=draw(st.sampled_from([1, 2, 3, 4, 6])),
        blocks=draw(st.sampled_from([4, 5, 8, 16, 64])),
        host=draw(st.sampled_from([0, 0, 4, 9, 64])),
        write=draw(st.sampled_from(["through", "through", "selective", "back"])),
        capacity=draw(st.sampled_from([None, None, None, 4_000, 15_000])),
        # Stalled reads keep their memory, and loads that wait for it take all their time.
        staging=1 << 30 if "stall" in rates else draw(st.sampled_from([1 << 30, 1 << 30, 1_500])),
        rates=rates,
        seed=draw(st.integers(0, 2**16)),
        stalls="stall" in rates,
        wait_tokens=draw(st.sampled_from([0, 3])),
    )
