"""Traces of block hashes: Mooncake's, Alibaba's Bailian, AIPerf's form of Mooncake's, and Weka's sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

import msgspec

from headway.errors import TraceError
from headway.formats.lines import Count, Ids, Line, Positive
from headway.formats.trace import TraceBuilder

__all__ = [
    "AIPERF_BLOCK",
    "BAILIAN_BLOCK",
    "MOONCAKE_BLOCK",
    "WEKA_BLOCK",
    "Reader",
    "read_aiperf",
    "read_bailian",
    "read_mooncake",
    "read_weka",
    "weka_width",
]

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
AIPERF_BLOCK = 512
"""AIPerf's own default; a trace does not say its block size."""
WEKA_BLOCK = 64


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Positive
    hash_ids: Ids
    output_length: Count | None = None


class _Bailian(_Mooncake):
    chat_id: Count = 0
    parent_chat_id: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    turn: Count | None = None


class _Aiperf(msgspec.Struct):
    input_length: Positive
    timestamp: float | None = None
    hash_ids: Ids | None = None
    output_length: Count | None = None
    session_id: str | int | None = None
    delay: float | None = None


class _WekaSession(msgspec.Struct):
    requests: list[dict[str, Any]]
    block_size: Positive | None = None
    hash_id_scope: str | None = None


class _WekaTime(msgspec.Struct):
    t: float | None = None


class _WekaRequest(msgspec.Struct):
    tokens: Count = msgspec.field(name="in")
    hash_ids: Ids | None = None
    out: Count | None = None


Reader = Callable[[Line], None]
"""Adds the requests of a line to the trace that it was made for. Raises TraceError, with the line and the field."""


def read_mooncake(builder: TraceBuilder) -> Reader:
    """Mooncake: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of 512 tokens each."""

    def read(line: Line) -> None:
        request = line.to(_Mooncake)
        _add(builder, line, request.hash_ids, request.input_length, request.output_length, request.timestamp / 1e3)

    return read


def read_bailian(builder: TraceBuilder) -> Reader:
    """Bailian: `timestamp` in seconds, `input_length`, `output_length`, `hash_ids` of 16 tokens each.

    `chat_id`, `parent_chat_id` and `turn` tie the turns of a session together. Each line covers its whole prompt, the
    history included, so the ids alone say what is shared; the three are checked and not needed.
    """

    def read(line: Line) -> None:
        request = line.to(_Bailian)
        _add(builder, line, request.hash_ids, request.input_length, request.output_length, request.timestamp)

    return read


@dataclass
class _Session:
    """A session of AIPerf's form as far as it has got: every turn adds to what was said and answered before."""

    number: int
    time: float = 0.0
    tokens: int = 0
    first: Ids = field(default_factory=list)


def read_aiperf(builder: TraceBuilder) -> Reader:
    """AIPerf: Mooncake's fields, all but `input_length` optional, and `session_id` and `delay` (milliseconds).

    Lines of one session are turns: each holds only what is new, and the prompt is everything before it, the answers
    included. Blocks of a later turn do not begin where the trace's blocks do, so only the first turn's `hash_ids` are
    shared between sessions; what follows is the session's own.
    """
    sessions: dict[str, _Session] = {}

    def read(line: Line) -> None:
        for other in ("messages", "text_input", "payload"):
            if line.has(other):
                raise line.fault(other, "this line holds text, not block ids: read it with --format chat --tokenizer")
        request = line.to(_Aiperf)
        if request.session_id is None:
            time = (request.timestamp or 0.0) / 1e3
            builder.session = -1
            _add(builder, line, request.hash_ids or None, request.input_length, request.output_length, time)
            return
        session = sessions.setdefault(str(request.session_id), _Session(len(sessions)))
        builder.session = session.number
        waited = session.time + (request.delay or 0.0) / 1e3
        session.time = waited if request.timestamp is None else request.timestamp / 1e3
        if session.tokens == 0:
            session.first = (request.hash_ids or [])[: request.input_length // builder.width]
        session.tokens += request.input_length
        ids = _turn(session, builder.width)
        _add(builder, line, ids, session.tokens, request.output_length, session.time)
        session.tokens += request.output_length or 0

    return read


def _turn(session: _Session, width: int) -> list[str]:
    """Block ids of a session's whole prompt so far: the first turn's, then its own."""
    known = [f"h{id}" for id in session.first]
    return known + [f"s{session.number}.{i}" for i in range(len(known), session.tokens // width)]


def _add(
    builder: TraceBuilder, line: Line, ids: Sequence[int | str] | None, tokens: int, answer: int | None, time: float
) -> None:
    if ids is None:
        builder.add_unknown(tokens, answer or 0, time)
        return
    try:
        builder.add_blocks(ids, tokens, answer or 0, time)
    except TraceError as error:
        raise line.fault("hash_ids", f"{error}; if the trace has another block size, give --block-tokens") from None


def weka_width(first: Line) -> int:
    """Tokens in a block of the sessions that begin with `first`.

    Raises:
        TraceError: A session without requests, or blocks of no tokens.
    """
    return first.to(_WekaSession).block_size or WEKA_BLOCK


def read_weka(builder: TraceBuilder) -> Reader:
    """Sessions of kv-cache-tester (Weka): one JSON object a session, with the requests of coding agents and sub-agents.

    A session has `block_size` (64), `hash_id_scope` ("local": ids mean something within the session only) and
    `requests`: `t` in seconds from the session's start, `type` ("n", "s", or "subagent" with `requests` of its own),
    `in`, `out`, `hash_ids` of the whole blocks. Token counts and hashes come from different counts in the published
    files, so that a prompt may be longer than its blocks: what no hash covers is taken as the request's own. All
    sessions start at time 0, as the tool that they come from replays them, unless they are spread.
    """
    numbers = count()

    def read(line: Line) -> None:
        number = next(numbers)
        session = line.to(_WekaSession)
        size = session.block_size or WEKA_BLOCK
        if size != builder.width:
            raise line.fault("block_size", f"{size} where {builder.width} was expected: give --block-tokens {size}")
        own = session.hash_id_scope != "global"
        scope = (number,) if own else ("global",)
        builder.session = number
        _weka_requests(list(line.inner("requests", session.requests)), builder, scope, 0.0)
        if own:
            builder.forget_ids(scope)

    return read


def _weka_requests(entries: list[Line], builder: TraceBuilder, scope: tuple[int | str], start: float) -> None:
    """The requests of a session or of a sub-agent that began at `start`.

    Times of a sub-agent's requests count from the session's start or, in some files, from the sub-agent's own: where
    one lies before the sub-agent's start it is taken as the latter.
    """
    relative = bool(entries) and _weka_time(entries[0]) < start
    for entry in entries:
        time = _weka_time(entry) + (start if relative else 0.0)
        if entry.has("requests"):
            agent = entry.to(_WekaSession)
            _weka_requests(list(entry.inner("requests", agent.requests)), builder, scope, time)
        elif entry.fields.get("type") != "subagent":
            request = entry.to(_WekaRequest)
            ids = request.hash_ids or []
            tokens = max(request.tokens, 1, len(ids) * builder.width)
            builder.add_long(ids, tokens, request.out or 0, time, scope=scope)


def _weka_time(entry: Line) -> float:
    return entry.to(_WekaTime).t or 0.0
