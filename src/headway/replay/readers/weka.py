"""Sessions of kv-cache-tester (Weka): one JSON object a session, with the requests of coding agents and sub-agents.

A session has `block_size` (64), `hash_id_scope` ("local": ids mean something within the session only) and `requests`:
`t` in seconds from the session's start, `type` ("n", "s", or "subagent" with `requests` of its own), `in`, `out`,
`hash_ids` of the whole blocks. Token counts and hashes come from different counts in the published files, so that a
prompt may be longer than its blocks: what no hash covers is taken as the request's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.replay.readers.lines import Record
from headway.replay.trace import TraceBuilder

__all__ = ["WEKA_BLOCK", "read_weka"]

WEKA_BLOCK = 64


def read_weka(sessions: Iterator[Record], builder: TraceBuilder) -> None:
    """Read sessions; all of them start at time 0, as the tool that they come from replays them.

    Raises:
        TraceError: Names the file, the line and the field.
    """
    for number, session in enumerate(sessions):
        size = session.integer("block_size", WEKA_BLOCK, least=1)
        if size != builder.width:
            raise session.fault("block_size", f"{size} where {builder.width} was expected: give --block-tokens {size}")
        shared = session.text("hash_id_scope", "local") == "global"
        _requests(session, builder, ("global",) if shared else (number,), 0.0)


def _requests(parent: Record, builder: TraceBuilder, scope: tuple[int | str], start: float) -> None:
    """The requests of a session or of a sub-agent that began at `start`.

    Times of a sub-agent's requests count from the session's start or, in some files, from the sub-agent's own: where
    one lies before the sub-agent's start it is taken as the latter.
    """
    entries = list(parent.objects("requests"))
    relative = bool(entries) and entries[0].number("t", 0.0) < start
    for entry in entries:
        time = entry.number("t", 0.0) + (start if relative else 0.0)
        if entry.has("requests"):
            _requests(entry, builder, scope, time)
        elif entry.text("type", "n") != "subagent":
            tokens, ids = entry.integer("in"), entry.ids("hash_ids", [])
            tokens = max(tokens, 1, len(ids) * builder.width)
            builder.add_long(ids, tokens, entry.integer("out", 0), time, scope=scope)
