"""The prefix cache: what an engine embeds.

The life of a request: `lookup` (changes nothing) -> `lease` -> per step `extend`, the ranks run, `commit` -> `finish`,
`preempt` or `abort`. All token and block figures are numpy arrays; block ids are the same on all ranks. One thread
drives it.

    cache = PrefixCache(CacheConfig(groups=[FullAttention("attn", 8064), Recurrent("kda", 43_417_600)], blocks=4096))
    lease = cache.lease(Prompt(tokens))
    while lease.computed < lease.tokens:
        step = cache.extend([lease.row], [lease.next_stop - lease.computed])
        ...  # copy step.copies, run the model on the tokens, copy step.exports
        cache.commit(step)
    cache.finish([lease.row])
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache import invariants
from headway.cache.config import CacheConfig
from headway.cache.index.events import Event
from headway.cache.index.explain import Explanation, Waterfall, explain_match
from headway.cache.index.hit import Hit
from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.index.reclaim import Counters
from headway.cache.index.tree import Match
from headway.cache.lease.commit import Committer
from headway.cache.lease.extend import Extender
from headway.cache.lease.open import Opener
from headway.cache.lease.step import Step
from headway.cache.lease.table import BROKEN, RUNNING, Lease, LeaseTable
from headway.cache.policy.placement import Placement
from headway.cache.shape.checks import longs
from headway.cache.shape.prompt import Media, Prompt, Symbols

__all__ = ["CacheStats", "PrefixCache", "ResetReport"]

Ids = NDArray[np.int32]
_NAMESPACES_COMPARED = 16
_NAMESPACES_KEPT = 1024
"""Other namespaces in which a lookup without any match is repeated to explain it: the latest ones."""


@dataclass(frozen=True)
class ResetReport:
    """What a reset did.

    Attributes:
        blocks_freed: Blocks that became free.
        checkpoints: Checkpoints dropped.
        leases_detached: Running leases that go on and publish nothing more.
    """

    blocks_freed: int
    checkpoints: int
    leases_detached: int


@dataclass(frozen=True)
class CacheStats:
    """Memory and events of a cache, for metrics.

    Attributes:
        blocks: Blocks in the pool.
        free: Held by nobody.
        leased: Needed by running leases.
        pinned: Under pins.
        evictable: Neither free nor leased nor pinned.
        leases: Running leases.
        checkpoints: Checkpoints kept.
        counters: Events by kind of placement.
    """

    blocks: int
    free: int
    leased: int
    pinned: int
    evictable: int
    leases: int
    checkpoints: int
    counters: Counters


class PrefixCache:
    """Prefix cache of one model on one set of ranks.

    Attributes:
        config: Its configuration.
        geometry: Where every token lives.
    """

    def __init__(self, config: CacheConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make an empty cache.

        Args:
            config: Groups, memory and policies.
            clock: Seconds, for pins and for the age of evictions.

        Raises:
            ConfigError: A configuration that cannot work; the message says what to change.
        """
        self.config = config
        self.geometry = config.geometry()
        self._pool = BlockPool(config.blocks)
        self._leases = LeaseTable(self.geometry, config.max_leases, config.answer_stretch)
        self._index = PrefixIndex(config, self.geometry, self._pool, self._leases, clock)
        parts = (self.geometry, self._pool, self._leases, self._index)
        self._placement = Placement(config.placement, config.checkpoint_alignment, self.geometry.lookahead)
        self._extender = Extender(*parts, inside=config.exports_inside)
        self._committer = Committer(*parts, self._placement)
        self._opener = Opener(*parts, self._placement, self._committer, config.cost)
        self._clock = clock
        self._namespaces: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self._namespace_ids = itertools.count(1)
        self._symbols = Symbols()
        self._waterfall = Waterfall()

    # ---- prompts

    def namespace(self, model: str = "", adapter: str = "", salt: str = "") -> int:
        """Id of a namespace; prompts in different ones never share. The empty one is 0.

        An id is never given out twice. It is remembered while anything is known in its namespace; ask for it again for
        every prompt instead of keeping it.
        """
        key = (model, adapter, salt)
        if key not in self._namespaces:
            if len(self._namespaces) > 2 * len(self._index.roots) + _NAMESPACES_KEPT:
                known = self._index.roots
                self._namespaces = {k: n for k, n in self._namespaces.items() if n in known or n == 0}
            self._namespaces[key] = next(self._namespace_ids)
        return self._namespaces[key]

    def symbols(self, tokens: ArrayLike, media: Sequence[Media] = ()) -> Ids:
        """Tokens as the cache compares them, int32: placeholders of media carry their content's identity.

        Raises:
            LeaseError: A medium outside the tokens.
        """
        return self._symbols.apply(tokens, media)

    # ---- finding

    def lookup(self, prompt: Prompt) -> Hit:
        """Where `prompt` can resume. Changes nothing; O(matched tokens + branches)."""
        at, tokens, checkpoint = self._index.find(prompt.namespace, prompt.tokens)
        kind = checkpoint.kind if checkpoint else ("path" if tokens else "")
        matched = min(at.position + self.geometry.lookahead, len(prompt.tokens)) if at.position else 0
        return Hit(tokens, matched, kind, prompt, at, checkpoint, self._index, self._index.version)

    def explain(self, prompt: Prompt) -> Explanation:
        """What would become of every token of `prompt`. Changes nothing."""
        return self._explain(self.lookup(prompt))

    def _explain(self, hit: Hit) -> Explanation:
        prompt, elsewhere = hit.prompt, 0
        if hit.matched == 0:
            latest = itertools.islice(reversed(self._index.roots.items()), _NAMESPACES_COMPARED)
            others = [root for namespace, root in latest if namespace != prompt.namespace]
            follow = self._index.tree.follow
            elsewhere = max((follow(Match(root, 0), prompt.tokens).position for root in others), default=0)
        return explain_match(
            hit.at,
            len(prompt.tokens),
            hit.tokens,
            hit.matched,
            tail=self._index.tail,
            now=self._clock(),
            elsewhere=elsewhere,
        )

    # ---- leases

    def lease(self, prompt: Prompt, hit: Hit | None = None) -> Lease:
        """Start a request: enter its path, hold what it resumes from, and plan its checkpoints.

        Args:
            prompt: The prompt.
            hit: What `lookup` returned for the same prompt object; looked up anew if the cache has changed since.

        Raises:
            UnservableError: The pool could never hold the prompt. Nothing has changed.
        """
        if hit is None or hit.version != self._index.version or hit.prompt is not prompt:
            hit = self.lookup(prompt)
        self._opener.refuse_unservable(hit)
        hit = self._opener.affordable(hit)
        explanation = self._explain(hit)
        self._waterfall.add(explanation)
        row = self._opener.open(hit, explanation)
        self._after()
        return Lease(self._leases, row)

    # ---- steps

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """Give leases the blocks for their next tokens.

        A count is cut at the next checkpoint that needs a state (unless states can be exported inside a chunk), and
        to what memory allows; a lease that gets nothing has count 0 and is unchanged: preempt one and try again.

        Args:
            rows: int [n], rows of running leases without a step under way.
            counts: int [n] or one int, tokens to compute next; may go beyond the known tokens by draft tokens.

        Returns:
            What the ranks must do. Every lease with a count above 0 now has a step under way: `commit` or `fail` it.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        step = self._extender.extend(rows, counts)
        self._after()
        return step

    def commit(
        self,
        step: Step,
        counts: ArrayLike | None = None,
        sampled: ArrayLike | None = None,
        sampled_counts: ArrayLike | None = None,
    ) -> None:
        """The ranks have done `step`: its tokens are computed, and others may use what it completed.

        Args:
            step: What `extend` returned.
            counts: int [n], tokens that count (rejected draft tokens do not); all if not given.
            sampled: int32 [n] or [n, m], tokens that follow what is known.
            sampled_counts: int [n], how many of each row of `sampled` are real. If not given: one for every lease
                whose computed tokens now reach the known ones.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._committer.commit(step, counts, sampled, sampled_counts)
        self._after()

    def fail(self, step: Step) -> None:
        """The ranks failed in `step`: nothing of it counts or is published. Its leases can only be aborted.

        What they had committed before stays reusable, so a retry is a new lease with a hit.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._committer.fail(step)
        self._after()

    # ---- the end

    def finish(self, rows: ArrayLike) -> None:
        """Requests are done. Their running states become checkpoints (placement `answer_end`), their blocks are freed.

        With groups of lookahead 2 or more the end of an answer cannot be kept: its entries depend on tokens that nobody
        knows yet. The same holds for `preempt`.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, "answer_end" if self._placement.answer_end or not self._index.tail else None, RUNNING)

    def preempt(self, rows: ArrayLike) -> None:
        """Take requests' memory away. Coming back, as a new lease on all their tokens, is a hit: states are kept.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, "preempt", RUNNING)

    def abort(self, rows: ArrayLike) -> None:
        """Requests end at once and leave only what they had published. The one way out of a failed step.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, None, RUNNING, BROKEN)

    def _end(self, rows: ArrayLike, donate: str | None, *phases: int) -> None:
        which = longs("rows", rows).reshape(-1)
        self._leases.check_rows(which, *phases)
        for row in which.tolist():
            if donate is not None:
                self._committer.donate(row, donate)
            self._committer.close(row)
        self._after()

    def reset(self) -> ResetReport:
        """Forget everything, interned namespaces and media included.

        Running leases go on with their own memory and publish nothing more.
        """
        free = self._pool.free
        rows = self._leases.active_rows()
        for row in rows:
            self._detach(row)
        checkpoints = self._index.clear()
        self._symbols.forget()
        self._namespaces = {("", "", ""): 0}
        for row in rows:
            record = self._leases.record(row)
            record.at = Match(self._index.root(record.prompt.namespace), 0)
        self._after()
        return ResetReport(self._pool.free - free, checkpoints, len(rows))

    def _detach(self, row: int) -> None:
        """Make a lease the holder of all that it uses."""
        record = self._leases.record(row)
        for table in self.geometry.prefix_tables:
            owned = int(self._leases.owned[table.index, row])
            self._pool.share(self._leases.blocks[table.index][row, :owned])
            self._leases.owned[table.index, row] = 0
        if row in record.at.node.rows:
            self._index.detach(row, record.at)
        record.published = False
        record.plan.clear()
        self._committer.set_due(row, 0)

    # ---- looking in

    @property
    def tables(self) -> list[Ids]:
        """Block tables, one int32 [rows, width] array a table of the geometry; valid until the next call.

        `tables[t][row]` maps block index (position // span) to block id, -1 where the lease holds none. The row of a
        table of states names the blocks of the running state.
        """
        return self._leases.blocks

    @property
    def leases(self) -> int:
        """Leases that have not ended."""
        return self._leases.running

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds; evictable ones do not count."""
        return self._pool.free

    @property
    def waterfall(self) -> Waterfall:
        """What became of the prompt tokens of all leases so far."""
        return self._waterfall

    @property
    def counters(self) -> Counters:
        """What happened to checkpoints and blocks so far; a live object, not to be changed."""
        return self._index.reclaim.counters

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on. Returns the function that ends it."""
        self._index.residency.listeners.append(listener)
        return lambda: self._index.residency.listeners.remove(listener)

    def stats(self) -> CacheStats:
        """Memory and events. O(blocks + leases)."""
        self._index.reclaim.expire_pins()
        leased = invariants.leased_blocks(self._leases, self.geometry, self._pool.blocks)
        pinned = invariants.pinned_blocks(self._index, self._pool.blocks) & ~leased
        held = self._pool.references > 0
        return CacheStats(
            blocks=self._pool.blocks,
            free=self._pool.free,
            leased=int(leased.sum()),
            pinned=int(pinned.sum()),
            evictable=int((held & ~leased & ~pinned).sum()),
            leases=self.leases,
            checkpoints=sum(len(node.marks) for node in self._index.nodes()),
            counters=self._index.reclaim.counters.copy(),
        )

    def check(self) -> None:
        """Check every invariant. O(everything).

        Raises:
            AssertionError: An invariant is broken: a bug in this package.
        """
        invariants.check(self._index, self._leases, self.geometry, self._pool)

    def _after(self) -> None:
        if self.config.check:
            self.check()
