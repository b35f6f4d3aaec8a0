"""What is written to disks and shared stores, and when.

A checkpoint is written when it is taken (`through`), when a request comes back to it for the first time (`selective`),
or when it is about to be evicted from the slowest memory of blocks (`back`), and in any case when the server ends. What
is to be written waits here until the engine has time between two steps; then its blocks are read, and everything else
happens on other threads. Whatever is gone by then is not written.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache import CheckpointStored, Event, HeldBlocks, PrefixCache, Prompt, ResidentGrown, Spill
from headway.engine.errors import RanksLostError
from headway.engine.scheduling.object_moves import ObjectMoves
from headway.tiers import Namespace, ObjectTiers, Rates, Span

__all__ = ["ObjectWriter", "WriterCounters"]

logger = logging.getLogger(__name__)


_MOST_WAITING = 64 << 20
"""Bytes of the paths of checkpoints that wait to be read, beyond which the oldest are given up."""
Ids = NDArray[np.int32]


@dataclass
class WriterCounters:
    """What became of checkpoints that were to be written.

    Attributes:
        read: Checkpoints whose blocks were read.
        read_bytes: Bytes of theirs that tiers lacked.
        gone: Checkpoints that went before they were read, or had to wait too long.
        failed: Checkpoints whose blocks could not be read.
    """

    read: int = 0
    read_bytes: int = 0
    gone: int = 0
    failed: int = 0


@dataclass(eq=False)
class ObjectWriter:
    """Reads what is to be written from blocks.

    Attributes:
        caches: The device's cache, and that of host memory behind it if there is one.
        objects: Where it is written.
        moves: Reads blocks.
        rates: What computing takes, for what a checkpoint is worth.
        when: `through`, `selective` or `back`.
        counters: What became of it.
    """

    caches: tuple[PrefixCache, ...]
    objects: ObjectTiers
    moves: ObjectMoves
    rates: Rates
    when: str = "through"
    counters: WriterCounters = field(default_factory=WriterCounters)
    _waiting: OrderedDict[tuple[int, bytes], int] = field(default_factory=OrderedDict)
    _waiting_bytes: int = 0

    def __post_init__(self) -> None:
        """Listen to what is taken, or to what goes."""
        self._ahead = self.caches[0].geometry.lookahead
        if self.when == "through":
            self.caches[0].subscribe(self._stored)
        elif self.when == "back":
            self.caches[-1].spill(self._spilled)

    @property
    def waiting(self) -> int:
        """Checkpoints that wait to be read."""
        return len(self._waiting)

    def name(self, namespace: int) -> Namespace | None:
        """A namespace as tiers know it: by a digest, as names are long and private; None if it is forgotten."""
        digest = self.caches[0].namespace_digest(namespace)
        return None if digest is None else ("", "", digest.hex())

    # ---- what is to be written

    def add(self, namespace: int, prefix: bytes, position: int) -> None:
        """Write the checkpoint at `position` of a path; `prefix`: its tokens, with the lookahead."""
        self._drop(namespace, prefix)
        self._waiting[namespace, prefix] = position
        self._waiting_bytes += len(prefix)
        while self._waiting_bytes > _MOST_WAITING:
            self._drop(*next(iter(self._waiting)))
            self.counters.gone += 1

    def _drop(self, namespace: int, prefix: bytes) -> None:
        """Let a checkpoint wait no more, if it does."""
        if self._waiting.pop((namespace, prefix), None) is not None:
            self._waiting_bytes -= len(prefix)

    def wanted(self, prompt: Prompt, position: int) -> None:
        """A request came back to the checkpoint at `position` of its prompt."""
        if self.when == "selective" and not prompt.no_store:
            self.add(prompt.namespace, prompt.data[: 4 * (position + self._ahead)], position)

    def _stored(self, event: Event) -> None:
        if isinstance(event, CheckpointStored):
            self.add(event.namespace, event.prefix.tobytes(), event.position)
        elif isinstance(event, ResidentGrown) and self.objects.layout.resumes_anywhere:
            grown = event.prefix.tobytes()
            before = grown[: 4 * (event.start + self._ahead)]
            self._drop(event.namespace, before)  # the path goes on: its longer part has all of it
            self.add(event.namespace, grown, event.position)

    def _spilled(self, spill: Spill) -> None:
        try:
            self._write(spill.namespace, spill.prefix.tobytes(), spill.blocks, host=len(self.caches) > 1)
        except Exception:
            self.counters.failed += 1
            logger.exception("reading what is evicted failed: it is lost")

    # ---- reading it

    def work(self, most_bytes: int) -> None:
        """Read of what waits, the oldest first, until about `most_bytes` were read.

        Raises:
            RanksLostError: The ranks are gone.
        """
        while self._waiting and most_bytes > 0:
            (namespace, prefix), position = next(iter(self._waiting.items()))
            self._drop(namespace, prefix)
            try:
                most_bytes -= self._read(namespace, prefix, position)
            except RanksLostError:
                raise
            except Exception:
                self.counters.failed += 1
                logger.exception("reading a checkpoint failed: it is not written")

    def _read(self, namespace: int, prefix: bytes, position: int) -> int:
        name = self.name(namespace)
        spans = [] if name is None else self.objects.wants(name, prefix, position)
        if name is None or not spans:
            return 0
        tokens = np.frombuffer(prefix, dtype=np.int32)
        more = len(tokens) > position
        prompt = Prompt(tokens if more else np.append(tokens, np.int32(0)), namespace=namespace)
        for number, cache in enumerate(self.caches):
            hit = cache.lookup(prompt)
            if hit.tokens != position:
                continue
            held = cache.hold_hit(hit)
            try:
                return self._put(name, prefix, held, spans, host=number > 0)
            finally:
                cache.release_hit(held)
        self.counters.gone += 1
        return 0

    def _write(self, namespace: int, prefix: bytes, held: HeldBlocks, *, host: bool) -> int:
        name = self.name(namespace)
        spans = [] if name is None else self.objects.wants(name, prefix, held.tokens)
        return 0 if name is None or not spans else self._put(name, prefix, held, spans, host=host)

    def _put(self, name: Namespace, prefix: bytes, held: HeldBlocks, spans: Sequence[Span], *, host: bool) -> int:
        """Read what tiers lack of a checkpoint, and have it written. Returns the bytes."""
        pieces = self.moves.read(spans, held, host=host)
        worth = self.caches[0].config.cost.between(0, held.tokens) * (self.rates.per_compute or 1.0)
        self.objects.put(name, prefix, held.tokens, held.kind, worth * (1 + held.past.uses), pieces)
        size = sum(len(data) for data in pieces.values())
        self.counters.read += 1
        self.counters.read_bytes += size
        return size

    # ---- the end

    def write_all(self, until: float) -> None:
        """Let everything that is kept be written, what is worth most first, until a time (seconds, monotonic)."""
        self.forget()
        for number, cache in enumerate(self.caches):
            for spill in cache.kept():
                if (left := until - time.monotonic()) < 0:
                    return
                what = (spill.namespace, spill.prefix.tobytes(), spill.blocks)
                refused = self.objects.stats().refused_writes
                self._write(*what, host=number > 0)
                if self.objects.stats().refused_writes > refused and self.objects.flush(left):
                    self._write(*what, host=number > 0)  # too much waited to be written

    def forget(self) -> None:
        """What waits is forgotten."""
        self._waiting.clear()
        self._waiting_bytes = 0
