"""The program that a rank's process runs: `python -m headway.engine.ranks.process_main FD RANK DEVICE THREADS FOLDER`.

`headway.engine.ranks.processes` starts it; it is no command for people.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from transformers.utils import logging as transformers_logging

from headway.engine.ranks.rank import Rank

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Answer the driver's messages until it is gone."""
    descriptor, rank, device, threads = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    folder = arguments[4]
    # The driver says when to end: it may have answers to finish when all of its service gets the signal.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")
    quiet: Any = transformers_logging
    if rank > 0:  # one rank's progress is enough
        quiet.disable_progress_bar()
    if rank > 0 or device == "cpu":  # hints at faster kernels, which are for GPUs
        quiet.set_verbosity_error()
    threading.Thread(target=_follow, args=(descriptor, folder), daemon=True).start()
    worker = Rank(rank, device, threads)
    connection: Connection[bytes, bytes] = Connection(descriptor)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            _leave(folder, 0)
        if _gone(descriptor, 0):  # a message was left, and what it asks for may hold off the thread that follows
            _leave(folder, 1)
        connection.send_bytes(worker.answer(message))


def _follow(descriptor: int, folder: str) -> None:
    """End this process when the driver is gone, even in the middle of a step or of a wait for other ranks."""
    _gone(descriptor)
    _leave(folder, 1)


def _leave(folder: str, code: int) -> NoReturn:
    """End this process at once. A driver that was killed could not clear away the folder in which the ranks met."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _gone(descriptor: int, patience: int | None = None) -> bool:
    """Whether the driver is gone, or goes within `patience` milliseconds; None waits until it does."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is reported unasked
    return bool(poll.poll(patience))


if __name__ == "__main__":
    main(sys.argv[1:])
