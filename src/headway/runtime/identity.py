"""Which weights a model's files hold, as a few bytes: whatever one set of weights has computed is no use to another.

Two folders with the same bytes have the same identity, on any machine and under any name; a file whose tensors were
replaced has another, also where their names and shapes are the same. To read all of a checkpoint would take as long as
to load it. So its config and the headers of its files are read, which name every tensor, and a piece from the middle of
tensors: of all, or of many that are spread evenly. To train, merge or quantise a model changes nearly all of them.

Rejected: times and sizes of files, which a copy or a rewrite changes or keeps for no reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import try_to_load_from_cache

from headway.errors import ModelError

__all__ = ["weights_identity"]

_SAMPLES = 2048
"""Places that are read, over all files."""
_SAMPLE_BYTES = 64
_LARGEST_HEADER = 100 << 20
"""Bytes of the header of a safetensors file, at most; by the format's own limit."""


def weights_identity(path: str) -> bytes:
    """Which weights a folder, or a model of the hub, has: 16 bytes.

    Args:
        path: A folder with `config.json` and weights, or a hub id. Of a hub id whose weights are not on this machine,
            the revision says which they are.

    Raises:
        ModelError: There is neither a weight nor a revision to tell it by.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = try_to_load_from_cache(path, "config.json")
        if not isinstance(found, str):
            raise ModelError(f"nothing here says which weights {path!r} has: name the folder that holds the model")
        folder = Path(found).parent  # named by its revision
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    _take(digest, config.read_bytes() if config.is_file() else b"")
    files = sorted(each for kind in ("*.safetensors", "*.bin") for each in folder.glob(kind))
    if not files and str(folder) == path:
        raise ModelError(f"{path!r} holds no weights (*.safetensors, *.bin)")
    if not files:
        _take(digest, folder.name.encode())
    for file in files:
        with file.open("rb") as read:
            size = file.stat().st_size
            header, places = _header(read, size)
            for part in (file.name.encode(), size.to_bytes(8, "little"), header):
                _take(digest, part)
            for place in _spread(places, max(1, _SAMPLES // len(files))):
                read.seek(place)
                _take(digest, read.read(_SAMPLE_BYTES))
    return digest.digest()


def _take(digest: hashlib.blake2b, part: bytes) -> None:
    """Add a part with its length, so that no two lists of parts look alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _header(read: BinaryIO, size: int) -> tuple[bytes, list[int]]:
    """What a file says of its tensors, and a place inside each; of another format nothing, and places all over it."""
    length = int.from_bytes(read.read(8), "little")
    if 2 <= length <= min(size - 8, _LARGEST_HEADER):
        header = read.read(length)
        try:
            tensors = {
                name: each["data_offsets"] for name, each in json.loads(header).items() if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            tensors = {}
        if tensors:
            return header, [8 + length + (int(first) + int(stop)) // 2 for _, (first, stop) in sorted(tensors.items())]
    return b"", list(range(0, size, max(1, size // _SAMPLES)))


def _spread(places: list[int], most: int) -> Iterator[int]:
    """At most so many of the places, evenly, in order of the file."""
    count = min(most, len(places))
    yield from sorted(places[i * len(places) // count] for i in range(count))
