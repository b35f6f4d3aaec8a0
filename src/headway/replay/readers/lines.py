"""Lines of a trace file, plain or compressed, as JSON objects whose fields are checked on the way out.

Every fault names the file, the line and the field. Fields that nobody asks for pass.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from headway.errors import ConfigError, TraceError

__all__ = ["Record", "open_text", "records"]

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Record:
    """A JSON object of a trace and where it stands.

    Attributes:
        where: File and line, for messages.
        fields: The object.
        path: Where the object lies inside the line's value, such as "requests[3].", for messages.
    """

    where: str
    fields: dict[str, Any]
    path: str = ""

    def fault(self, field: str, problem: str) -> TraceError:
        """The error that says what is wrong with a field."""
        name = f"field {self.path + field!r}: " if field or self.path else ""
        return TraceError(f"{self.where}: {name}{problem}")

    def has(self, field: str) -> bool:
        """Whether a field is there and not null."""
        return self.fields.get(field) is not None

    def integer(self, field: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number of at least `least`.

        Raises:
            TraceError: Missing without a default, another type, or too small.
        """
        value = self._value(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(field, f"expected a whole number, found {_shown(value)}")
        if value < least:
            raise self.fault(field, f"{value} is too small, it must be at least {least}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            TraceError: Missing without a default, or another type.
        """
        value = self._value(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fault(field, f"expected a number, found {_shown(value)}")
        return float(value)

    def text(self, field: str, default: str | None = None) -> str:
        """A text; a number is taken as its digits.

        Raises:
            TraceError: Missing without a default, or another type.
        """
        value = self._value(field, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.fault(field, f"expected a text, found {_shown(value)}")
        return value

    def ids(self, field: str, default: list[int] | None = None) -> list[int]:
        """A list of whole numbers (block hashes or tokens); hashes may be texts.

        Raises:
            TraceError: Missing without a default, or another type inside.
        """
        value = self._value(field, default)
        if not isinstance(value, list):
            raise self.fault(field, f"expected a list of ids, found {_shown(value)}")
        kinds = set(map(type, value))
        if not kinds <= {int} and not kinds <= {str}:
            kind = type(value[0]) if type(value[0]) in (int, str) else int
            index = next(i for i, item in enumerate(value) if type(item) is not kind)
            raise self.fault(f"{field}[{index}]", f"expected ids of one type, found {_shown(value[index])}")
        return cast("list[int]", value)

    def objects(self, field: str) -> Iterator[Record]:
        """The objects of a list.

        Raises:
            TraceError: Missing, or something else inside.
        """
        value = self._value(field, None)
        if not isinstance(value, list):
            raise self.fault(field, f"expected a list of objects, found {_shown(value)}")
        for i, item in enumerate(value):
            if not isinstance(item, dict):
                raise self.fault(f"{field}[{i}]", f"expected an object, found {_shown(item)}")
            yield Record(self.where, item, f"{self.path}{field}[{i}].")

    def _value(self, field: str, default: Any) -> Any:
        value = self.fields.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.fault(field, f"is missing; found {', '.join(map(repr, sorted(self.fields))) or 'no fields'}")
        return value


def open_text(path: Path) -> TextIO:
    """Open a text file, whatever it is compressed with (told by its first bytes, not by its name).

    Raises:
        TraceError: There is no such file.
        ConfigError: Zstandard without the package that reads it.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if magic[:2] == _GZIP:
        return gzip.open(path, "rt", encoding="utf-8")
    if magic == _ZSTD:
        try:
            import zstandard  # only for files that need it
        except ModuleNotFoundError:
            raise ConfigError(
                f"{path} is compressed with Zstandard: pip install 'headway[zstd]', or decompress it first"
            ) from None
        stream = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.TextIOWrapper(stream, encoding="utf-8")
    return path.open(encoding="utf-8")


def records(path: Path) -> Iterator[Record]:
    """The objects of a file of JSON lines, one at a time. A file that is one JSON object or list is taken as well.

    Raises:
        TraceError: Not JSON, or not objects.
    """
    with open_text(path) as file:
        try:
            yield from _lines(path, file)
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: cannot be read as text: {error}") from None


def _lines(path: Path, file: TextIO) -> Iterator[Record]:
    number = 0
    for line in file:
        number += 1
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1 and line.lstrip()[:1] in ("{", "["):
                yield from _document(path, line + file.read())
                return
            raise TraceError(f"{where}: not JSON: {error}") from None
        if number == 1 and isinstance(value, list):
            yield from _objects(path, value)
        elif isinstance(value, dict):
            yield Record(where, value)
        else:
            raise TraceError(f"{where}: expected a JSON object, found {_shown(value)}")


def _document(path: Path, text: str) -> Iterator[Record]:
    """A whole file that is one JSON value over several lines."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    if isinstance(value, dict):
        yield Record(f"{path}, line 1", value)
    else:
        yield from _objects(path, value)


def _objects(path: Path, values: list[Any]) -> Iterator[Record]:
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise TraceError(f"{path}, item {i}: expected a JSON object, found {_shown(value)}")
        yield Record(f"{path}, item {i}", value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
