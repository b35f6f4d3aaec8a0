"""A store in a Valkey or Redis server, shared by several of ours. Needs the extra `tiers`.

A value is an object; its key is the object's name behind `headway:`. The server's own eviction (`maxmemory-policy`)
is survived: what it took is a miss. With `noeviction` a full server refuses writes, and then we evict what we wrote
ourselves.

The client is valkey-py with the parser in C of libvalkey, without which values over 1 MiB take two to twenty-five
times as long; so it is required. (valkey-glide brings a second runtime and ten more packages for the same speed.)
Clusters are not supported: a lookup reads many records in one command.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from headway.errors import ConfigError
from headway.tiers.store import Buffer, Listed, MissingError, StoreError, StoreFullError, unanswered

__all__ = ["ValkeyStore"]

_PREFIX = "headway:"
_AT_ONCE = 512
_T = TypeVar("_T")


class ValkeyStore:
    """See `Store` for the contract of each method."""

    def __init__(
        self, url: str, password_file: Path | None = None, timeout: float = 30.0, *, optional: bool = False
    ) -> None:
        """Connect to a server.

        Args:
            url: `valkey://[user:password@]host[:port][/db]`, `valkeys://` with TLS, `unix://path`; `redis://` and
                `rediss://` mean the same. Options of the client follow a `?`, such as `ssl_ca_certs=/etc/ca.pem`.
            password_file: A file with the password, so that no list of processes shows it.
            timeout: Seconds of silence after which a call ends; so no memory is held for it longer.
            optional: A server that does not answer now is no error: it may come.

        Raises:
            ConfigError: A wrong URL, a refused password, no server, or the extra is not installed.
        """
        if find_spec("valkey") is None or find_spec("libvalkey") is None:
            raise ConfigError("a store in Valkey or Redis needs the tiers extra: pip install 'headway[tiers]'")
        valkey: Any = import_module("valkey")
        self._errors = valkey.exceptions
        more: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": min(5.0, timeout)}
        try:
            if password_file is not None:
                more["password"] = password_file.read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"the store's password cannot be read from {password_file}: {error}") from error
        try:
            self._client: Any = valkey.Valkey.from_url(url, **more)
            self._client.ping()
        except TypeError as error:  # the client's own words name the option, and a function that nobody knows
            named = re.search(r"argument '(\w+)'", str(error))
            told = f"the client takes no option {named[1]!r}" if named else str(error)
            raise ConfigError(f"the store's URL cannot be used: {told}") from error
        except (ValueError, OSError) as error:
            raise ConfigError(f"the store's URL cannot be used: {error}") from error
        except (valkey.AuthenticationError, self._errors.AuthorizationError, valkey.ResponseError) as error:
            raise ConfigError(f"the store refuses us: {error}") from error
        except valkey.ValkeyError as error:
            unanswered(error, optional)

    def read(self, name: str, buffer: memoryview) -> int:
        """See `Store.read`."""
        data = self._call(lambda: self._client.get(_PREFIX + name))
        if data is None:
            raise MissingError(f"{name} is not there")
        length = min(len(data), len(buffer))
        buffer[:length] = memoryview(data)[:length]
        return len(data)

    def read_small(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.read_small`."""
        if not names:
            return []
        found: list[bytes | None] = self._call(lambda: self._client.mget([_PREFIX + name for name in names]))
        return found

    def write(self, name: str, data: Buffer) -> None:
        """See `Store.write`."""
        self._call(lambda: self._client.set(_PREFIX + name, data if isinstance(data, bytes) else memoryview(data)))

    def remove(self, names: Sequence[str]) -> None:
        """See `Store.remove`."""
        for start in range(0, len(names), _AT_ONCE):
            some = [_PREFIX + name for name in names[start : start + _AT_ONCE]]
            self._call(partial(self._client.unlink, *some))

    def names(self, prefix: str) -> Iterator[Listed]:
        """See `Store.names`. Looks at all keys of the server."""
        escaped = "".join(f"[{c}]" if c in "*?[" else c for c in _PREFIX + prefix)
        keys = self._call(lambda: set(self._client.scan_iter(match=f"{escaped}*", count=1000, _type="STRING")))
        left = iter(keys)
        while some := list(itertools.islice(left, _AT_ONCE)):
            for key, length in zip(some, self._call(partial(self._lengths, some)), strict=True):
                if length:
                    yield Listed(key.decode()[len(_PREFIX) :], length)

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()
        self._client.connection_pool.disconnect()

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.strlen(key)
        lengths: list[int] = pipeline.execute()
        return lengths

    def _call(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except self._errors.OutOfMemoryError as error:
            raise StoreFullError(f"the store is full: {error}") from error
        except (self._errors.ValkeyError, OSError) as error:
            raise StoreError(f"the store: {error}") from error
