"""The key of the digests: a file that all servers of a store are given, or one made beside the folder of a disk."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from headway.errors import ConfigError

__all__ = ["store_key"]

_BYTES = 32


def store_key(file: Path | None, disk: Path | None) -> bytes:
    """Read the key of a store, at least 16 bytes and at most 64.

    Args:
        file: A file with the key, as `--store-key` names it. Its bytes are the key, without white space around them.
        disk: The folder of a disk tier. Without `file`, the key is in `DISK.key` beside it, and made there if it is
            missing, readable by its owner alone. Processes that start at the same time make one key.

    Raises:
        ConfigError: There is neither, or the file cannot be read or made, or holds no key.
    """
    if file is None and disk is None:
        raise ConfigError("a store needs the key of its names: give --store-key FILE, the same file to all its servers")
    place = file if file is not None else Path(f"{str(disk).rstrip('/')}.key")
    try:
        if file is None and not place.exists():
            _make(place)
        key = place.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the key {place} cannot be read or made ({error.strerror}): give one by --store-key FILE"
        ) from error
    if not 16 <= len(key) <= 64:
        raise ConfigError(f"the key {place} has {len(key)} bytes, it needs 16 to 64: `openssl rand -hex 32` makes one")
    return key


def _make(place: Path) -> None:
    """Write a new key, whole or not at all, and leave one that is there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(handle, secrets.token_hex(_BYTES).encode())
        os.fsync(handle)
        os.link(draft, place)
    except FileExistsError:
        pass
    finally:
        os.close(handle)
        os.unlink(draft)
