"""Objects of several ranks, in the driver: cut into portions, asked of all ranks, and put together.

Every rank is asked for every portion, also one that has nothing of it: whether a message is sent depends on what is
asked for, never on what a rank holds. A message with what is moved is bounded, so that neither side holds a large state
several times over, and none is silent for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from headway.cache import CacheGeometry
from headway.runtime.forward.canonical import (
    Bytes,
    GroupShare,
    Portion,
    add_portion,
    object_bytes,
    portions_of,
    take_portion,
)
from headway.runtime.interface import BlockRange, CanonicalGroup

__all__ = ["MESSAGE_BYTES", "RankObjects"]

MESSAGE_BYTES = 16 << 20
"""Bytes of objects that one message to a rank or from it holds, unless a single block or field is larger."""

Ask = Callable[[Sequence[Portion]], Sequence[Sequence[memoryview]]]
"""Has every rank read some portions: for each rank, what it read of each."""
Tell = Callable[[Sequence[Portion], Sequence[Sequence[Bytes]]], None]
"""Has every rank write its part of some portions: for each rank, what it writes of each."""


class RankObjects:
    """What the ranks have of each object.

    Args:
        geometry: The cache's geometry.
        shares: What each rank says that it has, in order of rank.

    Attributes:
        canonical: What the objects of each group are, by its name.
    """

    def __init__(self, geometry: CacheGeometry, shares: Sequence[Sequence[GroupShare]]) -> None:
        self._tables = {group.spec.name: group.table for group in geometry.groups}
        self._shares: list[Mapping[str, GroupShare]] = [{share.group.name: share for share in each} for each in shares]
        self.canonical: Mapping[str, CanonicalGroup] = {share.group.name: share.group for share in shares[0]}
        for name in self.canonical:
            _require_whole(name, [each[name] for each in self._shares])

    def read(self, ranges: Sequence[BlockRange], ask: Ask) -> Sequence[memoryview]:
        """Read the object of each range."""
        objects = [np.zeros(object_bytes(self.canonical[asked.group], asked), dtype=np.uint8) for asked in ranges]
        for batch in self._batches(ranges):
            answers = ask([portion for _, portion in batch])
            for shares, parts in zip(self._shares, answers, strict=True):
                for (i, portion), part in zip(batch, parts, strict=True):
                    group, data = portion.range.group, np.frombuffer(part, dtype=np.uint8)
                    add_portion(objects[i], ranges[i], portion, shares[group], self._tables[group], data)
        return [made.data for made in objects]

    def write(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview], tell: Tell) -> None:
        """Write an object to each range."""
        whole = [np.frombuffer(each, dtype=np.uint8) for each in objects]
        for batch in self._batches(ranges):
            tell(
                [portion for _, portion in batch],
                [
                    [
                        take_portion(
                            whole[i], ranges[i], portion, shares[ranges[i].group], self._tables[ranges[i].group]
                        )
                        for i, portion in batch
                    ]
                    for shares in self._shares
                ],
            )

    def _batches(self, ranges: Sequence[BlockRange]) -> Iterator[list[tuple[int, Portion]]]:
        """Portions of all ranges, with the number of the range of each, as many as a message holds."""
        batch: list[tuple[int, Portion]] = []
        held = 0
        for i, asked in enumerate(ranges):
            share, table = self._shares[0][asked.group], self._tables[asked.group]
            for portion in portions_of(asked, share, table, MESSAGE_BYTES):
                size = _portion_bytes(portion, share)
                if batch and held + size > MESSAGE_BYTES:
                    yield batch
                    batch, held = [], 0
                batch.append((i, portion))
                held += size
        if batch:
            yield batch


def _portion_bytes(portion: Portion, share: GroupShare) -> int:
    """Bytes of a portion over all ranks."""
    fields = share.fields[slice(*portion.fields)]
    return sum(field.count * field.whole_bytes for field in fields) * portion.range.tokens


def _require_whole(name: str, shares: Sequence[GroupShare]) -> None:
    """What the ranks call theirs must be every byte of every token, once: else objects would have holes."""
    for shard in {share.shard for share in shares}:
        alike = [share for share in shares if share.shard == shard]
        for fields in zip(*(share.fields for share in alike), strict=True):
            mine = sorted((piece.whole, piece.length) for field in fields for piece in field.mine)
            ends = [0, *np.cumsum([length for _, length in mine]).tolist()]
            first = fields[0]
            assert [start for start, _ in mine] == ends[:-1], f"ranks overlap or leave out bytes of {name}"
            assert ends[-1] == first.whole_bytes, f"ranks have {ends[-1]} of {first.whole_bytes} bytes of {name}"
            places = {(field.count, field.whole_offset, field.whole_step, field.whole_bytes) for field in fields}
            assert len(places) == 1, f"ranks disagree where the fields of {name} lie"
