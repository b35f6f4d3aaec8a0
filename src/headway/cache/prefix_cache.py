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

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headway.cache import invariants
from headway.cache.config import CacheConfig
from headway.cache.guard import Clock, Guarded, guarded
from headway.cache.index.below import Below, Past
from headway.cache.index.displaced import find_displaced
from headway.cache.index.edge import FAR, Edge
from headway.cache.index.events import Event
from headway.cache.index.explain import Explanation, Reason, Waterfall, explain_match
from headway.cache.index.held import HeldBlocks
from headway.cache.index.hit import Hit
from headway.cache.index.path import Path, describe_path
from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.index.reclaim import Spill
from headway.cache.index.survey import Holdings, survey
from headway.cache.index.usage import Counters, Learned
from headway.cache.lease.commit import Committer
from headway.cache.lease.extend import Extender
from headway.cache.lease.open import Opener
from headway.cache.lease.step import StateExport, Step
from headway.cache.lease.table import AHEAD, BROKEN, RUNNING, Lease, LeaseTable
from headway.cache.lease.transfer import Transfers
from headway.cache.namespaces import Namespaces, digest_of
from headway.cache.policy.placement import Placement
from headway.cache.saved import read, write
from headway.cache.shape.checks import TokenIds, longs
from headway.cache.shape.geometry import Ids
from headway.cache.shape.prompt import Prompt
from headway.cache.shape.symbols import Media, Symbols, SymbolTable
from headway.errors import LeaseError

__all__ = ["CacheStats", "PrefixCache", "ResetReport"]

_NAMESPACES_COMPARED = 16
"""Other namespaces in which a prompt is looked for to explain what does not match: the latest ones."""


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
        leased: Needed by running leases, and not under pins.
        pinned: Under pins.
        evictable: Neither free nor leased nor pinned.
        leases: Running leases.
        checkpoints: Checkpoints kept.
        counters: Events by kind of placement.
        bookkeeping_bytes: Memory of this process that the cache takes, an estimate from above.
        bookkeeping_limit: What it can take at most with the leases of now.
    """

    blocks: int
    free: int
    leased: int
    pinned: int
    evictable: int
    leases: int
    checkpoints: int
    counters: Counters
    bookkeeping_bytes: int
    bookkeeping_limit: int


class PrefixCache(Guarded):
    """Prefix cache of one model on one set of ranks.

    Attributes:
        config: Its configuration.
        geometry: Where every token lives.
        tables: Block tables, one int32 [rows, width] array per table of the geometry; valid until the next call.
            `tables[t][row]` maps block index (position // span) to block id, -1 where windows and chunks have been left
            behind, and where a lease resumes inside a block until its first step. Behind what `extend` gave to a lease
            stand ids without meaning (but within the pool): so a wide table takes memory only where it is used. The row
            of a table of states names the blocks of the running state, -1 until the first step.
        waterfall: What became of the prompt tokens of all leases so far.
        counters: What happened to checkpoints and blocks so far; a live object, not to be changed.
    """

    def __init__(
        self, config: CacheConfig, *, clock: Callable[[], float] = time.monotonic, beside: PrefixCache | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            config: Groups, memory and policies.
            clock: Seconds, for pins and for the age of evictions.
            beside: A cache of the same prompts in another memory: both know namespaces and media by the same numbers,
                so that a prompt for one is a prompt for the other.

        Raises:
            ConfigError: A configuration that cannot work; the message says what to change.
        """
        super().__init__()
        self.config = config
        self._watched = config.check
        self.geometry = config.geometry()
        self._clock = Clock(clock)
        self._pool = BlockPool(config.blocks)
        self._leases = LeaseTable(
            self.geometry, config.max_leases, config.answer_stretch, config.steps_in_flight, config.slots_ahead
        )
        learned: Learned | None = None if beside is None else beside._index.usage.learned
        self._index: PrefixIndex = PrefixIndex(self.geometry, self._pool, config.retention(self._clock), learned)
        self._placement = Placement(config.placement, config.checkpoint_alignment, self.geometry.lookahead)
        parts = (self.geometry, self._pool, self._leases, self._index, self._placement)
        self._extender = Extender(*parts, config.exports_inside)
        self._committer = Committer(*parts, config.pin_seconds)
        self._opener = Opener(*parts, self._committer, config.cost)
        self._transfers = Transfers(*parts, self._opener, self._extender)
        self._namespaces: Namespaces = Namespaces() if beside is None else beside._namespaces
        self._namespaces.watch(self._index.tree.roots)
        self._symbols: SymbolTable = SymbolTable() if beside is None else beside._symbols
        self.tables, self.waterfall, self.counters = self._leases.blocks, Waterfall(), self._index.usage.counters

    # ---- prompts

    @guarded
    def namespace(self, model: str = "", adapter: str = "", salt: str = "") -> int:
        """Id of a namespace; prompts in different ones never share. The empty one is 0.

        An id is never given out twice. It is remembered while anything is known in its namespace; ask for it again for
        every prompt instead of keeping it.
        """
        return self._namespaces.number((model, adapter, salt))

    @guarded
    def namespace_name(self, namespace: int) -> tuple[str, str, str] | None:
        """Model, adapter and salt of a namespace that is known; None if they are too long to be remembered as they are.

        O(1) for one that was given out lately, O(namespaces) for an old one.
        """
        name = self._namespaces.name(namespace)
        return None if isinstance(name, bytes) else name

    def namespace_digest(self, namespace: int) -> bytes | None:
        """A digest of a known namespace's name, which is the same in every process; None if the name is forgotten.

        May be called by what `spill` calls.
        """
        name = self._namespaces.name(namespace)
        return None if name is None else digest_of(name)

    @guarded
    def symbols(self, tokens: TokenIds, media: Sequence[Media] = ()) -> Symbols:
        """Tokens as the cache compares them: placeholders of media carry their content's identity.

        The latest 65,536 contents are remembered; one that comes again after it was forgotten is a new one.

        Raises:
            LeaseError: What is no token id, or media that overlap, lie outside the tokens or are not hashable.
        """
        return self._symbols.apply(tokens, media)

    # ---- finding

    @guarded
    def lookup(self, prompt: Prompt) -> Hit:
        """Where `prompt` can resume. Changes nothing; O(matched tokens + branches).

        Raises:
            LeaseError: The prompt has symbols of another cache.
        """
        return self._lookup(prompt)

    def _lookup(self, prompt: Prompt) -> Hit:
        if not isinstance(prompt, Prompt):
            raise LeaseError(f"give a Prompt, such as Prompt([1, 2, 3]), not {type(prompt).__name__}")
        if prompt.owner is not None and prompt.owner is not self._symbols.owner:
            raise LeaseError("the prompt has symbols of another cache: ask this one for its `symbols`")
        at, tokens, checkpoint = self._index.find(prompt.namespace, prompt.data)
        kind, matched = checkpoint.kind if checkpoint else "", self._matched(at.position, prompt)
        return Hit(tokens, matched, kind, prompt, at, checkpoint, self._index, self._index.version)

    def _true_now(self, hit: Hit | None, prompt: Prompt) -> Hit:
        """`hit`, or a new one if it is not that of `prompt` or the cache has changed since."""
        if hit is not None and hit.index is not self._index:
            raise LeaseError("this hit is another cache's: look the prompt up in the cache that leases it")
        if hit is None or hit.version != self._index.version or hit.prompt is not prompt:
            return self._lookup(prompt)
        return hit

    @guarded
    def lookup_batch(self, prompts: Iterable[Prompt]) -> list[Hit]:
        """`lookup` for each of `prompts`."""
        return [self._lookup(prompt) for prompt in prompts]

    @guarded
    def explain(self, prompt: Prompt) -> Explanation:
        """What would become of every token of `prompt`, and what is known behind another text. Changes nothing."""
        hit = self._lookup(prompt)
        return replace(self._explain(hit), displaced=find_displaced(self._index.tree, hit.at, prompt.data))

    @guarded
    def path(self, prompt: Prompt) -> Path:
        """What is known of the path of `prompt`, part by part. Changes nothing."""
        return describe_path(self._lookup(prompt).at, self._clock())

    def _matched(self, position: int, prompt: Prompt) -> int:
        """Tokens of `prompt` that match, where `position` entries do."""
        return min(position + self.geometry.lookahead, len(prompt.tokens)) if position else 0

    def _explain(self, hit: Hit) -> Explanation:
        prompt, elsewhere = hit.prompt, 0
        if hit.matched < len(prompt.tokens):
            known = self._index.known_elsewhere(prompt.namespace, prompt.data, _NAMESPACES_COMPARED)
            elsewhere = self._matched(known, prompt)
        length, floats = len(prompt.tokens), self._index.floats
        return explain_match(hit.at, length, hit.tokens, hit.matched, elsewhere, floats=floats, now=self._clock())

    # ---- leases

    @guarded
    def lease(self, prompt: Prompt, hit: Hit | None = None, own_blocks: bool = False, *, least_hit: int = 0) -> Lease:
        """Start a request: enter its path, hold what it resumes from, and plan its checkpoints.

        Args:
            prompt: The prompt.
            hit: What `lookup` returned for the same prompt object; looked up anew if the cache has changed since.
            own_blocks: The lease keeps its blocks until it ends: an entry of its row in `tables` stays what it is once
                it is given, but for windows and chunks, whose entries go as the tokens leave their reach. Otherwise,
                where others published the same tokens first, it takes over their blocks and frees its own.
            least_hit: A hit of fewer tokens is given up, where computing them anew is cheaper than going on from it.

        Raises:
            UnservableError: The pool could never hold the prompt. Nothing has changed.
        """
        hit, explanation = self._settle(self._true_now(hit, prompt), least_hit)
        self.waterfall.add(explanation)
        return Lease(self._leases, self._opener.open(hit, explanation, Below(), own_blocks=own_blocks))

    def _settle(self, hit: Hit, least_hit: int) -> tuple[Hit, Explanation]:
        """What of a hit, which is true now, a lease takes: all of it or nothing; and why.

        Raises:
            UnservableError: The pool could never hold the prompt.
        """
        affordable = self._opener.admit(hit)
        explanation = self._explain(hit)
        if not affordable or hit.tokens < least_hit:
            hit = replace(hit, tokens=0, kind="", checkpoint=None)
            explanation = explanation.without_hit(Reason.COMPUTED_ANEW if affordable else Reason.NO_ROOM)
        return hit, explanation

    # ---- other memories

    @guarded
    def lease_below(
        self, prompt: Prompt, below: Below, hit: Hit | None = None, *, asked: bool = True, least_hit: int = 0
    ) -> tuple[Lease, Step | None]:
        """`lease` for a prompt of which another memory has more, or was to have it.

        Args:
            prompt: The prompt.
            below: What can be read back behind the hit, and what could not be.
            hit: As for `lease`.
            asked: A request asks for it. Else a checkpoint is only moved here, from a memory above: it says nothing of
                what is wanted, and is no line of the waterfall.
            least_hit: As for `lease`, where nothing is read back.

        Returns:
            The lease, and the step that reads back: fill the blocks that `tables` has for tokens [start, start + count)
            of its row (of windows and chunks what resuming at the end of the step needs, and the running state) after
            its copies and before its exports, then `commit` or `fail` it. None where there is nothing to read, or no
            room for it now: then the lease is one that computes.

        Raises:
            UnservableError: The pool could never hold the prompt. Nothing has changed.
            LeaseError: A position that cannot be read back. Nothing has changed.
        """
        hit = self._true_now(hit, prompt)
        self._transfers.check(hit, below)
        hit, explanation = self._settle(hit, 0 if below.position else least_hit)
        if not self._transfers.fits(hit, below.position):
            explanation = explanation.without_room(below.position)
            below = replace(below, position=0)
        explanation = explanation.with_below(below)
        if asked:
            self.waterfall.add(explanation)
        row = self._opener.open(hit, explanation, below, asked=asked)
        step = self._transfers.begin(row, below) if below.position else None
        return Lease(self._leases, row), step

    @guarded
    def has_room(self, hit: Hit, position: int) -> bool:
        """Whether there is room now to read back, behind a hit, up to `position`; evicting counts as room."""
        return self._transfers.fits(self._true_now(hit, hit.prompt), position)

    @guarded
    def hold_hit(self, hit: Hit) -> HeldBlocks:
        """Keep the blocks under a hit as they are until `release_hit`, whatever is evicted, forgotten or reset.

        For copying them to another memory. They count as leased.

        Raises:
            LeaseError: The hit has no tokens, or is another cache's.
        """
        return self._transfers.hold(self._true_now(hit, hit.prompt))

    @guarded
    def release_hit(self, held: HeldBlocks) -> None:
        """Undo `hold_hit`.

        Raises:
            LeaseError: It is not held.
        """
        self._transfers.release(held)

    @guarded
    def lend(self, hit: Hit) -> None:
        """A request that runs on another memory has taken from here what `hit` says: learn from it as from a lease.

        What it took has a copy there from now on: here it goes first, until `keep` is told that the copy goes.
        """
        hit = self._true_now(hit, hit.prompt)
        if hit.tokens and hit.checkpoint is not None:
            at = self._index.place(hit.prompt.namespace, hit.at, hit.tokens)
            self._opener.resume(hit, at, hit.checkpoint, goes_on=hit.at.goes_on(len(hit.prompt.tokens)))
            self._index.mark_elsewhere(at, hit.tokens, hit.checkpoint, True)

    @guarded
    def keep(self, hit: Hit, past: Past) -> None:
        """The copy that another memory has of what `hit` says is about to go: here it counts again, with its `past`."""
        hit = self._true_now(hit, hit.prompt)
        if hit.tokens and hit.checkpoint is not None:
            at = self._index.place(hit.prompt.namespace, hit.at, hit.tokens)
            self._index.mark_elsewhere(at, hit.tokens, hit.checkpoint, False, past)

    def spill(self, take: Callable[[Spill], None] | None) -> None:
        """Call `take` with every checkpoint that is about to be evicted, while its blocks still are what they were.

        It is called in the middle of other calls: it may read and copy blocks, and must neither use this cache nor
        raise. What is forgotten or reset is not told. None ends it.
        """
        self._index.reclaim.take = take

    @guarded
    def reach(self, hit: Hit, row: int) -> int:
        """Where the prompt of `hit` could resume if it waited for a running lease. Changes nothing.

        Returns:
            The deepest position on the common path of both that the lease is yet to compute, and at which it keeps a
            checkpoint, or would if it is asked to (`keep_at`); 0 if there is none. What others have computed by then,
            such as `hit` itself, is not considered.

        Raises:
            LeaseError: Not a running lease, or another cache's hit.
        """
        self._leases.check_row(row, RUNNING, AHEAD)
        return self._opener.reach(self._true_now(hit, hit.prompt), row)

    @guarded
    def keep_at(self, row: int, position: int) -> None:
        """Let a running lease keep a checkpoint at `position`, which `reach` returned, as a junction.

        Raises:
            LeaseError: Not a running lease, or a position that `reach` does not return: the lease has passed it,
                nothing is known of it yet, no state can be exported there, or the lease stores nothing.
        """
        self._leases.check_row(row, RUNNING, AHEAD)
        self._opener.keep_at(row, position)

    @guarded
    def demand(self, hit: Hit, tokens: int, step: int = 1) -> int:
        """How many of the `available` blocks a lease on `hit` takes until it has computed `tokens` tokens, at most.

        For admission. Blocks of the prefix that others use anyway are not counted, nor are checkpoints, which need not
        be taken. O(tables + blocks under the hit).

        Args:
            hit: What `lookup` returned.
            tokens: Tokens of the sequence.
            step: Most of them that are under way at once: windows and chunks are let go behind them.
        """
        return self._opener.demand(self._true_now(hit, hit.prompt), tokens, step)

    # ---- steps

    @guarded
    def extend(self, rows: ArrayLike, counts: ArrayLike) -> Step:
        """Give leases the blocks for their next tokens.

        A count is cut at the next checkpoint that needs a state (unless states can be exported inside a chunk), and
        to what memory allows; a lease that gets nothing has count 0 and is unchanged: preempt one and try again.

        With `steps_in_flight=2` a lease may have one step under way: the new one starts where that one ends, and tokens
        that are not known yet are placeholders. The ranks do steps in the order in which they were planned: what a
        commit lets go may still be read by the step under way, and is written by later steps only.

        Args:
            rows: int [n], rows of running leases with fewer steps under way than `steps_in_flight`.
            counts: int [n] or one int, tokens to compute next; may go beyond the known tokens by draft tokens or
                placeholders.

        Returns:
            What the ranks must do. Every lease with a count above 0 now has a step under way: `commit` or `fail` it.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        return self._extender.extend(rows, counts)

    @guarded
    def extend_one(self, row: int, count: int, *, whole: bool = False) -> Step:
        """`extend` for one lease: a few microseconds where its blocks suffice and no checkpoint is due.

        With `whole` it gets all of `count` or nothing, for engines that cannot do with less.
        """
        return self._extender.extend_one(row, count, whole=whole)

    @guarded
    def hold(self, export: StateExport) -> None:
        """Keep the blocks of an export of a step under way for `release`, whatever becomes of lease and checkpoint.

        For engines whose ranks copy before a forward and not behind it: they do an export with the next step's copies,
        and let go of it then.
        """
        for state in (export.source, export.destination):
            self._pool.hold(state, whole=True)
        self._leases.held.append(export)

    @guarded
    def release(self, export: StateExport) -> None:
        """Undo `hold`.

        Raises:
            LeaseError: It is not held.
        """
        if export not in self._leases.held:
            raise LeaseError("this export is not held")
        self._leases.held.remove(export)
        for state in (export.source, export.destination):
            self._pool.drop(state, whole=True)

    @guarded
    def commit(
        self,
        step: Step,
        counts: ArrayLike | None = None,
        sampled: ArrayLike | None = None,
        sampled_counts: ArrayLike | None = None,
    ) -> None:
        """The ranks have done `step`: its tokens are computed, and others may use what it completed.

        Of a lease with two steps under way the older comes first. If fewer of its tokens count than it was given, the
        newer step is undone for that lease: its entry in that step's `counts` becomes 0, and what its ranks made of it
        does not count. Blocks that it was given stay with the lease.

        The cache never touches tensors. Where fewer tokens count, the engine sees to it that the running state is that
        after `Lease.computed` tokens before the lease's next step runs (entries of tokens are written again anyway).
        What was copied and zeroed for a first step of which no token counts is asked for again by the next.

        Entries of a group that looks ahead depend on tokens behind them. When `sampled` tells tokens, the entries of
        all computed positions p with p + lookahead < `Lease.tokens` must be those for the tokens that are now known,
        since others may resume from them. With a lookahead of 1 that is so if the group runs after sampling. With 2 or
        more some entries were computed over tokens not known then: the engine writes these again before this call.

        Args:
            step: What `extend` returned, the object itself.
            counts: int [n], tokens that count (rejected draft tokens do not), at most `step.counts`; all if not given.
            sampled: int32 [n] or [n, m], tokens that follow what is known.
            sampled_counts: int [n], how many of each row of `sampled` are real. If not given: one for every lease
                whose computed tokens now reach the known ones.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._committer.commit(step, counts, sampled, sampled_counts)

    @guarded
    def commit_one(self, step: Step, count: int, sampled: Sequence[int] = ()) -> None:
        """`commit` for a step of one lease, with plain integers.

        Args:
            step: What `extend_one` returned.
            count: Tokens that count, 0 to what was granted.
            sampled: Tokens that follow what is known.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._committer.commit_one(step, count, sampled)

    @guarded
    def fail(self, step: Step, rows: ArrayLike | None = None) -> None:
        """The ranks failed in `step`: nothing of it counts or is published. Its leases can only be aborted.

        A newer step under way is undone for them, as by `commit`; other leases of that step are not concerned. What
        they had committed before stays reusable, so a retry is a new lease with a hit.

        Args:
            step: What `extend` returned.
            rows: int [k], leases of the step that failed; their entries in its `counts` become 0, and the step is still
                to be committed for the others. All of them if not given.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._committer.fail(step, rows)

    # ---- the end

    @guarded
    def bookmark(self, rows: ArrayLike) -> None:
        """Remember where leases stand now, in place of where they stood before: they may have to end there.

        For answers that may end before their last token: where a stop string begins, or a character that may stay
        unfinished. A state cannot be taken back, so the next step copies it first. Nothing happens where no memory
        is free for the copy, and where a later step of the lease has none it is let go.

        Args:
            rows: int [n], rows of running leases without a step under way.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        which = longs("rows", rows).reshape(-1)
        self._leases.check_rows(which, RUNNING, RUNNING)
        for row in which.tolist():
            self._committer.bookmark(row)

    @guarded
    def unmark(self, rows: ArrayLike) -> None:
        """Let go of what leases hold for their bookmarks, if they have one: they may end where they stand.

        `rows` and errors are those of `bookmark`.
        """
        which = longs("rows", rows).reshape(-1)
        self._leases.check_rows(which, RUNNING, RUNNING)
        for row in which.tolist():
            self._committer.unmark(row)

    @guarded
    def finish(self, rows: ArrayLike, reach: ArrayLike | None = None) -> None:
        """Requests are done. Their running states become checkpoints (placement `answer_end`), their blocks are freed.

        `reach`, int [n], says up to where others can come, for example the end of the text that a client has got. Of
        a lease that was computed further, the state at its bookmark is kept instead, where that is not further, too.

        With groups of lookahead 2 or more the end of an answer cannot be kept: its entries depend on tokens that nobody
        knows yet. The same holds for `preempt`.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, "answer_end" if self._placement.answer_end or self._index.floats else None, reach)

    @guarded
    def preempt(self, rows: ArrayLike) -> None:
        """Take requests' memory away. Coming back, as a new lease on all their tokens, is a hit: states are kept.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, "preempt")

    @guarded
    def abort(self, rows: ArrayLike, reach: ArrayLike | None = None) -> None:
        """Requests are given up. What their steps have committed is kept as by `preempt`: the client may come back.

        `reach` is that of `finish`. The one way out of a failed step, after which the running state cannot be trusted:
        then only what had been published stays.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, "abort", reach, BROKEN)

    @guarded
    def discard(self, rows: ArrayLike) -> None:
        """End requests whose running states cannot be trusted: what was published stays, and nothing is added.

        Raises:
            LeaseError: Misuse; nothing has changed.
        """
        self._end(rows, None, None, BROKEN)

    def _end(
        self, rows: ArrayLike, donate: str | None, reach: ArrayLike | None = None, first_phase: int = RUNNING
    ) -> None:
        which = longs("rows", rows).reshape(-1)
        ends = [FAR] * len(which) if reach is None else longs("reach", reach).reshape(-1).tolist()
        if len(ends) != len(which):
            raise LeaseError(f"give one position of `reach` for each of the {len(which)} leases, not {len(ends)}")
        self._leases.check_rows(which, first_phase, RUNNING)
        over = donate != "preempt" and (donate is not None or first_phase == RUNNING)  # else it comes back, or failed
        for row, end in zip(which.tolist(), ends, strict=True):
            if donate is not None and self._leases.phase.item(row) == RUNNING:
                self._committer.donate(row, donate, end)
            self._committer.close(row, over=over, answered=donate == "answer_end")

    @guarded
    def catch_up(self, most: int = 1) -> bool:
        """Do some of the work that can wait: let the policies that are compared hear of `most` ended requests.

        For whoever has nothing else to do, such as an engine while its ranks compute. Without it the same is done
        before something is evicted. About 0.1 ms for each.

        Returns:
            Whether there is more.
        """
        return self._index.reclaim.catch_up(most)

    # ---- wishes about what is kept

    @guarded
    def unpin(self, prompt: Prompt, *, exactly: bool = False) -> int:
        """End every pin on the known path of `prompt`, at its last token or before. Returns how many.

        Args:
            prompt: The prompt.
            exactly: Only the pin at its last token.
        """
        return self._index.unpin(self._lookup(prompt).at, len(prompt.tokens) if exactly else 0)

    @guarded
    def forget(self, prompt: Prompt) -> ResetReport:
        """Forget every sequence that begins with `prompt`, as far back as no other known sequence shares it.

        Shorter sequences that the same requests made known go too. Nothing happens if the whole of `prompt` is not
        known. Running leases go on, with their own memory, and publish nothing more.
        """
        tops = self._index.beginning_with(self._lookup(prompt).at, prompt.data)
        rows, told = self._leases.rows_of(prompt.namespace), self._committer.sequence
        return self._forget(tops, "forgotten", [row for row in rows if told(row).startswith(prompt.data)])

    @guarded
    def forget_namespace(self, namespace: int) -> ResetReport:
        """Forget all that is known in a namespace. Running leases go on and publish nothing more."""
        if not isinstance(namespace, int):
            raise LeaseError(f"give the id that `namespace(...)` returns, not {namespace!r}")
        tops = list(root.children.values()) if (root := self._index.tree.roots.get(namespace)) else []
        return self._forget(tops, "forgotten", self._leases.rows_of(namespace))

    @guarded
    def reset(self) -> ResetReport:
        """Forget everything, interned namespaces and media included.

        Running leases go on with their own memory and publish nothing more.
        """
        tops = [child for root in self._index.tree.roots.values() for child in root.children.values()]
        report = self._forget(tops, "reset", self._leases.active_rows())
        self._symbols.forget()
        self._namespaces.forget()
        return report

    def _forget(self, tops: list[Edge], cause: str, rows: Sequence[int]) -> ResetReport:
        """Forget edges and all behind them; what runs there is detached, and `rows`."""
        free, gone = self._pool.free, set(tops)
        anchors = [(row, self._leases.record(row).anchor) for row in self._leases.active_rows()]
        inside = {row for row, at in anchors if at and not gone.isdisjoint(at.edge.path())}
        before = {row: at.edge for row, at in anchors if at and row in rows and row not in inside}
        leaving = [*inside, *before]
        for row in leaving:
            self._committer.detach(row)
        checkpoints = self._index.forget(tops, cause)
        for edge in before.values():
            self._index.reclaim.tidy(edge)
        return ResetReport(self._pool.free - free, checkpoints, len(leaving))

    # ---- looking in

    @property
    def leases(self) -> int:
        """Leases that have not ended."""
        return self._leases.running

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds; evictable ones do not count."""
        return self._pool.free

    @property
    @guarded
    def available(self) -> int:
        """Blocks that are free or can be evicted now: leases could take that many, or a few more. Ends pins in time.

        O(1); O(leases) where several tables of full attention have blocks of unlike spans.
        """
        self._index.reclaim.expire_pins()
        available, tables = self._pool.available, self.geometry.prefix_tables
        if len(tables) > 1:  # a block of one table may be kept for the sake of another's
            available -= sum(self._committer.kept_twice(row) for row in self._leases.active_rows())
        return max(available, self._pool.free)

    @property
    def held_blocks(self) -> Ids:
        """Ids of all blocks that somebody holds, int32 ascending: whose content must outlast `save` and `load`."""
        return np.flatnonzero(self._pool.references).astype(np.int32)

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on, each when the change it is part of is complete.

        What it raises is logged (`headway.cache`) and reaches nobody else.

        Returns:
            The function that ends it.
        """
        if not callable(listener):
            raise LeaseError(f"a listener is called with every event, and {listener!r} cannot be called")
        self._watched = True
        return self._index.residency.listeners.add(listener)

    @guarded
    def stats(self) -> CacheStats:
        """Memory and events. O(1), but for the bytes of the rows of leases."""
        self._index.reclaim.expire_pins()
        pool, index = self._pool, self._index
        fixed = pool.nbytes + self._leases.nbytes + self._namespaces.nbytes
        return CacheStats(
            blocks=pool.blocks,
            free=pool.free,
            leased=pool.used - pool.pinned,
            pinned=pool.pinned,
            evictable=pool.available - pool.free,
            leases=self.leases,
            checkpoints=self._index.tree.checkpoints,
            counters=self.counters.copy(),
            bookkeeping_bytes=fixed + self._symbols.nbytes + index.tree.nbytes,
            bookkeeping_limit=fixed + self._symbols.limit + max(index.tree.nbytes, index.reclaim.keep.hard_bytes),
        )

    def kept(self) -> Iterator[Spill]:
        """All that requests can resume from, what is worth most for its memory first; of paths, where they end.

        For writing it elsewhere before the cache is given up: nothing else may use it meanwhile. Ends of messages come
        before ends of answers, which only the next turn of the same conversation uses. O(everything that is kept).
        """
        return self._index.reclaim.kept()

    @guarded
    def holdings(self) -> Holdings:
        """What the blocks hold, and which checkpoints there are. Changes nothing; O(everything that is kept)."""
        return survey(self._index)

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What was written, with a registry of namespaces of its own."""
        super().__setstate__(state)
        self._namespaces.watch(self._index.tree.roots)

    def __copy__(self) -> PrefixCache:
        """Refused: a shallow copy would count the same blocks twice.

        Raises:
            LeaseError: Always; `copy.deepcopy` works.
        """
        raise LeaseError("a shallow copy of a cache would hand out the same blocks: use copy.deepcopy")

    @guarded
    def save(self) -> bytes:
        """The whole index as bytes, for `load`: what is known and kept, what was learned, pins, namespaces and media.

        What the bytes do not have is the arena: whoever loads them provides memory in which every block of
        `held_blocks` has the content that it had. Listeners are not part of it, and symbols of media must be asked for
        again.

        Raises:
            LeaseError: A lease runs: its blocks are being written. End all of them first.
            ConfigError: It holds an object of a foreign class: an eviction policy, or the identity of a medium.
        """
        if self._leases.running:
            raise LeaseError(f"{self._leases.running} leases run: end them before saving the cache")
        if self._leases.lent:
            raise LeaseError(f"{len(self._leases.lent)} hits are held: release them before saving the cache")
        return write(vars(self) | {"_lock": None})

    @staticmethod
    def load(data: bytes, *, clock: Callable[[], float] = time.monotonic) -> PrefixCache:
        """The cache that `save` wrote; its time goes on where it stood.

        Only objects of this package, numpy and the standard library's containers are read, so that a file from a
        stranger can be wrong but cannot run code of its own.

        Raises:
            ConfigError: Not what `save` of this release writes.
        """
        cache = PrefixCache.__new__(PrefixCache)
        cache.__setstate__(read(data))
        cache._clock.restart(clock)
        return cache

    @guarded
    def check(self) -> None:
        """Check every invariant. O(everything).

        Raises:
            AssertionError: An invariant is broken: a bug in this package.
        """
        invariants.check(self._index, self._leases)

    def _verify(self) -> None:
        if self.config.check:
            invariants.check(self._index, self._leases)

    def _deliver(self) -> None:
        self._index.residency.listeners.deliver()
