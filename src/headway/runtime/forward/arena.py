"""One byte tensor per rank, and typed views into it.

Every layer kind reads and writes the same bytes: a block of attention entries today holds a piece of a recurrent state
tomorrow. So nothing may be assumed about a byte that was not written under the block's present use; it may well read as
NaN. What gathers history replaces all that lies outside a row's own entries before anything computes on it.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from headway.cache import CacheGeometry, GroupGeometry, TableKind
from headway.errors import ConfigError
from headway.runtime.model.layout import STATE_ALIGNMENT, Entries, Field, ModelLayout
from headway.runtime.model.memory import row_bytes
from headway.sizes import format_bytes

__all__ = ["Arena"]


class Arena:
    """The memory of one rank. Every rank has as many blocks of as many bytes; what differs is whose tokens they hold.

    Args:
        layout: What the model stores.
        geometry: Where it is stored; its groups are those of `layout`.
        blocks: Number of blocks.
        device: Device of the memory.
        pinned: Lock the pages of host memory, which a GPU then reads and writes by itself.
        option: The option that says how large it is, for messages.

    Attributes:
        data: uint8 [blocks, block_bytes]. Rows start at multiples of 64 bytes.
        rows: uint8 [blocks, bytes from row to row], the same memory with what fills the rows up.

    Raises:
        ConfigError: Groups of another model, or no room for the blocks.
    """

    def __init__(
        self,
        layout: ModelLayout,
        geometry: CacheGeometry,
        blocks: int,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        option: str = "--memory",
    ) -> None:
        self.layout = layout
        self.geometry = geometry
        self.blocks = blocks
        self.device = torch.device(device)
        self._groups: dict[str, GroupGeometry] = {group.spec.name: group for group in geometry.groups}
        self._check()
        whole = self.rows = _allocate((blocks, row_bytes(geometry)), self.device, option)
        if pinned:
            weakref.finalize(self, _lock_pages(whole, option))
        self.data = whole[:, : geometry.block_bytes]
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: whole}
        self._entries: dict[int, tuple[torch.Tensor, ...]] = {}

    def _check(self) -> None:
        for spec in self.layout.groups:
            placed = self._groups.get(spec.name)
            if placed is None or placed.spec != spec:
                raise ConfigError(
                    f"the cache is configured without the model's group {spec!r}: use the groups of the model's layout"
                )

    def entries(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Views of a layer's token fields (keys, values), each typed [blocks, block_tokens, *shape].

        They alias the arena: writing to them is how entries are stored.
        """
        if layer not in self._entries:
            entries = self.layout.layers[layer].tokens
            assert entries is not None, f"layer {layer} keeps no token entries"
            self._entries[layer] = self.views(entries)
        return self._entries[layer]

    def views(self, entries: Entries) -> tuple[torch.Tensor, ...]:
        """Views of any token fields of a group of the geometry, each typed [blocks, block_tokens, *shape]."""
        return tuple(self._token_view(entries, field) for field in entries.fields)

    def _token_view(self, entries: Entries, field: Field) -> torch.Tensor:
        group = self._groups[entries.group]
        size = field.dtype.itemsize
        start = group.offset + field.offset * group.block_tokens
        assert start % size == 0, f"{entries.group}/{field.name} at byte {start} is not aligned to {size}"
        region = self._as(field.dtype)[:, start // size : (start + field.bytes * group.block_tokens) // size]
        return region.view(self.blocks, group.block_tokens, *field.shape)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the whole memory as [blocks, stride / itemsize] of `dtype`."""
        if dtype not in self._typed:
            self._typed[dtype] = self.rows.view(dtype)
        return self._typed[dtype]

    def gather_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Read states from their blocks.

        Args:
            ids: int64 [rows, state_blocks].

        Returns:
            uint8 [rows, bytes], a copy: the blocks of each state end to end, rows padded to a multiple of 16 bytes.
        """
        rows, count = ids.shape
        size = count * self.geometry.block_bytes
        states = self.new_states(rows, count)
        states[:, :size].view(rows, count, -1).copy_(self.data[ids])
        return states

    def new_states(self, rows: int, count: int) -> torch.Tensor:
        """Zeroed uint8 [rows, bytes] for states of `count` blocks, as `gather_states` returns them."""
        size = -(-count * self.geometry.block_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
        return torch.zeros((rows, size), dtype=torch.uint8, device=self.device)

    def scatter_states(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Write states, uint8 [rows, bytes] as from `gather_states`, to their blocks, int64 [rows, state_blocks]."""
        rows, count = ids.shape
        size = count * self.geometry.block_bytes
        self.data[ids] = states[:, :size].view(rows, count, self.geometry.block_bytes)

    def state_fields(self, states: torch.Tensor, layer: int) -> Mapping[str, torch.Tensor]:
        """Views of a layer's state fields inside gathered states, by name, each typed [rows, *shape]."""
        entries = self.layout.layers[layer].state
        assert entries is not None, f"layer {layer} keeps no state"
        offset = self._groups[entries.group].offset
        rows = states.shape[0]
        views: dict[str, torch.Tensor] = {}
        for field in entries.fields:
            start = offset + field.offset
            views[field.name] = states[:, start : start + field.bytes].view(field.dtype).view(rows, *field.shape)
        return views

    @property
    def bytes(self) -> int:
        """Bytes that the memory takes on the device."""
        return self.rows.nbytes

    @property
    def state_blocks(self) -> int:
        """Blocks that one state takes; 0 for a model without states."""
        return sum(table.state_blocks for table in self.geometry.tables if table.kind is TableKind.STATE)

    def copy_blocks(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy whole blocks, int64 [k] to int64 [k]; every source is read before any destination is written."""
        if len(source):
            rows = self._as(torch.int64)  # eight bytes at a time: rows are multiples of that
            rows.index_copy_(0, destination, rows.index_select(0, source))


def _allocate(shape: tuple[int, int], device: torch.device, option: str) -> torch.Tensor:
    """Memory as it is; on a CPU in large pages, if the system gives them: blocks are read and written in any order.

    Raises:
        ConfigError: There is none.
    """
    try:
        if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
            memory = mmap.mmap(-1, shape[0] * shape[1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
        return torch.empty(shape, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, OSError) as error:
        size, reason = format_bytes(shape[0] * shape[1]), str(error).strip().partition("\n")[0]
        raise ConfigError(f"there is no room for a cache of {size} on {device}: lower {option} ({reason})") from error


def _lock_pages(memory: torch.Tensor, option: str) -> Callable[[], object]:
    """Lock the pages of host memory, as it is: torch's own allocator would take up to twice as much.

    Returns:
        What undoes it, to be called before the memory is let go of.

    Raises:
        ConfigError: The system does not allow it.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise ConfigError(
            f"{format_bytes(memory.nbytes)} of host memory cannot be page-locked for the GPU (CUDA error {code}): "
            f"lower {option}, or raise the limit of locked memory (ulimit -l)"
        )
    return partial(runtime.cudaHostUnregister, memory.data_ptr())
