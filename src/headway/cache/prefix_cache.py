"""The prefix cache: what an engine embeds.

The life of a request: `lookup` (changes nothing) -> `lease` -> per step `extend`, the ranks run, `commit` -> `finish`,
`preempt` or `abort`. All token and block figures are numpy arrays; block ids are the same on all ranks. One thread drives it.

    cache = PrefixCache(CacheConfig(groups=[FullAttention("attn", 8064), Recurrent("kda", 43_417_600)], blocks=4096))
    lease = cache.lease(Prompt(tokens))
    while lease.computed < lease.tokens:
        step = cache.extend([lease.row], [lease.next_stop - lease.computed])
        ...  # copy step.copies, run the model on the tokens, copy step.exports
        cache.commit(step)
    cache.finish([lease.row])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cache import inspect_cache
from headway.cache.checkpoint import Checkpoint
from headway.cache.config import CacheConfig
from headway.cache.events import Event
from headway.cache.explain import Explanation, Waterfall, explain_match
from headway.cache.geometry import TableKind
from headway.cache.index import PrefixIndex
from headway.cache.lease import BROKEN, RUNNING, Lease, LeaseTable, Record, Rows, Step
from headway.cache.placement import Placement
from headway.cache.pool import BlockPool
from headway.cache.reclaim import Counters
from headway.cache.prompt import Media, Prompt, Symbols
from headway.cache.steps import Stepper
from headway.cache.tree import Match
from headway.errors import UnservableError

__all__ = ["CacheStats", "Hit", "PrefixCache", "ResetReport"]

Ids = NDArray[np.int32]
_NAMESPACES_COMPARED = 16


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a prompt can resume.

    Attributes:
        tokens: Tokens that need not be computed; 0 for none.
        matched: Tokens that follow a known path.
        kind: Kind of placement of the checkpoint that serves it; "path" for a model without checkpoints, "" for no hit.
    """

    tokens: int
    matched: int
    kind: str
    _prompt: Prompt
    _at: Match
    _checkpoint: Checkpoint | None
    _index: PrefixIndex
    _version: int

    def blocks(self, table: int) -> Ids:
        """Block ids of one table under the hit, int32: of the prefix, or what the checkpoint holds.

        Valid until the cache changes.
        """
        if self.tokens == 0:
            return np.empty(0, dtype=np.int32)
        return self._index.hit_blocks(self._at, self.tokens, self._checkpoint, table)


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
        self._leases = LeaseTable(self.geometry, config.max_leases)
        self._index = PrefixIndex(config, self.geometry, self._pool, self._leases, clock)
        self._placement = Placement(config.placement, config.checkpoint_alignment, self.geometry.lookahead)
        self._stepper = Stepper(
            self.geometry, self._pool, self._leases, self._index, self._placement, config.exports_inside
        )
        self._clock = clock
        self._namespaces: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self._symbols = Symbols()
        self._waterfall = Waterfall()

    # ---- prompts

    def namespace(self, model: str = "", adapter: str = "", salt: str = "") -> int:
        """Id of a namespace; prompts in different ones never share. The empty one is 0."""
        return self._namespaces.setdefault((model, adapter, salt), len(self._namespaces))

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
        prompt, elsewhere = hit._prompt, 0
        if hit.matched == 0:
            others = [r for ns, r in self._index.roots.items() if ns != prompt.namespace][-_NAMESPACES_COMPARED:]
            follow = self._index.tree.follow
            elsewhere = max((follow(Match(root, 0), prompt.tokens).position for root in others), default=0)
        return explain_match(
            hit._at,
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
        self._refuse_unservable(len(prompt.tokens))
        if hit is None or hit._version != self._index.version or hit._prompt is not prompt:
            hit = self.lookup(prompt)
        if hit.tokens and self._restore_blocks(len(prompt.tokens), hit) > self._available():
            hit = Hit(0, hit.matched, "", prompt, hit._at, None, self._index, hit._version)
        explanation = self._explain(hit)
        self._waterfall.add(explanation)
        record = self._record(prompt, hit, explanation)
        row = self._leases.open(record, len(prompt.tokens), hit.tokens)
        self._index.attach(row, record.at)
        if hit.tokens:
            self._take_hit(row, record, hit)
        self._stepper.set_due(row, hit.tokens)
        self._stepper.try_pin(row, hit.tokens)
        self._after()
        return Lease(self._leases, row)

    def _record(self, prompt: Prompt, hit: Hit, explanation: Explanation) -> Record:
        length, at = len(prompt.tokens), hit._at
        published = not prompt.no_store
        if not published:
            place = self._index.place(prompt.namespace, at, hit.tokens)
            return Record(prompt, hit, explanation, place, prompt.tokens[:0], False, [])
        parted = 0 < at.position < length - self.geometry.lookahead and (at.position < at.node.end or bool(at.node.children))
        pin = min(prompt.pin, length - max(1, self.geometry.lookahead)) if prompt.pin else 0
        plan = []
        if self._index.tail:
            plan = self._placement.plan(
                length,
                hit.tokens,
                junction=at.position if parted else None,
                breakpoints=prompt.breakpoints,
                boundaries=self._admitted(prompt, hit.tokens),
                pin=pin,
            )
        if hit.matched == 0:
            at = Match(self._index.root(prompt.namespace), 0)
        at = self._index.enter(at, prompt.tokens[at.position :])
        rest = prompt.tokens[at.position :]
        return Record(prompt, hit, explanation, at, rest, True, plan, pin=self._placement.floor(pin) if self._index.tail else pin)

    def _admitted(self, prompt: Prompt, hit: int) -> list[int]:
        """Message boundaries whose checkpoint is expected to be worth its memory."""
        blocks = sum(table.state_blocks or table.blocks_for(table.window or table.chunk) for table in self.geometry.tail_tables)
        worth = self._index.reclaim.pay.rate("boundary") / max(1, blocks)
        price = self._index.reclaim.policy.price
        inner = [p for p in self._placement.telling(prompt.boundaries) if hit < p < len(prompt.tokens)]
        return [p for p in inner if worth * self.config.cost.between(0, p) >= price]

    def _take_hit(self, row: int, record: Record, hit: Hit) -> None:
        """Fill the block tables with what the hit gives, and hold what the first step copies from."""
        leases, checkpoint = self._leases, hit._checkpoint
        for i, table in enumerate(self.geometry.prefix_tables):
            full, blocks = hit.tokens // table.span, leases.blocks[table.index][row]
            self._index.residency.path_ids(record.at, i, 0, blocks[:full])
            if hit.tokens % table.span:
                source = np.empty(1, dtype=np.int32)
                self._index.residency.path_ids(record.at, i, full, source)
                record.sources.append((table, source))
        for section, table in zip(checkpoint.sections if checkpoint else (), self.geometry.tail_tables, strict=True):
            if table.kind is TableKind.STATE:
                record.sources.append((table, section.ids))
                continue
            full = max(0, hit.tokens // table.span - section.first)
            shared = section.ids[:full]
            self._pool.share(shared)
            leases.blocks[table.index][row, section.first : section.first + len(shared)] = shared
            leases.filled[table.index, row] += len(shared)
            if len(section.ids) > full:
                record.sources.append((table, section.ids[full:]))
        for _, source in record.sources:
            self._pool.share(source)
        self._index.reclaim.used(record.at, hit.tokens, checkpoint)

    def _available(self) -> int:
        return self._pool.blocks - self._index.reclaim.pinned_blocks

    def _blocks_needed(self, length: int) -> int:
        """Fewest blocks with which a prompt of `length` tokens can be computed to its end."""
        need = 0
        for table in self.geometry.tables:
            if table.kind in (TableKind.WINDOW, TableKind.CHUNK):
                need += table.blocks_for(length) - table.first_needed(length - 1) // table.span
            else:
                need += table.blocks_for(length)
        return need

    def _restore_blocks(self, length: int, hit: Hit) -> int:
        """As `_blocks_needed`, when the first step also has to hold what it copies from."""
        held = sum(1 for table in self.geometry.tables if table.span and hit.tokens % table.span)
        return self._blocks_needed(length) + held + (self.geometry.state_table.state_blocks if self.geometry.state_table else 0)

    def _refuse_unservable(self, length: int) -> None:
        need, available = self._blocks_needed(length), self._available()
        if need > available:
            pins = f" ({self._index.reclaim.pinned_blocks} are pinned)" if self._index.reclaim.pinned_blocks else ""
            raise UnservableError(
                f"a prompt of {length} tokens needs {need} blocks and the pool has {self._pool.blocks}{pins}: "
                f"shorten the prompt or give the cache more memory",
                need,
                self._pool.blocks,
            )

    # ---- steps

    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """Give leases the blocks for their next tokens.

        A count is cut at the next checkpoint that needs a state (unless states can be exported inside a chunk), and to what
        memory allows; a lease that gets nothing has count 0 and is unchanged: preempt one and try again.

        Args:
            rows: int [n], rows of running leases without a step under way.
            counts: int [n] or one int, tokens to compute next; may go beyond the known tokens by draft tokens.

        Returns:
            What the ranks must do. Every lease with a count above 0 now has a step under way: `commit` or `fail` it.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        step = self._stepper.extend(rows, counts)
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
        self._stepper.commit(step, counts, sampled, sampled_counts)
        self._after()

    def fail(self, step: Step) -> None:
        """The ranks failed in `step`: nothing of it counts or is published. Its leases can only be aborted.

        What they had committed before stays reusable, so a retry is a new lease with a hit.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._stepper.fail(step)
        self._after()

    # ---- the end

    def finish(self, rows: ArrayLike) -> None:
        """Requests are done. Their running states become checkpoints (placement `answer_end`), their blocks are freed.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, "answer_end" if self._placement.answer_end or not self._index.tail else None, RUNNING)

    def preempt(self, rows: ArrayLike) -> None:
        """Take requests' memory away; their states become checkpoints, so coming back (a new lease on all tokens) is a hit.

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
        which: Rows = np.asarray(rows, dtype=np.int64).reshape(-1)
        self._leases.check_rows(which, *phases)
        for row in which.tolist():
            if donate is not None:
                self._stepper.donate(row, donate)
            self._stepper.close(row)
        self._after()

    def reset(self) -> ResetReport:
        """Forget everything. Running leases go on with their own memory and publish nothing more."""
        free = self._pool.free
        rows = self._leases.active_rows()
        for row in rows:
            self._detach(row)
        checkpoints = self._index.clear()
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
        self._stepper.set_due(row, 0)

    # ---- looking in

    @property
    def tables(self) -> list[Ids]:
        """Block tables, one int32 [rows, width] array a table of the geometry; valid until the next call.

        `tables[t][row]` maps block index (position // span) to block id, -1 where the lease holds none. The row of a table of
        states names the blocks of the running state.
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

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on. Returns the function that ends it."""
        self._index.residency.listeners.append(listener)
        return lambda: self._index.residency.listeners.remove(listener)

    def stats(self) -> CacheStats:
        """Memory and events. O(blocks + leases)."""
        leased = inspect_cache.leased_blocks(self._leases, self.geometry, self._pool.blocks)
        pinned = inspect_cache.pinned_blocks(self._index, self._pool.blocks) & ~leased
        held = self._pool.references > 0
        return CacheStats(
            blocks=self._pool.blocks,
            free=self._pool.free,
            leased=int(leased.sum()),
            pinned=int(pinned.sum()),
            evictable=int((held & ~leased & ~pinned).sum()),
            leases=self.leases,
            checkpoints=sum(len(node.marks) for node in self._index.nodes()),
            counters=self._index.reclaim.counters,
        )

    def check(self) -> None:
        """Check every invariant. O(everything).

        Raises:
            AssertionError: An invariant is broken: a bug in this package.
        """
        inspect_cache.check(self._index, self._leases, self.geometry, self._pool)

    def _after(self) -> None:
        if self.config.check:
            self.check()
