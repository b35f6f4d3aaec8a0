"""Sizes of memory and counts as people write them. It imports next to nothing: a wrong option is told at once."""

from __future__ import annotations

import math
import re

from headway.errors import ConfigError

__all__ = ["counted", "format_bytes", "parse_bytes"]

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


def parse_bytes(text: str, option: str = "") -> int:
    """Read a size such as `4GiB`, `512 MB`, `1.5g` or `1000000`.

    Args:
        text: The size.
        option: The option that it was given with, for the message.

    Raises:
        ConfigError: Anything else.
    """
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{option} {text!r}".lstrip() + " is not a size: write it like 4GiB, 512MB or 1000000")
    return size


def format_bytes(size: float, base: int = 1024, *, up: bool = False) -> str:
    """Write a size for people: `1.5 GiB`, or with a `base` of 1000 `1.5 GB`, as GPUs and traces are measured.

    With `up` it is rounded up: whoever gives a memory of what is written gives enough.
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB") if base == 1024 else ("B", "kB", "MB", "GB", "TB")
    power = 0
    while size >= base and power < len(units) - 1:
        size, power = size / base, power + 1
    digits = 0 if power == 0 else 2 if units[power] == "TB" else 1
    size = math.ceil(size * 10**digits) / 10**digits if up else size
    return f"{size:.{digits}f} {units[power]}"


def counted(count: int, noun: str) -> str:
    """Write a count of something for people: `1 token`, `2,030 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
