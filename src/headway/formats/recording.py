"""Headway's own recordings: what a server was asked and what it answered, as tokens or as salted hashes.

JSON lines. The first one says what follows:

    {"headway_recording": 1, "content": "tokens", "model": "..."}
    {"headway_recording": 1, "content": "hashes", "block_tokens": 16, "model": "..."}

Then one object a request, in any order, `time` of its arrival in seconds:

    {"time": 0.25, "prompt": [1, 2, 3], "answer": [4, 5], "boundaries": [2]}
    {"time": 0.25, "prompt_tokens": 40, "answer_tokens": 9, "blocks": ["5e0b...", "91c2...", "07aa..."]}

`boundaries` (where messages of the prompt end, in tokens) may be left out. With hashes, `blocks` names every whole
block of prompt and answer together; a hash covers the salt, the block before it and the block's tokens. Who has the
file but not the salt can see which prompts share a beginning and how long they are, and nothing of what they say. The
salt is made anew for each recording and written nowhere. Requests of different cache salts share no hash; their tokens
would look shared, so a recording of tokens cannot hold them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TextIO

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from headway.errors import ConfigError, TraceError
from headway.formats.lines import Count, Ids, Line, Positive
from headway.formats.trace import TraceBuilder

__all__ = ["RECORDING_BLOCK", "RecordingWriter", "read_recording", "recording_width"]

RECORDING_BLOCK = 16
_VERSION = 1


class _Head(msgspec.Struct):
    headway_recording: Count
    content: Literal["tokens", "hashes"]
    block_tokens: Positive | None = None


class _Tokens(msgspec.Struct):
    prompt: list[int]
    answer: list[int] | None = None
    time: float | None = None
    boundaries: list[int] | None = None


class _Hashes(msgspec.Struct):
    prompt_tokens: Positive
    blocks: Ids
    answer_tokens: Count | None = None
    time: float | None = None
    boundaries: list[int] | None = None


class RecordingWriter:
    """Writes a recording, one line a request."""

    def __init__(
        self, file: TextIO, *, content: str = "hashes", block_tokens: int = RECORDING_BLOCK, model: str = ""
    ) -> None:
        """Write the first line of a recording to `file`.

        Args:
            file: Where to; the caller closes it.
            content: "tokens" or "hashes".
            block_tokens: Tokens that one hash covers.
            model: Name of the model, for whoever reads it.

        Raises:
            ConfigError: Another content, or blocks of no tokens.
        """
        if content not in ("tokens", "hashes"):
            raise ConfigError(f"a recording holds 'tokens' or 'hashes', not {content!r}")
        if block_tokens < 1:
            raise ConfigError(f"block_tokens is {block_tokens}, it must be at least 1")
        self._file, self._hashes, self._width = file, content == "hashes", block_tokens
        self._salt = secrets.token_bytes(32)
        head: dict[str, object] = {"headway_recording": _VERSION, "content": content, "model": model}
        self._write(head | ({"block_tokens": block_tokens} if self._hashes else {}))

    def add(
        self, time: float, prompt: ArrayLike, answer: ArrayLike, boundaries: Sequence[int] = (), *, scope: str = ""
    ) -> None:
        """Write one request.

        Args:
            time: Seconds of its arrival.
            prompt: Token ids of its prompt.
            answer: Token ids of its answer.
            boundaries: Where messages of the prompt end, in tokens.
            scope: Requests of different scopes share nothing.

        Raises:
            ConfigError: A scope in a recording of tokens, which cannot tell scopes apart.
        """
        if scope and not self._hashes:
            raise ConfigError("a recording of tokens cannot keep cache salts apart: record hashes")
        prompt_ids, answer_ids = np.asarray(prompt, dtype=np.int32), np.asarray(answer, dtype=np.int32)
        line: dict[str, object] = {"time": round(time, 6)}
        if self._hashes:
            line |= {"prompt_tokens": len(prompt_ids), "answer_tokens": len(answer_ids)}
            line["blocks"] = list(self._blocks(np.concatenate((prompt_ids, answer_ids)), scope))
        else:
            line |= {"prompt": prompt_ids.tolist(), "answer": answer_ids.tolist()}
        if boundaries:
            line["boundaries"] = [int(mark) for mark in boundaries]
        self._write(line)

    def _blocks(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], scope: str) -> Iterator[str]:
        before = scope.encode()
        for start in range(0, len(tokens) - self._width + 1, self._width):
            block = tokens[start : start + self._width].astype("<i4").tobytes()
            before = hashlib.blake2b(before + block, digest_size=8, key=self._salt).digest()
            yield before.hex()

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(msgspec.json.encode(line).decode() + "\n")


def recording_width(first: Line) -> int:
    """Tokens in a block of the recording that begins with `first`; 1 for tokens.

    Raises:
        TraceError: A version or content that this release does not know.
    """
    version = first.fields.get("headway_recording")
    if version != _VERSION:
        raise first.fault("headway_recording", f"version {version} is not known here, only {_VERSION}: update Headway")
    head = first.to(_Head)
    return 1 if head.content == "tokens" else head.block_tokens or RECORDING_BLOCK


def read_recording(builder: TraceBuilder) -> Callable[[Line], None]:
    """What reads the lines of a recording, the first one included."""
    width = 0

    def read(line: Line) -> None:
        nonlocal width
        if not width:
            width = recording_width(line)
            return
        request: _Tokens | _Hashes = line.to(_Tokens) if width == 1 else line.to(_Hashes)
        time, marks = request.time or 0.0, request.boundaries or ()
        try:
            if isinstance(request, _Tokens):
                builder.add_tokens(request.prompt, request.answer or (), time, boundaries=marks)
            else:
                whole, ids, answer = request.prompt_tokens // width, request.blocks, request.answer_tokens or 0
                prompt = ids[:whole], request.prompt_tokens
                builder.add_blocks(*prompt, answer, time, answer=ids[whole:], boundaries=marks)
        except TraceError as error:
            raise line.fault("", str(error)) from None

    return read
