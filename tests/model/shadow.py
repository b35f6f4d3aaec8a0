"""A fake device: the memory of every rank, in which every slot says what was written there.

A token's entry carries the *name* (see `oracle.Names`) of the exact prefix that ends with that token, which says
namespace, position and all earlier tokens at once; a state carries the name of the prefix that it has run over. The
device does what a step asks for, in the order in which real ranks would: copies, zeroed states, then the forward pass,
which reads the history and writes new entries, then exports. Every read is checked.

Writing goes through the cache's own `slots`; reading goes through the formulas of the fact sheet, restated here. So a
wrong rank or offset is found as soon as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.model.oracle import Names

from headway.cache import CacheGeometry, TableGeometry, TableKind

__all__ = ["Lane", "Shadow", "first_needed", "first_served"]

_NOTHING = -1
_STATE_PARTS = 64


@dataclass
class Lane:
    """One running lease as the device sees it.

    Attributes:
        row: Its row in the block tables.
        path: Names of every prefix of its known tokens (element n: the first n tokens).
        computed: Tokens whose entries are written and committed.
        first: Where it resumed.
        given: Tokens up to which it was ever given blocks.
    """

    row: int
    path: list[int]
    computed: int
    first: int
    given: int = 0
    wrote: set[int] = field(default_factory=set)


class Shadow:
    """The memory of all ranks.

    Attributes:
        geometry: Geometry of the cache under test.
        tokens: For each token-indexed table, names written: int64 [shards, blocks, block_tokens].
        ahead: The same shape: name of the longest prefix known when the entry was written, as far as it depends on it.
        state: int64 [blocks], name and part of the state in a block.
        owner: int64 [blocks], the table whose data a block holds, -1 for none.
    """

    def __init__(self, geometry: CacheGeometry, blocks: int, names: Names) -> None:
        self.geometry = geometry
        self.names = names
        self.tokens: dict[int, Any] = {}
        self.ahead: dict[int, Any] = {}
        self.lookahead: dict[int, int] = {}
        for table in geometry.tables:
            if table.kind is not TableKind.STATE:
                shape = (table.shards, blocks, table.block_tokens)
                self.tokens[table.index] = np.full(shape, _NOTHING, dtype=np.int64)
                self.ahead[table.index] = np.full(shape, _NOTHING, dtype=np.int64)
                members = [g.spec.lookahead for g in geometry.groups if g.table.index == table.index]
                self.lookahead[table.index] = max(members)
        self.state = np.full(blocks, _NOTHING, dtype=np.int64)
        self.owner = np.full(blocks, _NOTHING, dtype=np.int64)

    # Memory.

    def _claim(self, block: int, table: int) -> None:
        """A block begins to hold data of `table`; what other tables left in these bytes is gone."""
        if self.owner[block] == table:
            return
        for index in self.tokens:
            self.tokens[index][:, block] = _NOTHING
            self.ahead[index][:, block] = _NOTHING
        self.state[block] = _NOTHING
        self.owner[block] = table

    def copy(self, pairs: Any) -> None:
        """Copy whole blocks on every rank. The pairs of one step may be done in any order, so they must not meet."""
        sources, targets = [int(a) for a, _ in pairs], [int(b) for _, b in pairs]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert not set(sources) & set(targets), "a copy reads what another copy of the step writes"
        for source, target in zip(sources, targets, strict=True):
            assert self.owner[source] != _NOTHING, f"copy from block {source}, which was never written"
            for index in self.tokens:
                self.tokens[index][:, target] = self.tokens[index][:, source]
                self.ahead[index][:, target] = self.ahead[index][:, source]
            self.state[target] = self.state[source]
            self.owner[target] = self.owner[source]

    # Reading, by the formulas of the fact sheet.

    def read(self, table: TableGeometry, row: Any, start: int, stop: int) -> tuple[Any, Any]:
        """Names found at positions [start, stop) through a block-table row, and what they were known to depend on."""
        p = np.arange(start, stop)
        shards, inter, size = table.shards, table.interleave, table.block_tokens
        block = np.asarray(row)[p // (shards * size)]
        assert (block >= 0).all(), f"table {table.index}: no block for a position in [{start}, {stop})"
        offset = p % (shards * size)
        rank, slot = p // inter % shards, offset // (shards * inter) * inter + offset % inter
        held = self.owner[block] == table.index
        names = np.where(held, self.tokens[table.index][rank, block, slot], _NOTHING)
        return names, self.ahead[table.index][rank, block, slot]

    def check_read(self, table: TableGeometry, row: Any, path: Sequence[int], stop: int, what: str) -> None:
        """Everything that resuming at `stop` needs from a token-indexed table must be there, on the right ranks."""
        start = first_needed(table, stop)
        if start == stop:
            return
        names, ahead = self.read(table, row, start, stop)
        wrong = np.flatnonzero(names != np.array(path[start + 1 : stop + 1]))
        assert not len(wrong), f"{what}: table {table.index} ({table.kind.value}): wrong entry at {start + wrong[0]}"
        reach = self.lookahead[table.index]
        for i in range(max(0, stop - start - reach), stop - start):
            assert self._agrees(int(ahead[i]), path), (
                f"{what}: table {table.index}: the entry at {start + i} depends on later tokens that differ"
            )

    def _agrees(self, name: int, path: Sequence[int]) -> bool:
        """Whether a prefix and a path are equal as far as both are known."""
        if name == _NOTHING:
            return True
        while self.names.depth[name] >= len(path):
            name = self.names.parent[name]
        return path[self.names.depth[name]] == name

    # A step.

    def prepare(self, step: Any, lanes: dict[int, Lane], tables: Any) -> None:
        """What the ranks do before the forward pass: copies, and states that start from zero."""
        self.copy(step.copies)
        state = self.geometry.state_table
        fresh = {int(row) for row in step.fresh}
        for i, row in enumerate(step.rows):
            if state is not None and step.counts[i] and step.starts[i] == 0:
                assert int(row) in fresh, f"row {row} starts at 0 and its state is not zeroed"
        if state is None:
            return
        for row in fresh:
            lane = lanes[row]
            blocks = tables[state.index][row][: state.state_blocks]
            self._write_state(blocks, lane.path[0])

    def forward(self, row: int, start: int, stop: int, written: Sequence[int], lane: Lane, tables: Any) -> None:
        """Compute positions [start, stop) of a lease: check all that is read, then write.

        Args:
            row: Row of the lease.
            start: First position.
            stop: Position after the last one.
            written: Names of the prefixes ending at each position, drafts included, from the first token on.
            lane: The lease.
            tables: The cache's block tables.
        """
        assert start == lane.computed, f"row {row}: step starts at {start}, {lane.computed} are computed"
        what = f"row {row}, step [{start}, {stop})"
        for table in self.geometry.tables:
            blocks = np.asarray(tables[table.index][row])
            if table.kind is TableKind.STATE:
                self.check_state(blocks[: table.state_blocks], lane.path[start], what)
                self._write_state(blocks[: table.state_blocks], written[stop])
                lane.wrote.update(int(b) for b in blocks[: table.state_blocks])
            else:
                self.check_read(table, blocks, lane.path, start, what)
                self._write_tokens(table, blocks, start, stop, written, lane)

    def check_state(self, blocks: Any, name: int, what: str) -> None:
        """These blocks must hold the state after exactly the prefix `name`."""
        assert (np.asarray(blocks) >= 0).all(), f"{what}: no block for the state"
        found = self.state[blocks]
        right = name * _STATE_PARTS + np.arange(len(blocks))
        table = self.geometry.state_table
        assert table is not None
        assert (self.owner[blocks] == table.index).all(), f"{what}: the state's blocks hold something else"
        assert (found == right).all(), f"{what}: the state is not that after this prefix"

    def _write_state(self, blocks: Any, name: int) -> None:
        table = self.geometry.state_table
        assert table is not None
        assert len({int(b) for b in blocks}) == table.state_blocks, "a state needs as many different blocks"
        for part, block in enumerate(blocks):
            assert block >= 0, "a state is written and has no block"
            self._claim(int(block), table.index)
            self.state[block] = name * _STATE_PARTS + part

    def _write_tokens(
        self, table: TableGeometry, row: Any, start: int, stop: int, written: Sequence[int], lane: Lane
    ) -> None:
        positions = np.arange(start, stop)
        blocks = row[positions // table.span]
        assert (blocks >= 0).all(), f"table {table.index}: no block to write [{start}, {stop})"
        for block in {int(b) for b in blocks}:
            self._claim(block, table.index)
            lane.wrote.add(block)
        names = np.array(written[start + 1 : stop + 1], dtype=np.int64)
        last = len(lane.path) - 1
        reach = self.lookahead[table.index]
        ahead = np.array(
            [lane.path[min(p + 1 + reach, last)] if p < last else _NOTHING for p in range(start, stop)], dtype=np.int64
        )
        stored = np.zeros(len(positions), dtype=np.int64)
        for rank in range(table.shards):
            slots = table.slots(positions, rank, row)
            mine = slots >= 0
            stored += mine
            self.tokens[table.index][rank].reshape(-1)[slots[mine]] = names[mine]
            self.ahead[table.index][rank].reshape(-1)[slots[mine]] = ahead[mine]
        assert (stored == 1).all(), f"table {table.index}: a token is stored on {stored.min()} or {stored.max()} ranks"

    def export(self, export: Any, start: int, stop: int, written: Sequence[int], tables: Any, inside: bool) -> None:
        """Copy a running state away, after the forward pass or at a position inside it."""
        table = self.geometry.state_table
        assert table is not None
        running = tables[table.index][export.row][: table.state_blocks]
        assert list(export.source) == list(running), "an export reads something else than the running state"
        position = int(export.position)
        assert position == stop or (inside and start < position < stop), f"export at {position} in [{start}, {stop})"
        assert not set(map(int, export.destination)) & set(map(int, export.source)), "an export onto itself"
        self._write_state(export.destination, written[position])

    def waste(
        self, row: int, start: int, stop: int, written: Sequence[int], tables: Any, exports: Sequence[Any]
    ) -> None:
        """Write nonsense where a step that does not count any more writes: its rows, states and exports."""
        for table in self.geometry.tables:
            blocks = np.asarray(tables[table.index][row])
            if table.kind is TableKind.STATE:
                self._write_state(blocks[: table.state_blocks], written[stop])
                continue
            for block in blocks[start // table.span : (stop - 1) // table.span + 1].tolist():
                self._claim(block, table.index)
            positions = np.arange(start, stop)
            for rank in range(table.shards):
                slots = table.slots(positions, rank, blocks)
                self.tokens[table.index][rank].reshape(-1)[slots[slots >= 0]] = _NOTHING
        for export in exports:
            self._write_state(export.destination, written[stop])

    def check_writers(
        self, rows: Sequence[int], spans: dict[int, tuple[int, int]], lanes: dict[int, Lane], tables: Any
    ) -> None:
        """No lease may write where another one reads or writes."""
        for table in self.geometry.tables:
            for row in rows:
                start, stop = spans[row]
                mine = np.asarray(tables[table.index][row])
                if table.kind is TableKind.STATE:
                    targets = {int(b): (0, 1) for b in mine[: table.state_blocks]}
                else:
                    indices = range(start // table.span, (stop - 1) // table.span + 1)
                    targets = {
                        int(mine[j]): (max(start, j * table.span), min(stop, (j + 1) * table.span)) for j in indices
                    }
                for other, lane in lanes.items():
                    if other != row:
                        self._check_other(table, targets, other, lane, tables, f"rows {row} and {other}")

    def _check_other(
        self, table: TableGeometry, targets: dict[int, tuple[int, int]], other: int, lane: Lane, tables: Any, what: str
    ) -> None:
        for theirs in self.geometry.tables:
            held = np.asarray(tables[theirs.index][other])
            started = lane.given > lane.first  # else it has no running state yet, and no copy of a block to write in
            if theirs.kind is TableKind.STATE:
                width = theirs.state_blocks if started else 0
            else:
                width = -(-lane.computed // theirs.span) if started else lane.first // theirs.span
            for j in range(width):
                block = int(held[j])
                if block < 0 or block not in targets:
                    continue
                assert theirs.index == table.index, f"{what}: block {block} is in two tables"
                assert table.kind is not TableKind.STATE, f"{what}: one running state"
                low, high = targets[block]
                reads = (j * table.span, min((j + 1) * table.span, lane.computed))
                assert not max(low, reads[0]) < min(high, reads[1]), (
                    f"{what}: block {block} of table {table.index} is written at [{low}, {high}) and read there"
                )
                assert block not in lane.wrote or lane.computed // table.span != j, f"{what}: both write block {block}"


def first_served(geometry: CacheGeometry, position: int) -> int:
    """First position that a checkpoint at `position` serves: down to there it holds all that each position needs.

    It holds a state after its own tokens alone; of a window whole blocks, from that of the first entry that it needs
    on; of a chunk the entries of its own.
    """
    tables = [table for table in geometry.tables if table.kind is not TableKind.PREFIX]
    held = [first_needed(table, position) for table in tables]
    held = [h - h % t.span if t.kind is TableKind.WINDOW else h for h, t in zip(held, tables, strict=True)]

    def holds(place: int) -> bool:
        needs = [first_needed(table, place) for table in tables]
        enough = [n >= h or n == place for n, h in zip(needs, held, strict=True)]
        return all(enough) and all(table.kind is not TableKind.STATE for table in tables)

    while position > 1 and holds(position - 1):
        position -= 1
    return position


def first_needed(table: TableGeometry, position: int) -> int:
    """First position needed to resume at `position`, from the definition of each kind."""
    if table.kind is TableKind.WINDOW:
        return max(0, position - table.window + 1)
    if table.kind is TableKind.CHUNK:
        return position - position % table.chunk
    return 0 if table.kind is TableKind.PREFIX else position
