"""Makes the lower tiers of an engine from its options: host memory beside the ranks, folders and stores opened."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.cache import PrefixCache
from headway.engine.executor import Executor
from headway.engine.scheduling.lower import LowerTiers
from headway.engine.scheduling.object_moves import ObjectMoves, object_groups
from headway.engine.tier_options import TierOptions
from headway.errors import ConfigError
from headway.sizes import format_bytes
from headway.tiers import HostTier, ObjectLayout, ObjectTiers
from headway.tiers.opening import disk_place

__all__ = ["lower_tiers"]

logger = logging.getLogger(__name__)

_OBJECT_BYTES = 4 << 20
"""Bytes of the prefix groups of one stretch, about: files of a few MiB cost little besides their bytes."""
_SCAN_SECONDS = 10.0
"""Longest time that a start waits until a disk was looked through, so that the first request finds what is there."""
_SHORTEST, _LONGEST = 64, 4096
"""Tokens of a stretch."""


def lower_tiers(
    cache: PrefixCache,
    executor: Executor,
    options: TierOptions,
    host_blocks: int,
    identity: Callable[[], bytes],
    label: str,
) -> LowerTiers | None:
    """What lies below a device's cache, as the options say; None if nothing does.

    Args:
        cache: The device's cache.
        executor: Has room for the cache, and `host_blocks` blocks in host memory.
        options: The options.
        host_blocks: Blocks in host memory, 0 for none.
        identity: Tells the weights of the model and its drafter apart from all others; asked where something is filed.
        label: What people call the model.

    Raises:
        ConfigError: A folder or store that cannot be used.
    """
    host = HostTier.beside(cache, host_blocks, executor.move_blocks) if host_blocks else None
    if not options.below:
        return None if host is None else LowerTiers(cache, host)
    layout = _layout(cache, executor, identity(), label)
    if options.store is not None and options.disk is not None and options.store_key is None:
        logger.warning(
            "the key of the store is %s.key: only servers with --store-key and a copy of it share it",
            disk_place(options.disk)[0],
        )
    _refuse_small(options, layout)
    key, tiers = options.open()
    objects = ObjectTiers(layout, key, tiers)
    if not objects.scanned(_SCAN_SECONDS):
        logger.info("the disk is still being looked through: what it holds is found as that goes on")
    return LowerTiers(cache, host, objects, ObjectMoves(cache.geometry, executor), options.tier_write)


def _refuse_small(options: TierOptions, layout: ObjectLayout) -> None:
    """Refuse a disk that could not hold a single checkpoint."""
    least = sum(layout.length(span) for span in layout.manifest_spans(1))
    if options.disk is not None and (size := disk_place(options.disk)[1]) < least:
        raise ConfigError(
            f"--disk: {format_bytes(size)} hold no checkpoint of this model, the shortest has {format_bytes(least)}: "
            f"give it more, better many times that"
        )


def _layout(cache: PrefixCache, executor: Executor, identity: bytes, label: str) -> ObjectLayout:
    groups = object_groups(cache.geometry, executor)
    per_token = sum(group.bytes for group in groups if group.kind == "prefix")
    stretch = _SHORTEST
    while stretch < _LONGEST and 2 * stretch * per_token <= _OBJECT_BYTES:
        stretch *= 2
    families = sorted(f"{name}: {group.family}" for name, group in executor.canonical.items())
    return ObjectLayout(identity, groups, cache.geometry.lookahead, stretch, "; ".join(families), label)
