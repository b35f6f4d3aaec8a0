"""Options of lower tiers of memory, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from headway.errors import ConfigError
from headway.option_records import Written, option
from headway.sizes import parse_bytes
from headway.tiers.keys import store_key
from headway.tiers.opening import disk_place, open_disk, open_store
from headway.tiers.store import Store
from headway.tiers.tier import TierConfig

__all__ = ["WRITES", "TierOptions"]

WRITES = ("through", "selective", "back")
"""When something is written to disks and stores, the default first."""
_PANEL, _GRACE = "Lower tiers of memory", 10.0


@dataclass(frozen=True)
class TierOptions:
    """What lies below the cache's own memory: options of `headway serve`, each with what it means."""

    host_memory: Annotated[
        int | None,
        option(
            _PANEL,
            "Host memory, such as 80GiB, of every rank: what the cache's own memory has no room for is kept there and "
            "copied back.",
        ),
        Written(partial(parse_bytes, option="--host-memory")),
    ] = None
    disk: Annotated[
        str | None,
        option(
            _PANEL,
            "A folder and the most that it may hold, such as /var/cache/headway:200GiB. It is kept over restarts, and "
            "the servers of one machine may share it.",
        ),
    ] = None
    store: Annotated[
        str | None,
        option(
            _PANEL,
            "A store that servers share: valkey://HOST:PORT, valkeys://USER:PASSWORD@HOST:PORT for TLS, or "
            "s3://BUCKET/PREFIX. Behind it, ?budget=SIZE bounds what this server keeps there, and ?optional=true lets "
            "it start while the store is down.",
        ),
    ] = None
    store_key: Annotated[
        str | None,
        option(
            _PANEL,
            "File with the key of the digests under which everything is filed: the same for all servers of a store. By "
            "default it is FOLDER.key beside the --disk folder, made if it is missing.",
        ),
    ] = None
    tier_write: Annotated[
        str,
        option(
            _PANEL,
            "When a checkpoint is written to disk and store: through (when it is taken), selective (when a request "
            "comes back to it) or back (when memory gives it up).",
        ),
    ] = "through"
    tier_grace: Annotated[float, option(_PANEL, "Seconds that a server which stops takes to write what it keeps.")] = (
        _GRACE
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        if self.host_memory is not None and self.host_memory < 1:
            raise ConfigError(f"host_memory is {self.host_memory}, it must be at least 1")
        if self.disk is not None:
            disk_place(self.disk)
        if self.tier_write not in WRITES:
            raise ConfigError(f"tier_write is {self.tier_write!r}, it must be one of {', '.join(WRITES)}")
        if self.tier_write != WRITES[0] and not self.below:
            raise ConfigError("tier_write says when disk and store are written, and there is neither: add --disk")
        if self.store_key is not None and not self.below:
            raise ConfigError("store_key is the key of disk and store, and there is neither: add --disk or --store")
        if self.store is not None and self.store_key is None and self.disk is None:
            raise ConfigError(
                "a store needs one key for all its servers: give --store-key FILE, the same file to each of them"
            )
        if self.tier_grace != _GRACE and not self.below:
            raise ConfigError(
                "tier_grace is time to write to disk and store, and there is neither: add --disk or --store"
            )
        if not 0 <= self.tier_grace <= 3600:
            raise ConfigError(f"tier_grace is {self.tier_grace}, it must be from 0 to 3600 seconds")

    def open(self) -> tuple[bytes, list[tuple[TierConfig, Store]]]:
        """Open disk and store. Returns the key of their digests, and how each is used.

        Raises:
            ConfigError: A key, folder or store that cannot be used.
        """
        tiers = [] if self.disk is None else [open_disk(self.disk)]
        folder = None if self.disk is None else disk_place(self.disk)[0]
        key = store_key(None if self.store_key is None else Path(self.store_key).expanduser(), folder)
        return key, tiers + ([] if self.store is None else [open_store(self.store)])

    def require(self) -> None:
        """Find out whether disk and store can be used, before anything else is begun that takes longer.

        Raises:
            ConfigError: As `open`.
        """
        if self.below:
            for _, store in self.open()[1]:
                store.close()

    @property
    def below(self) -> bool:
        """Whether there is a disk or a store."""
        return self.disk is not None or self.store is not None
