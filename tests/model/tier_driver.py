"""Servers over the same stores, driven by the machine of the tiers, and what is judged of them.

A server is the real scheduler, cache, host tier and object tiers over a device of tags (`TierDevice`), which checks
whatever a step reads. Its stores fail on purpose (`FaultyStore`); what they really hold is judged from beside.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.bench import KEY, Bench
from tests.model.oracle import Names
from tests.model.tier_contents import Contents
from tests.model.tier_device import SALTS, TierDevice
from tests.model.tier_worlds import LONGEST, ServerPlan, TierWorld
from tests.model.turns import Turns
from tests.model.worlds import Plan
from tests.tiers.world import until

from headway.cache import CacheConfig, Hit, PrefixCache, Prompt, Reason, TableKind
from headway.engine import EngineConfig, RunningRequest, StepWork
from headway.engine.fetched import Fetched
from headway.engine.scheduling.lower import HOST, Begun
from headway.tiers import IncompleteError, ObjectTiers, TierConfig
from headway.tiers.disk import DiskStore
from headway.tiers.faults import KINDS, Fault, FaultyStore
from headway.tiers.memory import MemoryStore
from headway.tiers.store import Buffer, Listed, Store, StoreFullError

__all__ = ["Server", "TierDriver"]

SECONDS = 60.0
"""How long what should come at once is waited for, on a machine that has other things to do."""
_TIER_REASONS = {Reason.TIER_MISSED, Reason.TIER_FAILED}
_HARMLESS = {"none", "delay"}
_SPOILING = {"drop", "truncate", "corrupt"}


@dataclass
class Server(Bench):
    """A server of a world.

    Attributes:
        plan: How it was started.
        cache_is: Its cache.
        names: Names of exact prefixes.
        requests: Those that have not ended.
        alone: Nobody else has written to its stores, or broken something there, since it was started.
        pinned: A request had a pin.
        step_failures: Steps were made to fail.
        spoiled: Whether what its stores hold was damaged, by whomever.
        turns: Its threads.
        happened: What happened, by name.
        foreign: All servers before it had another layout.
        forgot: It was told to forget something.
    """

    plan: ServerPlan = None  # type: ignore[assignment]
    cache_is: CacheConfig = None  # type: ignore[assignment]
    names: Names = field(default_factory=Names)
    requests: list[RunningRequest] = field(default_factory=list)
    alone: bool = True
    pinned: bool = False
    step_failures: bool = False
    spoiled: Callable[[], bool] = bool
    turns: Turns = None  # type: ignore[assignment]
    happened: Counter[str] = field(default_factory=Counter)
    foreign: bool = False
    forgot: bool = False

    def __post_init__(self) -> None:
        self.placement = self.cache_is.placement
        self.clock = lambda: self.turns.now
        super().__post_init__()
        self.device.ran = self._ran
        self.device.hauled = lambda blocks: self.turns.pause(self.plan.haul * blocks)
        self.device.inside = self.cache_is.exports_inside
        self.device.requests = lambda: {r.lease.row: r for r in self.scheduler.running if r.lease is not None}
        self._begin, self.lower.begin = self.lower.begin, self._judged  # type: ignore[method-assign]

    def cache_config(self) -> CacheConfig:
        return self.cache_is

    def make_device(self) -> TierDevice:  # type: ignore[override]
        return TierDevice(self.cache.geometry, self.blocks, self.host_blocks, self.names)

    @property
    def objects(self) -> ObjectTiers:
        assert self.lower is not None
        assert self.lower.objects is not None
        return self.lower.objects

    @property
    def faulty(self) -> list[FaultyStore]:
        return [store for _, store in self.stores]  # type: ignore[misc]

    @property
    def struck(self) -> Counter[str]:
        """What its stores did wrong so far."""
        return sum((store.struck for store in self.faulty), Counter())

    @property
    def well(self) -> bool:
        """Whether nothing has gone wrong below it, nobody else was there, and computing does not seem better."""
        harmless = not self.plan.pace and set(self.struck) <= _HARMLESS and not self.spoiled()
        return self.alone and harmless and self.staging > LONGEST * 1000

    def _ran(self, work: StepWork) -> None:
        """A step takes its time, and others go on meanwhile."""
        seconds = self.plan.pace * work.step.counts.sum()
        self.turns.pause(seconds)
        if seconds:
            self.lower.measure(work.step, seconds)

    # ---- what is judged when a request begins

    def _judged(self, prompt: Prompt, hit: Hit, least: int, fetched: Fetched | None = None) -> Begun:
        before = dict(self.lower.failures)
        position = max(self.lower.known(prompt, hit), fetched.position if fetched is not None else 0)
        room = position > hit.tokens and self.lower.has_room(prompt, hit, fetched)
        begun = self._begin(prompt, hit, least, fetched)
        story, lease = begun.lease.explanation, begun.lease
        self.happened.update(str(reason) for reason in story.reasons)
        if begun.tier:
            self.happened[f"read back from {begun.tier}"] += 1
            if begun.tier != HOST and self.foreign and not any(t.stores for t in self.objects.stats().tiers):
                self.happened["read back what another layout wrote"] += 1
        reused = story.hit_tokens + story.loaded_tokens
        assert (reused, story.prompt_tokens) == (lease.computed, len(prompt.tokens)), story
        assert begun.tokens == story.loaded_tokens, story
        assert (begun.tier != "") == (begun.tokens > 0), story
        lines = [(loss.start, loss.stop) for loss in story.losses]
        assert [a[1] for a in lines[:-1]] == [b[0] for b in lines[1:]], story
        assert lines[0][0] == reused, story
        assert lines[-1][1] == len(prompt.tokens), story
        assert all(start < stop for start, stop in lines), story
        if begun.tier and not prompt.no_store:
            assert self.cache.lookup(prompt).tokens >= lease.computed, "what was read back cannot be hit"
        told = [loss for loss in story.losses if loss.reason in _TIER_REASONS]
        copy_failed = [tier for tier, n in self.lower.failures.items() if n != before.get(tier, 0)]
        if copy_failed:
            self.happened["a copy failed"] += 1
            assert [loss.reason for loss in told] == [Reason.TIER_FAILED], story
            assert f"in tier {copy_failed[0]}: the copy failed" in str(told[0].detail), story
            return begun
        valid = fetched is not None and fetched.era == self.lower._reader.era
        assert valid or begun.tier in ("", HOST), f"what was fetched before something was forgotten is used: {story}"
        assert not room or Reason.NO_ROOM not in story.reasons, story
        losses = fetched.losses if fetched is not None and valid else ()
        for loss in told:
            assert loss.detail in losses, f"no tier failed: {story}"
            assert loss.reason is (Reason.TIER_MISSED if loss.detail.missed else Reason.TIER_FAILED), story
            assert loss.stop == min(loss.detail.position, story.prompt_tokens), story
            assert loss.start == reused, story
        if any(loss.position > reused for loss in losses) and Reason.NO_ROOM not in story.reasons:
            assert told, f"a tier failed and nothing is said: {losses}, {story}"
        if fetched is not None and valid and fetched.loaded is not None and not losses:
            assert not fetched.loaded.failures, "a load was lowered and nobody is told"
        if self.well:
            # What is evicted between `find` and the first read of a load is a miss, and said to be one.
            bad = [loss for loss in losses if self.plan.capacity is None or not loss.missed]
            assert not bad, f"nothing is wrong with the stores, and a load failed: {bad}, {self.plan}"
        return begun

    # ---- driving

    def submit(self, tokens: list[int], answer: int, **options: Any) -> RunningRequest:
        self.pinned |= bool(options.get("pin"))
        request = self.add(tokens, answer, **options)
        self.requests.append(request)
        return request

    def settle(self) -> None:
        """Let everything that was asked for end."""
        for store in self.faulty:
            store.released.set()
        self.run()
        while self.lower.busy:
            self.lower.work()
        assert self.objects.flush(SECONDS), "what was put is not written"
        for store in self.faulty:
            store.released.clear()

    def end(self) -> list[RunningRequest]:
        """Requests that have ended since the last call, judged."""
        ended = [request for request in self.requests if request.finish_reason is not None]
        self.requests = [request for request in self.requests if request.finish_reason is None]
        for request in ended:
            if request.finish_reason == "error":
                assert self.pinned or self.step_failures, "a request that fits failed"
            told = request.explanation
            if told is not None:
                assert request.cached_tokens == told.hit_tokens + told.loaded_tokens
                assert sum(request.loaded.values()) == told.loaded_tokens
                assert set(request.loaded) <= {HOST, *(config.name for config, _ in self.stores)}
        return ended

    # ---- judging

    def check(self) -> None:
        assert not self.device.wrong, self.device.wrong[0]
        assert not self.turns.errors, self.turns.errors[0]
        if not self.plan.check:
            self.cache.check()
            if self.lower.host is not None:
                self.lower.host.host.check()

    def check_settled(self) -> None:
        """After `settle`: nothing leaks, and all that is kept is right."""
        self.check()
        assert self.scheduler.idle
        assert self.scheduler.waiting == 0
        caches = [(self.cache, self.device.device)]
        if self.lower.host is not None:
            caches.append((self.lower.host.host, self.device.host))
        for cache, memory in caches:
            stats = cache.stats()
            assert (stats.leases, stats.leased) == (0, 0)
            assert stats.free + stats.evictable + stats.pinned == stats.blocks
            assert not cache._leases.lent
            cache.check()
            self._check_kept(cache, memory)
        until(lambda: not self.objects.stats().staging_bytes, SECONDS)
        stats = self.objects.stats()
        assert (stats.loads, stats.backlog_bytes) == (0, 0)
        for tier in self.objects._tiers:
            until(lambda tier=tier: not any(entry.holds for entry in tier.catalogue.entries()), SECONDS)
            assert all(entry.whole for entry in tier.catalogue.entries())
            if tier.config.capacity is not None and self.well:  # else its scan may have failed, or still stall
                assert tier.catalogue.used <= tier.config.capacity
        failures = {reason for tier in self.objects.stats().tiers for reason in tier.failures}
        if self.well and all(tier.config.capacity is None for tier in self.objects._tiers):
            may = {"full", "write full", "write forgotten"}
            may |= {"write incomplete"} if "full" in failures else set()  # what was to be written behind it
            may |= {"missing"} if self.forgot else set()  # while it was being read
            assert failures <= may, failures

    def _check_kept(self, cache: PrefixCache, memory: Any) -> None:
        for spill in cache.kept():
            salt = next(i for i, salt in enumerate(SALTS) if cache.namespace(salt=salt) == spill.namespace)
            path, held = self.names.path(salt, spill.prefix.tolist()), spill.blocks
            for number, part in zip(held.tables, held.parts, strict=True):
                table = cache.geometry.tables[number]
                what = f"the checkpoint at {held.tokens}"
                if table.kind is TableKind.STATE:
                    memory.check_state(part.ids, path[held.tokens], what)
                else:
                    row = np.full(part.first + len(part.ids), -1, dtype=np.int32)
                    row[part.first :] = part.ids
                    memory.check_read(table, row, path, held.tokens, what)


class _Folder(DiskStore):
    """A folder on a disk that has so much room, which lists its files in the same order in every run."""

    def __init__(self, folder: str, room: int | None) -> None:
        super().__init__(folder)
        self._room, self._sizes, self.refused = room, dict[str, int](), 0

    def _write(self, folder: str, place: str, data: Buffer) -> None:
        if self._room is not None and sum(self._sizes.values()) + len(data) > self._room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "no space left, on purpose")
        super()._write(folder, place, data)
        self._sizes[place] = len(data)

    def remove(self, names: Sequence[str]) -> None:
        super().remove(names)
        for name in names:
            self._sizes.pop(self._place(name), None)

    def names(self, prefix: str) -> Iterator[Listed]:
        return iter(sorted(super().names(prefix)))


class _Base:
    """What stores of servers stand on.

    Attributes:
        changes: How often it was changed.
    """

    def __init__(self, store: Store) -> None:
        self.changes = 0
        self.read, self.read_small, self.names, self.close = store.read, store.read_small, store.names, store.close
        self._store = store

    def write(self, name: str, data: Buffer) -> None:
        self.changes += 1
        self._store.write(name, data)

    def remove(self, names: Sequence[str]) -> None:
        self.changes += 1
        self._store.remove(names)


class TierDriver:
    """Servers, stores, and what was ever computed.

    Attributes:
        servers: Those that run.
        past: Salt and tokens of what has been asked, and answered.
        faulty: The stores of all servers there ever were.
        tampered: Something was broken in stores from outside.
        allowed: Names of prefixes that may lie in a store.
        happened: What happened, by name.
        ever: All servers that there were.
    """

    def __init__(self, world: TierWorld, turns: Turns) -> None:
        self.world, self.turns, self.names = world, turns, Names()
        self.happened: Counter[str] = Counter()
        self.ever: list[Server] = []
        self._seen: dict[tuple[str, int, int], Contents] = {}
        self._forgotten = 0
        self.servers: list[Server] = []
        self.past: list[tuple[str, list[int]]] = []
        self.faulty: list[FaultyStore] = []
        self.tampered = False
        self.allowed: set[int] = set()
        self._folder = tempfile.mkdtemp() if world.files else None
        if self._folder is not None:  # an example that is given up halfway ends without a word
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        bases = [_Base(MemoryStore(world.store_bytes)) for _ in range(world.disk + world.store)]
        if self._folder is not None:
            self._disk = _Folder(self._folder, world.store_bytes)
            bases[0] = _Base(self._disk)
        labels = [*(["disk"] if world.disk else []), *(["store"] if world.store else [])]
        self.bases = dict(zip(labels, bases, strict=True))

    # ---- servers

    def spoiled(self) -> bool:
        """Whether what a store said that it wrote may be missing or altered."""
        return self.tampered or any(_SPOILING & set(store.struck) for store in self.faulty)

    def start(self, plan: ServerPlan) -> Server:
        config = plan.cache_config(self.world)
        patience = 0.2 if plan.stalls else SECONDS
        stores = []
        for name, base in self.bases.items():
            tier = TierConfig(
                name, plan.capacity, name == "store", 2, patience, pause=0.02, retry=0.01, rescan=0.0, slowest=1e12
            )
            stores.append((tier, FaultyStore(base, seed=plan.seed, rates=plan.rates)))
        server = Server(
            config.groups,
            config.blocks,
            EngineConfig(
                max_batched_tokens=16, max_running=4, wait_tokens=plan.wait_tokens, placement=tuple(config.placement)
            ),
            host_blocks=config.blocks * plan.host // plan.blocks,
            stores=stores,
            write=plan.write,
            staging=plan.staging,
            scan_seconds=0.1 if plan.stalls else SECONDS,
            plan=plan,
            cache_is=config,
            names=self.names,
            spoiled=self.spoiled,
            turns=self.turns,
            happened=self.happened,
            foreign=bool(self.ever) and all(one.plan.shape != plan.shape for one in self.ever),
        )
        self.happened["a restart"] += bool(self.ever)
        self.happened["another layout"] += bool(self.ever) and self.ever[-1].plan.shape != plan.shape
        self.ever.append(server)
        self.faulty += server.faulty
        if not plan.stalls:
            assert server.objects.flush(SECONDS)  # what is beyond its budget has gone
        self.servers.append(server)
        if len(self.servers) > 1:
            self.happened["two servers at once"] += 1
            for each in self.servers:
                each.alone = False
        return server

    def stop(self, server: Server) -> None:
        """A server ends, with what it has written."""
        self.settle(server)
        for store in server.faulty:
            store.released.set()
        server.lower.close(SECONDS)
        assert server.objects.stats().backlog_bytes == 0
        self.servers.remove(server)

    def kill(self, server: Server, writes: int) -> None:
        """A server dies wherever it is, after so many more writes of its stores."""
        before = server.struck["fail"]
        for store in server.faulty:
            rest = [Fault("fail", operation) for operation in KINDS if operation != "write"]
            store.rules = [Fault("fail", "write", skip=writes), *rest]
            store.released.set()
        server.lower.work()
        server.objects.flush(SECONDS)
        self.happened["a kill"] += 1
        self.happened["a kill in the middle of writes"] += server.struck["fail"] > before
        for store in server.faulty:
            store.rules = [Fault("fail", operation) for operation in KINDS]
        server.objects.close(0.0)
        self.servers.remove(server)

    # ---- requests

    def prompt(self, plan: Plan) -> tuple[str, list[int]]:
        """Tokens of a plan."""
        salt, tokens = plan.salt, [3] if plan.begin else []
        if plan.base >= 0 and self.past:
            salt, base = self.past[-1 - plan.base % len(self.past)]
            tokens = base[: len(base) * plan.cut // 1000]
        tokens = [*tokens[: LONGEST - 1], *(100 * (plan.stream + 1) + i for i in range(plan.length))]
        return salt, tokens[:LONGEST] or [1]

    def submit(self, server: Server, plan: Plan, answer: int) -> RunningRequest:
        salt, tokens = self.prompt(plan)
        some = len(tokens)
        request = server.submit(
            tokens,
            answer,
            salt=salt,
            no_store=plan.no_store,
            breakpoints=tuple(sorted({max(1, some * mark // 1000) for mark in plan.marks})),
            boundaries=tuple(sorted({max(1, some * edge // 1000) for edge in plan.edges})),
            pin=some * plan.pin // 1000,
            pin_seconds=plan.pin_seconds if plan.pin else None,
        )
        if not plan.no_store:
            self._allow(salt, tokens)
        return request

    def come_back(
        self, server: Server, which: int, more: int, answer: int, less: int = 0, cut: int = 1000, other: bool = False
    ) -> None:
        """Go on from what was said, or from a few tokens before its end, or say it again where that is long already.

        `other`: somebody else says it, who shares nothing.
        """
        if self.past:
            salt, tokens = self.past[-1 - which % len(self.past)]
            salt = SALTS[1 - SALTS.index(salt)] if other else salt
            tokens = tokens[: max(1, len(tokens) * cut // 1000 - less)]
            tokens = [*tokens, *range(700, 700 + more)] if len(tokens) + more <= LONGEST else tokens[:LONGEST]
            self._allow(salt, tokens)
            server.submit(tokens, answer, salt=salt)

    def _allow(self, salt: str, tokens: list[int]) -> None:
        self.allowed.update(self.names.path(SALTS.index(salt), tokens))

    def after(self, server: Server) -> None:
        """After each thing that was done to a server."""
        server.check()
        for request in [*server.requests, *server.scheduler.running]:
            if not request.request.no_store:
                self._allow(request.request.salt, request.tokens[: request.known].tolist())
        for request in server.end():
            tokens = request.tokens[: request.known].tolist()
            if not request.request.no_store:
                self._allow(request.request.salt, tokens)
            self.past.append((request.request.salt, tokens))
            del self.past[:-8]

    def settle(self, server: Server) -> None:
        server.settle()
        self.after(server)
        server.check_settled()
        self.look()

    # ---- judging

    def look(self) -> list[Contents]:
        """What the stores really hold, every tag of it judged."""
        return [self._contents(label) for label in self.bases]

    def _contents(self, label: str) -> Contents:
        server = self.servers[-1]
        key = label, self.bases[label].changes, self._forgotten
        if key not in self._seen:
            self._seen = {seen: contents for seen, contents in self._seen.items() if seen[0] != label}
            contents = Contents(self.bases[label], server.objects.layout, KEY, self._namespaces(server))
            contents.judge(self.names, self.allowed)
            self._seen[key] = contents
        return self._seen[key]

    def _namespaces(self, server: Server) -> list[tuple[str, str, str]]:
        digests = [server.cache.namespace_digest(server.cache.namespace(salt=salt)) for salt in SALTS]
        return [("", "", digest.hex()) for digest in digests if digest is not None]

    def find(self, server: Server, which: int, cut: int) -> None:
        """What is in a store and whole is found, unless something is said to have gone wrong."""
        if not self.past:
            return
        self.settle(server)
        salt, tokens = self.past[-1 - which % len(self.past)]
        tokens = [*tokens[: min(LONGEST - 1, max(1, len(tokens) * cut // 1000))], 2]
        least = 0
        for base, contents in zip(self.bases, self.look(), strict=True):
            if base == "store" or server.alone:
                deepest = contents.deepest(SALTS.index(salt), tokens, searched=base == "store")
                capacity = server.plan.staging
                least = max(least, deepest if capacity > LONGEST * 1000 else 0)
        request = server.submit(tokens, 1, salt=salt, no_store=True)
        self.settle(server)
        well = set(server.struck) <= _HARMLESS
        failed = any(tier.failures for tier in server.objects.stats().tiers)
        story = request.explanation
        if story is None:
            return
        said = story.reasons & {*_TIER_REASONS, Reason.NO_ROOM, Reason.COMPUTED_ANEW}
        self.happened["something is there to be found"] += least > 0
        if well and not failed and not said and not server.plan.pace:
            assert request.cached_tokens >= least, f"a store has {least} tokens of it: {story}"

    # ---- operations

    def forget(self, server: Server, which: int, cut: int, how: str) -> None:
        """Forget a path, a namespace or everything, on a server and below it."""
        if not self.past:
            return
        self.happened[f"forgotten: {how}"] += 1
        for each in self.servers:
            each.forgot = True
        salt, tokens = self.past[-1 - which % len(self.past)]
        namespace = server.cache.namespace(salt=salt)
        prompt = Prompt(np.array(tokens[: max(1, len(tokens) * cut // 1000)], dtype=np.int32), namespace=namespace)
        calm = not any(each.requests or set(each.struck) - _HARMLESS for each in self.servers)
        for each in self.servers if calm else ():
            each.settle()
        for store in server.faulty:
            store.released.set()
        if how == "reset":
            server.cache.reset()
            complete = self._complete(server.lower.reset())
            doomed = set(self.allowed)
        else:
            server.cache.forget(prompt)
            server.lower.forget(prompt)
            name = ("", "", server.cache.namespace_digest(namespace).hex())
            complete = self._complete(server.objects.forget(name, prompt.data))
            doomed = set(self.names.below(self.names.path(SALTS.index(salt), prompt.tokens.tolist())[-1]))
        for store in server.faulty:
            store.released.clear()
        calm = calm and not any(
            set(each.struck) - _HARMLESS for each in self.servers
        )  # a removal may have been dropped
        if complete and calm:
            kept, self.allowed = self.allowed, self.allowed - doomed
            self._forgotten += 1
            self.look()  # whoever wrote it
            request = server.submit(tokens, 1, salt=salt, no_store=True)
            server.settle()
            if request.explanation is not None:
                least = 1 if how == "reset" else len(prompt.tokens)
                assert request.cached_tokens < least, f"it was forgotten: {request.explanation}"
            self.look()
            if len(self.servers) > 1:  # others have it still, and may write it again
                self.allowed = kept
        self.after(server)

    @staticmethod
    def _complete(future: Future[None]) -> bool:
        until(future.done, SECONDS)
        try:
            future.result()
        except IncompleteError:
            return False
        return True

    def tamper(self, which: int, how: str) -> None:
        """Somebody removes or alters an object of a store."""
        for base in self.bases.values():
            names = sorted(item.name for item in base.names(""))
            if not names:
                continue
            name = names[which % len(names)]
            self.tampered = True
            self.happened[f"somebody breaks an object: {how}"] += 1
            for server in self.servers:
                server.alone = False
            [data] = base.read_small([name])
            if how == "remove" or not data:
                base.remove([name])
            else:
                broken = data[: len(data) // 2] if how == "cut" else bytes([data[0] ^ 1]) + data[1:]
                with contextlib.suppress(StoreFullError):
                    base.write(name, broken)

    # ---- the end

    def tell(self) -> Counter[str]:
        """What happened, in any of the servers there were."""
        for server in self.ever:
            self.happened.update({f"fault: {kind}": n for kind, n in server.struck.items() if kind != "none"})
            for tier in server.objects.stats().tiers:
                self.happened.update({f"in a tier: {reason}": n for reason, n in tier.failures.items()})
                self.happened["a tier is switched off"] += tier.openings
                self.happened["a tier evicts"] += tier.evictions
        if self._folder is not None:
            self.happened["no space left on a disk"] += self._disk.refused
        return +self.happened

    def close(self) -> None:
        """End everything, and look whether something is left that nobody knows of."""
        layout = None
        while self.servers:
            server = self.servers[-1]
            layout = server.objects.layout
            namespaces = self._namespaces(server)
            self.stop(server)
        if layout is None:
            return
        for name, base in self.bases.items():
            janitor = ObjectTiers(layout, KEY, [(TierConfig(name, grace=0.0, rescan=0.0), base)])
            assert janitor.scanned(SECONDS)
            assert janitor.flush(SECONDS)
            janitor.close(SECONDS)
            Contents(base, layout, KEY, namespaces).check_nothing_loose()
        if self._folder is not None:
            left = [str(place) for place in Path(self._folder).rglob(".tmp-*")]
            assert not left, f"temporary files are left: {left}"
            shutil.rmtree(self._folder)
        self.turns.pause(2 * SECONDS)
        left = [thread.name for thread in self.turns.alive]
        assert not left, f"threads are left: {left}"
