"""Which release a run was made with: its version, and its code as far as results follow from it."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from headway import __version__

__all__ = ["release_mark"]

_DECIDES = ("cache", "engine", "replay")
"""Packages that decide what a run finds."""


@cache
def release_mark() -> str:
    """Version and a digest of the code, such as `0.1.0+9f31c0aa`.

    The version alone would not do: policies also change between releases, and results of the code before a change
    must not be taken for results of the code after it.
    """
    digest = hashlib.blake2b(digest_size=4)
    for name in _DECIDES:
        _add(digest, files("headway") / name)
    return f"{__version__}+{digest.hexdigest()}"


def _add(digest: hashlib.blake2b, place: Traversable) -> None:
    for part in sorted(place.iterdir(), key=lambda part: part.name):
        if part.is_dir():
            _add(digest, part)
        elif part.name.endswith((".py", ".json")):
            digest.update(f"{part.name}\0".encode())
            digest.update(part.read_bytes())
