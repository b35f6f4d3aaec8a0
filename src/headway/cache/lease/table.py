"""Running requests: what each holds, as rows of arrays, so that a step costs about the same for one and for many.

A lease holds one reference on each of its own blocks: of a table of full attention the block indices from `owned` on
(those before belong to the tree, where the lease's place in it keeps them), of a window or chunk all that it still
needs, and its running state. A block that it may write is written by nobody else.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np

from headway.cache.index.below import Past
from headway.cache.index.edge import FAR, Anchor, Match
from headway.cache.index.explain import Explanation
from headway.cache.index.held import HeldBlocks
from headway.cache.index.hit import Hit
from headway.cache.index.pool import BlockPool
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.lease.step import Rows, StateExport, Step
from headway.cache.lease.wish import Wish
from headway.cache.policy.placement import Place, Placement
from headway.cache.shape.geometry import CacheGeometry, Ids, Longs, TableGeometry, TableKind
from headway.cache.shape.prompt import Prompt
from headway.errors import LeaseError

__all__ = [
    "AHEAD",
    "BROKEN",
    "MOST_SAMPLED",
    "RUNNING",
    "STEPPING",
    "Bookmark",
    "Lease",
    "LeaseTable",
    "Parts",
    "Record",
    "ragged",
]

MOST_SAMPLED = 64
"""Tokens that one commit can add to a sequence."""

FREE, BROKEN, RUNNING, STEPPING, AHEAD = 0, 1, 2, 3, 4
"""Phases of a row, see `LeaseTable.phase`: from RUNNING on one more for each step under way."""
_WRONG_PHASE = {
    FREE: "is not a running lease",
    RUNNING: "has no step to commit",
    STEPPING: "has a step under way: commit or fail it first",
    AHEAD: "has two steps under way: commit or fail the older first",
    BROKEN: "has failed and can only be aborted",
}
_WRONG_STEP = (
    "this step is not the oldest under way: it is over, another cache's, or one before it is still to be committed"
)

_NOTHING = np.empty(0, dtype=np.int32)
_PAGE = 1024
"""Block ids in the least memory that a row takes once it is used."""
_RECORD_BYTES = 1500
"""What a running lease takes besides its row, an estimate."""


def _table(rows: int, width: int) -> Ids:
    """int32 [rows, width], zeros. What nobody writes takes no memory: numpy would ask for pages of 2 MB instead."""
    memory = mmap.mmap(-1, max(1, 4 * rows * width), access=mmap.ACCESS_COPY)
    return np.frombuffer(memory, dtype=np.int32, count=rows * width).reshape(rows, width)


def ragged(first: Longs, counts: Longs) -> Longs:
    """first[0], first[0] + 1, ... (counts[0] of them), then the same from first[1], and so on."""
    ends = np.cumsum(counts)
    indices: Longs = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
    return indices


@dataclass(slots=True)
class Bookmark:
    """A place where a lease has stood and can be resumed at when it ends further on.

    Attributes:
        position: Tokens before it.
        state: Blocks of a copy of the state there; none in models without states.
        due: The copy is still to be made, before the next step.
    """

    position: int
    state: Ids
    due: bool


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
        passed: Places on the way that could have got a checkpoint and do not, ascending.
        places: Every place that could, whatever the policy of now does without, ascending.
        goes_on: It goes on from the end of a known path, where nothing else does.
        sources: Blocks that its first step copies from; held until that step is committed.
        exports: States of the steps under way, by position.
        bookmark: A place that it may have to end at, or None.
        own_blocks: It keeps its own blocks, whatever of it is resident already.
        restored: Its first step has been committed.
        resident: Position up to which it has published (models without checkpoints).
        floor: What it holds of windows serves no position before this one.
        loading: Position up to which its first step reads back what another memory has; 0 if it computes.
        past: The life of the checkpoint there in that memory, or None.
        asked: A request asks for it; else it is only moved here, which says nothing of what is wanted.
    """

    prompt: Prompt
    hit: Hit
    explanation: Explanation
    anchor: Anchor | None
    rest: bytes
    published: bool
    plan: list[Place]
    wishes: tuple[Wish, ...] = ()
    passed: list[Place] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    goes_on: bool = False
    sources: list[tuple[TableGeometry, Ids]] = field(default_factory=list)
    exports: dict[int, StateExport] = field(default_factory=dict)
    bookmark: Bookmark | None = None
    own_blocks: bool = False
    restored: bool = False
    resident: int = 0
    floor: int = 0
    loading: int = 0
    past: Past | None = None
    asked: bool = True

    def place(self, position: int) -> Match:
        """The place at `position` of the path of a lease that is in the tree (above 0, not behind its anchor)."""
        assert self.anchor is not None
        return Match(self.anchor.edge.edge_at(position), position)

    def past_at(self, position: int) -> Past | None:
        """The life in another memory of what is published at `position`; None if it was not read back."""
        return self.past if position == self.loading else None


class LeaseTable:
    """The rows of all running leases.

    Attributes:
        stretch: Answer tokens that gather in a row before they are entered in the tree.
        steps: Steps that a lease may have under way at once, 1 or 2.
        ahead: Positions behind those of a step that have blocks too.
        extendable: The last phase in which a lease can be extended.
        plain: Steps of one lease are done with plain numbers, which is faster for it than arrays.
        phase: int8 [R], FREE, BROKEN (a step failed), RUNNING, STEPPING (a step is under way) or AHEAD (two are).
        known: int64 [R], tokens of the sequence told so far.
        computed: int64 [R], tokens computed and committed.
        planned: int64 [R], where the next step starts: behind the step under way, or at `computed` if there may be only
            one (and then this is the same array).
        due: int64 [R], position of the next checkpoint, FAR if none is planned.
        calm: int64 [R], position up to which `extend` has nothing to do: 0 before the first commit, else before `due`
            and where the blocks at hand suffice.
        eager: int64 [R], computed tokens from which on `commit` has something to publish.
        bookmarked: int64 [R], position of the bookmark, FAR if there is none: windows and chunks are held for it.
        newest: int64 [R], number of the newest step under way, if there may be two.
        under_way: Steps under way, by number.
        stamp: int64 [R], scratch: to see whether a row is given twice.
        tail: int32 [stretch + MOST_SAMPLED, R], answer tokens that are not in the tree yet.
        tail_size: int64 [R], how many.
        blocks: One int32 [R, width] array per table: the block tables, of each row up to `filled`.
        filled: int64 [tables, R], block indices allocated so far (end).
        touched: int64 [tables, R], block indices that earlier leases of the row had written.
        owned: int64 [tables, R], first block index on which the lease holds a reference.
        records: The rest, by row.
        held: Exports whose blocks the engine keeps.
        lent: Hits whose blocks the engine keeps.
    """

    def __init__(self, geometry: CacheGeometry, rows: int, stretch: int, steps: int, ahead: int = 0) -> None:
        """Make room for `rows` leases; it grows. Up to `stretch` answer tokens gather before they are entered."""
        self.stretch, self.ahead = stretch, ahead
        self.steps = steps
        self.extendable = RUNNING if steps == 1 else STEPPING
        self.plain = True
        self._tables, self._token_tables = geometry.tables, geometry.token_tables
        self._page = _PAGE * min([table.span for table in self._token_tables], default=1)
        self.phase = np.zeros(rows, dtype=np.int8)
        columns: list[Rows] = list(np.zeros((10, rows), dtype=np.int64))
        self.known, self.computed, self.due, self.calm, self.eager, self.tail_size = columns[:6]
        self.newest, self.stamp, self.bookmarked, self.planned = columns[6:]
        self.planned = self.computed if steps == 1 else self.planned
        self.tail = np.zeros((stretch + MOST_SAMPLED, rows), dtype=np.int32)
        self.filled, self.touched, self.owned = np.zeros((3, len(self._tables), rows), dtype=np.int64)
        self.under_way: dict[int, Step] = {}
        self.blocks = [_table(rows, t.state_blocks or 16) for t in self._tables]
        self.records: list[Record | None] = [None] * rows
        self.held: list[StateExport] = []
        self.lent: list[HeldBlocks] = []
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def running(self) -> int:
        """Leases that have not ended."""
        return len(self.phase) - len(self._free_rows)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take: of the block tables what was written. O(rows)."""
        columns = sum([values.nbytes for values in vars(self).values() if isinstance(values, np.ndarray)])
        written = 4 * (np.maximum(self.filled, self.touched).sum(axis=1) + _PAGE * len(self.phase))
        tables = np.minimum(written, [blocks.nbytes for blocks in self.blocks])
        return columns + int(tables.sum()) + _RECORD_BYTES * self.running

    def active_rows(self) -> list[int]:
        """Rows of all leases that have not ended."""
        rows: list[int] = np.flatnonzero(self.phase).tolist()
        return rows

    def rows_of(self, namespace: int) -> list[int]:
        """Rows of the leases in a namespace that have not ended."""
        return [row for row in self.active_rows() if self.record(row).prompt.namespace == namespace]

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
        self.known[row] = length
        self.computed[row] = self.planned[row] = computed
        self.tail_size[row] = self.calm[row] = self.eager[row] = 0
        self.bookmarked[row] = FAR
        for i, table in enumerate(self._tables):
            first = 0
            if table.span:
                needed = table.first_needed(max(computed, record.loading))
                first = (computed if table.kind is TableKind.PREFIX else needed) // table.span
                self.widen(i, -(-length // table.span) + 1)
            self.blocks[i][row, : table.state_blocks or first + 1] = -1
            self.filled[i, row] = self.owned[i, row] = first
        self.phase[row] = RUNNING
        return row

    def close(self, row: int) -> None:
        """Free a row whose blocks have been released."""
        if self.known.item(row) > self._page:
            self.touched[:, row] = np.maximum(self.touched[:, row], self.filled[:, row])
        self.records[row] = None
        self.phase[row] = FREE
        self._free_rows.append(row)

    def widen(self, table: int, width: int) -> None:
        """Make the rows of a table at least `width` wide."""
        blocks = self.blocks[table]
        if width > blocks.shape[1]:
            self._move(table, len(blocks), max(width, blocks.shape[1] * 3 // 2))

    def _move(self, table: int, rows: int, width: int) -> None:
        """Move a table to a larger array: what running leases hold, and the -1 that says that a lease has no more."""
        old, self.blocks[table] = self.blocks[table], _table(rows, width)
        for row in self.active_rows():
            end = self._tables[table].state_blocks or min(self.filled.item(table, row) + 1, old.shape[1])
            self.blocks[table][row, :end] = old[row, :end]
        self.touched[table] = 0

    def drop_behind(self, rows: Rows, computed: Longs) -> Ids:
        """Take out the blocks of windows and chunks that no token from `computed`, or from the bookmark, on can see.

        Returns:
            int32, their ids, which may repeat; the leases' references are the caller's to release.
        """
        dropped, first = [_NOTHING], np.minimum(computed, self.bookmarked[rows])
        for i, table in enumerate(self._tables):
            if table.kind not in (TableKind.WINDOW, TableKind.CHUNK):
                continue
            keep = table.first_needed(first) // table.span
            owned = self.owned[i, rows]
            counts = np.maximum(np.minimum(keep, self.filled[i, rows]) - owned, 0)
            if counts.any():
                where = np.repeat(rows, counts), ragged(owned, counts)
                dropped.append(self.blocks[i][where])
                self.blocks[i][where] = -1
                self.owned[i, rows] = owned + counts
        return np.concatenate(dropped)

    def room(self, row: int) -> int:
        """Position up to which the blocks of a lease suffice for steps."""
        spans = [self.filled.item(table.index, row) * table.span for table in self._token_tables]
        return min(spans, default=FAR) - self.ahead

    def begin(self, rows: Rows | int, ends: Rows | int, step: Step) -> None:
        """A step that computes leases up to `ends` is under way."""
        self.under_way[step.serial] = step
        if self.steps == 1:
            self.phase[rows] = STEPPING
        else:
            self.phase[rows] += 1
            self.newest[rows], self.planned[rows] = step.serial, ends

    def end(self, rows: Rows | int) -> None:
        """The older step of leases is no longer under way."""
        self.phase[rows] = RUNNING if self.steps == 1 else self.phase[rows] - 1

    def check_step(self, serial: int, rows: Rows, starts: Rows) -> None:
        """Refuse a step that is not the oldest under way of the leases to which it gave something.

        Raises:
            LeaseError: Another step is under way, or none.
        """
        if serial in self.under_way:  # the older one of two starts at what is computed
            first = self.computed.item(rows.item(0)) == starts.item(0)
            if first and (len(rows) == 1 or np.count_nonzero(self.computed[rows] != starts) == 0):
                return
        self.check_rows(rows, STEPPING, AHEAD)
        raise LeaseError(_WRONG_STEP)

    def check_rows(self, rows: Rows, first: int, last: int) -> None:
        """Refuse rows that are not in one of the phases `first` to `last`, and rows given twice.

        Raises:
            LeaseError: Names the first such row.
        """
        if len(rows) > 1 and rows.view(np.uint64).max() < len(self.phase):  # negative ones are large
            order, phase = np.arange(len(rows)), self.phase[rows]
            self.stamp[rows] = order
            if np.count_nonzero((phase >= first) & (phase <= last) & (self.stamp[rows] == order)) == len(rows):
                return
        for row in rows.tolist():
            self.check_row(row, first, last)
        if len(rows) > 1:
            raise LeaseError(f"a lease is given twice: {rows[:20].tolist()}")

    def check_row(self, row: int, first: int, last: int) -> None:
        """As `check_rows`, for one."""
        if not 0 <= row < len(self.phase):
            raise LeaseError(f"row {row} is not a lease")
        phase = self.phase.item(row)
        if not first <= phase <= last:
            raise LeaseError(f"row {row} {_WRONG_PHASE[phase]}")

    def _more_rows(self) -> None:
        old = len(self.phase)
        for name, values in list(vars(self).items()):
            if isinstance(values, np.ndarray):
                setattr(self, name, np.concatenate([values, np.zeros_like(values)], axis=-1))
        self.planned = self.computed if self.steps == 1 else self.planned
        for i, blocks in enumerate(self.blocks):
            self._move(i, 2 * old, blocks.shape[1])
        self.records += [None] * old
        self._free_rows = list(range(2 * old - 1, old - 1, -1))


@dataclass(eq=False)
class Parts:
    """What a lease is opened, extended, committed and ended with.

    Attributes:
        geometry: Where every token lives.
        pool: The blocks.
        leases: The rows.
        index: What is known and kept.
        placement: Which positions get a checkpoint.
    """

    geometry: CacheGeometry
    pool: BlockPool
    leases: LeaseTable
    index: PrefixIndex
    placement: Placement

    def drop_bookmark(self, row: int) -> bool:
        """Take the bookmark of a lease out. Returns whether it had one."""
        record = self.leases.record(row)
        mark, record.bookmark, self.leases.bookmarked[row] = record.bookmark, None, FAR
        if mark is not None and len(mark.state):
            self.pool.drop(mark.state, whole=True)
        return mark is not None


class Lease:
    """A running request's hold on memory: a view of its row.

    Its numbers end with the lease (LeaseError afterwards); its prompt, hit, explanation and wishes stay.

    Attributes:
        row: Its row in the block tables and in the arrays given to `extend`.
        prompt: The prompt it was made for.
        hit: Where it resumed.
        explanation: What became of the prompt's tokens.
        wishes: What became of the pins and breakpoints of the prompt.
    """

    __slots__ = ("_record", "_table", "explanation", "hit", "prompt", "row", "wishes")

    def __init__(self, table: LeaseTable, row: int) -> None:
        """View `row` of `table`."""
        self._table = table
        self._record = record = table.record(row)
        self.row, self.prompt, self.hit = row, record.prompt, record.hit
        self.explanation, self.wishes = record.explanation, record.wishes

    @property
    def tokens(self) -> int:
        """Tokens of the sequence told so far."""
        return self._number(self._table.known)

    @property
    def computed(self) -> int:
        """Tokens computed and committed."""
        return self._number(self._table.computed)

    @property
    def planned(self) -> int:
        """Where the next step starts: at `computed`, or behind the step under way if there may be a second one."""
        return self._number(self._table.planned)

    @property
    def next_stop(self) -> int:
        """Where the next prefill chunk should end: the next checkpoint, or all that is known."""
        known, planned = self._number(self._table.known), self._table.planned.item(self.row)
        for place in self._record.plan:
            if place.position > planned:
                return min(known, place.position)
        return known

    def _number(self, column: Longs) -> int:
        if self._table.records[self.row] is not self._record:
            raise LeaseError(f"the lease of row {self.row} has ended")
        return column.item(self.row)
