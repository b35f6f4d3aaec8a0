"""The prefix cache: Python and numpy, to be embedded in any engine. Imports nothing above it.

Start with `PrefixCache` and `CacheConfig`; `docs/cache-api.md` has a worked example.
"""

from headway.cache.config import CacheConfig
from headway.cache.events import CheckpointRemoved, CheckpointStored, Event, ResidentGrown, ResidentShrunk
from headway.cache.eviction import Candidate, EvictionPolicy, GreedyDual, Lru, Value
from headway.cache.explain import Explanation, Loss, Reason, Waterfall
from headway.cache.geometry import CacheGeometry, GroupGeometry, TableGeometry, TableKind
from headway.cache.hit import Hit
from headway.cache.lease import MOST_SAMPLED, Lease
from headway.cache.placement import DEFAULT_PLACEMENT
from headway.cache.prefix_cache import CacheStats, PrefixCache, ResetReport
from headway.cache.prompt import Media, Prompt
from headway.cache.reclaim import Counters
from headway.cache.spec import (
    BlockId,
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Position,
    Recurrent,
    SlidingWindow,
    Slot,
)
from headway.cache.step import StateExport, Step

__all__ = [
    "DEFAULT_PLACEMENT",
    "MOST_SAMPLED",
    "BlockId",
    "CacheConfig",
    "CacheGeometry",
    "CacheStats",
    "Candidate",
    "CheckpointRemoved",
    "CheckpointStored",
    "ChunkedLocal",
    "ComputeCost",
    "Counters",
    "Event",
    "EvictionPolicy",
    "Explanation",
    "FullAttention",
    "GreedyDual",
    "GroupGeometry",
    "Hit",
    "LayerSpec",
    "Lease",
    "Loss",
    "Lru",
    "Media",
    "ParallelLayout",
    "Position",
    "PrefixCache",
    "Prompt",
    "Reason",
    "Recurrent",
    "ResetReport",
    "ResidentGrown",
    "ResidentShrunk",
    "SlidingWindow",
    "Slot",
    "StateExport",
    "Step",
    "TableGeometry",
    "TableKind",
    "Value",
    "Waterfall",
]
