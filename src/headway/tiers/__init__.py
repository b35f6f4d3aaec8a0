"""Lower tiers of memory: what the device has no room for is kept below it, and comes back as a hit.

`HostTier` keeps blocks in host memory, under a second prefix cache. `ObjectTiers` keeps checkpoints on disks and in
shared stores, as canonical objects that any parallel layout can use. The package knows tokens, groups, blocks and
bytes, not tensors or engines.
"""

from headway.tiers.host import HostCounters, HostTier
from headway.tiers.keys import store_key
from headway.tiers.loading import Failure, Load, Loaded, Moved, Piece, Place
from headway.tiers.objects import Namespace, ObjectGroup, ObjectLayout, Span
from headway.tiers.rates import MoveRate, Rates
from headway.tiers.tier import TierConfig, TierStats
from headway.tiers.tiers import IncompleteError, ObjectTiers, TiersStats

__all__ = [
    "Failure",
    "HostCounters",
    "HostTier",
    "IncompleteError",
    "Load",
    "Loaded",
    "MoveRate",
    "Moved",
    "Namespace",
    "ObjectGroup",
    "ObjectLayout",
    "ObjectTiers",
    "Piece",
    "Place",
    "Rates",
    "Span",
    "TierConfig",
    "TierStats",
    "TiersStats",
    "store_key",
]
