"""What a cache group of any kind weighs and how far it reaches, for code that treats all kinds alike."""

from __future__ import annotations

from headway.cache import CacheGeometry, ChunkedLocal, LayerSpec, Recurrent, SlidingWindow

__all__ = ["checkpoint_blocks", "reach_of", "size_of"]


def reach_of(group: LayerSpec) -> int:
    """Tokens of a window or a chunk; 0 for the other kinds."""
    if isinstance(group, SlidingWindow):
        return group.window
    return group.chunk if isinstance(group, ChunkedLocal) else 0


def size_of(group: LayerSpec) -> int:
    """Bytes of one token, or of one state, on one rank before context parallelism."""
    return group.state_bytes if isinstance(group, Recurrent) else group.bytes_per_token


def checkpoint_blocks(geometry: CacheGeometry) -> int:
    """Pool blocks that a checkpoint holds, beside those of full attention."""
    return sum(table.blocks_for(table.window or table.chunk) for table in geometry.tail_tables)
