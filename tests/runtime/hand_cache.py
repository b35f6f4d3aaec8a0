"""Block tables by hand: the least that can drive a runner, with every block it does not hold poisoned."""

from __future__ import annotations

import numpy as np
import torch
from tests.runtime.parallel.rank_threads import RankedRunner
from transformers import PreTrainedModel

from headway.cache import CacheGeometry, ParallelLayout, TableGeometry, TableKind
from headway.runtime.forward.batch import RunBatch, RunResult, StateMove
from headway.runtime.model.inspection import inspect_model


class HandCache:
    """Sequences by name, each with its own randomly placed blocks; windows give up what no later token needs.

    A block that nobody holds is full of NaN (0xFF bytes), so whatever reads one shows it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: int = 400,
        block_tokens: int = 16,
        seed: int = 0,
        single_steps: bool = False,
        parallel: ParallelLayout | None = None,
        form: str = "ag_rs",
    ) -> None:
        self.layout = inspect_model(model)
        self.geometry = CacheGeometry(self.layout.groups, parallel, block_tokens=block_tokens)
        self.ranked = RankedRunner(model, self.geometry, blocks, form, single_steps)
        self.runner = self.ranked.runners[0]
        for data in self.ranked.arenas:
            data.fill_(0xFF)
        self.free = [int(i) for i in np.random.default_rng(seed).permutation(blocks)]
        self.width = max(64, *(table.state_blocks for table in self.geometry.tables))
        self.tables: dict[str, list[np.ndarray]] = {}
        self.length: dict[str, int] = {}

    def start(self, name: str) -> None:
        self.tables[name] = [np.full(self.width, -1, dtype=np.int32) for _ in self.geometry.tables]
        self.length[name] = 0
        for table, row in zip(self.geometry.tables, self.tables[name], strict=True):
            if table.kind is TableKind.STATE:
                row[: table.state_blocks] = [self.free.pop() for _ in range(table.state_blocks)]

    def step(
        self,
        work: dict[str, list[int]],
        copies: list[tuple[int, int]] = (),  # type: ignore[assignment]
        exports: list[StateMove] = (),  # type: ignore[assignment]
        whole: bool = False,
    ) -> RunResult:
        """Compute the given tokens of each named sequence as one batch."""
        names = list(work)
        for name in names:
            self._grow(name, len(work[name]))
        batch = RunBatch(
            tokens=np.array([t for name in names for t in work[name]], dtype=np.int32),
            starts=np.array([self.length[name] for name in names], dtype=np.int64),
            counts=np.array([len(work[name]) for name in names], dtype=np.int64),
            tables=[np.stack([self.tables[n][t.index] for n in names]) for t in self.geometry.tables],
            fresh=np.array([self.length[name] == 0 for name in names]),
            copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
            exports=exports,
            all_logits=np.full(len(names), True) if whole else None,
        )
        result = self.ranked.run(batch)
        for name in names:
            self.length[name] += len(work[name])
            self._shrink(name)
        return result

    def fork(self, source: str, name: str) -> list[tuple[int, int]]:
        """Start `name` as a copy of `source`, returning the block copies that its first step must do."""
        copies = []
        self.tables[name] = []
        for row in self.tables[source]:
            mine = row.copy()
            for i in np.flatnonzero(row >= 0):
                mine[i] = self.free.pop()
                copies.append((int(row[i]), int(mine[i])))
            self.tables[name].append(mine)
        self.length[name] = self.length[source]
        return copies

    def end(self, name: str) -> None:
        for row in self.tables.pop(name):
            self._release(row, row >= 0)
        del self.length[name]

    def snapshot(self, name: str) -> tuple[list[np.ndarray], list[StateMove]]:
        """Blocks for a checkpoint of `name` after its next step, in which it is the first row, and the export."""
        rows, moves = [], []
        for table, row in zip(self.geometry.tables, self.tables[name], strict=True):
            taken = np.array([self.free.pop() for _ in range(table.state_blocks)], dtype=np.int32)
            rows.append(taken)
            if table.state_blocks:
                moves.append(StateMove(row[: table.state_blocks].copy(), taken, 0))
        return rows, moves

    def _grow(self, name: str, count: int) -> None:
        start = self.length[name]
        for table, row in zip(self.geometry.tables, self.tables[name], strict=True):
            if table.kind is TableKind.STATE:
                continue
            first = self._first(table, start + count)
            for block in range(start // table.span, (start + count - 1) // table.span + 1):
                if row[block] < 0 and (block + 1) * table.span > first:
                    row[block] = self.free.pop()

    def _shrink(self, name: str) -> None:
        for table, row in zip(self.geometry.tables, self.tables[name], strict=True):
            if table.kind is not TableKind.STATE:
                held = np.arange(len(row)) < self._first(table, self.length[name]) // table.span
                self._release(row, held & (row >= 0))

    @staticmethod
    def _first(table: TableGeometry, position: int) -> int:
        return table.first_needed(position)

    def _release(self, row: np.ndarray, which: np.ndarray) -> None:
        ids = row[which]
        for data in self.ranked.arenas:
            data[torch.from_numpy(ids.astype(np.int64))] = 0xFF
        self.free[:0] = [int(i) for i in ids]
        row[which] = -1
