"""Traces of block hashes, one request a line: Mooncake's, Alibaba's Bailian, and AIPerf's form of Mooncake's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headway.errors import TraceError
from headway.replay.readers.lines import Record
from headway.replay.trace import TraceBuilder

__all__ = ["AIPERF_BLOCK", "BAILIAN_BLOCK", "MOONCAKE_BLOCK", "read_aiperf", "read_bailian", "read_mooncake"]

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
AIPERF_BLOCK = 512
"""AIPerf's own default; a trace does not say its block size."""


def read_mooncake(lines: Iterator[Record], builder: TraceBuilder) -> None:
    """Mooncake: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of 512 tokens each.

    Raises:
        TraceError: Names the line and the field.
    """
    for line in lines:
        _add(builder, line, line.ids("hash_ids"), line.integer("input_length", least=1), line.number("timestamp") / 1e3)


def read_bailian(lines: Iterator[Record], builder: TraceBuilder) -> None:
    """Bailian: `timestamp` in seconds, `input_length`, `output_length`, `hash_ids` of 16 tokens each.

    `chat_id`, `parent_chat_id` and `turn` tie the turns of a session together. Each line covers its whole prompt, the
    history included, so the ids alone say what is shared; the three are checked and not needed.

    Raises:
        TraceError: Names the line and the field.
    """
    for line in lines:
        line.integer("chat_id")
        line.integer("parent_chat_id", -1, least=-1)
        line.integer("turn", 1)
        _add(builder, line, line.ids("hash_ids"), line.integer("input_length", least=1), line.number("timestamp"))


@dataclass
class _Session:
    """A session of AIPerf's form as far as it has got: every turn adds to what was said and answered before."""

    number: int
    time: float = 0.0
    tokens: int = 0
    first: list[int] = field(default_factory=list)


def read_aiperf(lines: Iterator[Record], builder: TraceBuilder) -> None:
    """AIPerf: Mooncake's fields, all but `input_length` optional, and `session_id` and `delay` (milliseconds).

    Lines of one session are turns: each holds only what is new, and the prompt is everything before it, the answers
    included. Blocks of a later turn do not begin where the trace's blocks do, so only the first turn's `hash_ids` are
    shared between sessions; what follows is the session's own.

    Raises:
        TraceError: Names the line and the field.
    """
    sessions: dict[str, _Session] = {}
    for line in lines:
        for other in ("messages", "text_input", "payload"):
            if line.has(other):
                raise line.fault(other, "this line holds text, not block ids: read it with --format chat --tokenizer")
        ids, tokens = line.ids("hash_ids", []), line.integer("input_length", least=1)
        if not line.has("session_id"):
            _add(builder, line, ids or None, tokens, line.number("timestamp", 0.0) / 1e3)
            continue
        session = sessions.setdefault(line.text("session_id"), _Session(len(sessions)))
        wait = line.number("delay", 0.0) / 1e3
        session.time = line.number("timestamp") / 1e3 if line.has("timestamp") else session.time + wait
        if session.tokens == 0:
            session.first = ids[: tokens // builder.width]
        session.tokens += tokens
        _add(builder, line, _turn(session, builder.width), session.tokens, session.time)
        session.tokens += line.integer("output_length", 0)


def _turn(session: _Session, width: int) -> list[str]:
    """Block ids of a session's whole prompt so far: the first turn's, then its own."""
    known = [f"h{id}" for id in session.first]
    return known + [f"s{session.number}.{i}" for i in range(len(known), session.tokens // width)]


def _add(builder: TraceBuilder, line: Record, ids: list[int] | list[str] | None, tokens: int, time: float) -> None:
    answer = line.integer("output_length", 0)
    if ids is None:
        builder.add_unknown(tokens, answer, time)
        return
    try:
        builder.add_blocks(ids, tokens, answer, time)
    except TraceError as error:
        raise line.fault("hash_ids", f"{error}; if the trace has another block size, give --block-tokens") from None
