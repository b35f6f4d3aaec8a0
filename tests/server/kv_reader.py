"""A reader of KV events that shares nothing with their publisher: it knows vLLM's records, and what routers do.

`Index` counts blocks, as routers do; it refuses what would harm one of them. With the field `checkpoints`, which others
ignore, it also finds where a prompt resumes exactly. `Reader` is the connection: it notices gaps and asks for a replay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    checkpoints: list[dict[str, Any]] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    checkpoints: list[dict[str, Any]] | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)
MESSAGES = msgspec.msgpack.Decoder()


@dataclass
class Index:
    """Blocks by their hashes, each behind its parent."""

    size: int
    blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = field(default_factory=dict)
    points: dict[int, dict[str, Any]] = field(default_factory=dict)

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.points.clear()
                continue
            assert (event.medium, event.group_idx) == ("GPU", 0), "a removal names what the store named (E10, E12, E13)"
            if isinstance(event, BlockStored):
                self._store(event)
            for name in event.block_hashes if isinstance(event, BlockRemoved) else ():
                del self.blocks[name]  # told before, and once
            for told in event.checkpoints or ():
                if "removed" in told:
                    del self.points[told["id"]]
                else:
                    self.points[told["id"]] = told
        parents = {parent for parent, _, _ in self.blocks.values()} - {None}
        assert parents <= self.blocks.keys(), "a block in the middle was removed, or its parent was never stored"
        assert all(told["block"] is None or told["block"] in self.blocks for told in self.points.values())

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert size == self.size, "one block size"
        assert len(event.token_ids) == size * len(event.block_hashes) > 0, "no placeholders (E11)"
        assert event.kv_cache_spec_kind == "full_attention"
        assert parent is None or parent in self.blocks
        for i, name in enumerate(event.block_hashes):
            assert 0 <= name < 2**64
            assert name not in self.blocks, "no block is stored twice (E9)"
            self.blocks[name] = parent, tuple(event.token_ids[i * size : (i + 1) * size]), event.cache_salt or ""
            parent = name

    def _children(self) -> dict[tuple[int | None, tuple[int, ...], str], int]:
        return {place: name for name, place in self.blocks.items()}

    def overlap(self, tokens: Sequence[int], salt: str = "") -> int:
        """What a router expects to be reused: whole blocks from the beginning on."""
        children, name, end = self._children(), None, 0
        while (found := children.get((name, tuple(tokens[end : end + self.size]), salt))) is not None:
            name, end = found, end + self.size
        return end

    def path(self, name: int | None) -> list[int]:
        """All tokens up to the end of a block."""
        parts: list[tuple[int, ...]] = []
        while name is not None:
            name, tokens, _ = self.blocks[name]
            parts.append(tokens)
        return [token for part in reversed(parts) for token in part]

    def resume(self, tokens: Sequence[int], salt: str = "") -> int:
        """Where a prompt resumes in a model with checkpoints."""
        best = 0
        for told in self.points.values():
            if told.get("cache_salt", "") == salt:
                text = [*self.path(told["block"]), *told["tail"]]
                common = next((i for i, pair in enumerate(zip(text, tokens, strict=False)) if pair[0] != pair[1]), None)
                common = min(len(text), len(tokens)) if common is None else common
                ahead = len(text) - told["position"]
                place = min(common - ahead, told["position"], len(tokens) - 1)
                if place >= told["first"]:
                    best = max(best, place)
        return best


class Reader:
    """A connection to a publisher."""

    def __init__(self, size: int, live: str, replay: str | None, **options: int) -> None:
        self.index, self.last = Index(size), -1
        self.batches: list[tuple[int, Batch]] = []
        self.replays = 0
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        for name, value in options.items():
            self.live.setsockopt(getattr(zmq, name), value)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.live.setsockopt(zmq.RCVTIMEO, 20_000)
        self.live.connect(live)
        self.ask = self._context.socket(zmq.DEALER)
        self.ask.setsockopt(zmq.RCVTIMEO, 20_000)
        self._replay = replay
        if replay is not None:
            self.ask.connect(replay)

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Ask for the batches from a number on."""
        self.replays += 1
        self.ask.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            empty, topic, number, payload = self.ask.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return
            yield int.from_bytes(number, "big"), payload

    def receive(self) -> Batch:
        """The next live batch, after those before it that were missed."""
        _, number, payload = self.live.recv_multipart()
        sequence, batch = int.from_bytes(number, "big"), DECODER.decode(payload)
        if sequence > self.last + 1 and self._replay is not None:
            for missed, what in list(self.replay(self.last + 1)):
                self._apply(missed, DECODER.decode(what))
        if sequence > self.last:
            self._apply(sequence, batch)
        return batch

    def _apply(self, sequence: int, batch: Batch) -> None:
        assert sequence > self.last
        self.last = sequence
        self.batches.append((sequence, batch))
        self.index.apply(batch)

    def catch_up(self) -> Index:
        """Read on until two empty batches, one after the other, were made after now: all before them was told."""
        now, quiet = time.time(), 0
        while quiet < 2:
            batch = self.receive()
            quiet = quiet + 1 if not batch.events and batch.ts > now else 0
        return self.index

    def close(self) -> None:
        self._context.destroy(0)


@contextmanager
def reading(size: int, live: str, replay: str | None = None, **options: int) -> Iterator[Reader]:
    reader = Reader(size, live, replay, **options)
    try:
        yield reader
    finally:
        reader.close()
