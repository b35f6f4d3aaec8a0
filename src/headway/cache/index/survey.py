"""What the blocks of a cache hold, for people who look at it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from headway.cache.index.prefix_index import PrefixIndex
from headway.cache.shape.geometry import TableKind

__all__ = ["Holdings", "survey"]

_KINDS = ("running", "attention", "windows", "states")
_OF_TABLE = {TableKind.PREFIX: 1, TableKind.WINDOW: 2, TableKind.CHUNK: 2, TableKind.STATE: 3}


class Holdings(NamedTuple):
    """What the blocks of a cache hold. Every block counts once.

    Attributes:
        blocks: Blocks by what they hold: `attention` (entries of known prefixes), `windows` (of checkpoints, chunks
            too), `states` (of checkpoints), `running` (what running requests have for themselves), `free`.
        checkpoints: Checkpoints kept, by kind of placement.
        prefixes: Parts of known prefixes, between two places where they part, of which anything is kept.
    """

    blocks: dict[str, int]
    checkpoints: dict[str, int]
    prefixes: int


def survey(index: PrefixIndex) -> Holdings:
    """Look at everything that is kept. Changes nothing; O(edges + checkpoints + blocks)."""
    geometry, pool = index.geometry, index.pool
    edges = [edge for edge in index.tree.edges() if edge.resident > edge.start]
    checkpoints = [one for edge in edges for one in edge.checkpoints if not one.floats]
    marks = np.zeros(pool.blocks, dtype=np.int64)
    for i in range(len(geometry.prefix_tables)):
        marks[np.frombuffer(b"".join(edge.runs[i] for edge in edges), dtype=np.int32)] = 1
    for i, table in enumerate(geometry.tail_tables):
        ids = [np.empty(0, dtype=np.int32), *(one.sections[i].ids for one in checkpoints)]
        marks[np.concatenate(ids)] = _OF_TABLE[table.kind]
    held = np.bincount(marks[pool.references > 0], minlength=len(_KINDS)).tolist()
    return Holdings(
        dict(zip(_KINDS, held, strict=True)) | {"free": pool.free},
        dict(Counter(one.kind for one in checkpoints)),
        len(edges),
    )
