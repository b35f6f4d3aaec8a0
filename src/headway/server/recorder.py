"""Recording the traffic of a server, to be replayed later.

The engine's thread must not wait for a disk, so it leaves what ended in a queue, and a thread of the recorder writes
it. A disk that fails ends the recording with one line in the log, and never a request.

Left out, and counted in the log at the end: requests that keep nothing in the cache (`no_store`), and in a recording
of tokens those with a cache salt. Breakpoints and pins are not in a recording.
"""

from __future__ import annotations

import logging
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
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from error
        self._writer = RecordingWriter(self._file, content=form, model=model)
        self._ended: SimpleQueue[RequestResult | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="headway-recorder", daemon=True)
        self._thread.start()

    def request_finished(self, result: RequestResult) -> None:
        """Take a request that ended; after a failure nobody would write it, so it is dropped."""
        if not self._failed:
            self._ended.put(result)

    def step_done(self, seconds: float, tokens: int) -> None:
        """Steps are not recorded."""

    def close(self) -> None:
        """Write what is left and close the file. May be called again."""
        self._ended.put(None)
        self._thread.join()
        self._file.close()

    def _write_all(self) -> None:
        try:
            while (result := self._ended.get()) is not None:
                self._write(result)
            logger.info("recorded %d requests to %s, left out %d", self.written, self.path, self.left_out)
        except OSError as error:
            self._failed = True
            logger.error("the recording to %s ends here: %s", self.path, error)

    def _write(self, result: RequestResult) -> None:
        asked = result.request
        if result.explanation is None:
            return  # it never ran, so the cache knows nothing of it
        if asked.no_store or (asked.salt and not self._salted):
            self.left_out += 1
            return
        arrived = max(0.0, result.timings.arrived - self._started)
        answer = result.tokens[
            : result.settled[0] + 1
        ]  # what others can reach, and the last token, which is not computed
        self._writer.add(arrived, asked.tokens, answer, asked.boundaries, scope=asked.salt)
        self._file.flush()
        self.written += 1


def check_recording(path: Path | None, form: str) -> None:
    """Refuse what cannot be recorded, before anything else is done.

    Raises:
        ConfigError: An unknown form, or a file that exists already.
    """
    if form not in FORMS:
        raise ConfigError(f"--record-form {form!r}: use {' or '.join(FORMS)}")
    if path is not None and path.exists():
        raise ConfigError(f"--record {path}: the file exists already; a recording needs a new one")
