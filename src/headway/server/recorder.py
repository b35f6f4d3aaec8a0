"""Recording the traffic of a server, to be replayed later.

The engine's thread must not wait for a disk, so it leaves what ended in a queue, and a thread of the recorder writes
it. A disk that fails or is full ends the recording with one line in the log. The server goes on, because answers are
worth more than their recording, and the file keeps the requests that were written whole.

Left out, and counted in the log at the end: requests that keep nothing in the cache (`no_store`), and in a recording
of tokens those with a cache salt. Breakpoints and pins are not in a recording.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from headway.engine import RequestResult
from headway.engine.stats import Observer
from headway.errors import ConfigError
from headway.formats import RecordingWriter

__all__ = ["FORMS", "Observers", "Recorder", "check_recording"]

logger = logging.getLogger(__name__)

FORMS = ("hashes", "tokens")
"""What `--record-form` may be."""


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def request_finished(self, result: RequestResult) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.request_finished(result)

    def step_done(self, seconds: float, tokens: int) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.step_done(seconds, tokens)

    def forgotten(self, salt: str | None) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.forgotten(salt)


class Recorder:
    """Writes every request that ends to a file; an `Observer` of the engine.

    Attributes:
        path: The file.
        written: Requests written so far.
        left_out: Requests that a recording cannot hold.
    """

    def __init__(self, path: Path, form: str, model: str) -> None:
        """Begin a recording. `close` ends it.

        Raises:
            ConfigError: An unknown form, or a file that exists already or cannot be made.
        """
        check_recording(path, form)
        self.path, self.written, self.left_out = path, 0, 0
        self._started = time.monotonic()
        self._failed = False
        self._salted = form == "hashes"
        try:
            self._file = path.open("x", encoding="utf-8")
            self._writer = RecordingWriter(self._file, content=form, model=model)
            self._whole = self._flushed()
        except OSError as error:
            raise _unwritable(path, error) from error
        self._ended: SimpleQueue[RequestResult | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="headway-recorder", daemon=True)
        self._thread.start()

    def request_finished(self, result: RequestResult) -> None:
        """Take a request that ended; after a failure nobody would write it, so it is dropped."""
        if not self._failed:
            self._ended.put(result)

    def step_done(self, seconds: float, tokens: int) -> None:
        """Steps are not recorded."""

    def forgotten(self, salt: str | None) -> None:
        """Not recorded."""

    def close(self) -> None:
        """Write what is left and close the file. May be called again."""
        self._ended.put(None)
        self._thread.join()
        with contextlib.suppress(OSError):  # of a disk that has failed before: what is still buffered is given up
            self._file.close()
        if self._failed:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._whole)

    def _write_all(self) -> None:
        try:
            while (result := self._ended.get()) is not None:
                self._write(result)
            logger.info("recorded %d requests to %s, left out %d", self.written, self.path, self.left_out)
        except OSError as error:
            self._failed = True
            reason = f"{error.strerror or error}; {self.written} requests are in it, and the server goes on without it"
            logger.error("the recording to %s ends here: %s", self.path, reason)

    def _write(self, result: RequestResult) -> None:
        asked = result.request
        if result.explanation is None:
            return  # it never ran, so the cache knows nothing of it
        if asked.no_store or (asked.salt and not self._salted):
            self.left_out += 1
            return
        arrived = max(0.0, result.timings.arrived - self._started)
        # Of the answer, what others can reach, and the last token, which is not computed.
        answer = result.tokens[: result.settled[0] + 1]
        self._writer.add(arrived, asked.tokens, answer, asked.boundaries, scope=asked.salt)
        self._whole = self._flushed()
        self.written += 1

    def _flushed(self) -> int:
        """Bytes in the file when all that was written is there."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size


def check_recording(path: Path | None, form: str) -> None:
    """Refuse what cannot be recorded, before anything else is done.

    Raises:
        ConfigError: An unknown form, or a file that exists already or cannot be written.
    """
    if form not in FORMS:
        raise ConfigError(f"--record-form {form!r}: use {' or '.join(FORMS)}")
    if path is None:
        return
    if path.exists():
        raise ConfigError(f"--record {path}: the file exists already; a recording needs a new one")
    try:
        with path.open("xb") as probe:
            try:
                probe.write(b"\n")
                probe.flush()
            finally:
                path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--record {path}: the file cannot be written ({error.strerror}); choose another one")
