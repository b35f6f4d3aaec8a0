"""The bytes of a saved cache: a mark of their release, a checksum, and objects that cannot run code of their own."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

from headway.errors import ConfigError

__all__ = ["read", "write"]

_SAVED = b"headway prefix cache 1\n"
_READABLE = {
    "array": {"_array_reconstructor", "array"},
    "builtins": {"frozenset", "object", "set"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "copyreg": {"_reconstructor"},
    "numpy": {"dtype", "ndarray", "_reconstruct", "_frombuffer", "scalar"},
    "time": {"monotonic"},
}
"""Names of other modules that a saved cache may hold."""


class _Reader(pickle.Unpickler):
    """Reads what a saved cache consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        plain = name in _READABLE.get(module, ()) or (module.startswith("numpy.") and name in _READABLE["numpy"])
        if plain or (module.startswith("headway.cache.") and "." not in name):
            found = super().find_class(module, name)
            if plain or (isinstance(found, type) and found.__module__ == module):
                return found
        raise ConfigError(f"{module}.{name} cannot be part of a saved cache: only plain values and our own classes can")


def write(state: dict[str, Any]) -> bytes:
    """Write the attributes of a cache, and see that they can be read.

    Raises:
        ConfigError: They hold an object of a foreign class.
    """
    try:
        body = pickle.dumps(state, protocol=5)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ConfigError(f"the cache holds an object that cannot be written: {error}") from error
    _Reader(io.BytesIO(body)).load()
    return _SAVED + hashlib.sha256(body).digest() + body


def read(data: bytes) -> dict[str, Any]:
    """The attributes that `write` wrote.

    Raises:
        ConfigError: Not what `write` of this release writes.
    """
    given: object = data
    if not isinstance(given, bytes) or not given.startswith(_SAVED):
        raise ConfigError(f"these bytes were not saved by this release of the prefix cache ({_SAVED!r} is missing)")
    digest, body = data[len(_SAVED) : len(_SAVED) + 32], data[len(_SAVED) + 32 :]
    if hashlib.sha256(body).digest() != digest:
        raise ConfigError("these bytes of a prefix cache are damaged or cut: they are not what was saved")
    state: dict[str, Any] = _Reader(io.BytesIO(body)).load()
    return state
