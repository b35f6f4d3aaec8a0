"""Lines of a trace file, plain or compressed, as JSON objects, and how an object becomes one of a type.

Every fault names the file, the line and the field. Fields that nobody asks for pass.
"""

from __future__ import annotations

import codecs
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, cast

import msgspec

from headway.errors import ConfigError, TraceError

__all__ = ["LONGEST", "Count", "Damage", "Ids", "Line", "Positive", "decode", "open_binary", "read_lines"]

T = TypeVar("T")

LONGEST = 1 << 26
"""Most tokens of a prompt or an answer: more is no length but a fault."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]
"""A number of tokens. A number such as `3.0` is one."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]
"""A number of tokens from 1 on."""
Ids = list[int | str]
"""Block hashes, as numbers or as texts."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "array": "a list", "object": "an object"}


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise msgspec.DecodeError(f"{text} is too large for a number")
    return int(value) if value.is_integer() else value


_DECODER = msgspec.json.Decoder(float_hook=_number)


def decode(value: Any, kind: type[T], where: str, path: str = "") -> T:
    """An object of type `kind` from plain values, by its annotations.

    Args:
        value: What JSON gave.
        kind: A dataclass or a `msgspec.Struct`.
        where: File and line, for messages.
        path: Where the value lies inside the line, such as "requests[3].", for messages.

    Raises:
        TraceError: A field is missing, of another type or out of range; names it and shows what was found.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _fault(str(error), value, where, path) from None


def _fault(told: str, value: Any, where: str, path: str) -> TraceError:
    """What msgspec told, with the value that it found."""
    problem, _, place = told.rstrip("`").partition(" - at `$")
    exact, anywhere, _ = place.partition("[...]")  # of a dictionary msgspec does not name the key
    for name, index in _STEP.findall(exact):
        value = value[name] if name else value[int(index)]
    field = path + place.removeprefix(".")
    if problem.startswith("Object missing required field"):
        missing = problem.split("`")[1]
        field = f"{field}.{missing}" if place else path + missing
        names = ", ".join(map(repr, sorted(value))) if isinstance(value, dict) else ""
        problem = f"is missing; found {names or 'no fields'}"
    elif problem.startswith("Expected"):
        wanted, _, found = problem.removeprefix("Expected ").replace("`", "").partition(", got ")
        wanted = wanted.replace(" | ", " or ").replace(">=", "of at least").replace("<=", "of at most")
        wanted = re.sub(r"[a-z]+", lambda word: _KINDS.get(word[0], word[0]), wanted)
        problem = f"expected {wanted}, found {found if anywhere else _shown(value)}"
    return TraceError(f"{where}: {f'field {field!r}: ' if field else ''}{problem}")


@dataclass(frozen=True)
class Line:
    """A JSON object of a trace and where it stands.

    Attributes:
        where: File and line, for messages.
        fields: The object.
        path: Where the object lies inside the line's value, such as "requests[3].", for messages.
    """

    where: str
    fields: dict[str, Any]
    path: str = ""

    def to(self, kind: type[T]) -> T:
        """The object as one of type `kind`.

        Raises:
            TraceError: See `decode`.
        """
        return decode(self.fields, kind, self.where, self.path)

    def has(self, field: str) -> bool:
        """Whether a field is there and not null."""
        return self.fields.get(field) is not None

    def inner(self, field: str, objects: Iterable[dict[str, Any]]) -> Iterator[Line]:
        """The objects of a list of this one, as lines that know their place."""
        for i, item in enumerate(objects):
            yield Line(self.where, item, f"{self.path}{field}[{i}].")

    def fault(self, field: str, problem: str) -> TraceError:
        """The error that says what is wrong with a field."""
        name = f"field {self.path + field!r}: " if field or self.path else ""
        return TraceError(f"{self.where}: {name}{problem}")


class _Frames(io.RawIOBase):
    """The text of a file of Zstandard frames. The package's own reader takes a frame without its end for whole."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        """The file, and the package."""
        self._zstandard, self._file = zstandard, path.open("rb")
        self._frame: Any = None
        self._data, self._text = b"", b""

    def readable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as files do.

        Raises:
            EOFError: The file ends inside a frame.
            OSError: What stands there is no frame.
        """
        while not self._text:
            data = self._data or self._file.read(1 << 16)
            if not data:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._text = self._decompressed(data)
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def _decompressed(self, data: bytes) -> bytes:
        frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            text = frame.decompress(data)
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        self._frame, self._data = None if frame.eof else frame, frame.unused_data
        return bytes(text)


def open_binary(path: Path) -> BinaryIO:
    """Open a file, whatever it is compressed with (told by its first bytes, not by its name).

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
        return cast("BinaryIO", gzip.open(path, "rb"))
    if magic == _ZSTD:
        try:
            import zstandard  # only for files that need it
        except ModuleNotFoundError:
            raise ConfigError(
                f"{path} is compressed with Zstandard: pip install 'headway[zstd]', or decompress it first"
            ) from None
        return cast("BinaryIO", io.BufferedReader(_Frames(path, zstandard)))
    return path.open("rb")


class Damage:
    """What is wrong with a file and does not end its reading.

    Attributes:
        most: Damaged lines that are left out before they are too many.
        found: Faults of those that were left out.
        cut: Last lines that were written in half.
    """

    def __init__(self, most: int = 0) -> None:
        """Leave out up to `most` damaged lines."""
        self.most = most
        self.found: list[str] = []
        self.cut: list[str] = []

    def take(self, error: TraceError) -> None:
        """Leave a damaged line out.

        Raises:
            TraceError: There are too many.
        """
        if len(self.found) >= self.most:
            more = f"; {self.most} were left out before it" if self.most else ""
            raise TraceError(f"{error}{more} (--skip-bad N leaves out up to N damaged lines)") from None
        self.found.append(str(error))

    @property
    def notes(self) -> list[str]:
        """What is told of it."""
        told = [f"The last line is written in half and was left out: {where}." for where in self.cut]
        if self.found:
            lines = "line was" if len(self.found) == 1 else "lines were"
            told.append(f"{len(self.found):,} damaged {lines} left out; the first: {self.found[0]}")
        return told


def read_lines(path: Path, damage: Damage | None = None) -> Iterator[Line]:
    """The objects of a file of JSON lines, one at a time. A file that is one JSON object or list is taken as well.

    Args:
        path: The file. A byte order mark in front is left out.
        damage: Takes damaged lines, and a last line that is written in half; None: both end the reading.

    Raises:
        TraceError: Not JSON, or not objects.
    """
    with open_binary(path) as file:
        try:
            yield from _lines(path, file, damage)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceError(f"{path}: cannot be read as text: {error}") from None


def _lines(path: Path, file: BinaryIO, damage: Damage | None) -> Iterator[Line]:
    for number, text in enumerate(file, 1):
        line = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = _DECODER.decode(line)
            whole = number == 1 and isinstance(value, list)
            found = (
                [_line(f"{path}, item {i}", item) for i, item in enumerate(value)] if whole else [_line(where, value)]
            )
        except (msgspec.DecodeError, TraceError) as error:
            if number == 1 and line.lstrip()[:1] in (b"{", b"[") and isinstance(error, msgspec.DecodeError):
                value = _document(path, line + file.read())
                items = enumerate(value) if isinstance(value, list) else [(None, value)]
                yield from (_line(where if i is None else f"{path}, item {i}", item) for i, item in items)
                return
            fault = error if isinstance(error, TraceError) else TraceError(f"{where}: not JSON: {error}")
            if damage is None:
                raise fault from None
            if line.endswith(b"\n"):
                damage.take(fault)
            else:
                damage.cut.append(where)
        else:
            yield from found


def _document(path: Path, text: bytes) -> Any:
    """The value of a whole file that is one JSON value over several lines."""
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError as error:
        byte = re.search(r"\(byte (\d+)\)", str(error))
        line = 1 + text.count(b"\n", 0, int(byte[1])) if byte else 1
        raise TraceError(f"{path}, line {line}: not JSON: {error}") from None


def _line(where: str, value: Any) -> Line:
    if not isinstance(value, dict):
        raise TraceError(f"{where}: expected a JSON object, found {_shown(value)}")
    return Line(where, value)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
