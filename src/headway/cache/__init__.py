"""The prefix cache: Python and numpy, to be embedded in any engine. Imports nothing above it.

Start with `PrefixCache` and `CacheConfig`; `docs/cache-api.md` has a worked example.
"""

from headway.cache.config import CacheConfig
from headway.cache.directory import Directory
from headway.cache.index.below import Below, BelowLoss
from headway.cache.index.displaced import Displaced
from headway.cache.index.events import (
    CheckpointReduced,
    CheckpointRemoved,
    CheckpointStored,
    Event,
    ResidentGrown,
    ResidentShrunk,
)
from headway.cache.index.explain import Evicted, Explanation, Loss, Reason, Waterfall
from headway.cache.index.held import HeldBlocks
from headway.cache.index.hit import Hit
from headway.cache.index.path import KeptCheckpoint, Path, PathPart
from headway.cache.index.reclaim import Spill
from headway.cache.index.survey import Holdings
from headway.cache.index.usage import Counters
from headway.cache.lease.step import StateExport, Step
from headway.cache.lease.table import MOST_SAMPLED, Lease
from headway.cache.lease.wish import Outcome, Wish
from headway.cache.policy.eviction import (
    EVICTIONS,
    Adaptive,
    Candidate,
    EvictionPolicy,
    GreedyDual,
    Lru,
    SharedValue,
    Value,
)
from headway.cache.policy.placement import DEFAULT_PLACEMENT, check_placement
from headway.cache.prefix_cache import CacheStats, PrefixCache, ResetReport
from headway.cache.shape.geometry import CacheGeometry, GroupGeometry, TableGeometry, TableKind
from headway.cache.shape.prompt import Prompt
from headway.cache.shape.spec import (
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.cache.shape.symbols import Media, Symbols

__all__ = [
    "DEFAULT_PLACEMENT",
    "EVICTIONS",
    "MOST_SAMPLED",
    "Adaptive",
    "Below",
    "BelowLoss",
    "CacheConfig",
    "CacheGeometry",
    "CacheStats",
    "Candidate",
    "CheckpointReduced",
    "CheckpointRemoved",
    "CheckpointStored",
    "ChunkedLocal",
    "ComputeCost",
    "Counters",
    "Directory",
    "Displaced",
    "Event",
    "Evicted",
    "EvictionPolicy",
    "Explanation",
    "FullAttention",
    "GreedyDual",
    "GroupGeometry",
    "HeldBlocks",
    "Hit",
    "Holdings",
    "KeptCheckpoint",
    "LayerSpec",
    "Lease",
    "Loss",
    "Lru",
    "Media",
    "Outcome",
    "ParallelLayout",
    "Path",
    "PathPart",
    "PrefixCache",
    "Prompt",
    "Reason",
    "Recurrent",
    "ResetReport",
    "ResidentGrown",
    "ResidentShrunk",
    "SharedValue",
    "SlidingWindow",
    "Spill",
    "StateExport",
    "Step",
    "Symbols",
    "TableGeometry",
    "TableKind",
    "Value",
    "Waterfall",
    "Wish",
    "check_placement",
]
