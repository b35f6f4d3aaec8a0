"""What a running cache is doing now, as one record: what the live page shows.

Everything that must be there comes from counters alone (`headway.tell.metrics`), so that the same page is served
wherever these arrive: by our server, and by vLLM's front-end, whose cache is in another process. What else a server
knows are optional parts of the record, and the page leaves out what is missing.

A hit rate since the start says little about now. So the counters are remembered every few seconds, and the record
tells the last minutes beside the whole. Whether the cache is working is judged here, once, and not in the page.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.tell.facts import WaterfallLine, waterfall_lines
from headway.tell.metrics import Values

__all__ = [
    "SAMPLE_SECONDS",
    "Board",
    "CheckpointKind",
    "LiveRecord",
    "LiveRequest",
    "Memory",
    "PrefixUse",
    "Traffic",
    "Verdict",
    "live_events",
]

SAMPLE_SECONDS = 5.0
"""From one remembered moment to the next."""
_RECENT_SECONDS = 300.0
"""What counts as now."""
_TREND_SECONDS, _TREND_STEP = 900.0, 15.0
_FEW_TOKENS = 0.05
"""Share of the prompts below which there is next to nothing to reuse."""
_GOOD, _FAIR = 0.8, 0.4
"""Shares of what could be reused from which on the cache works well, or in part."""
_EVENT_SECONDS, _STREAM_SECONDS = 1.0, 20.0
"""A stream ends after a while, so that a server that waits for its connections can end; the page asks again."""


@dataclass(frozen=True)
class Verdict:
    """Whether the cache is working.

    Attributes:
        level: `good`, `fair`, `bad`, or `none` where there is nothing to judge.
        title: In a few words.
        text: Why, and what to do.
    """

    level: str
    title: str
    text: str


@dataclass(frozen=True)
class Traffic:
    """Requests of a stretch of time, counted when they were admitted.

    Attributes:
        seconds: How long it is.
        requests: Requests.
        prompt_tokens: Tokens of their prompts.
        reused_tokens: Of these, tokens that were cached.
        share: Of the prompt tokens, those that were reused; None without requests.
        possible: Of the tokens that could have been reused, those that were; None where none could.
        lines: Where the prompt tokens went.
    """

    seconds: float
    requests: int
    prompt_tokens: int
    reused_tokens: int
    share: float | None
    possible: float | None
    lines: list[WaterfallLine]


@dataclass(frozen=True)
class Memory:
    """The pool of one rank.

    Attributes:
        block_bytes: Bytes of a block.
        states: Blocks by state: `free`, `leased` (needed by running requests), `pinned`, `evictable`.
        kinds: Blocks by what they hold: `attention`, `windows`, `states`, `running` and `free`; None if not known.
        evicted: Blocks freed by eviction since the start.
    """

    block_bytes: int
    states: dict[str, int]
    kinds: dict[str, int] | None
    evicted: int


@dataclass(frozen=True)
class CheckpointKind:
    """Checkpoints of one kind of place.

    Attributes:
        kind: Where they are taken: `prompt_end`, `junction`, ...
        kept: How many there are now; None if not known.
        taken: Taken since the start.
        reused: Of these, resumed from at least once.
        resumed: Requests that resumed from one.
        evicted: Evicted to make room.
        evicted_unused: Of these, never resumed from.
    """

    kind: str
    kept: int | None
    taken: int
    reused: int
    resumed: int
    evicted: int
    evicted_unused: int


@dataclass(frozen=True)
class PrefixUse:
    """A part of prompts that follow the same text, and what became of its tokens.

    Attributes:
        name: A name without a meaning, as long as the server runs.
        start: Its first token.
        stop: The token after its last.
        requests: Requests whose prompts have it.
        reused_tokens: Tokens of it that were cached.
        lost_tokens: Tokens of it that were computed again, though the cache had known them.
        reason: Why most of these were lost, or "".
        text: How it begins, where all may know; else "".
    """

    name: str
    start: int
    stop: int
    requests: int
    reused_tokens: int
    lost_tokens: int
    reason: str
    text: str


@dataclass(frozen=True)
class LiveRequest:
    """A request that runs.

    Attributes:
        number: Its place in the order of arrival, since the start.
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Of these, tokens that were cached.
        computed_tokens: Tokens of prompt and answer that are computed.
        answer_tokens: Tokens of its answer so far.
        max_tokens: Most tokens that its answer may have.
        seconds: Since it arrived.
        preemptions: How often it gave way.
    """

    number: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    answer_tokens: int
    max_tokens: int
    seconds: float
    preemptions: int


@dataclass(frozen=True)
class LiveRecord:
    """What there is to see of a running cache.

    Attributes:
        server: Who serves, with the release.
        model: Name of the model.
        seconds: Since counting began.
        unavailable: Why no request can be computed now, or "".
        verdict: Whether the cache is working.
        recent: The last minutes.
        total: All since counting began.
        trend: Share of the prompt tokens that was reused, per 15 seconds, the latest last; None without requests.
        memory: What the pool holds.
        checkpoints: By kind, the most frequent first; empty for a model that needs none.
        running: Requests that run; None if not known.
        waiting: Requests that wait; None if not known.
        tokens_per_second: Tokens of answers in the last minute; None if not known.
        requests: Those that run, the oldest first, or some of them; None if not known.
        saving: The parts of prompts of which most tokens were reused, the best first; None if not known or not told.
        costing: Those of which most were computed again, the worst first; None if not known or not told.
    """

    server: str
    model: str
    seconds: float
    unavailable: str
    verdict: Verdict
    recent: Traffic
    total: Traffic
    trend: list[float | None]
    memory: Memory
    checkpoints: list[CheckpointKind]
    running: int | None = None
    waiting: int | None = None
    tokens_per_second: float | None = None
    requests: list[LiveRequest] | None = None
    saving: list[PrefixUse] | None = None
    costing: list[PrefixUse] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Sample:
    """Totals at one moment."""

    time: float
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated: int | None = None
    lost: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, values: Values, time: float) -> _Sample:
        counts = {name: sum(values[name].values()) for name in values}
        return cls(
            time,
            counts.get("requests_admitted", 0),
            counts.get("prompt_tokens", 0),
            counts.get("prompt_hit_tokens", 0),
            counts.get("generation_tokens"),
            Counter(values.get("prompt_lost_tokens", {})),
        )


class Board:
    """Remembers the counters of a cache and makes records of them. One thread at a time.

    Attributes:
        model: Name of the model.
    """

    def __init__(self, server: str, model: str, now: float, *, reuses: bool = True) -> None:
        """Nothing is known yet.

        Args:
            server: Who serves, with the release.
            model: Name of the model.
            now: Seconds of a monotonic clock, as in all calls.
            reuses: Whether the server reuses anything, or was told not to.
        """
        self._server, self.model, self._reuses = server, model, reuses
        self._values: Values = {}
        self._first = _Sample(now)
        self._samples = deque([self._first])

    def add(self, values: Values, now: float) -> None:
        """Take the totals and levels of a moment."""
        self._values = values
        while len(self._samples) > 1 and self._samples[1].time < now - _TREND_SECONDS:
            self._samples.popleft()
        if now >= self._samples[-1].time + SAMPLE_SECONDS:
            self._samples.append(_Sample.of(values, now))

    def record(
        self,
        now: float,
        *,
        kinds: dict[str, int] | None = None,
        kept: dict[str, int] | None = None,
        unavailable: str = "",
        **known: Any,
    ) -> LiveRecord:
        """What there is to see at a moment.

        Args:
            now: The moment.
            kinds: Blocks by what they hold, if that is known.
            kept: Checkpoints by kind, if that is known.
            unavailable: Why no request can be computed, or "".
            known: Other optional parts of the record.
        """
        latest = _Sample.of(self._values, now)
        recent, total = _traffic(self._at(now - _RECENT_SECONDS), latest), _traffic(self._first, latest)
        states = {"free": 0, "leased": 0, "pinned": 0, "evictable": 0} | dict(self._values.get("blocks", {}))
        memory = Memory(self._number("block_bytes"), states, kinds, self._number("blocks_evicted"))
        before = self._at(now - 60.0)
        if latest.generated is not None:
            known["tokens_per_second"] = (latest.generated - (before.generated or 0)) / max(1.0, now - before.time)
        return LiveRecord(
            self._server,
            self.model,
            now - self._first.time,
            unavailable,
            _verdict(recent if recent.requests else total, unavailable, reuses=self._reuses),
            recent,
            total,
            self._trend(latest),
            memory,
            self._checkpoints(kept),
            **known,
        )

    def _number(self, name: str) -> int:
        return self._values.get(name, {}).get("", 0)

    def _at(self, time: float) -> _Sample:
        """The totals as of `time`: those of the last sample before it, or of the first one."""
        return next((one for one in reversed(self._samples) if one.time <= time), self._samples[0])

    def _trend(self, latest: _Sample) -> list[float | None]:
        shares: list[float | None] = []
        span = min(_TREND_SECONDS, latest.time - self._first.time)
        for back in range(int(span // _TREND_STEP), 0, -1):
            start = self._at(latest.time - back * _TREND_STEP)
            stop = self._at(latest.time - (back - 1) * _TREND_STEP) if back > 1 else latest
            asked = stop.prompt_tokens - start.prompt_tokens
            shares.append((stop.hit_tokens - start.hit_tokens) / asked if asked else None)
        return shares

    def _checkpoints(self, kept: dict[str, int] | None) -> list[CheckpointKind]:
        counts = ("taken", "reused", "", "evicted", "evicted_unused")
        tables = [self._values.get(f"checkpoints_{name}" if name else "resumed", {}) for name in counts]
        taken = tables[0]
        return [
            CheckpointKind(kind, None if kept is None else kept.get(kind, 0), *(table.get(kind, 0) for table in tables))
            for kind in sorted(taken, key=lambda kind: (-taken[kind], kind))
        ]


def _traffic(start: _Sample, stop: _Sample) -> Traffic:
    """What came between two moments."""
    asked, reused = stop.prompt_tokens - start.prompt_tokens, stop.hit_tokens - start.hit_tokens
    lines = waterfall_lines(asked, reused, stop.lost - start.lost)
    possible = reused + sum(line.tokens for line in lines if line.kind == "lost")
    return Traffic(
        stop.time - start.time,
        stop.requests - start.requests,
        asked,
        reused,
        reused / asked if asked else None,
        reused / possible if possible else None,
        lines,
    )


def _verdict(traffic: Traffic, unavailable: str, *, reuses: bool) -> Verdict:
    """Whether the cache gave what it could. New text is nobody's fault: it is judged by what could be reused."""
    if unavailable:
        return Verdict("bad", "No request can be computed", unavailable)
    if not reuses:  # then nothing is kept, and every token looks new
        return Verdict("none", "Prefix reuse is off", "Every prompt is computed anew: leave out --no-prefix-reuse.")
    if traffic.share is None:
        return Verdict("none", "No requests yet", "Send one, and send it again: then the cache has something to show.")
    new = sum(line.share for line in traffic.lines if line.kind == "new")
    losses = [line for line in traffic.lines if line.kind == "lost"]
    if traffic.possible is None or 1 - new < _FEW_TOKENS:
        text = (
            f"{new:.0%} of the prompt tokens are new: nothing that may be reused begins like them. Prompts that begin "
            "alike share, unless their salts differ or no_store keeps nothing of them."
        )
        return Verdict("none", "Nothing to reuse", text)
    could = f"{traffic.possible:.0%} of what could be reused is reused"
    if traffic.possible >= _GOOD:
        return Verdict("good", "The cache is working", f"{could}; {new:.0%} of the prompt tokens are new.")
    worst = losses[0]
    text = f"{could}. The largest loss is {worst.name}, {worst.share:.0%} of the prompt tokens: {worst.meaning}."
    text += f" To mend it: {worst.remedy}." if worst.remedy else ""
    if traffic.possible >= _FAIR:
        return Verdict("fair", "The cache works in part", text)
    return Verdict("bad", "The cache loses most of what it could reuse", text)


async def live_events(
    read: Callable[[], LiveRecord], ended: Callable[[], bool] = lambda: False
) -> AsyncIterator[bytes]:
    """Server-sent events with a record each, one per second, for a while.

    Args:
        read: Makes a record; called in another thread.
        ended: Whether to end at once, since the server does.
    """
    for _ in range(int(_STREAM_SECONDS / _EVENT_SECONDS)):
        record = await asyncio.to_thread(read)
        yield b"data: " + json.dumps(record.as_dict(), separators=(",", ":")).encode() + b"\n\n"
        if ended():
            return
        await asyncio.sleep(_EVENT_SECONDS)
