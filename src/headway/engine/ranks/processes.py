"""One process per rank, on this machine.

Each rank is a fresh interpreter with a socket pair to the driver: an end that closes says at once that the other is
gone. The driver's end limits how long it waits for a rank to take a message. A rank leaves as soon as its driver does,
whatever it is computing. Nothing listens on a port: the ranks find each other through a file in a private folder, which
they clear away if their driver could not.

Rejected: `multiprocessing` processes. They import the driver's main module once more, get its Ctrl-C, and hold up its
exit.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

import headway
from headway.engine.errors import RanksLostError
from headway.errors import ConfigError
from headway.runtime.parallel.distributed import Rendezvous

__all__ = ["ProcessRanks", "devices_of_ranks"]

_REST_SECONDS = 30
"""Patience for the rest of an answer that has begun to arrive."""


def devices_of_ranks(device: str, ranks: int) -> list[str]:
    """The device of each rank of this machine: the CPU for all, or a GPU each.

    Raises:
        ConfigError: One GPU named for several ranks, or fewer GPUs than ranks.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or ranks == 1:
        return [device] * ranks
    if index:
        raise ConfigError(f"--device {device} names one GPU for {ranks} ranks: write cuda, and each takes its own")
    found = torch.cuda.device_count()
    if found < ranks:
        raise ConfigError(
            f"{ranks} ranks need a GPU each, there are {found} here: lower --tp, --dcp or --pcp, or use --device cpu"
        )
    return [f"cuda:{rank}" for rank in range(ranks)]


class ProcessRanks:
    """Ranks as processes (see `headway.engine.ranks.driver.RankGroup`). They run once this returns, without a model.

    Args:
        devices: The device of each rank.

    Attributes:
        processes: The process of each rank.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.size = len(devices)
        self._directory = Path(tempfile.mkdtemp(prefix="headway-ranks-"))
        self.meeting = Rendezvous(path=str(self._directory / "meeting"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[bytes, bytes]] = []
        threads = max(1, len(os.sched_getaffinity(0)) // self.size) if hasattr(os, "sched_getaffinity") else 1
        try:
            for rank, device in enumerate(devices):
                self._start(rank, device, threads)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, device: str, threads: int) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(headway.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "headway.engine.ranks.process_main"]
                    + [str(value) for value in (theirs.fileno(), rank, device, threads, self._directory)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,
                )
            )
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _REST_SECONDS, 0))
        self._connections.append(Connection(ours.detach()))

    def send(self, messages: Sequence[bytes], timeout: float) -> None:
        """Send every rank a message (see `RankGroup.send`)."""
        for rank, connection in enumerate(self._connections):
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(timeout)), 0))
            try:
                connection.send_bytes(messages[rank % len(messages)])
            except BlockingIOError as error:
                raise RanksLostError(f"rank {rank} has taken no message for {timeout:g} seconds") from error
            except OSError as error:
                raise self._gone(rank) from error

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next answer (see `RankGroup.receive`)."""
        ready = wait(self._connections, timeout)
        if not ready:
            return None
        rank = next(i for i, connection in enumerate(self._connections) if connection is ready[0])
        try:
            return rank, self._connections[rank].recv_bytes()
        except BlockingIOError as error:
            raise RanksLostError(f"rank {rank} stopped in the middle of an answer") from error
        except (EOFError, OSError) as error:
            raise self._gone(rank) from error

    def check(self) -> None:
        """Look whether all ranks are there (see `RankGroup.check`)."""
        if (unasked := self.receive(0.0)) is not None:
            raise RanksLostError(f"rank {unasked[0]} has answered what nobody asked")

    def stopped(self) -> Sequence[int]:
        """Ranks that are there and do not run (see `RankGroup.stopped`)."""
        states = os.WSTOPPED | os.WNOHANG | os.WNOWAIT  # looks, and leaves the state for whoever waits for the process
        alive = [(rank, process.pid) for rank, process in enumerate(self.processes) if process.poll() is None]
        return [rank for rank, pid in alive if os.waitid(os.P_PID, pid, states) is not None]

    def kill(self) -> None:
        """End all ranks now."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _gone(self, rank: int) -> RanksLostError:
        process = self.processes[rank]
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:
            return RanksLostError(f"rank {rank} has closed its connection")
        if code < 0:
            hint = " (the system may have run out of memory)" if -code == signal.SIGKILL else ""
            return RanksLostError(f"rank {rank} was ended by {signal.Signals(-code).name}{hint}")
        return RanksLostError(f"rank {rank} has ended with exit code {code}; what it printed stands above")
