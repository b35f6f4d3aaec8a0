"""Where a prompt can resume: what a lookup returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.cache.index.edge import Checkpoint, Match
from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.shape.geometry import Ids, TableKind
from headway.cache.shape.prompt import Prompt

__all__ = ["Hit"]


@dataclass(slots=True)
class Hit:
    """Where a prompt can resume. Not to be changed: it is what the index said at `version`.

    Attributes:
        tokens: Tokens that need not be computed; 0 for none.
        matched: Tokens that follow a known path.
        kind: Kind of placement of the checkpoint that serves it; "path" for a model without checkpoints, "" for no hit.
        prompt: The prompt that was looked up.
        at: Where it leaves what is known. For the cache's own use, as the rest.
        checkpoint: The checkpoint that serves it, or None.
        index: The index it was found in.
        version: The version of the index it is true for.
    """

    tokens: int
    matched: int
    kind: str
    prompt: Prompt = field(repr=False)
    at: Match = field(repr=False)
    checkpoint: Checkpoint | None = field(repr=False)
    index: PrefixIndex = field(repr=False)
    version: int = field(repr=False)

    def blocks(self, table: int) -> Ids:
        """Block ids of one table under the hit, int32: of the prefix, or what the checkpoint holds of its tail.

        Valid until the cache changes.
        """
        if self.tokens == 0 or self.checkpoint is None:
            return np.empty(0, dtype=np.int32)
        geometry, one = self.index.geometry, self.index.geometry.tables[table]
        if one.kind is not TableKind.PREFIX:
            section = self.checkpoint.sections[geometry.tail_tables.index(one)]
            return section.part(one, self.tokens).ids.copy()
        edge, number = self.at.edge.edge_at(self.tokens), geometry.prefix_tables.index(one)
        return self.index.tree.path_ids(edge, number, 0, one.blocks_for(self.tokens)).copy()
