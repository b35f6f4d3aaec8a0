"""Reading request traces of any known format: `read_trace`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from headway.errors import ConfigError, TraceError
from headway.formats.blocks import (
    AIPERF_BLOCK,
    BAILIAN_BLOCK,
    MOONCAKE_BLOCK,
    WEKA_BLOCK,
    Reader,
    read_aiperf,
    read_bailian,
    read_mooncake,
    read_weka,
    weka_width,
)
from headway.formats.chat import ChatEntry, ChatRenderer, read_chat
from headway.formats.lines import Damage, Line, read_lines
from headway.formats.recording import read_recording, recording_width
from headway.formats.trace import Trace, TraceBuilder

__all__ = ["FORMATS", "Format", "read_trace"]


@dataclass(frozen=True)
class Format:
    """A format of traces.

    Attributes:
        summary: One line about it.
        fits: Whether a first object looks like it.
        read: What adds the requests of a line to a trace; None where reading needs more (chat).
        block_tokens: Tokens in a block, unless somebody says otherwise; 1 for tokens.
        outputs: How answers are read, see `Trace`.
        width: Tokens in a block as the first object says; None where a trace does not say.
    """

    summary: str
    fits: Callable[[Line], bool]
    read: Callable[[TraceBuilder], Reader] | None
    block_tokens: int
    outputs: str
    width: Callable[[Line], int] | None = None


def _is_aiperf(first: Line) -> bool:
    return first.has("input_length") and (first.has("session_id") or first.has("delay") or not first.has("hash_ids"))


FORMATS: dict[str, Format] = {
    "recording": Format(
        "Headway's own, from `headway serve --record`",
        lambda first: first.has("headway_recording"),
        read_recording,
        1,
        "recorded",
        recording_width,
    ),
    "weka": Format(
        "sessions of kv-cache-tester: a file or a folder of them",
        lambda first: first.has("requests"),
        read_weka,
        WEKA_BLOCK,
        "continuation",
        weka_width,
    ),
    "bailian": Format(
        "Alibaba's Bailian traces: chat_id, seconds, hash_ids of 16 tokens",
        lambda first: first.has("chat_id") and first.has("hash_ids"),
        read_bailian,
        BAILIAN_BLOCK,
        "continuation",
    ),
    "aiperf": Format(
        "AIPerf's form of Mooncake's: session_id, delay, turns that add up",
        _is_aiperf,
        read_aiperf,
        AIPERF_BLOCK,
        "continuation",
    ),
    "mooncake": Format(
        "Mooncake's: timestamp in milliseconds, hash_ids of 512 tokens",
        lambda first: first.has("hash_ids") and first.has("input_length"),
        read_mooncake,
        MOONCAKE_BLOCK,
        "never",
    ),
    "chat": Format(
        "a log of an OpenAI-style chat API, or dialogues as tau-bench writes them (traj); needs --tokenizer",
        lambda first: any(first.has(name) for name in ("messages", "body", "request", "prompt", "traj")),
        None,
        1,
        "recorded",
    ),
}
"""Every format by name, in the order in which they are tried."""


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",
    block_tokens: int | None = None,
    renderer: ChatRenderer | None = None,
    limit: int | None = None,
    skip_bad: int = 0,
    spread: float | None = None,
    entries: list[ChatEntry] | None = None,
) -> Trace:
    """Read a trace from a file (plain, gzip or Zstandard) or from the files of a folder, in order of their names.

    Args:
        path: File or folder.
        format: A name of `FORMATS`, or "auto" to tell from the first object.
        block_tokens: Tokens in a block, where a trace differs from its format's usual.
        renderer: What makes tokens of chat logs.
        limit: Stop after that many requests.
        skip_bad: Damaged lines that are left out, and told in the notes of the trace.
        spread: Seconds over which sessions start, evenly and in their order; None: as the trace says.
        entries: Where the requests of a chat log are kept, in the order of the file.

    Raises:
        TraceError: A file that cannot be read as a trace; names file, line and field.
        ConfigError: An unknown format, a tokenizer that is missing or not needed, blocks that the trace itself knows or
            of no tokens, sessions to spread where there are none.
    """
    if format != "auto" and format not in FORMATS:
        raise ConfigError(f"unknown trace format {format!r}; known are {', '.join(FORMATS)} and auto")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"--block-tokens {block_tokens}: a block has at least one token")
    damage = Damage(skip_bad)
    lines = chain.from_iterable(read_lines(file, damage) for file in _files(Path(path)))
    first = next(lines, None)
    if first is None:
        cut = f"{damage.cut[0]} is no whole line of JSON, and there is no other" if damage.cut else ""
        raise TraceError(cut or f"{path}: the file is empty")
    name = _told(first) if format == "auto" else format
    form = FORMATS[name]
    if renderer is not None and form.read is not None:
        raise ConfigError(
            f"--tokenizer: is for chat logs, and {path} is read as {name}: leave it out, or give --format"
        )
    if block_tokens is not None and form.block_tokens == 1:
        raise ConfigError(f"--block-tokens: a trace of the format {name} says itself what its blocks are: leave it out")
    width = block_tokens or (form.width(first) if form.width is not None else form.block_tokens)
    builder = TraceBuilder(str(path), name, width, form.outputs)
    _read(chain((first,), lines), builder, _reader(form, builder, renderer, entries), damage, limit)
    trace = builder.build(spread)
    trace = replace(trace, notes=(*damage.notes, *trace.notes))
    trace = trace.head(limit) if limit else trace
    return trace if trace.outputs != "recorded" or trace.has_answers else replace(trace, outputs="never")


def _reader(
    form: Format, builder: TraceBuilder, renderer: ChatRenderer | None, entries: list[ChatEntry] | None
) -> Reader:
    if form.read is not None:
        return form.read(builder)
    if renderer is None:
        raise ConfigError("a chat log holds text: name the model's tokenizer with --tokenizer (a folder or a hub id)")
    return read_chat(builder, renderer, entries)


def _read(lines: Iterator[Line], builder: TraceBuilder, read: Reader, damage: Damage, limit: int | None) -> None:
    """Read lines until the trace has enough requests, and leave damaged ones out."""
    for line in lines:
        if limit is not None and len(builder) >= limit:
            return
        try:
            read(line)
        except TraceError as error:
            damage.take(error)
            builder.undo()


def _told(first: Line) -> str:
    for name, form in FORMATS.items():
        if form.fits(first):
            return name
    fields = f"the fields {', '.join(sorted(first.fields))}" if first.fields else "an object without fields"
    raise TraceError(
        f"{first.where}: cannot tell the format of this trace from {fields}: "
        f"give --format (one of {', '.join(FORMATS)})"
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.split(".")[1:2] in (["json"], ["jsonl"]))
    if not files:
        raise TraceError(f"{path}: no .json or .jsonl file in this folder")
    return files
