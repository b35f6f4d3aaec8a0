"""Ranks that are processes: the group they form, through torch.distributed.

A group meets at a *rendezvous*: a file in a directory that only its user can read, for ranks on one machine, or a TCP
address for ranks on several. Only tensors travel between ranks, so nothing that arrives is ever executed. On one
machine the sockets are those of the loopback interface and nobody outside can reach them. A group over several machines
trusts the network that it runs in, as every user of torch.distributed does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from headway.errors import ConfigError

__all__ = ["CollectiveError", "Rendezvous", "TorchCommunicator", "join_group", "leave_group"]


class CollectiveError(RuntimeError):
    """A collective failed on this rank. Nobody knows what became of it on the others: the group is of no use now."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet.

    Attributes:
        path: A file that does not exist yet, in a directory that all ranks and nobody else can use; or "".
        host: Else: the address of rank 0's machine, which listens there.
        port: And its port.
    """

    path: str = ""
    host: str = ""
    port: int = 0


def join_group(meeting: Rendezvous, rank: int, size: int, device: torch.device, timeout: float) -> TorchCommunicator:
    """Form a group with the other ranks: gloo on a CPU, nccl on CUDA. Waits for all of them.

    Args:
        meeting: Where; the same for all.
        rank: This rank.
        size: Ranks of the group.
        device: This rank's device.
        timeout: Seconds after which a collective that others do not join fails.

    Raises:
        ConfigError: torch was built without what the device needs.
        RuntimeError: The others did not come.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise ConfigError(f"this build of torch has no {backend}, which ranks on {device.type} talk through")
    patience = timedelta(seconds=timeout)
    stores: Any = dist  # it has them, and its types do not say so
    if meeting.path:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        store = stores.FileStore(meeting.path, size)
    else:
        store = stores.TCPStore(meeting.host, meeting.port, size, is_master=rank == 0, timeout=patience)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # a Ray actor sees its own GPU only, as number 0
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    return TorchCommunicator(rank, size, timeout)


def leave_group() -> None:
    """Leave the group that this process is in, if it is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class TorchCommunicator:
    """A group of ranks of torch.distributed (see `headway.runtime.parallel.communicator.Communicator`).

    Every method raises `CollectiveError` if the collective fails.

    Attributes:
        begun: Collectives that this process has begun, in all of its groups. A backend that does not block pairs
            collectives by their order alone, so ranks that differ here would take each other's numbers.

    Args:
        rank: This rank in the group.
        size: Ranks of the group.
        timeout: Seconds after which a collective that others do not join fails, in groups that are parted from this.
        group: The group; None for the process's default group.
        members: The ranks of the default group that are in it, in order; None for all.
    """

    begun: ClassVar[int] = 0

    def __init__(
        self, rank: int, size: int, timeout: float, group: Any = None, members: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._group = group
        self._members = range(size) if members is None else members

    def parted(self, size: int, step: int = 1) -> TorchCommunicator:
        """Part the default group into groups of `size` ranks, `step` apart, and return this rank's; all ranks call it.

        `size * step` divides the number of ranks.
        """
        if size == self.size:
            return self
        patience = timedelta(seconds=self._timeout)
        starts = [first + i for first in range(0, self.size, size * step) for i in range(step)]
        members = [range(start, start + size * step, step) for start in starts]
        groups = [dist.new_group(list(each), timeout=patience) for each in members]
        mine = next(i for i, each in enumerate(members) if self.rank in each)
        place = members[mine].index(self.rank)
        return TorchCommunicator(place, size, self._timeout, groups[mine], members[mine])

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Give every rank every part: [...] to [size, ...]."""
        gathered, part = part.new_empty((self.size, *part.shape)), part.contiguous()
        with _counted():
            dist.all_gather(list(gathered), part, group=self._group)
        return gathered

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of the row that has this rank's number: [size, ...] to [...]."""
        summed, parts = torch.empty_like(parts[0]), parts.contiguous()
        with _counted():
            dist.reduce_scatter(summed, list(parts), group=self._group)
        return summed

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r: [size, ...] to [size, ...]."""
        received, parts = torch.empty_like(parts), parts.contiguous()
        with _counted():
            dist.all_to_all_single(received, parts, group=self._group)
        return received

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over ranks: [...] to [...]."""
        summed = part.contiguous()
        with _counted():
            dist.all_reduce(summed, group=self._group)
        return summed

    def broadcast(self, part: torch.Tensor, root: int) -> torch.Tensor:
        """Give every rank what rank `root` has."""
        given = part.contiguous()
        with _counted():
            dist.broadcast(given, self._members[root], group=self._group)
        return given

    def pass_on(self, part: torch.Tensor) -> Callable[[], object]:
        """Send the next rank a tensor, without waiting for it. All ranks count one, also the last, which sends none."""
        with _counted():
            if self.rank + 1 == self.size:
                return lambda: None
            held = part.contiguous()
            sent = dist.isend(held, self._members[self.rank + 1], group=self._group)
            assert sent is not None, "only a rank outside the group has nothing to wait for"

        def wait(held: torch.Tensor = held) -> None:  # the memory must last until then
            with _told():
                sent.wait()

        return wait

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """What the rank before has passed on."""
        with _counted():
            if self.rank == 0:
                return like
            taken = torch.empty_like(like, memory_format=torch.contiguous_format)
            dist.recv(taken, self._members[self.rank - 1], group=self._group)
        return taken


@contextmanager
def _counted() -> Iterator[None]:
    """Count a collective that begins here. What fails before, memory for its result for example, has begun none."""
    TorchCommunicator.begun += 1
    with _told():
        yield


@contextmanager
def _told() -> Iterator[None]:
    """Raise what fails as what it is, a collective."""
    try:
        yield
    except Exception as error:
        raise CollectiveError(f"{type(error).__name__}: {error}") from error
