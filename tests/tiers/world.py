"""A small model's objects, and the few steps that every test of tiers takes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from headway.tiers import Loaded, Namespace, ObjectGroup, ObjectLayout, ObjectTiers, Place, Span, TierConfig
from headway.tiers.store import Store

KEY = b"k" * 32
NAME: Namespace = ("model", "", "")
SECONDS = 60.0
"""How long a test waits for what comes at once."""

HYBRID = ObjectLayout(
    b"weights 1",
    (
        ObjectGroup("full", "prefix", 8),
        ObjectGroup("window-6", "window", 4, window=6),
        ObjectGroup("chunk-5", "chunk", 4, chunk=5),
        ObjectGroup("state", "state", 64),
    ),
    stretch=8,
)
ATTENTION = ObjectLayout(b"weights 2", (ObjectGroup("full", "prefix", 8), ObjectGroup("mla", "prefix", 4)), stretch=8)


def tier(name: str = "disk", **more: Any) -> TierConfig:
    """A tier that is patient even where the machine is busy, unless it is told otherwise."""
    return TierConfig(name, **{"patience": 60.0, **more})


def tokens(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32).tobytes()


def content(layout: ObjectLayout, data: bytes, span: Span) -> bytes:
    """What an object must hold: it depends on its group, its span, and all tokens before its end."""
    stop = 4 * (span.stop + layout.lookahead)
    return hashlib.shake_128(f"{span} ".encode() + data[:stop]).digest(layout.length(span))


class World:
    """`ObjectTiers` and what a test does with it."""

    def __init__(self, *tiers: tuple[TierConfig, Store], layout: ObjectLayout = HYBRID, **more: int) -> None:
        self.layout = layout
        self.tiers = ObjectTiers(layout, KEY, tiers, **more)
        assert self.tiers.scanned(SECONDS)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.tiers.close(SECONDS)

    def pieces(self, data: bytes, spans: Sequence[Span]) -> Mapping[Span, bytes]:
        return {span: content(self.layout, data, span) for span in spans}

    def put(
        self, data: bytes, position: int, name: Namespace = NAME, worth: float = 1.0, wait: bool = True
    ) -> list[Span]:
        """Write what is wanted of a checkpoint."""
        wanted = self.tiers.wants(name, data, position)
        if wanted:
            assert self.tiers.put(name, data, position, "end", worth, self.pieces(data, wanted))
        if wait:
            assert self.tiers.flush(SECONDS)
        return wanted

    def positions(self, data: bytes, floor: int = 0, limit: int = 1 << 30, name: Namespace = NAME) -> list[int]:
        return [place.position for place in self.tiers.find(name, data, floor, limit)]

    def deepest(self, data: bytes, floor: int = 0, limit: int = 1 << 30, name: Namespace = NAME) -> Place:
        return self.tiers.find(name, data, floor, limit)[-1]

    def start(self, place: Place, floor: int = 0, seconds: float = SECONDS) -> Future[Loaded]:
        future: Future[Loaded] = Future()
        self.tiers.load(place, floor, future.set_result, seconds)
        return future

    def load(
        self, data: bytes, floor: int = 0, limit: int = 1 << 30, name: Namespace = NAME, seconds: float = SECONDS
    ) -> Loaded:
        """Load the deepest place, and check every byte of what comes."""
        loaded = self.start(self.deepest(data, floor, limit, name), floor, seconds).result(SECONDS)
        self.check(data, loaded, floor)
        return loaded

    def check(self, data: bytes, loaded: Loaded, floor: int = 0) -> None:
        """Whatever was restored is whole and right."""
        spans = [Span(piece.group, piece.first, piece.stop) for piece in loaded.pieces]
        assert len(set(spans)) == len(spans)
        for piece, span in zip(loaded.pieces, spans, strict=True):
            assert bytes(piece.data) == content(self.layout, data, span), span
        if loaded.position == floor:
            assert not spans
            return
        size, groups = self.layout.stretch, self.layout.groups
        for group in groups:
            have = {t for span in spans if span.group == group.name for t in range(span.first, span.stop)}
            if group.kind == "prefix":
                assert have.issuperset(range(floor // size * size, loaded.position))
            elif group.kind == "state":
                assert Span(group.name, loaded.position, loaded.position) in spans
            else:
                assert have.issuperset(range(group.tail(loaded.position), loaded.position))

    def search(self, data: bytes, floor: int = 0, limit: int = 1 << 30, name: Namespace = NAME) -> list[int]:
        asked = threading.Event()
        if self.tiers.search(name, data, floor, limit, asked.set, SECONDS):
            assert asked.wait(SECONDS)
        return self.positions(data, floor, limit, name)


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for what another thread does soon and does not tell."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it did not happen")
