"""Servers and ranks that start in a moment, for tests that kill hundreds: forked from a process that has imported all.

Such a process, a nursery, is told over a socket what to run, forks, and answers with the process id. It forks twice, so
that whoever asked is the parent of what runs, as of any process that it starts. A server has a nursery of its own,
forked before it does anything, from which its ranks come. What runs in servers and ranks is what always runs there;
only the seconds in which Python imports are left out.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Nursery", "ranks_of"]

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 1 << 14, 1 << 18
_LIBC = ctypes.CDLL(None)


def adopt() -> None:
    """Be the parent of all below whose own parent has ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Forked(subprocess.Popen[bytes]):
    """A process that a nursery has forked."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, (), None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock, self._child_created, self._communication_started = threading.Lock(), True, False


class Nursery:
    """A process that has imported everything, and forks servers. It ends when this object is closed.

    Attributes:
        shared_memory: Where it, and what it has started, have named shared memory.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        adopt()
        self._end, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.server.preforked", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        assert self._end.recv(8) == b"ready"
        self.shared_memory = Path("/proc", str(self._process.pid), "root", "dev", "shm")

    def serve(self, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Run `headway serve`; the process, and what it prints as a descriptor to read from."""
        ours, theirs = os.pipe()
        pid = _ask(self._end, arguments, [theirs])
        os.close(theirs)
        return _Forked(pid), ours

    def close(self) -> None:
        self._end.close()
        self._process.wait()


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The ranks of a server. Any thread of it may have started them."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    children = {child for thread in threads for child in (thread / "children").read_text().split()}
    return [int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == "rank\n"]


def _ask(end: socket.socket, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    socket.send_fds(end, [json.dumps(list(arguments)).encode()], descriptors)
    return int(end.recv(32))


def _fork(end: socket.socket, run: Callable[[list[str], list[int]], None]) -> NoReturn:
    """Fork whatever is asked for, until nobody is there to ask."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(end, 1 << 16, 4)
        if not data:
            os._exit(0)
        source, target = os.pipe()
        if (middle := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                end.close()
                os.close(source)
                os.close(target)
                _run(run, json.loads(data), list(descriptors))
            os.write(target, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        end.send(os.read(source, 32))
        for descriptor in (source, target, *descriptors):
            os.close(descriptor)


def _run(run: Callable[[list[str], list[int]], None], arguments: list[str], descriptors: list[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        run(arguments, descriptors)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(code)


def _serve(arguments: list[str], descriptors: list[int]) -> None:
    from headway.cli import main
    from headway.engine.ranks import processes

    [printed] = descriptors
    for number in (1, 2):
        os.dup2(printed, number)
    os.close(printed)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _fork(theirs, _rank)
    theirs.close()
    adopt()
    lock = threading.Lock()

    def start(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> _Forked:
        with lock:
            return _Forked(_ask(ours, command[3:], pass_fds))

    processes.subprocess.Popen = start  # type: ignore[assignment, misc]
    Path("/proc/self/comm").write_text("server")
    main(["serve", *arguments])


def _rank(arguments: list[str], descriptors: list[int]) -> None:
    from headway.engine.ranks.process_main import main

    Path("/proc/self/comm").write_text("rank")
    main([str(descriptors[0]), *arguments[1:]])


def _have_own_shared_memory() -> None:
    """Nobody else uses the /dev/shm of this process and of what it starts, where the system allows for that."""
    if _LIBC.unshare(_CLONE_NEWNS) == 0 and _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:
        _LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


if __name__ == "__main__":
    _have_own_shared_memory()
    for module in ("headway.cli", "headway.engine.ranks.process_main", "headway.server.app", "headway.server.command"):
        importlib.import_module(module)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.send(b"ready")
    _fork(end, _serve)
