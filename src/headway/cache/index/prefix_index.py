"""The prefix index: the tree of known sequences together with the memory that keeps them reusable.

It finds where a prompt can resume, keeps the places of running leases, and publishes what they computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headway.cache.config import CacheConfig
from headway.cache.index.checkpoint import Checkpoint, Section
from headway.cache.index.pool import BlockPool
from headway.cache.index.reclaim import Reclaimer
from headway.cache.index.residency import Residency
from headway.cache.index.tree import Match, Node, PrefixTree
from headway.cache.lease.table import LeaseTable
from headway.cache.shape.geometry import CacheGeometry, TableKind

__all__ = ["PrefixIndex"]

Ids = NDArray[np.int32]
_FEW_NAMESPACES = 64
"""Namespaces among which empty ones are not looked for."""


class PrefixIndex:
    """The tree of known sequences, what of it is resident, and who is computing where.

    Attributes:
        tail: The model resumes at checkpoints only.
        tree: The tree's operations.
        residency: Moves resident ends.
        reclaim: Makes room.
        roots: Root of each namespace.
        version: Changes with every change of the index.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: CacheGeometry,
        pool: BlockPool,
        leases: LeaseTable,
        clock: Callable[[], float],
    ) -> None:
        """Make an empty index."""
        self._geometry = geometry
        self._pool = pool
        self._leases = leases
        self.tail = bool(geometry.tail_tables)
        self.residency = Residency(geometry, pool, self._move_rows)
        self.tree = PrefixTree(geometry.lookahead, len(geometry.prefix_tables), self.residency)
        self.reclaim = Reclaimer(config, geometry, pool, leases, self.residency, self.tree, clock)
        self.roots: dict[int, Node] = {}
        self.version = 0
        self._roots_before_sweep = _FEW_NAMESPACES
        self._nowhere = Match(self.tree.root(), 0)

    # ---- finding

    def root(self, namespace: int) -> Node:
        """Root of a namespace."""
        root = self.roots.get(namespace)
        if root is None:
            if len(self.roots) >= self._roots_before_sweep:
                self._sweep_roots()
            root = self.roots[namespace] = self.tree.root()
            self.residency.namespaces[root] = namespace
        return root

    def _sweep_roots(self) -> None:
        """Forget namespaces behind which nothing is known; clients choose cache salts, so there is no end of them."""
        for namespace, root in list(self.roots.items()):
            if not root.children and not root.rows:
                del self.roots[namespace], self.residency.namespaces[root]
        self._roots_before_sweep = 2 * len(self.roots) + _FEW_NAMESPACES

    def find(self, namespace: int, tokens: Ids) -> tuple[Match, int, Checkpoint | None]:
        """How far a prompt follows a known path, where it can resume, and the checkpoint that serves it. Pure."""
        root = self.roots.get(namespace)
        if root is None:
            return self._nowhere, 0, None
        at = self.tree.follow(Match(root, 0), tokens)
        limit = min(at.position, len(tokens) - 1)
        if limit <= 0:
            return at, 0, None
        if not self.tail:
            return at, min(self.residency.frontier(at), limit), None
        checkpoint = at.node.checkpoint_at_or_before(limit)
        return at, checkpoint.position if checkpoint else 0, checkpoint

    def place(self, namespace: int, at: Match, position: int) -> Match:
        """The place at `position` of the path to `at`."""
        if position == 0:
            return Match(self.root(namespace), 0)
        node = next(node for node in at.node.path() if node.start < position)
        return Match(node, position)

    def hit_blocks(self, at: Match, position: int, checkpoint: Checkpoint | None, table: int) -> Ids:
        """Block ids of one table under a hit at `position` of the path to `at`."""
        geometry = self._geometry.tables[table]
        if geometry.kind is TableKind.PREFIX:
            ids = np.empty(geometry.blocks_for(position), dtype=np.int32)
            self.residency.path_ids(at, self._geometry.prefix_tables.index(geometry), 0, ids)
            return ids
        assert checkpoint is not None
        return checkpoint.sections[self._geometry.tail_tables.index(geometry)].ids.copy()

    # ---- leases in the tree

    def enter(self, at: Match, tokens: Ids) -> Match:
        """Make `tokens` known from `at` on, where nothing known continues with them.

        Once the lease is attached to the place returned, call `settle(at.node)`: if its edge was split, its lower half
        may have been held only by leases that end above.
        """
        place = self.tree.enter(at, tokens)
        if place.position > at.position:
            self.version += 1
            self.reclaim.entered(place.position - at.position, place.node)
        return place

    def attach(self, row: int, at: Match) -> None:
        """The path of lease `row` now ends at `at`: nothing on it is evicted before the lease ends."""
        at.node.rows.add(row)
        for node in at.node.path():
            node.active += 1

    def detach(self, row: int, at: Match) -> None:
        """Undo `attach`; call `settle` when no new place follows."""
        at.node.rows.discard(row)
        for node in at.node.path():
            node.active -= 1

    def advance(self, row: int, tokens: Ids) -> None:
        """The sequence of lease `row` goes on with `tokens`: move its place in the tree behind them."""
        record = self._leases.record(row)
        if len(record.rest):
            tokens = np.concatenate([record.rest, tokens])
        left, start = record.at
        self.detach(row, record.at)
        at = self.tree.follow(record.at, tokens)
        record.at = self.enter(at, tokens[at.position - start :])
        record.rest = tokens[record.at.position - start :]
        self.attach(row, record.at)
        for node in {left, at.node} - {record.at.node}:
            self.settle(node)

    def saw(self, at: Match, start: int, stop: int) -> None:
        """Positions [start, stop) of the path to `at` have been computed."""
        for node in at.node.path():
            node.seen = max(node.seen, min(stop, node.end))
            if node.start <= start:
                return

    def _move_rows(self, upper: Node, lower: Node) -> None:
        if lower.rows:
            for row in list(lower.rows):
                record = self._leases.record(row)
                if record.at.position <= lower.start:
                    lower.rows.remove(row)
                    upper.rows.add(row)
                    lower.active -= 1
                    record.at = Match(upper, record.at.position)

    # ---- publishing

    def publish(self, row: int, position: int) -> Match:
        """Make the path of lease `row` resident up to `position` (all computed). Returns the place.

        What is resident already is taken over by the lease, whose own copies are freed: one copy is left.
        """
        self.version += 1
        leases, node = self._leases, self._leases.record(row).at.node
        while node.start >= position and node.parent is not None:
            node = node.parent
        at = Match(node, position)
        frontier = self.residency.frontier(at)
        self.saw(at, frontier, position)
        rows = []
        for i, table in enumerate(self._geometry.prefix_tables):
            blocks = leases.blocks[table.index][row]
            owned, full = leases.owned.item(table.index, row), frontier // table.span
            if full > owned:
                mine = blocks[owned:full].copy()
                self.residency.path_ids(at, i, owned, blocks[owned:full])
                self._pool.release(mine)
            leases.owned[table.index, row] = max(owned, position // table.span)
            rows.append(blocks)
        self.reclaim.grew(self.residency.grow(at, rows))
        return at

    def take_checkpoint(self, row: int, position: int, kind: str, state: Ids | None) -> bool:
        """Publish the path of lease `row` up to `position` and keep a checkpoint there.

        Args:
            row: The lease, which still holds its windows and chunks at `position`.
            position: Tokens before the checkpoint; all computed and known to the tree.
            kind: Kind of placement.
            state: Blocks of the state after `position` tokens, whose reference goes to the checkpoint (None: no
                states).

        Returns:
            False if one was there already, or not all tokens on which its entries depend are known yet; then the
            reference on `state` is the caller's to release.
        """
        if position > self._leases.record(row).at.position:
            return False
        at = self.publish(row, position)
        index = bisect_left(at.node.marks, position)
        if index < len(at.node.marks) and at.node.marks[index] == position:
            return False
        sections = []
        for table in self._geometry.tail_tables:
            if table.kind is TableKind.STATE:
                assert state is not None
                sections.append(Section(0, state))
                continue
            first = table.first_needed(position)
            low, high = first // table.span, -(-position // table.span) if first < position else first // table.span
            ids = self._leases.blocks[table.index][row, low:high].copy()
            self._pool.share(ids)
            sections.append(Section(low, ids))
        checkpoint = Checkpoint(position, kind, tuple(sections), at.node)
        self.residency.store(checkpoint)
        self.reclaim.born(checkpoint)
        return True

    def settle(self, node: Node) -> None:
        """A lease that ended at `node` is gone."""
        self.version += 1
        self.reclaim.retreat(node)

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` are free. Returns whether they are."""
        if self._pool.free >= blocks:
            return True
        self.version += 1
        return self.reclaim.make_room(blocks)

    # ---- everything

    def nodes(self) -> list[Node]:
        """All edges, parents before children."""
        found: list[Node] = []
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def clear(self) -> int:
        """Forget everything that no lease holds by itself. Returns the checkpoints dropped."""
        self.version += 1
        dropped = 0
        for node in reversed(self.nodes()):
            for checkpoint in list(node.checkpoints):
                self.residency.remove(checkpoint, "reset")
                dropped += 1
            self.residency.shrink(node, node.start, "reset")
        self.reclaim.clear()
        self.roots.clear()
        self.residency.namespaces.clear()
        return dropped
