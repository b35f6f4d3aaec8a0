"""What vLLM's scheduler asks of its KV cache manager, answered from a `PrefixCache`.

The life of a request, in vLLM's words and ours:

    get_computed_blocks    a lease, if the pool has room for it: it holds the hit and nothing else
    allocate_slots         `extend_one`; the worker is told of the blocks that are new to it
    (the forward runs)
    update_from_output     `commit`: what was computed counts, what was sampled is known
    free                   `finish`, `preempt` or `abort`, by the request's status

The invariants that vLLM's workers ask for:

* Block tables only grow. So leases own their blocks, and of each table it is remembered how much the worker has.
* Copies run before a forward, and a state is exported behind one. So exports go with the next step's copies. Until then
  their blocks are held, since new pages are zeroed before anything is copied; and who resumes from a checkpoint that is
  not written yet copies from its source.
* A request is granted all of what the scheduler asks for, or nothing.
* Steps are done in the order in which they were planned, whether or not the outcome of the one before is known. So a
  request that ends while a step of its own is under way counts those of its tokens that are known.

Nothing here imports vLLM: what must be of vLLM's own classes is made by functions that the scheduler gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from headway.cache import CacheConfig, Lease, Media, PrefixCache, Prompt, StateExport, Step, Waterfall
from headway.errors import ConfigError, HeadwayError
from headway.vllm.events import KvEvents
from headway.vllm.groups import Groups
from headway.vllm.options import Options
from headway.vllm.wishes import DryRun, Wishes, read_wishes, report

__all__ = ["Blocks", "KVCacheManager"]

_WHO = {"own": "requests with a cache_salt", "off": "nobody"}
_FAR = 1 << 62
"""A position that is never reached."""


class Blocks:
    """Block ids of each group, as the scheduler passes them on: vLLM's `KVCacheBlocks` without objects for blocks."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[Sequence[int], ...]) -> None:
        """`blocks`: ids of each group, in vLLM's order."""
        self.blocks = blocks

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Ids of each group, or of `group_ids`; with `allow_none` None if there are none."""
        groups = self.blocks if group_ids is None else [self.blocks[i] for i in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple(list(group) for group in groups)


@dataclass(slots=True, eq=False)
class _Part:
    """A request's part of a step.

    Attributes:
        step: Of this request alone.
        count: Its tokens.
        drafts: How many of them are drafts, the last ones.
    """

    step: Step
    count: int
    drafts: int = 0


@dataclass(slots=True, eq=False)
class _Asked:
    """A request from its arrival to its end.

    Attributes:
        prompt: Its tokens as the cache compares them; None if they are to be converted anew.
        wishes: What it asks for.
        first: Its first lease since its latest input.
    """

    prompt: Prompt | None
    wishes: Wishes
    first: Lease | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """A request that has a lease.

    Attributes:
        lease: The lease.
        row: Its row.
        asked: What is known of the request.
        last_stop: Position from which on it is to stop at no checkpoint any more.
        room: Position up to which the worker's tables reach.
        sent: Blocks of each table of attention that the worker has.
        parts: Its parts of the steps under way, the oldest first.
        admitted: The scheduler has given it slots.
        whole: Its running state is that after the tokens that count. Once a draft was accepted it is not: states then
            lie in pages for drafts, and the windows of convolutions are shifted, as the worker alone knows.
        failed: A step of it has failed.
    """

    lease: Lease
    row: int
    asked: _Asked
    last_stop: int
    room: int = 0
    sent: list[int] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)
    admitted: bool = False
    whole: bool = True
    failed: bool = False


class KVCacheManager:
    """The substitute for vLLM's `KVCacheManager`.

    Attributes:
        cache: The prefix cache.
        groups: vLLM's groups as the cache has them.
        options: The user's options.
        unservable: Requests that cannot be served (the pool could never hold them), and why; the scheduler ends them.
        events: Makes the KV events, if somebody wants them.
        waterfall: What became of the prompts of admitted requests, each counted once.
        resumed_tokens: Tokens of requests that were admitted again, after a preemption.
        resumed_hit_tokens: Of these, tokens that were still cached.
    """

    def __init__(
        self,
        groups: Groups,
        options: Options,
        *,
        max_model_len: int,
        steps_in_flight: int = 1,
        slots_ahead: int = 0,
        most_under_way: int = 1,
        watermark: float = 0.0,
        new_stats: Callable[[], Any] | None = None,
        new_copy: Callable[[int, int], Any] = lambda source, destination: (source, destination),
    ) -> None:
        """Make the cache.

        Args:
            groups: What the planner made of the model.
            options: The user's options.
            max_model_len: Tokens for which the worker's tables have room.
            steps_in_flight: 2 for asynchronous scheduling.
            slots_ahead: Positions behind a step's that drafts write.
            most_under_way: Most tokens that are planned and not yet committed.
            watermark: Share of the pool that stays free when requests are admitted.
            new_stats: Makes a `PrefixCacheStats`; None if nobody reads it.
            new_copy: Makes a `KVCacheBlockCopy`.

        Raises:
            ConfigError: Options that cannot work.
        """
        self._interval = any(kind.startswith("interval") for kind in options.placement)
        if self._interval and any(group.drafts for group in groups.groups):
            raise ConfigError(
                "additional-config, headway: placement has interval:N, which takes states inside answers. With drafts "
                "they cannot be copied there: leave it out, or serve without --speculative-config"
            )
        self.groups, self.options = groups, options
        self.cache = PrefixCache(_cache_config(groups, options, steps_in_flight, slots_ahead))
        geometry = self.cache.geometry
        self._tables = [(i, geometry.group(groups.groups[i].name).table) for i in groups.attention]
        self._max_model_len, self._ahead = max_model_len, slots_ahead
        self._step = min(most_under_way, max_model_len)
        pages = [group.spec.block_size for group in groups.groups if group.span]
        self._page = max(pages, default=_FAR) if groups.states else _FAR
        self._watermark = int(watermark * groups.blocks)
        self._new_stats, self._new_copy = new_stats, new_copy
        self.prefix_cache_stats = new_stats() if new_stats else None
        self.unservable: dict[str, str] = {}
        self.events: KvEvents | None = None
        self.waterfall, self.resumed_tokens, self.resumed_hit_tokens = Waterfall(), 0, 0
        self._asked: dict[str, _Asked] = {}
        self._runs: dict[str, _Run] = {}
        self._opened: list[str] = []
        self._planned: dict[str, _Part] = {}
        self._flying: deque[tuple[Any, dict[str, _Part]]] = deque()
        self._copies: dict[str, np.ndarray[Any, Any]] = {}
        self._late: list[StateExport] = []
        self._exports: list[StateExport] = []
        self._new_ids: list[int] = []
        self.empty_kv_cache_blocks = Blocks(tuple(() for _ in groups.groups))
        self.coordinator = SimpleNamespace(
            single_type_managers=tuple(
                SimpleNamespace(block_size=group.span or group.spec.block_size, kv_cache_spec=group.spec)
                for group in groups.groups
            ),
            enable_partial_hash_hits=False,
        )
        self.block_pool = SimpleNamespace(
            free_blocks=lambda blocks: None, get_num_free_blocks=lambda: self.cache.available
        )
        self.mamba_shared_prefix_checkpoint = False

    # ---- a step

    def new_step_starts(self) -> None:
        """A step is being planned. Who could not be admitted in the last one lets go of what it holds."""
        for rid in self._opened:
            run = self._runs.get(rid)
            if run is not None and not run.admitted:
                self.cache.abort([run.row])
                del self._runs[rid]
        self._opened.clear()

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Blocks, int, int]:
        """Where a waiting request can start: blocks (none: `allocate_slots` gives all of them), tokens, and 0."""
        run = self._runs.get(request.request_id) or self._open(request)
        return self.empty_kv_cache_blocks, run.lease.computed if run else 0, 0

    def _open(self, request: Any) -> _Run | None:
        """A lease for a request, or None if the pool has no room for all of its tokens now, or never has."""
        rid, cache = request.request_id, self.cache
        try:
            prompt = self._prompt(request)
            length = len(prompt.tokens)
            hit = cache.lookup(prompt)
            room = cache.available - self._watermark
            fits = not self._runs or cache.geometry.fits_anyway(room, length + self._ahead)
            if not fits and room < cache.demand(hit, length, self._step) <= self.groups.blocks:
                return None
            lease = cache.lease(
                prompt, hit, own_blocks=True, least_hit=length if request.skip_reading_prefix_cache else 0
            )
        except HeadwayError as error:
            self.unservable[rid] = str(error)
            return None
        last_stop = _FAR if self._interval else length
        run = _Run(lease, lease.row, self._asked[rid], last_stop, sent=[0] * len(self._tables))
        self._runs[rid] = run
        self._opened.append(rid)
        return run

    def _prompt(self, request: Any) -> Prompt:
        """The tokens of a request as the cache compares them. They are converted when it arrives, and if it has more.

        Where the last whole page ends is vLLM's own place for a state. Prompts that differ in their last question only
        can resume there before anyone has seen where they part. The cache learns, as of the ends of messages, whether
        that pays.
        """
        rid, length = request.request_id, request.num_tokens
        known = self._asked.get(rid)
        if known is not None and known.prompt is not None and len(known.prompt.tokens) == length:
            return known.prompt
        tokens, lora, given = request._all_token_ids, request.lora_request, request.prompt_embeds is not None
        media = [Media(one.mm_position.offset, one.mm_position.length, one.identifier) for one in request.mm_features]
        adapter = f"{lora.lora_name}\0{lora.lora_int_id}\0{lora.lora_path}" if lora else ""
        page_end = (length - 1) // self._page * self._page
        wishes = self._wishes(request)
        prompt = Prompt(
            self.cache.symbols(tokens, _apart(media)) if media else tokens,
            # what was given as embeddings has no tokens to compare
            self.cache.namespace("embeddings" if given else "", adapter, rid if given else request.cache_salt or ""),
            breakpoints=wishes.breakpoints,
            boundaries=(page_end,) if page_end else (),
            pin=wishes.pin,
            no_store=wishes.no_store or given,
            pin_seconds=wishes.pin_seconds,
        )
        self._asked[rid] = _Asked(prompt, wishes, known.first if known else None)
        if self.events and not given:
            self.events.name(prompt.namespace, lora, request.cache_salt)
        return prompt

    def _wishes(self, request: Any) -> Wishes:
        parameters = request.sampling_params
        return read_wishes(parameters and parameters.extra_args, request.num_prompt_tokens, pins=self.options.pins)

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,
        num_lookahead_tokens: int = 0,
        **_: Any,
    ) -> Blocks | None:
        """Blocks that are new to the worker for the next tokens of a request, or None: then nothing has changed."""
        rid = request.request_id
        run = self._runs.get(rid)
        if run is None or run.failed:
            return None
        step = self.cache.extend_one(run.row, num_new_tokens, whole=True)
        if step.counts.item() == 0:
            return None
        self._planned[rid] = part = _Part(step, num_new_tokens)
        run.parts.append(part)
        if len(step.copies):
            self._copies[rid] = step.copies
        for export in step.exports:
            self.cache.hold(export)
            self._exports.append(export)
        first = not run.admitted
        if first:
            run.admitted = True
            self._count_admission(run.asked, run.lease)
        end = step.starts.item() + num_new_tokens + self._ahead
        return self._send(run, end, first=first) if first or end > run.room else self.empty_kv_cache_blocks

    def _count_admission(self, asked: _Asked, lease: Lease) -> None:
        """A request was admitted, at first or again."""
        if asked.first is None:
            asked.first = lease
            self.waterfall.add(lease.explanation)
        else:
            self.resumed_tokens += lease.explanation.prompt_tokens
            self.resumed_hit_tokens += lease.explanation.hit_tokens

    def cut(self, request: Any, num_new_tokens: int) -> int:
        """How many of the next tokens of a request one step may compute: no further than to the next checkpoint."""
        run = self._runs.get(request.request_id)
        if run is None or request.num_computed_tokens >= run.last_stop:
            return num_new_tokens
        lease = run.lease
        stop, planned = lease.next_stop, lease.planned
        return min(num_new_tokens, stop - planned) if planned < stop < lease.tokens else num_new_tokens

    def _send(self, run: _Run, end: int, *, first: bool) -> Blocks:
        """The blocks for positions up to `end` that the worker does not have yet."""
        out: list[Sequence[int]] = [()] * len(self.groups.groups)
        start, end, rooms = run.lease.planned if not first else run.lease.computed, min(end, self._max_model_len), []
        for i, (group, table) in enumerate(self._tables):
            had, want = run.sent[i], -(-end // table.span)
            if want > had:
                ids = self.cache.tables[table.index][run.row, had:want] + 1
                out[group] = ids.tolist()
                self._new_ids += out[group][max(0, start // table.span - had) :] if first else out[group]
                run.sent[i] = want
            rooms.append(run.sent[i] * table.span)
        run.room = min(rooms, default=_FAR)
        if first:
            self._add_states(run, out)
        return Blocks(tuple(out))

    def _add_states(self, run: _Run, out: list[Sequence[int]]) -> None:
        """Put the pages of the running states into `out`: of each group the state's, then those for drafts."""
        table = self.cache.geometry.state_table
        if table is None:
            return
        states = (self.cache.tables[table.index][run.row, : table.state_blocks] + 1).tolist()
        drafts = (self.cache.tables[-1][run.row] + 1).tolist()
        for group, state in zip(self.groups.states, states, strict=True):
            count = self.groups.groups[group].drafts
            out[group], drafts = [state, *drafts[:count]], drafts[count:]

    def get_blocks(self, request_id: str) -> Blocks:
        """All blocks that the worker has of a request; none if it does not run."""
        run, out = self._runs.get(request_id), list(self.empty_kv_cache_blocks.blocks)
        if run is None:
            return self.empty_kv_cache_blocks
        for (group, table), sent in zip(self._tables, run.sent, strict=True):
            out[group] = (self.cache.tables[table.index][run.row, :sent] + 1).tolist()
        self._add_states(run, out)
        return Blocks(tuple(out))

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """The copies that the worker makes before this step's forward: exports of the last one, and hits.

        All sources are read before anything is written.
        """
        late: dict[int, int] = {}
        for export in self._late:
            late.update(zip(export.destination.tolist(), export.source.tolist(), strict=True))
            self.cache.release(export)
        self._late, self._exports = self._exports, []
        pairs = [(source, destination) for destination, source in late.items()]
        for copies in self._copies.values():
            pairs += [(late.get(source, source), destination) for source, destination in copies.tolist()]
        self._copies.clear()
        return [self._new_copy(source + 1, destination + 1) for source, destination in pairs], []

    def take_new_block_ids(self) -> list[int]:
        """Blocks of attention that requests got in this step: they are zeroed if the model wants that."""
        ids, self._new_ids = self._new_ids, []
        return ids

    def close_step(self, output: Any) -> None:
        """The step is planned: `output` is what the worker will be told."""
        for rid, drafts in output.scheduled_spec_decode_tokens.items():
            self._planned[rid].drafts = len(drafts)
        self._flying.append((output, self._planned))
        self._planned = {}

    def commit(self, output: Any, index: dict[str, int], sampled: Sequence[Sequence[int]]) -> None:
        """The worker has done the step of `output`.

        Args:
            output: What `close_step` got.
            index: Request id to place in `sampled`.
            sampled: Tokens that each request got: drafts that were accepted, and one more.
        """
        for rid, part in self._landed(output).items():
            run = self._runs.get(rid)
            if run is not None and run.parts and run.parts[0] is part:
                self._commit(run, sampled[index[rid]] if sampled else ())

    def _landed(self, output: Any) -> dict[str, _Part]:
        """The parts of the step of `output`. Steps that were planned before it and never came back have failed."""
        while self._flying:
            planned, parts = self._flying.popleft()
            if planned is output:
                return parts
            for rid, part in parts.items():
                run = self._runs.get(rid)
                if run and run.parts and run.parts[0] is part:
                    self.cache.fail(part.step)
                    run.parts.clear()
                    run.failed = True
        return {}

    def _commit(self, run: _Run, tokens: Sequence[int]) -> None:
        """Commit the older step of a request, which sampled `tokens`."""
        part = run.parts.pop(0)
        rejected = max(0, part.drafts - max(0, len(tokens) - 1))
        newer = run.parts[0].count if rejected and run.parts else 0
        self.cache.commit_one(part.step, part.count - rejected, tokens)
        run.whole = rejected == part.drafts
        if newer:  # the worker puts the newer step behind what was accepted: so it is planned anew, there
            run.parts[0].step = again = self.cache.extend_one(run.row, newer, whole=True)
            assert again.counts.item() == newer

    # ---- the end of a request

    def free(self, request: Any) -> None:
        """A request has ended, is preempted, or (a session) waits with more input: its status says which."""
        rid = request.request_id
        self._copies.pop(rid, None)
        if request.is_finished() or request.status.name == "WAITING":
            self._asked.pop(rid, None)
        run, unsent = self._runs.pop(rid, None), self._planned.pop(rid, None)
        if run is None:
            return
        for part in run.parts:
            self._settle(run, part, runs=part is not unsent)
        if run.failed:
            self.cache.abort([run.row])
        elif self.groups.states and not run.whole:
            self.cache.discard([run.row])
        elif not request.is_finished():
            self.cache.preempt([run.row])
        elif request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self.cache.finish([run.row])
        else:
            self.cache.abort([run.row])

    def _settle(self, run: _Run, part: _Part, *, runs: bool) -> None:
        """Commit a step under way of a request that ends: its known tokens count, if the worker `runs` it at all."""
        step = part.step
        count = min(max(run.lease.tokens - step.starts.item(), 0), step.counts.item()) if runs else 0
        if runs:
            run.whole = count == step.counts.item() - part.drafts
        self.cache.commit_one(step, count)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """`free`; there are no blocks to free later."""
        self.free(request)
        return []

    def explain(self, request: Any) -> dict[str, Any] | None:
        """What a request that ends is told: all if it asked for that, else which wishes were refused; None if none."""
        run, rule = self._runs.get(request.request_id), self.options.explain
        if run is None or not run.admitted or rule == "off":
            return None
        first, wishes, full = run.asked.first, run.asked.wishes, rule == "all" or bool(request.cache_salt)
        if first is None or not wishes.explain:
            return {"refused": wishes.refused} if wishes.refused else None
        return report(first, run.lease, wishes, full=full, everything=rule == "all")

    def add_request(self, request: Any) -> dict[str, Any] | None:
        """A request has arrived. Returns what it is told if it asks for no answer (wish `dry_run`), else None.

        It is told in full or not at all: who computes nothing leaves nothing behind, and could try out prompts.
        """
        wishes, rule = self._wishes(request), self.options.explain
        if not wishes.dry_run:
            with suppress(HeadwayError):  # which is said when it would be admitted
                self._prompt(request)
            return None
        if rule == "off" or (rule == "own" and not request.cache_salt):
            return {"refused": [f"dry_run: this server explains to {_WHO[rule]}"]}
        try:
            prompt = self._prompt(request)
        except HeadwayError as error:
            return {"refused": [f"dry_run: {error}"]}
        del self._asked[request.request_id]
        found = DryRun(self.cache.explain(prompt), self.cache.lookup(prompt))
        return report(found, found, wishes, full=True, everything=rule == "all")

    def reset_prefix_cache(self) -> bool:
        """Forget everything. Running requests go on with their own memory."""
        for asked in self._asked.values():
            asked.prompt = None  # it may name media and namespaces that are forgotten
        self.cache.reset()
        if self.events:
            self.events.clear()
        return True

    # ---- what is told

    @property
    def usage(self) -> float:
        """Share of the pool that running requests and pins need."""
        return 1.0 - self.cache.available / self.groups.blocks

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Whether a request may start from the cache."""
        return not request.skip_reading_prefix_cache

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """A request was admitted, with a hit of so many tokens."""
        stats = self.prefix_cache_stats
        if stats is not None and self.prefix_cache_lookup_enabled(request):
            stats.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0)

    def make_prefix_cache_stats(self) -> Any:
        """What was recorded since the last call."""
        stats = self.prefix_cache_stats
        self.prefix_cache_stats = self._new_stats() if self._new_stats else None
        return stats

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens of a request that others could resume behind."""
        run = self._runs.get(request.request_id)
        return run.lease.computed if run else 0

    def take_events(self) -> list[Any]:
        """KV events since the last call."""
        return self.events.take() if self.events else []

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Nothing to do: what is computed counts by `commit`."""

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """None: there is no KV connector."""
        return {}

    def remove_skipped_blocks(self, *_: Any, **__: Any) -> None:
        """Nothing to do: `extend_one` lets go of what windows have left behind."""


def _apart(media: list[Media]) -> list[Media]:
    """`media` so that none share placeholders: those that do (a video and its sound) become one; empty ones go."""
    found: list[Media] = []
    for medium in sorted(media, key=lambda each: each.start):
        last = found[-1] if found else Media(0, 0, "")
        if medium.start < last.start + last.length:
            length = max(last.length, medium.start + medium.length - last.start)
            content = (last.content, last.length, medium.start - last.start, medium.length, medium.content)
            found[-1] = Media(last.start, length, content)
        elif medium.length:
            found.append(medium)
    return found


def _cache_config(groups: Groups, options: Options, steps_in_flight: int, slots_ahead: int) -> CacheConfig:
    """What the cache is told when it is made."""
    return CacheConfig(
        groups.specs,
        groups.blocks,
        block_bytes=groups.block_bytes,
        layout=groups.layout,
        steps_in_flight=steps_in_flight,
        slots_ahead=slots_ahead,
        scratch_blocks=sum(group.drafts for group in groups.groups),
        **options.of_cache(),
    )
