"""A device and its host memory for the machine of the tiers: two shadows, between which and objects tags are moved.

An object has 16 bytes for each token: the tag of the entry (the name of its exact prefix, and which group it is of),
and the name of what it depends on behind it. A state has one such pair. So objects are the same whatever the layout of
the ranks that wrote them, and whoever reads one can say whether each of its entries is the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.model.oracle import Names
from tests.model.shadow import Lane, Shadow

from headway.cache import CacheGeometry, TableKind
from headway.engine import RowAnswer, RunningRequest, StepWork
from headway.runtime.interface import BlockRange, CanonicalGroup

__all__ = ["SALTS", "TierDevice", "answer_of", "marked", "unmarked"]

SALTS = ("", "t")
_GROUPS = 64
_VOCAB = 6


def answer_of(tokens: Sequence[int]) -> int:
    """What the model says after some tokens; 0 ends the answer."""
    return (7 * sum(tokens) + len(tokens)) % _VOCAB


def marked(names: Any, group: int) -> Any:
    """Tags of entries of a group."""
    return np.asarray(names) * _GROUPS + group


def unmarked(tags: Any) -> tuple[Any, Any]:
    """Names and groups."""
    return np.asarray(tags) // _GROUPS, np.asarray(tags) % _GROUPS


class TierDevice:
    """An executor.

    Attributes:
        device: The device's memory.
        host: The host's.
        wrong: What was found wrong. Whoever calls may take an error for a failed copy, so it is noted as well.
        requests: Row of the block tables -> the request that has it.
        fail_move: How many moves of blocks fail from now on.
        fail_write: How many writes of objects fail from now on.
        fail_step: How many steps fail from now on.
        ran: Told of every step.
        hauled: Told how many blocks are copied.
    """

    def __init__(self, geometry: CacheGeometry, blocks: int, host_blocks: int, names: Names) -> None:
        self.geometry, self.names = geometry, names
        self.device, self.host = Shadow(geometry, blocks, names), Shadow(geometry, max(1, host_blocks), names)
        self.wrong: list[str] = []
        self.requests: Callable[[], Mapping[int, RunningRequest]] = dict
        self.inside = False
        self.fail_move = self.fail_write = self.fail_step = 0
        self.hauled: Callable[[int], None] = lambda blocks: None
        self.ran: Callable[[StepWork], None] = lambda work: None
        self._numbers = {name: i for i, name in enumerate(sorted(g.spec.name for g in geometry.groups))}

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        return {
            g.spec.name: CanonicalGroup(
                g.spec.name, g.table.kind.value, 16, g.table.window, g.table.chunk, g.spec.lookahead, True, "tagged"
            )
            for g in self.geometry.groups
        }

    # ---- steps

    def run(self, work: StepWork) -> list[RowAnswer]:
        try:
            return self._run(work)
        except AssertionError as error:
            self.wrong.append(str(error))
            raise

    def _run(self, work: StepWork) -> list[RowAnswer]:
        step, requests = work.step, self.requests()
        fails, self.fail_step = self.fail_step > 0, max(0, self.fail_step - 1)
        spans = {int(r): (int(s), int(s + c)) for r, s, c in zip(step.rows, step.starts, step.counts, strict=True)}
        lanes = {row: Lane(row, self._path(requests[row]), start, start) for row, (start, _) in spans.items()}
        self.device.prepare(step, lanes, work.tables)
        answers = []
        for i, (row, (start, stop)) in enumerate(spans.items()):
            known = requests[row].tokens[: requests[row].known].tolist()
            assert work.tokens[i].tolist() == known[start:stop], f"row {row} is given other tokens than it has"
            if start < stop:
                path = self.names.path(-1, [0] * stop) if fails else lanes[row].path
                self.device.forward(row, start, stop, path, lanes[row], work.tables)
                for export in step.exports:
                    if int(export.row) == row:
                        self.device.export(export, start, stop, path, work.tables, self.inside)
            wanted = start < stop and work.samples[i] is not None
            answers.append(RowAnswer((answer_of(known),) if wanted else (), stop - start))
        self.ran(work)
        if fails:
            raise RuntimeError("the device says no")
        return answers

    def _path(self, request: RunningRequest) -> list[int]:
        return self.names.path(SALTS.index(request.request.salt), request.tokens[: request.known].tolist())

    def check(self) -> None: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...

    # ---- moves

    def move_blocks(self, out: NDArray[np.int32], back: NDArray[np.int32]) -> None:
        """Half of what is asked for is done before a failure."""
        fails, self.fail_move = self.fail_move > 0, max(0, self.fail_move - 1)
        part = slice(0, None, 2) if fails else slice(None)
        _copy(self.device, self.host, out[part])
        _copy(self.host, self.device, back[part])
        self.hauled(len(out) + len(back))
        if fails:
            raise OSError("the copy fails, on purpose")

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        return [memoryview(self._read(asked).astype(np.int64).tobytes()) for asked in ranges]

    def _read(self, asked: BlockRange) -> NDArray[np.int64]:
        memory, table = self.host if asked.host else self.device, self.geometry.group(asked.group).table
        number = self._numbers[asked.group]
        try:
            if table.kind is TableKind.STATE:
                name = int(memory.state[asked.blocks[0]]) // _GROUPS
                memory.check_state(asked.blocks, name, f"object {asked.group} at {asked.first}")
                return np.array([[marked(name, number), 0]])
            names, ahead = memory.read(table, self._row(asked), asked.first, asked.stop)
            return np.stack([marked(names, number), ahead], axis=1)
        except AssertionError as error:
            self.wrong.append(str(error))
            raise

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        """The first half of the ranges is written before a failure."""
        fails, self.fail_write = self.fail_write > 0, max(0, self.fail_write - 1)
        most = len(ranges) // 2 if fails else len(ranges)
        for asked, data in list(zip(ranges, objects, strict=True))[:most]:
            self._write(asked, np.frombuffer(data, dtype=np.int64).reshape(-1, 2))
        if fails:
            raise OSError("the write fails, on purpose")

    def _write(self, asked: BlockRange, values: NDArray[np.int64]) -> None:
        table, memory = self.geometry.group(asked.group).table, self.device
        names, groups = unmarked(values[:, 0])
        if len(values) != asked.tokens or (groups != self._numbers[asked.group]).any():
            self.wrong.append(
                f"{asked.group} [{asked.first}, {asked.stop}) is given an object of another group or span"
            )
        if table.kind is TableKind.STATE:
            memory._write_state(asked.blocks, int(names[0]))
            return
        positions, row = np.arange(asked.first, asked.stop), self._row(asked)
        kept = row[positions // table.span] >= 0
        positions, names, ahead = positions[kept], names[kept], values[kept, 1]
        for block in {int(b) for b in row[positions // table.span]}:
            memory._claim(block, table.index)
        for rank in range(table.shards):
            slots = table.slots(positions, rank, row)
            mine = slots >= 0
            memory.tokens[table.index][rank].reshape(-1)[slots[mine]] = names[mine]
            memory.ahead[table.index][rank].reshape(-1)[slots[mine]] = ahead[mine]

    def _row(self, asked: BlockRange) -> NDArray[np.int32]:
        first = asked.first // self.geometry.group(asked.group).table.span
        return np.concatenate([np.full(first, -1, dtype=np.int32), np.asarray(asked.blocks, dtype=np.int32)])


def _copy(source: Shadow, target: Shadow, pairs: NDArray[np.int32]) -> None:
    a, b = pairs[:, 0], pairs[:, 1]
    for index in source.tokens:
        target.tokens[index][:, b] = source.tokens[index][:, a]
        target.ahead[index][:, b] = source.ahead[index][:, a]
    target.state[b], target.owner[b] = source.state[a], source.owner[a]
