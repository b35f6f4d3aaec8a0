"""How much memory the cache gets, and what fits into it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.cache import CacheGeometry, TableGeometry, TableKind
from headway.errors import ConfigError
from headway.sizes import format_bytes

__all__ = ["Capacity", "available_host_memory", "blocks_that_fit", "capacity", "default_memory", "row_bytes"]

_CPU_SHARE, _CPU_LIMIT = 0.5, 4 * 1024**3
"""On a CPU the machine's other work needs memory too."""
_CUDA_SHARE = 0.85
"""The rest is for what a forward holds for a moment: activations, logits, gathered histories."""


_ROW_ALIGNMENT = 64
"""Bytes to which blocks are aligned: a cache line, and a multiple of the size of every type."""


def row_bytes(geometry: CacheGeometry) -> int:
    """Bytes that one block takes in the arena: its own, up to a multiple of `_ROW_ALIGNMENT`."""
    return -(-geometry.block_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


@dataclass(frozen=True)
class Capacity:
    """What a pool of blocks can hold, each figure if it held nothing else.

    Attributes:
        blocks: Blocks of the pool.
        bytes: Bytes of the pool on one rank.
        tokens: Tokens of full-attention entries; 0 for a model without full attention.
        checkpoint_blocks: Blocks of one checkpoint: a state, full windows and full chunks.
        checkpoints: Checkpoints; None for a model that needs none.
    """

    blocks: int
    bytes: int
    tokens: int
    checkpoint_blocks: int
    checkpoints: int | None


def default_memory(device: torch.device | str) -> int:
    """Bytes that the cache takes if nobody says: most of what is free on a GPU, a careful part of it in host memory.

    Call it once the model is loaded.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return min(int(available_host_memory() * _CPU_SHARE), _CPU_LIMIT)


def blocks_that_fit(memory: int, geometry: CacheGeometry) -> int:
    """Blocks whose arena takes at most `memory` bytes on one rank.

    Raises:
        ConfigError: Not even one sequence of one block per table and a state fits.
    """
    blocks = memory // row_bytes(geometry)
    least = sum(table.state_blocks or 1 for table in geometry.tables)
    if blocks < least:
        raise ConfigError(
            f"{format_bytes(memory)} of memory hold {blocks} blocks of {format_bytes(row_bytes(geometry))}, a single "
            f"request needs {least}: give at least {format_bytes(least * row_bytes(geometry))}, better many times that"
        )
    return int(blocks)


def capacity(blocks: int, geometry: CacheGeometry) -> Capacity:
    """What `blocks` blocks can hold."""
    prefix = [table for table in geometry.tables if table.kind is TableKind.PREFIX]
    tails = [table for table in geometry.tables if table.kind is not TableKind.PREFIX]
    each = sum(_tail_blocks(table) for table in tails)
    tokens = math.floor(blocks / sum(1 / table.span for table in prefix)) if prefix else 0
    return Capacity(
        blocks=blocks,
        bytes=blocks * row_bytes(geometry),
        tokens=tokens,
        checkpoint_blocks=each,
        checkpoints=blocks // each if each else None,
    )


def _tail_blocks(table: TableGeometry) -> int:
    """Blocks that a table adds to a checkpoint at most."""
    if table.kind is TableKind.STATE:
        return table.state_blocks
    reach = table.window - 1 if table.kind is TableKind.WINDOW else table.chunk - 1
    return -(-reach // table.span) + 1 if reach else 0


def available_host_memory() -> int:
    """Bytes that this process may still take: what the system has available, within the limit of its control group."""
    available = _from_meminfo()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        bound, taken = _read_number(limit), _read_number(used)
        if bound is not None and taken is not None:
            available = min(available, max(0, bound - taken))
    return available


def _from_meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
