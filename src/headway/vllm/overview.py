"""What the log says at the start: the groups, the memory, and what fits into it."""

from __future__ import annotations

import math

from headway.cache import TableGeometry, TableKind
from headway.sizes import counted, format_bytes
from headway.vllm.groups import Group
from headway.vllm.manager import KVCacheManager

__all__ = ["start_lines"]


def start_lines(manager: KVCacheManager) -> list[str]:
    """Lines for the log, each figure of what fits as if nothing else were there."""
    groups, geometry, alignment = manager.groups, manager.cache.geometry, manager.options.alignment
    each = sum(_most_pages(table) for table in geometry.tail_tables)
    room = []
    if geometry.prefix_tables:
        tokens = math.floor(groups.blocks / sum(1 / table.span for table in geometry.prefix_tables))
        room.append(counted(tokens, "token"))
    if each:
        room.append(f"{counted(groups.blocks // each, 'checkpoint')} of {counted(each, 'page')}")
    shortest, ahead = alignment if each else 1, max(1, geometry.lookahead)
    return [
        "Headway's cache: " + ", ".join(map(_group, groups.groups)),
        f"Headway's cache: {counted(groups.blocks, 'page')} of {format_bytes(groups.block_bytes)} on each rank, "
        f"room for {' or '.join(room)}; shortest reusable prefix: {counted(shortest, 'token')}, "
        f"in a prompt of at least {shortest + ahead}",
    ]


def _group(group: Group) -> str:
    what = f"{group.span} tokens per page" if group.span else "a page per state"
    return f"{group.name} ({counted(group.layers, 'layer')}, {what})"


def _most_pages(table: TableGeometry) -> int:
    """Pages that a table adds to a checkpoint at most."""
    if table.kind is TableKind.STATE:
        return table.state_blocks
    reach = (table.window if table.kind is TableKind.WINDOW else table.chunk) - 1
    return -(-reach // table.span) + 1 if reach else 0
