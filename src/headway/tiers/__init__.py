"""Tiers below memory: checkpoints on disks and in shared stores, as canonical objects that any parallel layout can use.

`ObjectTiers` is what an engine talks to. The package knows tokens, groups and bytes, not tensors or engines.
"""

from headway.tiers.keys import store_key
from headway.tiers.loading import Failure, Load, Loaded, Moved, Piece, Place
from headway.tiers.objects import Namespace, ObjectGroup, ObjectLayout, Span
from headway.tiers.tier import TierConfig, TierStats
from headway.tiers.tiers import IncompleteError, ObjectTiers, TiersStats

__all__ = [
    "Failure",
    "IncompleteError",
    "Load",
    "Loaded",
    "Moved",
    "Namespace",
    "ObjectGroup",
    "ObjectLayout",
    "ObjectTiers",
    "Piece",
    "Place",
    "Span",
    "TierConfig",
    "TierStats",
    "TiersStats",
    "store_key",
]
