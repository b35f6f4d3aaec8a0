"""How fast this machine moves what lower tiers hold: host memory, a folder, a store; for the links of `headway replay`.

Time of the clock, unlike the rest of the bench: a move waits for the other side. Bytes are moved as tiers move them, so
checksums and copies count. A file is flushed to its drive and leaves the page cache before it is read, since a disk
tier holds more than memory does; what is still in the cache is read faster than is said here.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from headway.errors import ConfigError
from headway.tiers.disk import DiskStore
from headway.tiers.objects import checksum
from headway.tiers.opening import open_store
from headway.tiers.store import Store

__all__ = ["MoveFigure", "measure_moves"]

_BLOCK, _OBJECT = 256 << 10, 4 << 20
"""Bytes of a block, and of an object, about as servers have them."""
_BYTES, _ROUNDS, _THREADS = 256 << 20, 5, 4
_T = TypeVar("_T")


@dataclass(frozen=True)
class MoveFigure:
    """What one tier reaches.

    Attributes:
        tier: `host`, `disk` or `store`.
        read: Bytes per second from there.
        write: Bytes per second to there.
        latency: Seconds to read a record of 100 bytes; 0 for host memory.
    """

    tier: str
    read: float
    write: float
    latency: float

    @property
    def option(self) -> str:
        """The option of `headway replay` that says so, for a rank that is alone."""
        return f"--{self.tier}-link {self.read / 1e9:.2f}GB/s,{self.write / 1e9:.2f}GB/s"

    def as_data(self) -> dict[str, object]:
        """The figure for JSON."""
        return {**asdict(self), "option": self.option}


def measure_moves(disk: Path | None, store: str | None, size: int = _BYTES) -> list[MoveFigure]:
    """Measure host memory, and what else is given.

    Args:
        disk: A folder on the drive; a folder is made in it, and removed.
        store: The URL of a store; objects are written there, and removed.
        size: Bytes that are moved each way.

    Raises:
        ConfigError: A folder or store that cannot be used.
        StoreError: It failed.
    """
    figures = [_host(size)]
    if disk is not None:
        if not disk.is_dir():
            raise ConfigError(f"{disk} is no folder: give one on the drive that is to be measured")
        with tempfile.TemporaryDirectory(prefix="headway-bench-", dir=disk) as folder:
            figures.append(_objects("disk", DiskStore(folder), size, partial(_leave_cache, folder)))
    if store is not None:
        figures.append(_objects("store", open_store(store)[1], size))
    return figures


def _host(size: int) -> MoveFigure:
    """Blocks in random order between a device and host memory; on a machine without CUDA both are host memory."""
    import torch  # which takes seconds to import

    cuda = torch.cuda.is_available()
    shape = (max(1, size // _BLOCK), _BLOCK)
    device = torch.ones(shape, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    host = torch.ones(shape, dtype=torch.uint8, pin_memory=cuda)
    order = np.random.default_rng(0).permutation(shape[0]).tolist()

    def move(source: torch.Tensor, target: torch.Tensor) -> None:
        if not cuda:
            rows, targets = source.numpy(), target.numpy()
            for place, block in enumerate(order):
                targets[place] = rows[block]
            return
        for place, block in enumerate(order):
            target[place].copy_(source[block], non_blocking=True)
        torch.cuda.synchronize()

    read, write = (_seconds(partial(move, *pair)) for pair in ((host, device), (device, host)))
    return MoveFigure("host", host.nbytes / read, host.nbytes / write, 0.0)


def _objects(tier: str, store: Store, size: int, settle: Callable[[], object] = lambda: None) -> MoveFigure:
    """Objects to a store and back, several at once."""
    data = np.random.default_rng(0).integers(0, 256, _OBJECT, dtype=np.uint8).tobytes()
    check, folder = checksum(data), f"{secrets.token_hex(16)}/{secrets.token_hex(16)}"
    names = [f"{folder}/{secrets.token_hex(16)}.0.{check.hex()}" for _ in range(max(1, size // _OBJECT))]
    record = f"{folder}/{secrets.token_hex(16)}.m"
    buffers = [bytearray(_OBJECT) for _ in range(_THREADS)]

    def read(number: int) -> None:
        for name in names[number::_THREADS]:
            store.read(name, memoryview(buffers[number]))
            if checksum(buffers[number]) != check:
                raise ConfigError(f"{tier}: what was read is not what was written")

    def write(name: str) -> None:
        checksum(data)
        store.write(name, data)

    def write_all() -> None:
        _at_once(write, names)
        settle()

    try:
        store.write(record, b"x" * 100)
        latency = _seconds(partial(store.read_small, [record]), 20)
        taken = [_seconds(call, 1) for call in (write_all, partial(_at_once, read, range(_THREADS)))]
    finally:
        store.remove([*names, record])
        store.close()
    written, found = (len(names) * _OBJECT / seconds for seconds in taken)
    return MoveFigure(tier, found, written, latency)


def _at_once(call: Callable[[_T], None], each: Sequence[_T]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(call, each))


def _leave_cache(folder: str) -> None:
    """Have files written to their drive, and read from there."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
