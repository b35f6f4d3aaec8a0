"""`ObjectTiers`: checkpoints below the device and host memory, on disks and in shared stores.

tiers = ObjectTiers(layout, key, [(TierConfig("disk", capacity=200 << 30), DiskStore("/var/cache/headway"))])
places = tiers.find(namespace, data, floor=1024, limit=len(data) // 4 - 1)      # from memory, cheap
load = tiers.load(places[-1], 1024, done)                                      # `done(Loaded)`: another thread
missing = tiers.wants(namespace, data, position)                               # what a tier lacks of a checkpoint
tiers.put(namespace, data, position, "end", 3.2, {span: bytes_of(span) for span in missing})

A path's objects may come from several tiers at once: a place takes each from the first tier that has it. `find`
answers from memory of what is there; where others write too, `search` asks the store first. What it says is no
promise: the verdict comes with the load, which checks every byte.

Positions count entries. With a lookahead of L, a checkpoint at p is found on paths that agree on p + L tokens. Tokens
below zero stand for media and mean something else in every process, so paths end before the first for all tiers.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from headway.errors import ConfigError, HeadwayError
from headway.tiers.catalogue import Entry, Path
from headway.tiers.loading import Key, Load, Loaded, Loader, Place, Wanted
from headway.tiers.objects import (
    Manifest,
    Namespace,
    ObjectLayout,
    PathDigests,
    Span,
    usable_tokens,
)
from headway.tiers.scanning import Scanner
from headway.tiers.searching import Search
from headway.tiers.store import Buffer, Store
from headway.tiers.tier import Tier, TierConfig, TierStats
from headway.tiers.workers import Clock
from headway.tiers.writing import Backlog, Write, Writer

__all__ = ["IncompleteError", "ObjectTiers", "TiersStats"]

_PATHS_KEPT = 32
"""Digests of the latest paths are kept: a request asks about its path several times."""
_NAMESPACES_KEPT = 1024
_TRIED = 8
"""Of so many lookups for which asking a store does not pay, one asks."""


class IncompleteError(HeadwayError):
    """Something was to be forgotten, and a tier did not say that it is gone. This server does not offer it any more."""


@dataclass(frozen=True)
class TiersStats:
    """What goes on in all tiers.

    Attributes:
        tiers: Of each tier, in their order.
        loads: Loads under way.
        staging_bytes: Staging memory in use.
        staging_capacity: Staging memory there is.
        backlog_bytes: Bytes that wait to be written.
        backlog_capacity: Bytes that may.
        refused_writes: Checkpoints that were not written because the backlog was full.
    """

    tiers: tuple[TierStats, ...]
    loads: int
    staging_bytes: int
    staging_capacity: int
    backlog_bytes: int
    backlog_capacity: int
    refused_writes: int


class ObjectTiers:
    """See the module. All methods may be called by any thread; none but `close` waits for a store."""

    def __init__(
        self,
        layout: ObjectLayout,
        key: bytes,
        tiers: Sequence[tuple[TierConfig, Store]],
        staging: int = 1 << 30,
        backlog: int = 1 << 30,
    ) -> None:
        """Open tiers, the quickest first. The stores are closed by `close`.

        Args:
            layout: What the model stores.
            key: From `store_key`.
            tiers: How each is used, and where its bytes are.
            staging: Bytes of memory for loads, taken when they are needed.
            backlog: Bytes that may wait to be written.

        Raises:
            ConfigError: Two tiers of one name, or a layout without identity or groups.
        """
        names = [config.name for config, _ in tiers]
        if len(set(names)) != len(names):
            raise ConfigError(f"tiers need different names, not {', '.join(names)}")
        if not layout.identity or not layout.groups or layout.stretch < 1:
            raise ConfigError("a layout needs the identity of its weights, a group, and stretches of a token or more")
        self.layout = layout
        self._key = key
        self._lock = threading.RLock()
        self._clock = Clock()
        self._tiers = [Tier(config, store, layout, self._lock, self._clock) for config, store in tiers]
        self._writers = {tier.config.name: Writer(tier, layout, key) for tier in self._tiers}
        self._loader = Loader(staging, self._clock, lambda tier, names: self._writers[tier.config.name].remove(names))
        self._backlog = Backlog(backlog, self._lock)
        self._refused = 0
        self._root = layout.digest(key).hex()
        self._folders: OrderedDict[Namespace, str] = OrderedDict()
        self._paths: OrderedDict[tuple[str, bytes], PathDigests] = OrderedDict()
        self._scanners = [Scanner(tier, layout, key, self._writers[tier.config.name]) for tier in self._tiers]
        self._closed = False

    # ---- reading

    def find(self, namespace: Namespace, data: bytes, floor: int, limit: int) -> list[Place]:
        """The positions in (floor, limit] that a load can restore, as far as is known, ascending.

        Args:
            namespace: Model, adapter, salt.
            data: The tokens of the path, int32.
            floor: Tokens that the caller has already.
            limit: The deepest position of use.

        Returns:
            Places that take nothing from tiers that are switched off, and nothing that failed lately.

        No I/O. O(tokens) for the first question about a path, then O(stretches + positions).
        """
        with self._lock:
            folder, digests = self._path(namespace, data)
            return self._places(folder, digests, data, floor, limit, frozenset()) if limit > floor else []

    def search(
        self,
        namespace: Namespace,
        data: bytes,
        floor: int,
        limit: int,
        done: Callable[[], None],
        seconds: float = 1.0,
        computing: float = math.inf,
    ) -> bool:
        """Ask the tiers that others write to as well what they have of a path; then `find` knows it.

        Args:
            namespace: Model, adapter, salt.
            data: The tokens of the path, int32.
            floor: Tokens that the caller has already.
            limit: The deepest position of use.
            done: Called once, from another thread, when all have answered or so many seconds have passed.
            seconds: See `done`.
            computing: Seconds that computing from `floor` to `limit` takes. A tier whose answers save less of that than
                they take, as they did lately, is not asked; but now and then, without anyone waiting for it.

        Returns:
            False if there is no such tier to ask now: then `done` is not called, and `find` knows all.
        """
        shared = [tier for tier in self._tiers if tier.config.shared and tier.usable]
        if not shared or self._closed:
            return False
        asked = [tier for tier in shared if tier.worth_asking(computing)]
        tried = [tier for tier in shared if tier not in asked and tier.counts["unasked"] % _TRIED == 0]
        with self._lock:
            folder, digests = self._path(namespace, data)
        for tiers, told in ((asked, done), (tried, lambda: None)):
            if tiers:
                search = Search(tiers, self.layout, self._key, self._lock, folder, digests, floor, limit)
                search.start(told, self._clock, seconds)
        return bool(asked)

    def load(self, place: Place, floor: int, done: Callable[[Loaded], None], seconds: float = 30.0) -> Load:
        """Fetch all objects of a place, from the stretch that `floor` is in on. They are not evicted until it ends.

        Args:
            place: From `find`.
            floor: Tokens that the caller has; not less than `find` was told.
            done: Called once, from another thread, in any case: after a success, lowered, with nothing, or after
                `Load.cancel`. It should be quick. What it is given must be released (`Loaded.release`).
            seconds: How long it may take. What is whole by then is what it ends with.

        Returns:
            The load, which can be cancelled.
        """
        with self._lock:
            return self._loader.start(place, floor, done, seconds)

    # ---- writing

    def wants(self, namespace: Namespace, data: bytes, position: int) -> list[Span]:
        """What tiers lack of a checkpoint, and `put` needs for it. Empty if there is nothing to do, or no room for it.

        What is being written counts as there. No I/O.
        """
        with self._lock:
            if not 0 < position <= usable_tokens(data) - self.layout.lookahead or self._closed:
                return []
            folder, digests = self._path(namespace, data)
            spans = self._lacking(folder, digests, position)
            size = sum(self.layout.length(span) for span in spans)
            if self._backlog.used + size > self._backlog.capacity:
                self._refused += 1
                return []
            return spans

    def put(
        self,
        namespace: Namespace,
        data: bytes,
        position: int,
        kind: str,
        worth: float,
        pieces: Mapping[Span, Buffer],
    ) -> bool:
        """Write a checkpoint to all tiers that lack something of it, in the background.

        Args:
            namespace: Model, adapter, salt.
            data: The tokens of the path, int32, at least `position` and the lookahead.
            position: The checkpoint's position.
            kind: The kind of placement that took it.
            worth: Expected seconds that keeping it saves; what is worth least per byte is evicted first.
            pieces: The bytes for all that `wants` named. They are kept, not copied, until they are written.

        Returns:
            False if the backlog is full: then nothing is written, and the bytes are not kept.

        Raises:
            ConfigError: Bytes of another length than the layout says.
        """
        for span, buffer in pieces.items():
            if len(memoryview(buffer).cast("B")) != self.layout.length(span):
                raise ConfigError(f"{span} has {len(buffer)} bytes, the layout says {self.layout.length(span)}")
        size = sum(self.layout.length(span) for span in pieces)
        with self._lock:
            if self._closed or not self._backlog.take(size):
                self._refused += 1
                return False
            folder, digests = self._path(namespace, data)
            flat = {Span(*span): memoryview(buffer).cast("B") for span, buffer in pieces.items()}
            write = Write(folder, digests, position, kind, worth, flat, lambda: self._backlog.give(size))
            for tier in self._accepting(position):
                self._writers[tier.config.name].begin(write)
            if not write.tiers:
                write.free()
        return True

    # ---- forgetting

    def forget(self, namespace: Namespace, data: bytes) -> Future[None]:
        """Forget all checkpoints whose path begins with `data`, and those on it as far back as no other path shares it.

        From now on `find` offers nothing of it, and loads of it under way end with nothing.

        Returns:
            Done when every tier has removed it; with an `IncompleteError` that names the tiers that did not.
        """
        with self._lock:
            folder, digests = self._path(namespace, data)
            return self._forgotten(folder, data, digests, self._drop(folder, data, digests))

    def forget_namespace(self, namespace: Namespace) -> Future[None]:
        """Forget a namespace, as `forget` does."""
        with self._lock:
            folder = self._folder(namespace)
            return self._forgotten(folder, None, None, self._drop(folder, None, None))

    def reset(self) -> Future[None]:
        """Forget everything of this layout, what other servers wrote included, as `forget` does."""
        with self._lock:
            folders = {entry.folder for tier in self._tiers for entry in tier.catalogue.entries()}
            gone: dict[str, list[str]] = {tier.config.name: [] for tier in self._tiers}
            for folder in folders:
                for name, names in self._drop(folder, None, None).items():
                    gone[name] += names
            return self._forgotten(self._root, None, None, gone)

    # ---- the rest

    def scanned(self, seconds: float) -> bool:
        """Wait until every tier that is this server's own has been looked through once; False if it takes longer."""
        until = time.monotonic() + seconds
        own = [s for s, tier in zip(self._scanners, self._tiers, strict=True) if not tier.config.shared]
        return all(scanner.wait(max(0.0, until - time.monotonic())) for scanner in own)

    def flush(self, seconds: float) -> bool:
        """Wait until everything that was put is written or given up; False if it takes longer."""
        ended = threading.Event()
        left = [len(self._writers)]

        def count() -> None:
            left[0] -= 1
            if not left[0]:
                ended.set()

        for writer in self._writers.values():
            writer.post(lambda: self._locked(count))
        return not self._writers or ended.wait(seconds)

    def stats(self) -> TiersStats:
        """Counters and memory as they are now."""
        return TiersStats(
            tiers=tuple(tier.stats() for tier in self._tiers),
            loads=self._loader.active,
            staging_bytes=self._loader.used,
            staging_capacity=self._loader.capacity,
            backlog_bytes=self._backlog.used,
            backlog_capacity=self._backlog.capacity,
            refused_writes=self._refused,
        )

    def close(self, grace: float = 10.0) -> None:
        """End: loads end with nothing, what was put is written as far as `grace` seconds allow, stores are closed.

        Returns within the grace and a little, whatever the stores do.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + grace
        for scanner in self._scanners:
            scanner.close()
        self._loader.close()
        for writer in self._writers.values():
            writer.close(max(0.0, until - time.monotonic()))
        for tier in self._tiers:
            tier.close(1.0)
        self._clock.close()

    # ---- inside, with the lock

    def _locked(self, call: Callable[[], None]) -> None:
        with self._lock:
            call()

    def _folder(self, namespace: Namespace) -> str:
        if namespace not in self._folders:
            digest = self.layout.namespace_digest(self._key, namespace)
            self._folders[namespace] = f"{self._root}/{digest.hex()}"
            if len(self._folders) > _NAMESPACES_KEPT:
                self._folders.popitem(last=False)
        return self._folders[namespace]

    def _path(self, namespace: Namespace, data: bytes) -> tuple[str, PathDigests]:
        folder = self._folder(namespace)
        digests = self._paths.get((folder, data))
        if digests is None:
            known = data[: 4 * usable_tokens(data)]
            digests = self._paths[folder, data] = PathDigests(
                self.layout, self._key, bytes.fromhex(folder[-32:]), known
            )
            if len(self._paths) > _PATHS_KEPT:
                self._paths.popitem(last=False)
        else:
            self._paths.move_to_end((folder, data))
        return folder, digests

    def _places(
        self, folder: str, digests: PathDigests, data: bytes, floor: int, limit: int, there: frozenset[Key]
    ) -> list[Place]:
        size, now = self.layout.stretch, time.monotonic()
        end = digests.tokens - self.layout.lookahead
        limit = min(limit, end)
        asked = [tier for tier in self._tiers if tier.usable or there]
        far = end if self.layout.resumes_anywhere else limit  # a checkpoint behind the limit serves it then
        paths = {tier: tier.catalogue.path(folder, digests, floor, far) for tier in asked}
        finder = _Finder(paths, there, now)

        def find(floor: int, limit: int, there: frozenset[Key]) -> list[Place]:
            with self._lock:
                return self._places(folder, digests, data, floor, limit, there) if limit > floor else []

        def place(position: int, kind: str, linked: int, own: tuple[Wanted, ...]) -> Place:
            wanted = [*own, *finder.chain[:linked]]
            sizes: Counter[Tier] = Counter()
            for w in wanted:
                sizes[w.tier] += w.reference.length
            seconds = sum(tier.seconds(size) for tier, size in sizes.items())
            names, moved = tuple(tier.config.name for tier in sizes), sizes.total()
            return Place(position, kind, names, moved, seconds, (folder, data), find, finder.chain, linked, own)

        places: list[Place] = []
        for number in range(floor // size, digests.stretches + 1):
            if number > floor // size:
                if not finder.link(number - 1):
                    break
                stop = min(number * size, limit)
                if self.layout.resumes_anywhere and stop > floor and stop > number * size - size:
                    places.append(place(stop, "stretch", len(finder.chain), ()))
            for position in finder.positions(number * size, number * size + size):
                own = finder.checkpoint(position) if position <= limit or number * size < limit else None
                if own is not None:
                    linked = len(finder.chain)
                    places.append(place(min(position, limit), own[0], linked, own[1]))
                    if position >= limit:
                        break  # the first one that reaches the limit moves least
        return places

    def _lacking(self, folder: str, digests: PathDigests, position: int) -> list[Span]:
        spans: dict[Span, None] = {}
        for tier in self._accepting(position):
            stretches, checkpoint = self._writers[tier.config.name].lacking(folder, digests, position)
            for number in stretches:
                spans.update(dict.fromkeys(self.layout.stretch_spans(number)))
            if checkpoint:
                spans.update(dict.fromkeys(self.layout.manifest_spans(position)))
        return list(spans)

    def _accepting(self, position: int) -> list[Tier]:
        """Tiers that are well and could hold a checkpoint at a position by itself."""
        whole = position // self.layout.stretch
        spans = [*self.layout.manifest_spans(position)]
        size = sum(self.layout.length(span) for span in spans)
        size += whole * sum(self.layout.length(span) for span in self.layout.stretch_spans(0))
        return [t for t in self._tiers if t.usable and (t.config.capacity is None or size <= t.config.capacity)]

    def _drop(self, folder: str, data: bytes | None, digests: PathDigests | None) -> dict[str, list[str]]:
        gone = {}
        for tier in self._tiers:
            entries = tier.catalogue.forget(folder, data, digests)
            gone[tier.config.name] = tier.names([entry for entry in entries if entry.whole])
        return gone

    def _forgotten(
        self, folder: str, data: bytes | None, digests: PathDigests | None, gone: dict[str, list[str]]
    ) -> Future[None]:
        self._loader.each(
            lambda place: place.path[0].startswith(folder) and (data is None or place.path[1].startswith(data)),
            "forgotten",
        )
        futures = {name: writer.forget(folder, data, digests, gone[name]) for name, writer in self._writers.items()}
        return _together(futures)


class _Finder:
    """Which tier each object of a path comes from: one from which it came already, else the first that may be asked."""

    def __init__(self, paths: Mapping[Tier, Path], there: frozenset[Key], now: float) -> None:
        self.chain: list[Wanted] = []
        self._paths, self._there, self._now = paths, there, now

    def link(self, number: int) -> bool:
        """Append the objects of a stretch; False if no tier has it."""
        found = self._choose({tier: path.stretches[number] for tier, path in self._paths.items()})
        self.chain += found or ()
        return found is not None

    def positions(self, first: int, stop: int) -> list[int]:
        """Positions of checkpoints in [first, stop), ascending."""
        return sorted({p for path in self._paths.values() for p in path.checkpoints if first <= p < stop})

    def checkpoint(self, position: int) -> tuple[str, tuple[Wanted, ...]] | None:
        """Kind and objects of the checkpoint at a position."""
        entries = {tier: path.checkpoints.get(position) for tier, path in self._paths.items()}
        found = self._choose(entries)
        if found is None:
            return None
        kinds = [entry.record.kind for entry in entries.values() if entry and isinstance(entry.record, Manifest)]
        return kinds[0], found

    def _choose(self, entries: Mapping[Tier, Entry | None]) -> tuple[Wanted, ...] | None:
        best: tuple[Wanted, ...] | None = None
        for tier, entry in entries.items():
            if entry is None or not entry.whole:
                continue
            wanted = tuple(Wanted(tier, entry, reference) for reference in entry.record.objects)
            if self._there and all(w.key in self._there for w in wanted):
                return wanted
            if best is None and tier.usable and entry.usable(self._now):
                best = wanted
        return best


def _together(futures: Mapping[str, Future[None]]) -> Future[None]:
    """One future for those of all tiers."""
    whole: Future[None] = Future()
    left, lock = set(futures), threading.Lock()

    def ended(name: str, _: Future[None]) -> None:
        with lock:
            left.discard(name)
            if left:
                return
        failed = {name: error for name, future in futures.items() if (error := future.exception()) is not None}
        if failed:
            told = "; ".join(f"{name}: {error}" for name, error in failed.items())
            whole.set_exception(IncompleteError(f"not everything is forgotten, try again: {told}"))
        else:
            whole.set_result(None)

    if not futures:
        whole.set_result(None)
    for name, future in futures.items():
        future.add_done_callback(partial(ended, name))
    return whole
