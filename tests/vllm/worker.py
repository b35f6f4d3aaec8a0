"""An emulated vLLM worker: it has no model, and asserts that every request reads its own prefix and nothing else.

It does what vLLM's workers do with block ids: block tables that only grow, pages zeroed before they are used, copies
gathered before they are scattered, states in place, entries of rejected drafts left behind. Every slot of a page holds
a tag that says which prefix an entry belongs to, every page of a state says which one it is the state of.

The worker knows tokens by itself, as a device does: what it sampled and which drafts it accepted, whether or not the
scheduler has heard of it. So steps may be planned before the outcome of the last one is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tags = NDArray[np.int64]


@dataclass(frozen=True)
class WorkerGroup:
    """How the worker uses one KV cache group.

    Attributes:
        kind: "full", "window", "chunk" or "state".
        span: Tokens of the sequence in a page (0 for states).
        reach: Size of the window or chunk.
        draft: Entries depend on one later token, and drafts write behind the tokens of a step.
        columns: Pages of a state in a table: 1 and one for each draft.
    """

    kind: str
    span: int = 0
    reach: int = 0
    draft: bool = False
    columns: int = 1

    def first_read(self, position: int) -> int:
        """First position whose entry is read to compute `position`."""
        if self.kind == "window":
            return max(0, position - self.reach + 1)
        return position // self.reach * self.reach if self.kind == "chunk" else 0


@dataclass
class _Sequence:
    """A request as the device knows it."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    accepted: int = 0
    adapter: int = 0
    sums: Tags = field(default_factory=lambda: np.zeros(0, np.int64))

    def tags(self, end: int) -> Tags:
        """int64 [end], one tag per prefix."""
        have = self.sums
        if len(have) < end:
            new = np.asarray(self.tokens[len(have) : end], dtype=np.uint64) + np.uint64(self.adapter << 20)
            with np.errstate(over="ignore"):
                mixed = _mix(new * np.uint64(1_000_003) + np.arange(len(have), end, dtype=np.uint64)).astype(np.int64)
                more = np.cumsum(mixed) + (have[-1] if len(have) else 0)
            self.sums = have = np.concatenate([have, more])
        return have[:end]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class Output:
    """What a step brought: the part of vLLM's `ModelRunnerOutput` that schedulers read here."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]


class EmulatedWorker:
    """Runs `SchedulerOutput`s on pages of tags.

    Attributes:
        checked: Forwards whose reads were asserted.
        reads: Entries and states that were compared.
        copied: Pages that were copied.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        sample: Callable[[str, int], int],
        accept: Callable[[int], int] = lambda drafts: 0,
        *,
        slots_ahead: int = 0,
        max_model_len: int = 1 << 40,
    ) -> None:
        """Make a worker without pages.

        Args:
            groups: How it uses the groups, in vLLM's order.
            sample: Request id and position to the token that is sampled there.
            accept: How many of so many drafts are accepted.
            slots_ahead: Positions behind a step's tokens that drafts write.
            max_model_len: Positions that the tables have room for.
        """
        self.groups, self.sample, self.accept = list(groups), sample, accept
        self.slots_ahead, self.max_model_len = slots_ahead, max_model_len
        self.sequences: dict[str, _Sequence] = {}
        self.slots: list[dict[int, Tags]] = [{} for _ in groups]
        self.states: dict[int, tuple[object, tuple[object, ...]]] = {}
        self.checked = self.reads = self.copied = 0
        self._garbage = -1

    def run(self, output: Any) -> Output:
        """One step: forget, zero, copy, then compute, with every read asserted."""
        for rid in output.finished_req_ids:
            self.sequences.pop(rid, None)
        for block in output.new_block_ids_to_zero or ():
            self._wipe(block)
        self._update(output)
        self._copy([(one.src_block_id, one.dst_block_id) for one in output.kv_cache_block_copies or ()])
        ids = list(output.num_scheduled_tokens)
        sampled = [self._forward(rid, output) for rid in ids]
        return Output(ids, {rid: i for i, rid in enumerate(ids)}, sampled)

    def _wipe(self, block: int) -> None:
        for slots in self.slots:
            slots.pop(block, None)
        self.states.pop(block, None)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        assert len({d for _, d in pairs}) == len(pairs), "two copies to one page"
        assert all(s > 0 and d > 0 for s, d in pairs), "a copy from or to the null page"
        read = [(d, [slots.get(s) for slots in self.slots], self.states.get(s)) for s, d in pairs]
        for block, pages, state in read:
            self._wipe(block)
            for slots, page in zip(self.slots, pages, strict=True):
                if page is not None:
                    slots[block] = page.copy()
            if state is not None:
                self.states[block] = state
        self.copied += len(pairs)

    def _update(self, output: Any) -> None:
        """New, resumed and running requests: their tokens and tables."""
        for new in output.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            lora = getattr(new, "lora_request", None)
            self.sequences[new.req_id] = _Sequence(
                list(tokens),
                new.num_computed_tokens,
                [list(t) for t in new.block_ids],
                adapter=lora.lora_int_id if lora else 0,
            )
        cached = output.scheduled_cached_reqs
        for rid, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            sequence = self.sequences[rid]
            if rid in cached.resumed_req_ids:
                tokens = cached.all_token_ids.get(rid, sequence.tokens)
                tables = [list(table) for table in blocks]
                self.sequences[rid] = _Sequence(list(tokens), computed, tables, adapter=sequence.adapter)
            elif blocks:
                for table, more in zip(sequence.tables, blocks, strict=True):
                    table.extend(more)

    def _forward(self, rid: str, output: Any) -> list[int]:
        """Compute one request's tokens. Returns what was sampled."""
        sequence, count = self.sequences[rid], output.num_scheduled_tokens[rid]
        drafts = len(output.scheduled_spec_decode_tokens.get(rid, ()))
        start, sure = sequence.computed, count - drafts
        known = len(sequence.tokens)
        assert start + sure <= known, f"{rid}: {sure} tokens from {start} on, of {known} known"
        self._check_reads(rid, sequence, start)
        samples = start + sure == known
        accepted = min(self.accept(drafts), drafts) if samples else 0
        new = [self.sample(rid, known + i) for i in range(accepted + 1)] if samples else []
        sequence.tokens += new
        sequence.computed = start + sure + accepted
        self._write(rid, sequence, start, start + sure, start + count)
        sequence.accepted = accepted
        self.checked += 1
        return new

    def _check_reads(self, rid: str, sequence: _Sequence, start: int) -> None:
        """Every entry that the first token sees, and the state before it, are the request's own."""
        tags = sequence.tags(min(len(sequence.tokens), start + 1))
        for i, group in enumerate(self.groups):
            if group.kind == "state":
                if start:
                    want = (start, int(tags[start - 1]))
                    table = sequence.tables[i]
                    ssm = self.states.get(table[sequence.accepted], (None, ()))[0]
                    windows = self.states.get(table[0], (None, ()))[1]
                    window = windows[sequence.accepted] if len(windows) > sequence.accepted else None
                    assert ssm == want == window, f"{rid}: state of group {i} at {start}: {ssm}, {window}, not {want}"
                    self.reads += 1
                continue
            first = group.first_read(start)
            have = self._entries(rid, sequence, i, first, start)
            wrong = np.flatnonzero(have != (tags[first + 1 : start + 1] if group.draft else tags[first:start]))
            assert len(wrong) == 0, f"{rid}: group {i}, entry {first + wrong[0]} of {start} is not its own"
            self.reads += start - first

    def _entries(self, rid: str, sequence: _Sequence, i: int, first: int, end: int) -> Tags:
        """Tags of the entries [first, end) of a group."""
        span, table = self.groups[i].span, sequence.tables[i]
        pages = []
        for index in range(first // span, -(-end // span)):
            assert index < len(table), f"{rid}: group {i} has no page {index}"
            assert table[index] > 0, f"{rid}: group {i} reads the null page at {index}"
            pages.append(self.slots[i].get(table[index], np.zeros(span, np.int64)))
        entries = np.concatenate(pages) if pages else np.zeros(0, np.int64)
        base = first // span * span
        return entries[first - base : end - base]

    def _write(self, rid: str, sequence: _Sequence, start: int, sure: int, end: int) -> None:
        """Write entries [start, end): sure ones, accepted drafts, and rejected ones, which belong to no prefix."""
        tags, computed = sequence.tags(len(sequence.tokens)), sequence.computed
        for i, group in enumerate(self.groups):
            if group.kind == "state":
                self._write_state(rid, sequence, i, sure, computed, end)
                continue
            real = tags[start + 1 : computed + 1] if group.draft else tags[start:computed]
            self._store(rid, sequence, i, start, real)
            last = min(end + (self.slots_ahead if group.draft else 0), self.max_model_len)
            self._garbage -= 1
            self._store(rid, sequence, i, start + len(real), np.full(max(0, last - start - len(real)), self._garbage))

    def _store(self, rid: str, sequence: _Sequence, i: int, start: int, tags: Tags) -> None:
        span, table, end = self.groups[i].span, sequence.tables[i], start + len(tags)
        for index in range(start // span, -(-end // span)):
            assert index < len(table), f"{rid}: group {i} has no page {index} to write {start} to {end}"
            block = table[index]
            assert block > 0, f"{rid}: group {i} writes the null page at {index}"
            self._claim(i, block)
            page = self.slots[i].setdefault(block, np.zeros(span, np.int64))
            low, high = max(start, index * span), min(end, (index + 1) * span)
            page[low - index * span : high - index * span] = tags[low - start : high - start]

    def _claim(self, i: int | None, block: int) -> None:
        """A page belongs to one group at a time: what another group had in it is gone."""
        for j, slots in enumerate(self.slots):
            if j != i:
                slots.pop(block, None)
        if i is not None:
            self.states.pop(block, None)

    def _write_state(self, rid: str, sequence: _Sequence, i: int, sure: int, computed: int, end: int) -> None:
        """The state behind the sure tokens and behind each draft, in a page each; convolutions have one window for all.

        So a page of a state is that of one position only if no draft was accepted behind it.
        """
        table, tags = sequence.tables[i], sequence.tags(len(sequence.tokens))
        assert len(table) == self.groups[i].columns, f"{rid}: group {i} has {len(table)} pages"
        states: list[object] = [(p, int(tags[p - 1])) if p <= computed else "rejected" for p in range(sure, end + 1)]
        for column, state in enumerate(states):
            self._claim(None, table[column])
            self.states[table[column]] = (state, tuple(states) if column == 0 else ())
