"""vLLM as it serves hybrid models today: blocks found by hash, and all groups in one pool of pages of one size.

The rules, as its public source of 2026 has them in align mode (`vllm/v1/core/sched/scheduler.py`: how prompts are cut;
`single_type_kv_cache_manager.py`: which blocks are held and named; `kv_cache_coordinator.py`: hits and junctions;
`block_pool.py`: the free list; sparse retention of states: vllm#45845):

- A page holds `block_tokens` tokens of all attention layers, or of those of a group of windows, or the state of one of
  `state_groups` groups of recurrent layers (`headway.replay.config.vllm_pages`). So a state takes `state_groups` pages,
  however little of a page it fills.
- A hit is the deepest block boundary, before the prompt's last token, to which every attention block is found, and
  there every group's state, and all blocks that every window covers. What attention alone would reach is remembered as
  the *junction*.
- Up to `running` requests run. A step has `step_tokens` tokens: one for each that decodes, the rest for prompts in
  order of arrival. A request is admitted if its whole prompt finds pages.
- With states, a part of a prompt ends at a block boundary, unless it ends the prompt; at the last boundary of the
  prompt; and at the junction. Where it ends at a boundary the state is there, in pages of its own, and may be kept.
- "latest": it is kept at the last boundary before the prompt's last token and at the junction. "dense": everywhere. So
  are the blocks that a window covers (`headway.replay.imitate.windows`). "common": as "latest", but of boundaries count
  only those that attention and states have in common.
- Blocks can be found as soon as their step is *planned*. A state cannot be used in the step that computes it: the
  request that would, waits, and all behind it.
- A state that is no longer the running one is freed at once; everything else when its request ends, last block first.
  Free pages are taken from the one that was freed first. A page without a hash is taken before all others.
- Who finds no page in a running request preempts the youngest, which starts over.

With context parallelism an attention page covers shards x `block_tokens` tokens. States stay at multiples of
`block_tokens`, so a hit may end inside an attention page: its entries up to there are copied to a page of its own. Such
a place is found if it is the last boundary of an earlier prompt, or lies inside a page that is found whole.

With `geometry=process` context parallelism widens the blocks of states too, where they are kept and named, and not
where they are looked for (vllm#53598): a name of a wide block is never that of a narrow one, so no state is found.

Dense retention meets the figures in docs/replay.md if pages without a hash are *not* taken first; with it, it reuses
up to two points more than they say. We take that for the order of the engine that was measured.

With `match_unit` (vLLM's `prefix_match_unit`) a hit may end at any multiple of it, inside an attention page as with
context parallelism, and states lie at such multiples. The memory of a page stays what it is.

Not modelled: the time that anything takes (a step is a step), speculative decoding, connectors.
"""

from __future__ import annotations

from collections import deque
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from headway.cache import FullAttention, SlidingWindow
from headway.errors import ConfigError
from headway.formats import Trace
from headway.replay.config import ReplayConfig, VllmPreset
from headway.replay.config.scale import page_plan_of
from headway.replay.imitate.paged import PagedCache, PagedRequest, PageSizes
from headway.replay.imitate.windows import WindowPages
from headway.replay.run.ledger import Ledger, Progress
from headway.replay.trace.prefixes import PrefixKeys, Reading

__all__ = ["run_vllm", "vllm_pages"]


def vllm_pages(config: ReplayConfig, settings: VllmPreset) -> PageSizes:
    """Sizes and number of pages.

    Raises:
        ConfigError: A model that vLLM lays out in a way that is not modelled, or memory for less than a request.
    """
    plan = page_plan_of(config, settings)
    attention = [table for table in plan.tables if table.kind is FullAttention]
    windows = [table for table in plan.tables if table.kind is SlidingWindow]
    if len(attention) > 1 or attention[0].groups > 1 or (windows and plan.state_groups):
        raise ConfigError(
            "preset vllm: attention in several groups, and windows beside states, are not modelled; to replay "
            "attention as if it were one group, give state_groups, as in vllm,state_groups=3: layers with states over "
            "layers with attention, rounded up"
        )
    wide = [table.span for table in (*attention, *windows)]
    block, align = (gcd(*wide), lcm(*wide)) if windows else (settings.match_unit or plan.block_tokens, 0)
    if settings.match_unit and (not plan.state_groups or plan.block_tokens % settings.match_unit):
        raise ConfigError(
            f"preset vllm: match_unit={settings.match_unit} must divide the block of {plan.block_tokens} tokens, and "
            f"is for models with states"
        )
    count = 0
    if config.memory is not None:
        count = config.memory // plan.page_bytes - 1  # one page is the null block
        if count < 2 + 3 * plan.state_groups + 2 * sum(table.groups for table in windows):
            raise ConfigError(
                f"preset vllm: {config.memory} bytes are only {count + 1} pages of {plan.page_bytes} bytes: give more "
                f"memory"
            )
    spans, shards = attention[0].span // block, config.layout.shards if settings.geometry == "process" else 1
    return PageSizes(
        block,
        spans,
        plan.page_bytes,
        plan.state_groups,
        count,
        tuple(WindowPages(table.reach, table.groups, table.span // block) for table in windows),
        align // block or 1,
        spans if shards > 1 or settings.retention == "common" else 1,
        shards,
    )


def run_vllm(
    trace: Trace,
    pages: PageSizes,
    settings: VllmPreset,
    reading: Reading,
    matches: NDArray[np.int64],
    progress: Progress | None,
) -> Ledger:
    """Run a trace with `running` requests in flight."""
    return _Vllm(trace, pages, settings, reading, Ledger(trace, matches, progress)).all()


class _Vllm:
    """The scheduler. Requests that wait are numbers; those that run are `PagedRequest` objects, in order of arrival."""

    def __init__(self, trace: Trace, pages: PageSizes, settings: VllmPreset, reading: Reading, ledger: Ledger) -> None:
        self._prompts: list[int] = trace.prompt_tokens.tolist()
        self._answers: list[int] = np.maximum(trace.answer_tokens, 1).tolist()
        self._settings, self._ledger = settings, ledger
        self._block, self._grain = pages.block_tokens, pages.block_tokens * pages.grain
        self._keys = PrefixKeys(trace, reading)
        self._cuts = pages.state_groups > 0
        """Whether parts of prompts end at block boundaries: states are kept there alone."""
        dense = settings.retention == "dense"
        self._cache = PagedCache(pages, dense=dense, ledger=ledger, step_tokens=settings.step_tokens)
        self._waiting: deque[int] = deque(range(len(trace)))
        self._running: list[PagedRequest] = []
        self._told: dict[int, int] = {}
        """Tokens answered by requests that were preempted."""
        self._seen: set[int] = set()
        self._times: list[float] = trace.times.tolist()
        self._looked = 0

    def all(self) -> Ledger:
        """Run every request."""
        while self._waiting or self._running:
            self._step()
        self._sample()
        return self._ledger

    def _step(self) -> None:
        self._cache.new_step()
        picks, preempted = self._pick_running()
        if not preempted:
            self._admit(picks, self._settings.step_tokens - sum(picks.values()))
        times = self._repeats(picks)
        for sequence, count in picks.items():
            self._cache.computed(sequence, count * times)
            if sequence.done >= sequence.known:
                sequence.known += times
                if sequence.known >= sequence.total:
                    self._running.remove(sequence)
                    self._cache.free(sequence)

    def _pick_running(self) -> tuple[dict[PagedRequest, int], bool]:
        """Tokens for each running request, and whether somebody was preempted."""
        picks: dict[PagedRequest, int] = {}
        budget, index, preempted = self._settings.step_tokens, 0, False
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = self._cut(sequence, min(sequence.known - sequence.done, budget))
            index += 1
            if not count:
                continue
            self._cache.drop_old_state(sequence)
            while not self._cache.extend(sequence, sequence.done + count):
                victim = self._running.pop()
                budget += picks.pop(victim, 0)
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    return picks, True
            picks[sequence] = count
            budget -= count
        return picks, preempted

    def _preempt(self, victim: PagedRequest) -> None:
        self._cache.free(victim)
        self._told[victim.request] = victim.known - self._prompts[victim.request]
        self._waiting.appendleft(victim.request)

    def _admit(self, picks: dict[PagedRequest, int], budget: int) -> None:
        while self._waiting and len(self._running) < self._settings.running and budget > 0:
            request = self._waiting[0]
            sequence = self._sequence(request)
            if not self._cache.could_hold(sequence):
                self._waiting.popleft()
                if request not in self._seen:
                    self._look(sequence, None)
                continue
            self._cache.look_up(sequence)
            history = self._cache.history(sequence, self._ledger.match(request))
            count = self._cut(sequence, min(sequence.known - sequence.done, budget))
            if not count or not self._cache.enter(sequence, sequence.done + count):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            if request not in self._seen:
                self._look(sequence, history)
            picks[sequence] = count
            budget -= count

    def _sequence(self, request: int) -> PagedRequest:
        prompt, answer = self._prompts[request], self._answers[request]
        keys = self._keys.multiples(request, self._block, prompt + answer)
        return PagedRequest(request, prompt, prompt + self._told.get(request, 0), prompt + answer, keys)

    def _look(self, sequence: PagedRequest, history: tuple[int, int] | None) -> None:
        """A request is admitted for the first time, or refused (None): write down what became of its prompt."""
        request = sequence.request
        self._seen.add(request)
        if self._ledger.sample_is_due(self._looked):
            self._sample()
        self._looked += 1
        if history is None:
            self._ledger.refuse(request, self._cache.bytes_for(sequence))
        else:
            self._ledger.note(request, sequence.hit, *history)

    def _sample(self) -> None:
        time = self._times[min(self._looked, len(self._times) - 1)]
        self._ledger.sample(self._looked, time, *self._cache.bytes())

    def _cut(self, sequence: PagedRequest, count: int) -> int:
        """Where a part of a prompt ends: see the rules above."""
        start, block = sequence.done, self._block
        prefill = max(sequence.prompt, sequence.known - 1)
        if start >= prefill or not self._cuts:
            return count
        end = start + count
        if end < prefill and (end // block * block > start or block <= self._settings.step_tokens):
            end = end // block * block
        stops = [place // self._grain * self._grain for place in (sequence.known, sequence.junction)]
        if start % block:
            stops.append((start // block + 1) * block)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def _repeats(self, picks: dict[PagedRequest, int]) -> int:
        """How many steps like this one follow each other: while all decode, nothing ends and no block is full."""
        if len(picks) != len(self._running) or any(s.done < s.known - 1 for s in picks):
            return 1
        if self._waiting and len(self._running) < self._settings.running:
            return 1
        return max(1, min((min(s.total - s.known, -(s.done + 1) % self._block) for s in picks), default=1))
