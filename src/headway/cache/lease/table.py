"""Running requests: what each holds, as rows of arrays, so that a step costs about the same for one and for many.

A lease holds one reference on each of its own blocks: of a table of full attention the block indices from `owned` on
(those before belong to the tree, where the lease's place in it keeps them), of a window or chunk all that it still
needs, and its running state. A block that it may write is written by nobody else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.cache.index.edge import Anchor
from headway.cache.index.explain import Explanation
from headway.cache.index.hit import Hit
from headway.cache.lease.step import StateExport
from headway.cache.lease.wish import Wish
from headway.cache.policy.placement import Place
from headway.cache.shape.geometry import CacheGeometry, TableGeometry, TableKind
from headway.cache.shape.prompt import Prompt
from headway.errors import LeaseError

__all__ = [
    "BROKEN",
    "FAR",
    "FEW",
    "FREE",
    "MOST_SAMPLED",
    "RUNNING",
    "STEPPING",
    "Lease",
    "LeaseTable",
    "Record",
    "Rows",
    "ragged",
]

Ids = NDArray[np.int32]
Rows = NDArray[np.int64]

MOST_SAMPLED = 64
"""Tokens that one commit can add to a sequence."""

FEW = 4
"""Rows up to which plain numbers are faster than arrays."""

FAR = np.iinfo(np.int64).max
"""A position that is never reached."""

FREE, RUNNING, STEPPING, BROKEN = 0, 1, 2, 3
"""Phases of a row, see `LeaseTable.phase`."""
_WRONG_PHASE = {
    FREE: "is not a running lease",
    RUNNING: "has no step to commit",
    STEPPING: "has a step under way: commit or fail it first",
    BROKEN: "has failed and can only be aborted",
}

_SERIALS = itertools.count(1)
_NOTHING = np.empty(0, dtype=np.int32)


def ragged(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0], first[0] + 1, ... (counts[0] of them), then the same from first[1], and so on."""
    ends = np.cumsum(counts)
    indices: NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
    return indices


@dataclass(slots=True)
class Record:
    """What a lease needs to remember apart from its numbers.

    Attributes:
        prompt: The prompt.
        hit: Where it resumed.
        explanation: What became of the prompt's tokens.
        anchor: Its place in the tree: the end of what was entered of its sequence. None once it is detached: what it
            uses is its own, and it publishes nothing.
        rest: int32 as bytes, tokens from that place on that were told apart from the answer: the last `lookahead`
            ones, or fewer.
        published: It publishes what it computes (not `no_store`, not detached).
        plan: Checkpoints still to be taken, ascending.
        wishes: What the caller asked for.
        sources: Blocks that its first step copies from; held until that step is committed.
        exports: States of the step under way.
        resident: Position up to which it has published (models without checkpoints).
    """

    prompt: Prompt
    hit: Hit
    explanation: Explanation
    anchor: Anchor | None
    rest: bytes
    published: bool
    plan: list[Place]
    wishes: tuple[Wish, ...] = ()
    sources: list[tuple[TableGeometry, Ids]] = field(default_factory=list)
    exports: dict[int, StateExport] = field(default_factory=dict)
    resident: int = 0


class LeaseTable:
    """The rows of all running leases.

    Attributes:
        stretch: Answer tokens that gather in a row before they are entered in the tree.
        few: Rows up to which plain numbers are used instead of arrays.
        phase: int8 [R], FREE, RUNNING, STEPPING (a step is under way) or BROKEN (a step failed).
        known: int64 [R], tokens of the sequence told so far.
        computed: int64 [R], tokens computed.
        prompt: int64 [R], tokens of the prompt.
        due: int64 [R], position of the next checkpoint, FAR if none is planned.
        quiet: int64 [R], position up to which the blocks at hand suffice.
        calm: int64 [R], position up to which `extend` has nothing to do: 0 before the first commit, else before `due`
            and within `quiet`.
        eager: int64 [R], computed tokens from which on `commit` has something to publish.
        serial: int64 [R], number of the last step.
        restored: bool [R], the first step has been committed.
        stamp: int64 [R], scratch: to see whether a row is given twice.
        tail: int32 [R, stretch + MOST_SAMPLED], answer tokens that are not in the tree yet.
        tail_size: int64 [R], how many.
        blocks: One int32 [R, width] array a table: the block tables.
        filled: int64 [tables, R], block indices allocated so far (end).
        owned: int64 [tables, R], first block index on which the lease holds a reference.
        records: The rest, by row.
    """

    def __init__(self, geometry: CacheGeometry, rows: int, stretch: int) -> None:
        """Make room for `rows` leases; it grows. Up to `stretch` answer tokens gather before they are entered."""
        self.stretch = stretch
        self.few = FEW
        self._tables = geometry.tables
        self.phase = np.zeros(rows, dtype=np.int8)
        self.known = np.zeros(rows, dtype=np.int64)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.prompt = np.zeros(rows, dtype=np.int64)
        self.due = np.full(rows, FAR, dtype=np.int64)
        self.quiet = np.zeros(rows, dtype=np.int64)
        self.calm = np.zeros(rows, dtype=np.int64)
        self.eager = np.zeros(rows, dtype=np.int64)
        self.serial = np.zeros(rows, dtype=np.int64)
        self.stamp = np.zeros(rows, dtype=np.int64)
        self.restored = np.zeros(rows, dtype=np.bool_)
        self.tail = np.zeros((rows, stretch + MOST_SAMPLED), dtype=np.int32)
        self.tail_size = np.zeros(rows, dtype=np.int64)
        self.filled = np.zeros((len(self._tables), rows), dtype=np.int64)
        self.owned = np.zeros((len(self._tables), rows), dtype=np.int64)
        self.blocks: list[Ids] = [
            np.full((rows, t.state_blocks if t.kind is TableKind.STATE else 16), -1, dtype=np.int32)
            for t in self._tables
        ]
        self.records: list[Record | None] = [None] * rows
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def running(self) -> int:
        """Leases that have not ended."""
        return len(self.phase) - len(self._free_rows)

    def active_rows(self) -> list[int]:
        """Rows of all leases that have not ended."""
        return [int(row) for row in np.flatnonzero(self.phase)]

    def record(self, row: int) -> Record:
        """The record of a running lease."""
        record = self.records[row]
        assert record is not None
        return record

    def open(self, record: Record, length: int, computed: int) -> int:
        """Give a lease a row."""
        if not self._free_rows:
            self._more_rows()
        row = self._free_rows.pop()
        self.records[row] = record
        self.phase[row] = RUNNING
        self.known[row] = self.prompt[row] = length
        self.computed[row] = computed
        self.restored[row] = False
        self.tail_size[row] = self.quiet[row] = self.calm[row] = self.eager[row] = 0
        for i, table in enumerate(self._tables):
            if table.kind is TableKind.STATE:
                first = 0
            else:
                first = (computed if table.kind is TableKind.PREFIX else table.first_needed(computed)) // table.span
                self.widen(i, -(-length // table.span) + 1)
            self.filled[i, row] = self.owned[i, row] = first
        return row

    def close(self, row: int) -> None:
        """Free a row whose blocks have been released."""
        for i, blocks in enumerate(self.blocks):
            state = self._tables[i].kind is TableKind.STATE
            blocks[row, : None if state else int(self.filled[i, row])] = -1
        self.records[row] = None
        self.phase[row] = FREE
        self._free_rows.append(row)

    def widen(self, table: int, width: int) -> None:
        """Make the rows of a table at least `width` wide."""
        blocks = self.blocks[table]
        if width > blocks.shape[1]:
            wide = np.full((blocks.shape[0], max(width, blocks.shape[1] * 3 // 2)), -1, dtype=np.int32)
            wide[:, : blocks.shape[1]] = blocks
            self.blocks[table] = wide

    def drop_behind(self, rows: Rows, computed: NDArray[np.int64]) -> Ids:
        """Take out the blocks of windows and chunks that no token from `computed` on can see.

        Returns:
            int32, their ids, which may repeat; the leases' references are the caller's to release.
        """
        dropped = [_NOTHING]
        for i, table in enumerate(self._tables):
            if table.kind not in (TableKind.WINDOW, TableKind.CHUNK):
                continue
            keep = table.first_needed(computed) // table.span
            owned = self.owned[i, rows]
            counts = np.maximum(np.minimum(keep, self.filled[i, rows]) - owned, 0)
            if counts.any():
                where = np.repeat(rows, counts), ragged(owned, counts)
                dropped.append(self.blocks[i][where])
                self.blocks[i][where] = -1
                self.owned[i, rows] = owned + counts
        return np.concatenate(dropped)

    @staticmethod
    def new_serial() -> int:
        """A number for a step that no other step of any cache has."""
        return next(_SERIALS)

    def check_step(self, rows: Rows, serial: int) -> None:
        """Refuse rows whose step under way is not the one with this serial.

        Raises:
            LeaseError: Another step is under way, or none.
        """
        self.check_rows(rows, STEPPING)
        if len(rows) and not (self.serial[rows] == serial).all():
            raise LeaseError("this step is not the one under way: it is over, or another cache's")

    def check_rows(self, rows: Rows, *phases: int) -> None:
        """Refuse rows that are not in one of `phases`, and rows given twice.

        Raises:
            LeaseError: Names the first such row.
        """
        if len(rows) <= self.few:
            self.check_few(rows.tolist(), phases)
            return
        order = np.arange(len(rows))
        try:
            self.stamp[rows] = order
            phase = self.phase[rows]
        except IndexError:
            raise LeaseError(f"row {int(rows.max())} is not a lease") from None
        right = phase == phases[0]
        for other in phases[1:]:
            right |= phase == other
        if not right.all() or not (self.stamp[rows] == order).all() or rows.min() < 0:
            self.check_few(rows.tolist(), phases)

    def check_few(self, rows: list[int], phases: tuple[int, ...]) -> None:
        """As `check_rows`, with plain numbers."""
        for row in rows:
            if not 0 <= row < len(self.phase):
                raise LeaseError(f"row {row} is not a lease")
            phase = self.phase.item(row)
            if phase not in phases:
                raise LeaseError(f"row {row} {_WRONG_PHASE[phase]}")
        if len(rows) > 1 and len(set(rows)) < len(rows):
            raise LeaseError(f"a lease is given twice: {rows[:20]}")

    def _more_rows(self) -> None:
        old = len(self.phase)
        columns = [name for name, values in vars(self).items() if isinstance(values, np.ndarray) and values.ndim == 1]
        for name in columns:
            values = getattr(self, name)
            setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        self.tail = np.concatenate([self.tail, np.zeros_like(self.tail)])
        self.filled = np.concatenate([self.filled, np.zeros_like(self.filled)], axis=1)
        self.owned = np.concatenate([self.owned, np.zeros_like(self.owned)], axis=1)
        self.blocks = [np.concatenate([b, np.full_like(b, -1)]) for b in self.blocks]
        self.records += [None] * old
        self._free_rows = list(range(2 * old - 1, old - 1, -1))


class Lease:
    """A running request's hold on memory: a view of its row.

    Its numbers end with the lease (LeaseError afterwards); its prompt, hit and explanation stay.

    Attributes:
        row: Its row in the block tables and in the arrays given to `extend`.
    """

    __slots__ = ("_record", "_table", "row")

    def __init__(self, table: LeaseTable, row: int) -> None:
        """View `row` of `table`."""
        self._table = table
        self._record = table.record(row)
        self.row = row

    @property
    def prompt(self) -> Prompt:
        """The prompt it was made for."""
        return self._record.prompt

    @property
    def hit(self) -> Hit:
        """Where it resumed."""
        return self._record.hit

    @property
    def explanation(self) -> Explanation:
        """What became of the prompt's tokens."""
        return self._record.explanation

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """What became of the pins and breakpoints of the prompt; stays when the lease has ended."""
        return self._record.wishes

    @property
    def tokens(self) -> int:
        """Tokens of the sequence told so far."""
        return self._number(self._table.known)

    @property
    def computed(self) -> int:
        """Tokens computed and committed."""
        return self._number(self._table.computed)

    @property
    def next_stop(self) -> int:
        """Where the next prefill chunk should end: the next checkpoint, or all that is known."""
        return min(self._number(self._table.due), self._number(self._table.known))

    def _number(self, column: NDArray[np.int64]) -> int:
        if self._table.records[self.row] is not self._record:
            raise LeaseError(f"the lease of row {self.row} has ended")
        return column.item(self.row)
