"""A device without a model: every entry it stores is a fingerprint of the exact tokens before it.

What a row computes depends on every entry that a real model would read for it, as it lies in memory now. So an entry
that was reused for another prefix, overwritten too early, not copied or never written gives other tokens than
`expected_answer`, which computes the same function of the whole sequence without any memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.cache import CacheGeometry, TableGeometry, TableKind
from headway.engine import ModelFacts, RowAnswer, StepWork
from headway.runtime.interface import BlockRange, CanonicalGroup, RowFault

VOCAB = 61
EOS = 0
_PRIME = (1 << 61) - 1
_START = 1234567


def model_facts(max_model_len: int | None = None) -> ModelFacts:
    return ModelFacts(VOCAB, lambda tokens: "".join(chr(ord("0") + t) for t in tokens), (EOS,), max_model_len)


def _mix(*values: int) -> int:
    out = 17
    for value in values:
        out = (out * 1000003 + value + 0x9E3779B9) % _PRIME
    return out


def _first_read(kind: TableKind, window: int, chunk: int, position: int) -> int:
    """First entry that the token at `position` reads."""
    if kind is TableKind.WINDOW:
        return max(0, position - window + 1)
    return position // chunk * chunk if kind is TableKind.CHUNK else 0


def _fold(entries: Sequence[int], first: int, table: TableGeometry) -> int:
    """What a token reads of one table, as a number: every entry at its own place counts."""
    return sum(entry * place for place, entry in enumerate(entries, first + 1)) * (table.index + 1)


class FakeDevice:
    """An executor. Thread-safe as far as one engine and one test need it.

    The objects of a group are the fingerprints of its table, eight bytes per token, or per state.
    """

    def __init__(self, geometry: CacheGeometry, blocks: int, seed: int = 0, host_blocks: int = 0) -> None:
        garbage = np.random.default_rng(seed)
        self._geometry = geometry
        self._memory, self._host = (
            [
                garbage.integers(1, _PRIME, (count, max(1, table.block_tokens)), dtype=np.int64)
                for table in geometry.tables
            ]
            for count in (blocks, host_blocks)
        )
        self.fail_move: Callable[[int, int], Exception | None] = lambda out, back: None
        self.fail_write: Callable[[], Exception | None] = lambda: None
        self.fail_when: Callable[[StepWork], bool] = lambda work: False
        self.not_finite: Callable[[StepWork], Sequence[int]] = lambda work: ()
        self.before_step: Callable[[StepWork], None] = lambda work: None
        self.steps: list[list[int]] = []
        self.closed = threading.Event()
        self.restarts = 0

    def run(self, work: StepWork) -> list[RowAnswer]:
        self.before_step(work)
        step = work.step
        self.steps.append([int(c) for c in step.counts])
        self._copy(step.copies[:, 0], step.copies[:, 1])
        answers = [RowAnswer() for _ in step.rows]
        fresh = set(np.asarray(step.fresh).tolist())
        for i, row in enumerate(step.rows):
            if step.counts[i] > 0:
                table_rows = [table[row] for table in work.tables]
                token = self._row(table_rows, int(step.starts[i]), work.tokens[i], int(row) in fresh)
                answers[i] = RowAnswer(() if work.samples[i] is None else (token,), int(step.counts[i]))
        if self.fail_when(work):
            raise RuntimeError("the device says no")
        for export in step.exports:
            self._copy(export.source, export.destination)
        for i in self.not_finite(work):
            answers[i] = RowAnswer(fault=RowFault())
        return answers

    def check(self) -> None: ...

    def restart(self) -> None:
        self.restarts += 1
        for memory in self._memory:
            memory[:] = -7

    def close(self) -> None:
        self.closed.set()

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        return {
            g.spec.name: CanonicalGroup(
                g.spec.name, g.table.kind.value, 8, g.table.window, g.table.chunk, g.spec.lookahead, True, "fake"
            )
            for g in self._geometry.groups
        }

    def move_blocks(self, out: NDArray[np.int32], back: NDArray[np.int32]) -> None:
        """Half of what is asked for is done before a failure."""
        error = self.fail_move(len(out), len(back))
        part = slice(None) if error is None else slice(0, None, 2)
        for device, host in zip(self._memory, self._host, strict=True):
            host[out[part, 1]] = device[out[part, 0]]
            device[back[part, 1]] = host[back[part, 0]]
        if error is not None:
            raise error

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        return [memoryview(self._entries(asked)[self._places(asked)][: asked.tokens].tobytes()) for asked in ranges]

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        """The first half of the ranges is written before a failure."""
        error = self.fail_write()
        most = len(ranges) if error is None else len(ranges) // 2
        for asked, data in list(zip(ranges, objects, strict=True))[:most]:
            blocks, slots = self._places(asked)
            values = np.frombuffer(data, dtype=np.int64)
            kept = blocks >= 0
            values = np.broadcast_to(values, kept.shape)[kept]
            self._entries(asked)[blocks[kept], slots[kept]] = values
        if error is not None:
            raise error

    def _entries(self, asked: BlockRange) -> NDArray[np.int64]:
        return (self._host if asked.host else self._memory)[self._geometry.group(asked.group).table.index]

    def _places(self, asked: BlockRange) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Where the entries of a range are; a state is in each of its blocks."""
        table = self._geometry.group(asked.group).table
        if table.kind is TableKind.STATE:
            return np.asarray(asked.blocks), np.zeros(len(asked.blocks), dtype=np.int64)
        positions = np.arange(asked.first, asked.stop)
        return np.asarray(asked.blocks)[positions // table.span - asked.first // table.span], positions % table.span

    def _copy(self, source: NDArray[np.int32], destination: NDArray[np.int32]) -> None:
        for memory in self._memory:
            memory[destination] = memory[source]

    def _row(self, rows: Sequence[NDArray[np.int32]], start: int, tokens: NDArray[np.int32], fresh: bool) -> int:
        state = self._load_state(rows, fresh)
        out = 0
        for position, token in enumerate(np.asarray(tokens).tolist(), start):
            tag = _mix(token, self._reads(rows, position), state)
            state = _mix(state, token, 5) if self._geometry.state_table else _START
            for table, row, memory in zip(self._geometry.tables, rows, self._memory, strict=True):
                if table.kind is not TableKind.STATE:
                    memory[row[position // table.span], position % table.span] = tag
            out = tag
        for table, row, memory in zip(self._geometry.tables, rows, self._memory, strict=True):
            if table.kind is TableKind.STATE:
                memory[row[: table.state_blocks], 0] = state
        return out % VOCAB

    def _load_state(self, rows: Sequence[NDArray[np.int32]], fresh: bool) -> int:
        for table, row, memory in zip(self._geometry.tables, rows, self._memory, strict=True):
            if table.kind is TableKind.STATE and not fresh:
                values = {int(v) for v in memory[row[: table.state_blocks], 0]}
                return values.pop() if len(values) == 1 else -1
        return _START

    def _reads(self, rows: Sequence[NDArray[np.int32]], position: int) -> int:
        total = 0
        for table, row, memory in zip(self._geometry.tables, rows, self._memory, strict=True):
            if table.kind is not TableKind.STATE:
                first = _first_read(table.kind, table.window, table.chunk, position)
                read = np.arange(first, position)
                entries = memory[row[read // table.span], read % table.span]
                total += _fold(entries.tolist(), first, table)
        return total


def expected_answer(
    geometry: CacheGeometry, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False
) -> list[int]:
    """What the device answers to `prompt` if nothing goes wrong."""
    tags: list[int] = []
    state = _START
    answer: list[int] = []
    tokens = list(prompt)
    while len(answer) < max_tokens and (ignore_eos or not answer or answer[-1] != EOS):
        for position in range(len(tags), len(tokens)):
            reads = 0
            for table in geometry.tables:
                if table.kind is not TableKind.STATE:
                    first = _first_read(table.kind, table.window, table.chunk, position)
                    reads += _fold(tags[first:position], first, table)
            tags.append(_mix(tokens[position], reads, state))
            state = _mix(state, tokens[position], 5) if geometry.state_table else _START
        answer.append(tags[-1] % VOCAB)
        tokens.append(answer[-1])
    return answer
