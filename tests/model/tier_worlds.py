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
        wait_tokens: Requests wait for a running prefill that computes so many tokens of theirs; 0 for never.
        pace: Seconds that a token takes; 0 where computing is not measured.
        haul: Seconds that a block takes on its way to host memory or back.
        check: Its caches are checked after every call, and not only after every rule.
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
    wait_tokens: int
    pace: float
    haul: float
    check: bool

    def __post_init__(self) -> None:
        """Stalled reads keep their memory, and loads that wait for it take all their time."""
        if self.stalls:
            object.__setattr__(self, "staging", 1 << 30)

    @property
    def shape(self) -> tuple[ParallelLayout, int]:
        """How its bytes are laid out."""
        return self.layout, self.block_tokens

    @property
    def stalls(self) -> bool:
        """A call may stall, so answers are not waited for long."""
        return "stall" in self.rates

    def cache_config(self, world: TierWorld) -> CacheConfig:
        """The cache of this server."""
        groups, block_tokens = list(world.config.groups), self.block_tokens * self.layout.interleave
        while not fits(groups, self.layout, block_tokens):
            block_tokens *= 2
        geometry = CacheGeometry(groups, self.layout, block_tokens=block_tokens)
        least = max(geometry.peak_blocks(_MOST) + geometry.state_blocks, tight(groups, self.layout, block_tokens))
        return replace(
            world.config,
            blocks=least * self.blocks // 4 + 1,
            block_tokens=block_tokens,
            layout=self.layout,
            check=self.check,
        )


_KINDS = st.integers(0, 3)
_WORLDS = worlds()
_RARE = st.integers(0, 7)
_ROOM = st.sampled_from([None, None, 1_500, 5_000])


@st.composite
def tier_worlds(draw: st.DrawFn) -> TierWorld:
    """A model and its stores."""
    kinds, config = draw(_KINDS), draw(_WORLDS).config
    if draw(st.booleans()):
        config = replace(config, placement=DEFAULT_PLACEMENT, checkpoint_alignment=1)
    return TierWorld(
        config=config, disk=kinds != 1, store=kinds in (1, 2), files=draw(_RARE) == 0, store_bytes=draw(_ROOM)
    )


_RATES: list[dict[Kind, float]] = [
    {},
    {},
    {"delay": 0.1},
    {"delay": 0.5},
    {"drop": 0.03, "corrupt": 0.02, "truncate": 0.02},
    {"fail": 0.05, "delay": 0.01},
    {"full": 0.1, "lie": 0.2, "drop": 0.02},
    {"stall": 0.02, "drop": 0.02},
]
_PLANS = st.builds(
    ServerPlan,
    layout=st.sampled_from([ParallelLayout(*layout) for layout in LAYOUTS]),
    block_tokens=st.sampled_from([1, 2, 3, 4, 6]),
    blocks=st.sampled_from([4, 5, 8, 16, 64]),
    host=st.sampled_from([0, 0, 4, 9, 64]),
    write=st.sampled_from(["through", "through", "selective", "back"]),
    capacity=st.sampled_from([None, None, None, 1_500, 6_000]),
    staging=st.sampled_from([1 << 30, 1 << 30, 700]),
    rates=st.sampled_from(_RATES),
    seed=st.integers(0, 2**16),
    wait_tokens=st.sampled_from([0, 3]),
    pace=st.sampled_from([0.0, 0.0, 1e-5, 1e-4, 1e-2]),
    haul=st.sampled_from([0.0, 1e-4]),
    check=st.sampled_from([False] * 7 + [True]),
)


def server_plans() -> st.SearchStrategy[ServerPlan]:
    """A server to be."""
    return _PLANS
