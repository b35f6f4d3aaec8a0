"""The publisher of KV events: a thread between the engine, which must not wait, and readers, which may be slow or late.

The cache tells the engine's thread of each change. There it costs one entry in a queue; this thread finds out which
blocks became usable, and sends them. Batches are numbered. A reader that has missed a number asks for it at the replay
socket, as it does in vLLM.

What can go wrong, and what is done about it:

- A reader is slow: ZeroMQ drops what does not fit into its queue. It is counted and logged, and the reader finds the
  gap, asks, and gets what it missed. Nobody else waits.
- A reader is late, or has missed more than is kept: it gets all that is usable now instead of what has happened, in the
  numbers before the latest. That begins by clearing what it knows.
- This server starts again: numbers come from the clock, so they begin above those of the run before, and the first
  batch clears what readers know of it.
- A reader has missed the last batch before a pause, or joins in one: it would learn of it with the next batch, so an
  empty one follows after a while.
- This thread does not keep up: where the queue is full, all that was told is taken back, and what is used from then on
  is told anew. Readers expect less than there is for a while.
- This thread fails: the server goes on, and the log says so.

Rejected: to number from 0, as vLLM does. Readers take the first batches of a new run for old ones and go on with what
the old run had. To keep all batches: what there is takes less memory than how it came to be.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from headway.cache import Event, PrefixCache
from headway.errors import ConfigError
from headway.server.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KvEventsConfig,
    WireEvent,
    encode_batch,
    wire_events,
)
from headway.tell.usable_blocks import Change, UsableBlocks

__all__ = ["KvEventCounts", "KvEventPublisher", "KvEventSockets"]

logger = logging.getLogger(__name__)

_GATHER_SECONDS = 0.01
"""Changes of so long become one batch: readers do not need them sooner, and each batch costs."""
_MOST_QUEUED_TOKENS = 1 << 26
"""Tokens of the prefixes in the queue: 256 MiB."""
_SNAPSHOT_BLOCKS = 4096
"""Blocks in one batch of an answer that tells all there is."""
_LOG_SECONDS = 60.0
_LINGER_MILLISECONDS = 1000
_LONGEST_ASKED = 4096
"""Bytes of a frame that a reader may send beyond the topic. Who sends more is disconnected."""
_SALTS_REMEMBERED = 65_536
_END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends an answer."""


class KvEventSockets:
    """The sockets of a publisher, open before the model is loaded: an address that is taken is told at once.

    Attributes:
        config: The options.
        live: Publishes.
        replay: Answers those who have missed something; None without.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        """Open them.

        Raises:
            ConfigError: An address that is taken, or does not exist.
        """
        self.config = config
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.PUB)
        self.replay = None if config.replay_endpoint is None else self._context.socket(zmq.ROUTER)
        try:
            for one in filter(None, (self.live, self.replay)):
                one.setsockopt(zmq.MAXMSGSIZE, _LONGEST_ASKED + len(config.topic.encode()))
            self.live.set_hwm(config.hwm)
            self.live.setsockopt(zmq.XPUB_NODROP, 1)  # what does not fit is told, not dropped
            _open(self.live, "endpoint", config.endpoint, bind=_binds(config.endpoint))
            if self.replay is not None and config.replay_endpoint is not None:
                self.replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                _open(self.replay, "replay_endpoint", config.replay_endpoint, bind=True)
        except ConfigError:
            self.close()
            raise

    def told(self) -> str:
        """Where readers find them, in words."""
        where = "at" if _binds(self.config.endpoint) else "to the reader at"
        hint = "no replay (add a replay_endpoint: who misses a batch stays wrong)"
        replay = hint if self.replay is None else f"replay at {_address(self.replay)}"
        return f"KV events {where} {_address(self.live)}, {replay}"

    def close(self, linger: int = 0) -> None:
        """Close them; what was sent may take `linger` milliseconds to leave."""
        self._context.destroy(linger)


def _binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _address(socket: Any) -> str:
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())


def _open(socket: Any, name: str, endpoint: str, *, bind: bool) -> None:
    """Bind or connect a socket.

    Raises:
        ConfigError: It cannot be.
    """
    if "[" in endpoint or "::" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint) if bind else socket.connect(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is in use: choose another port (each server of a machine needs its own)"
        else:
            why = f"cannot be used: {error.strerror}"
        raise ConfigError(f"--kv-events-config: {name} {endpoint} {why}") from error


@dataclass
class KvEventCounts:
    """Totals of a publisher.

    Attributes:
        batches: Batches sent, empty ones included.
        missed: Of these, batches that a slow reader did not get.
        replays: Answers at the replay socket.
        snapshots: Of these, answers that told all there is.
        overflows: How often the queue was full, and all that had been told was taken back.
        untold: Changes that were not told, because their salt is too long.
    """

    batches: int = 0
    missed: int = 0
    replays: int = 0
    snapshots: int = 0
    overflows: int = 0
    untold: int = 0


class _Waiting(NamedTuple):
    """An event in the queue, with what its namespace stands for."""

    event: Event
    space: str
    model: str


_RESET, _OVERFLOW = False, True
"""In the queue: the cache was emptied; the queue was full."""


class KvEventPublisher:
    """Publishes which blocks of one cache can be used.

    Attributes:
        counts: Totals; a live object, not to be changed.
        latest: Number of the latest batch.
    """

    def __init__(self, cache: PrefixCache, sockets: KvEventSockets, block_tokens: int) -> None:
        """Listen to a cache that is empty and that no thread drives yet, and begin to publish. `close` ends it.

        Args:
            cache: The cache.
            sockets: Where to; closed by `close`.
            block_tokens: Tokens of a block, if the options do not say.
        """
        self._cache, self._sockets, self._config = cache, sockets, sockets.config
        size = self._config.block_size or block_tokens
        self._blocks = UsableBlocks(size, floats=not cache.geometry.tail_tables)
        self.counts = KvEventCounts()
        self.latest = time.time_ns() // 1000
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self._config.buffer_steps)
        self._sent = 0.0
        self._warned: dict[str, float] = {}
        self._salts: dict[int, tuple[str, str] | None] = {}
        self._queue: deque[_Waiting | bool] = deque()
        self._put = self._taken = 0
        self._cleared = self._lost = self._ended = self._roused = False
        self._pipe: tuple[int, ...] = os.pipe()
        self._wake, self._rouse = self._pipe
        os.set_blocking(self._rouse, False)
        self._unsubscribe = cache.subscribe(self._hear)
        self._thread = threading.Thread(target=self._run, name="headway-kv-events", daemon=True)
        self._thread.start()

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._blocks.size

    @property
    def usable(self) -> int:
        """Blocks that are told and not taken back."""
        return len(self._blocks)

    def told(self) -> str:
        """What is published where, in words."""
        return f"{self._sockets.told()}: blocks of {self.block_size} tokens"

    def close(self) -> None:
        """Publish what waits, take all back, and end. May be called again."""
        self._unsubscribe()
        self._ended = True
        self._notify()
        self._thread.join()
        for end in self._pipe:
            os.close(end)
        self._pipe = ()

    # ---- in the engine's thread

    def _hear(self, event: Event) -> None:
        """Leave an event in the queue."""
        if self._lost or self._ended:
            return
        if getattr(event, "cause", "") == "reset":  # one of many: all of them are told as one
            if not self._cleared:
                self._cleared = True
                self._leave(_RESET)
            return
        known = self._known(event.namespace)
        if known is None:
            self.counts.untold += 1
            return
        self._cleared, size = False, len(event.prefix)
        if len(self._queue) < self._config.max_queue_size and self._put - self._taken + size <= _MOST_QUEUED_TOKENS:
            self._put += size
            self._leave(_Waiting(event, *known))
        else:
            self._lost = True
            self._leave(_OVERFLOW)

    def _leave(self, item: _Waiting | bool) -> None:
        self._queue.append(item)
        self._notify()

    def _known(self, namespace: int) -> tuple[str, str] | None:
        """Salt and model of a namespace; None if the cache does not know it by name."""
        if namespace not in self._salts:
            if len(self._salts) >= _SALTS_REMEMBERED:
                self._salts.clear()
            name = self._cache.namespace_name(namespace)
            if name is None and not self.counts.untold:
                logger.warning("KV events: a cache salt is too long to be told, nor is what is cached for it")
            self._salts[namespace] = None if name is None else (name[2], name[0])
        return self._salts[namespace]

    def _notify(self) -> None:
        if not self._roused:
            self._roused = True
            with contextlib.suppress(OSError):  # there is a byte in it already
                os.write(self._rouse, b"!")

    # ---- in the publisher's thread

    def _run(self) -> None:
        try:
            self._send([AllBlocksCleared()])
            while not self._ended:
                self._work()
            self._news()
            self._send([AllBlocksCleared()])
        except Exception:
            logger.exception("KV events end here, and the server goes on without: start it again to have them")
            self._ended = True
        finally:
            self._sockets.close(_LINGER_MILLISECONDS)

    def _work(self) -> None:
        """Wait for something to do, and do it."""
        heartbeat, replay = self._sent + self._config.heartbeat_seconds, self._sockets.replay
        waiting = [self._wake] if replay is None else [self._wake, replay]
        ready, _, _ = zmq.select(waiting, [], [], max(0.0, heartbeat - time.monotonic()))
        if replay is not None and replay in ready:
            self._answer(replay)
        if self._wake in ready:
            time.sleep(max(0.0, self._sent + _GATHER_SECONDS - time.monotonic()))
            os.read(self._wake, 64)
            self._roused = False  # before the queue is emptied: who comes later rouses again
            if events := self._news():
                self._send(events)
        elif time.monotonic() >= heartbeat:
            self._send([])

    def _news(self) -> list[WireEvent]:
        """What is to be told of the events that wait."""
        before: list[WireEvent] = []
        changes: list[Change] = []
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, _Waiting):
                self._taken += len(item.event.prefix)
                if not self._lost and (change := self._blocks.hear(*item)) is not None:
                    changes.append(change)
                continue
            self._blocks.clear()
            before, changes = [AllBlocksCleared()], []
            if item is _OVERFLOW:
                self.counts.overflows += 1
                self._lost = False
                self._warn("KV events come faster than they are published: all that was told is taken back")
        return before + wire_events(changes, self.block_size)

    def _send(self, events: Sequence[WireEvent]) -> None:
        """Publish a batch, and keep it."""
        payload, topic = encode_batch(events), self._config.topic.encode()
        self.latest += 1
        self._sent = time.monotonic()
        self._buffer.append((self.latest, payload))
        self.counts.batches += 1
        frames, live = (topic, self.latest.to_bytes(8, "big"), payload), self._sockets.live
        try:
            live.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # some reader's queue is full: the others get it
            live.setsockopt(zmq.XPUB_NODROP, 0)
            live.send_multipart(frames, zmq.NOBLOCK)
            live.setsockopt(zmq.XPUB_NODROP, 1)
            self._note_missed()

    def _note_missed(self) -> None:
        self.counts.missed += 1
        remedy = "it can ask for them at the replay endpoint" if self._sockets.replay else "give a replay_endpoint"
        self._warn("KV events: a reader is slow and has missed %d batches by now: %s", self.counts.missed, remedy)

    def _warn(self, text: str, *told: object) -> None:
        """Tell the log what readers cause, each thing once in a while."""
        now = time.monotonic()
        if now - self._warned.get(text, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._warned[text] = now
            logger.warning(text, *told)

    def _answer(self, replay: Any) -> None:
        """Send what a reader asks for: all batches from a number on, or all there is where they are not kept."""
        *envelope, asked = replay.recv_multipart()
        if len(asked) != 8 or not 1 <= len(envelope) <= 2:
            self._warn("KV events: a request for a replay is not understood: send an empty frame and 8 bytes")
            return
        start = int.from_bytes(asked, "big")
        batches: Sequence[tuple[int, bytes]] = [batch for batch in self._buffer if batch[0] >= start]
        if start < self._buffer[0][0]:
            batches = self._snapshot(start)
            self.counts.snapshots += 1
        for number, payload in batches:
            replay.send_multipart((*envelope, self._config.topic.encode(), number.to_bytes(8, "big"), payload))
        replay.send_multipart((*envelope, b"", _END, b""))
        self.counts.replays += 1

    def _snapshot(self, start: int) -> list[tuple[int, bytes]]:
        """All there is, as batches with the latest numbers, none of them before `start`."""
        events = wire_events(self._blocks.all(), self.block_size)
        parts: list[list[WireEvent]] = [[AllBlocksCleared()]]
        most = min(1 + self.usable // _SNAPSHOT_BLOCKS, self.latest - start + 1)
        each, size = -(-self.usable // most), 0
        for event in events:
            if size >= each > 0 and len(parts) < most:
                parts, size = [*parts, []], 0
            parts[-1].append(event)
            size += len(event.block_hashes) if isinstance(event, BlockStored) else 0
        first = self.latest - len(parts) + 1
        return [(first + i, encode_batch(part)) for i, part in enumerate(parts)]
