"""The folder of a sweep: one line a finished run, so that a sweep that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from headway import __version__
from headway.errors import ConfigError, TraceError
from headway.tell.run import RunRecord

__all__ = ["SweepFolder", "release_mark"]

_RUNS, _PAGE = "runs.jsonl", "report.html"
_DECIDES = ("cache", "engine", "formats", "replay", "tiers", "tell/run.py")
"""Code that decides what a run finds, and how it is written down."""


class SweepFolder:
    """Finished runs by key.

    Attributes:
        path: The folder.
        finished: Runs of this release so far, by key.
        stale: Lines of other releases, which are left alone and not used.
        reused: Runs that somebody wanted and found here.
        made: Runs that somebody wanted and that were not here.
    """

    def __init__(self, path: Path) -> None:
        """Open a folder, making it if it is not there.

        A last line that was cut off when a sweep was killed is dropped; its run is done again.

        Raises:
            ConfigError: The folder cannot be made or read.
            TraceError: A line that is no run.
        """
        self.path = path
        self.finished: dict[str, RunRecord] = {}
        self.stale = self.reused = self.made = 0
        self._file = path / _RUNS
        try:
            path.mkdir(parents=True, exist_ok=True)
            text = self._file.read_bytes() if self._file.exists() else b""
            if text and not text.endswith(b"\n"):
                text = text[: text.rfind(b"\n") + 1]
                self._file.write_bytes(text)
        except OSError as error:
            raise ConfigError(f"cannot use {path} as the folder of a sweep: {error.strerror}") from error
        for number, line in enumerate(text.decode("utf-8", errors="replace").splitlines(), 1):
            self._read(line, f"{self._file}, line {number}")

    @property
    def page(self) -> Path:
        """Where the report goes."""
        return self.path / _PAGE

    def add(self, key: str, run: dict[str, Any]) -> None:
        """Keep a finished run: what `RunRecord.as_dict` gave."""
        line = json.dumps({"key": key, "release": release_mark(), "run": run}, separators=(",", ":"))
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.finished[key] = RunRecord.from_dict(run)

    def _read(self, line: str, where: str) -> None:
        try:
            found = json.loads(line)
            key, run = str(found["key"]), found["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{where}: not a run of a sweep ({error}); remove the line to do it again") from None
        if found.get("release") != release_mark():
            self.stale += 1
            return
        self.finished[key] = RunRecord.from_dict(run, where)


@cache
def release_mark() -> str:
    """Version and a digest of the code, such as `0.1.0+9f31c0aa`.

    The version alone would not do: policies also change between releases, and results of the code before a change
    must not be taken for results of the code after it.
    """
    digest = hashlib.blake2b(digest_size=4)
    for name in _DECIDES:
        _add(digest, files("headway").joinpath(name))
    return f"{__version__}+{digest.hexdigest()}"


def _add(digest: hashlib.blake2b, place: Traversable) -> None:
    if place.is_dir():
        for part in sorted(place.iterdir(), key=lambda part: part.name):
            _add(digest, part)
    elif place.name.endswith((".py", ".json")):
        digest.update(f"{place.name}\0".encode())
        digest.update(place.read_bytes())
