"""A store in a bucket of S3, or of what speaks its protocol, shared by several servers. Needs the extra `tiers`.

obstore (Rust) does the talking: it lets other threads run, reads credentials as AWS's own tools do, and cuts large
objects into parts, which appear as one object or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from headway.errors import ConfigError
from headway.tiers.store import Buffer, Listed, MissingError, StoreError, unanswered

__all__ = ["S3Store"]

_AT_ONCE = 16
"""Records that are read at once."""
_REMOVED_AT_ONCE = 1000
_OPENING_SECONDS = 5.0
"""Patience when a bucket is opened."""
_METADATA = "/latest/api/token"
"""What is asked for last where there are no credentials: those of a machine of the cloud."""
_T = TypeVar("_T")


class S3Store:
    """See `Store` for the contract of each method."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        config: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        *,
        silence: float = 5.0,
        optional: bool = False,
    ) -> None:
        """Use a bucket that exists.

        Args:
            bucket: Its name.
            prefix: What all names begin with there.
            config: What obstore's `S3Store` takes: `endpoint`, `region`, ... The environment (`AWS_ACCESS_KEY_ID`,
                `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, ...) has the rest.
            timeout: Seconds after which a request ends, retries included.
            silence: Seconds of silence after which it ends.
            optional: A service that does not answer now is no error: it may come.

        Raises:
            ConfigError: An unknown setting, no credentials, no such bucket, no answer, or the extra is not installed.
        """
        if find_spec("obstore") is None:
            raise ConfigError("a store in S3 needs the tiers extra: pip install 'headway[tiers]'")
        self._obstore: Any = import_module("obstore")
        errors: Any = import_module("obstore.exceptions")
        self._error, self._missing = errors.BaseError, (errors.NotFoundError, FileNotFoundError)
        refused = (*self._missing, errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)
        opened = import_module("obstore.store").S3Store
        try:
            self._bucket: Any = opened(bucket, prefix=prefix or None, **_settings(config or {}, timeout, silence))
            asked = opened(bucket, prefix=prefix or None, **_settings(config or {}, _OPENING_SECONDS, silence))
            next(iter(self._obstore.list(asked, chunk_size=1)), None)
        except (*refused, errors.UnknownConfigurationKeyError, ValueError, TypeError) as error:
            raise ConfigError(f"the bucket {bucket} cannot be used: {_first_line(error)}") from error
        except self._error as error:
            if _METADATA in str(error):
                raise ConfigError(
                    f"the bucket {bucket} cannot be used without credentials: set AWS_ACCESS_KEY_ID and "
                    f"AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), or give ?skip_signature=true for a public one"
                ) from error
            unanswered(_first_line(error), optional)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="headway-tiers-s3")

    def read(self, name: str, buffer: memoryview) -> int:
        """See `Store.read`."""
        data = self._read(name)
        if data is None:
            raise MissingError(f"{name} is not there")
        length = min(len(data), len(buffer))
        buffer[:length] = data[:length]
        return len(data)

    def _read(self, name: str) -> memoryview | None:
        try:
            return self._call(lambda: memoryview(self._obstore.get(self._bucket, name).bytes()))
        except MissingError:
            return None

    def read_small(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.read_small`."""
        found = self._threads.map(self._read, names)
        return [None if data is None else bytes(data) for data in found]

    def write(self, name: str, data: Buffer) -> None:
        """See `Store.write`."""
        self._call(lambda: self._obstore.put(self._bucket, name, data))

    def remove(self, names: Sequence[str]) -> None:
        """See `Store.remove`."""
        for start in range(0, len(names), _REMOVED_AT_ONCE):
            some = list(names[start : start + _REMOVED_AT_ONCE])
            with contextlib.suppress(MissingError):
                self._call(partial(self._obstore.delete, self._bucket, some))

    def names(self, prefix: str) -> Iterator[Listed]:
        """See `Store.names`."""
        folder = prefix.rpartition("/")[0] or None
        pages = iter(self._call(lambda: self._obstore.list(self._bucket, prefix=folder, chunk_size=1000)))
        while (page := self._call(lambda: next(pages, None))) is not None:
            for item in page:
                if item["path"].startswith(prefix):
                    yield Listed(item["path"], item["size"], item["last_modified"].timestamp())

    def close(self) -> None:
        """See `Store.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except self._missing as error:
            raise MissingError("the object is not there") from error
        except (self._error, OSError) as error:
            raise StoreError(f"the store: {_first_line(error)}") from error


def _settings(config: Mapping[str, str], seconds: float, silence: float) -> dict[str, Any]:
    limit, quiet = timedelta(seconds=seconds), timedelta(seconds=silence)
    given: dict[str, Any] = {"region": "us-east-1"} if "endpoint" in config else {}
    given["client_options"] = {"timeout": limit, "read_timeout": quiet, "connect_timeout": quiet, "allow_http": True}
    given["retry_config"] = {"max_retries": 2, "retry_timeout": limit}
    return {**given, **config}


def _first_line(error: BaseException) -> str:
    """What obstore says, without the debugging output behind it."""
    return str(error).partition("\n")[0]
