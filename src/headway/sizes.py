"""Sizes of memory as people write them. It imports next to nothing, so that a wrong option is told at once."""

from __future__ import annotations

import re

from headway.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size such as `4GiB`, `512 MB`, `1.5g` or `1000000`.

    Raises:
        ConfigError: Anything else.
    """
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size: write it like 4GiB, 512MB or 1000000")
    return size


def format_bytes(size: float) -> str:
    """Write a size for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
