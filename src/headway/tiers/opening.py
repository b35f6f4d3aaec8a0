"""Tiers as people write them on a command line: `/var/cache/headway:200GiB`, `valkey://host`, `s3://bucket/prefix`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from headway.errors import ConfigError
from headway.sizes import parse_bytes
from headway.tiers.disk import DiskStore
from headway.tiers.s3 import S3Store
from headway.tiers.store import Store
from headway.tiers.tier import TierConfig
from headway.tiers.valkey import ValkeyStore

__all__ = ["disk_place", "open_disk", "open_store"]

_RESCAN = 6 * 3600.0
"""Seconds between two scans of a store that others use as well: each lists all of it."""
_VALKEY = ("valkey", "valkeys", "redis", "rediss", "unix")


def disk_place(text: str) -> tuple[Path, int]:
    """Read `FOLDER:SIZE`.

    Raises:
        ConfigError: It has no size.
    """
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise ConfigError(f"--disk {text!r} needs a folder and its size, like /var/cache/headway:200GiB")
    return Path(folder).expanduser(), parse_bytes(size, "--disk")


def open_disk(text: str) -> tuple[TierConfig, Store]:
    """Open the tier `disk` in a folder, `FOLDER:SIZE`.

    Raises:
        ConfigError: It has no size, or cannot be written to.
    """
    folder, size = disk_place(text)
    return TierConfig("disk", capacity=size), DiskStore(folder)


def open_store(url: str) -> tuple[TierConfig, Store]:
    """Open the shared tier `store` at a URL.

    Args:
        url: `valkey://[user:password@]host[:port][/db]`, `valkeys://` with TLS, `unix://path` and `redis[s]://`, with
            `password_file=FILE` and the client's options behind a `?`; or `s3://bucket[/prefix]`, with
            `endpoint=URL`, `region=NAME` and others of obstore. `budget=SIZE` bounds what this process keeps there.
            Without it the store's own limit is all there is. `optional=true`: it may be down now.

    Raises:
        ConfigError: Another URL, an unknown option, or a store that refuses us or does not answer.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if empty := [name for name, value in options.items() if not value]:
        raise ConfigError(f"the URL of --store gives {', '.join(empty)} no value: write {empty[0]}=VALUE, or nothing")
    budget = options.pop("budget", None)
    capacity = None if budget is None else parse_bytes(budget, "budget=")
    said = options.pop("optional", "false")
    if said not in ("true", "false"):
        raise ConfigError(f"optional={said} in the URL of --store: it is true or false")
    optional = said == "true"
    config = TierConfig("store", capacity=capacity, shared=True, rescan=_RESCAN)
    if parts.scheme in _VALKEY:
        password = options.pop("password_file", None)
        plain = urlunsplit(parts._replace(query=urlencode(options)))
        if parts.scheme == "unix" and not parts.netloc:  # urlunsplit leaves out an empty host
            plain = f"unix://{parts.path}" + (f"?{urlencode(options)}" if options else "")
        file = None if password is None else Path(password).expanduser()
        return config, ValkeyStore(plain, file, config.patience, optional=optional)
    if parts.scheme == "s3" and parts.netloc:
        return config, S3Store(parts.netloc, parts.path.strip("/"), options, silence=config.patience, optional=optional)
    raise ConfigError(
        f"--store {parts.scheme}://... is no store: give valkey://, valkeys://, redis://, unix:// or s3://"
    )
