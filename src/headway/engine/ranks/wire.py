"""Plain records as bytes, for messages between the driver and the ranks.

A message is a JSON skeleton followed by the raw bytes of its arrays. It can hold nothing but numbers, strings, arrays
and the records that a `Codec` was made with, so that reading a message runs no code of whoever wrote it.

A step of many rows has as many small arrays and records. So a sequence of records of one class travels as columns, and
a sequence of one-dimensional arrays as one array with the length of each: what costs time is the number of parts.

Rejected: pickle, which does run code and would make every connection between machines a way in; and safetensors, which
has no place for what is not an array.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Codec"]

_ALIGNMENT = 16
"""Bytes to which every array is aligned, so that it can be used where it lies."""
_PLAIN = {type(None), bool, int, float, str}
_HEAD = struct.Struct("<Q")


class Codec:
    """Turns records into bytes and back.

    Args:
        records: The dataclasses and enumerations that a message may hold, each with a name of its own.
    """

    def __init__(self, records: Sequence[type]) -> None:
        self._classes = {record.__name__: record for record in records}
        self._fields = {record: _fields(record) for record in records}
        assert len(self._classes) == len(records), "two records of one name"

    def encode(self, record: object) -> bytes:
        """Return a record as bytes.

        Raises:
            TypeError: It holds something that is neither plain nor one of the records.
        """
        arrays: list[NDArray[Any]] = []
        skeleton = self._pack(record, arrays)
        header = json.dumps([[(a.dtype.str, a.shape) for a in arrays], skeleton], separators=(",", ":")).encode()
        parts = [_HEAD.pack(len(header)), header]
        size = _HEAD.size + len(header)
        for array in arrays:
            gap = -size % _ALIGNMENT
            parts += [bytes(gap), array.tobytes()]
            size += gap + array.nbytes
        return b"".join(parts)

    def decode(self, message: bytes) -> Any:
        """Return the record of a message. Its arrays are its own and may be written; sequences come back as tuples.

        Raises:
            ValueError: Not a message of `encode`, or one with a record that this codec does not know.
        """
        try:
            return self._read(bytearray(message))
        except (struct.error, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"a message between ranks cannot be read: {type(error).__name__}: {error}") from error

    def _read(self, data: bytearray) -> Any:
        (length,) = _HEAD.unpack_from(data)
        offset = _HEAD.size + length
        kinds, skeleton = json.loads(data[_HEAD.size : offset])
        arrays: list[NDArray[Any]] = []
        for name, shape in kinds:
            offset += -offset % _ALIGNMENT
            dtype, count = np.dtype(name), int(np.prod(shape, dtype=np.int64))
            if dtype.hasobject:
                raise ValueError("an array of objects")
            arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape) if count else np.empty(shape, dtype))
            offset += count * dtype.itemsize
        return self._unpack(skeleton, arrays)

    def _pack(self, value: object, arrays: list[NDArray[Any]]) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        if isinstance(value, np.generic):
            return value.item()
        if type(value) in self._fields:
            names = self._fields[type(value)]
            return {"is": type(value).__name__, "of": [self._pack(getattr(value, name), arrays) for name in names]}
        if isinstance(value, Mapping):
            return {"map": [[self._pack(k, arrays), self._pack(v, arrays)] for k, v in value.items()]}
        if isinstance(value, frozenset):
            return {"set": self._pack(tuple(value), arrays)}
        if isinstance(value, list | tuple):
            return self._pack_sequence(value, arrays)
        raise TypeError(f"a {type(value).__name__} is no plain record: it cannot be sent to a rank")

    def _pack_sequence(self, items: Sequence[Any], arrays: list[NDArray[Any]]) -> Any:
        kinds = set(map(type, items))
        if kinds <= _PLAIN:
            return list(items)
        if len(items) > 1 and len(kinds) == 2 and type(None) in kinds:
            there = [i for i, item in enumerate(items) if item is not None]
            return {"at": there, "long": len(items), "of": self._pack([items[i] for i in there], arrays)}
        kind = kinds.pop() if len(items) > 1 and len(kinds) == 1 else None
        if kind is np.ndarray and all(item.ndim == 1 and item.dtype == items[0].dtype for item in items):
            return {"lengths": [len(item) for item in items], "of": self._pack(np.concatenate(items), arrays)}
        if kind in self._fields and not issubclass(kind, Enum):
            columns = ([getattr(item, name) for item in items] for name in self._fields[kind])
            return {"all": kind.__name__, "long": len(items), "of": [self._pack(column, arrays) for column in columns]}
        return [self._pack(item, arrays) for item in items]

    def _unpack(self, packed: Any, arrays: Sequence[NDArray[Any]]) -> Any:
        if isinstance(packed, list):
            if set(map(type, packed)) <= _PLAIN:
                return tuple(packed)
            return tuple(self._unpack(item, arrays) for item in packed)
        if not isinstance(packed, dict):
            return packed
        if "array" in packed:
            return arrays[packed["array"]]
        if "set" in packed:
            return frozenset(self._unpack(packed["set"], arrays))
        if "map" in packed:
            return {self._unpack(k, arrays): self._unpack(v, arrays) for k, v in packed["map"]}
        if "is" in packed:
            record = self._classes[packed["is"]]
            values = (self._unpack(item, arrays) for item in packed["of"])
            return record(**dict(zip(self._fields[record], values, strict=True)))
        return self._unpack_sequence(packed, arrays)

    def _unpack_sequence(self, packed: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> tuple[Any, ...]:
        if "all" in packed:
            record, size = self._classes[packed["all"]], packed["long"]
            columns = [self._unpack(column, arrays) for column in packed["of"]]
            names = self._fields[record]
            return tuple(record(**{n: c[i] for n, c in zip(names, columns, strict=True)}) for i in range(size))
        inner = self._unpack(packed["of"], arrays)
        if "lengths" in packed:
            ends = np.cumsum(packed["lengths"]).tolist()
            return tuple(inner[start:end] for start, end in zip([0, *ends], ends, strict=False))
        whole: list[Any] = [None] * packed["long"]
        for i, item in zip(packed["at"], inner, strict=True):
            whole[i] = item
        return tuple(whole)


def _fields(record: type) -> tuple[str, ...]:
    """What to write down of a record, and to make it from."""
    if issubclass(record, Enum):
        return ("value",)
    assert dataclasses.is_dataclass(record), f"{record.__name__} is no record"
    return tuple(field.name for field in dataclasses.fields(record) if field.init)
