"""The bytes of a group as no rank has them: all layers, all heads, all tokens, in one order.

An *object* holds the entries of one group for tokens [first, stop), or one state. Its bytes do not depend on how many
ranks there are, nor on what they split: field after field in the order of layers, and of each field
`[tokens, *whole shape]`; a state lies as one rank alone would keep it, with zeros between its fields. So what one rank
has written, ranks that share it can read, and the other way round.

What a rank has of it is a `GroupShare`: of every field some runs of each token's bytes, for some of the tokens. It is
found once, from the cuts that made the rank's weights (`Field.parts`), never from the sizes that came out: the channels
of a convolution state are x | B | C of unequal widths, each cut by itself, B and C perhaps on several ranks. Where
several ranks have the same run, one of them writes it and all read it.

A field whose cut is not known for certain is not guessed: its object has what each rank holds, one rank after another,
`CanonicalGroup.certified` is False, and the family of the group names the layout of ranks, so that the keys of objects
keep others away from it.

Between ranks and their driver travel *portions*: what one rank has of some fields, or of some tokens, in the order of
the fields. A rank reads and writes portions (`headway.runtime.forward.moves`); the driver puts them together and takes
them apart, for which it needs neither tensors nor the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.cache import CacheGeometry, GroupGeometry, TableGeometry, TableKind
from headway.runtime.interface import BlockRange, CanonicalGroup
from headway.runtime.model.layout import STATE_ALIGNMENT, Entries, Field, ModelLayout, Part

__all__ = [
    "Bytes",
    "FieldShare",
    "GroupShare",
    "Piece",
    "Portion",
    "Runs",
    "add_portion",
    "local_tokens",
    "object_bytes",
    "parts_of_object",
    "parts_of_portion",
    "portion_bytes",
    "portions_of",
    "shares_of",
    "take_portion",
]

_VERSION = 1
"""Of this form: whatever changes the bytes of an object for the same tokens changes it."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Piece:
    """A run of the bytes that a field has for a token, or for a state.

    Attributes:
        local: First byte among those of the rank.
        whole: First byte among those of all ranks.
        length: Bytes.
    """

    local: int
    whole: int
    length: int


Runs: TypeAlias = Sequence[tuple[Piece, int]]
"""Pieces, and where each begins."""


@dataclass(frozen=True)
class FieldShare:
    """What a rank has of a field, or of several alike at equal distances.

    Attributes:
        count: Fields.
        offset: First byte of the first one within the rank's bytes of a token or state, and
        step: bytes from each to the next.
        bytes: Bytes of each on the rank, of a token or state.
        whole_offset: As `offset`, in objects.
        whole_step: As `step`, in objects.
        whole_bytes: As `bytes`, in objects.
        pieces: Cover the rank's bytes of each of the fields, in order.
        mine: Those of `pieces` that this rank puts into objects; every byte of an object is one rank's.
    """

    count: int
    offset: int
    step: int
    bytes: int
    whole_offset: int
    whole_step: int
    whole_bytes: int
    pieces: tuple[Piece, ...]
    mine: tuple[Piece, ...]

    def moved(self, mine: bool) -> tuple[Piece, ...]:
        """The pieces that the rank reads (`mine`), or writes."""
        return self.mine if mine else self.pieces

    @property
    def alike(self) -> tuple[object, ...]:
        """What fields have in common that are moved together."""
        return self.bytes, self.whole_bytes, self.pieces, self.mine


@dataclass(frozen=True)
class GroupShare:
    """What a rank has of a group's objects.

    Attributes:
        group: The group.
        shard: Number of the rank among those that split the tokens; 0 where none do.
        fields: What it has of each field.
    """

    group: CanonicalGroup
    shard: int
    fields: tuple[FieldShare, ...]


@dataclass(frozen=True)
class Portion:
    """A part of an object that is moved at once.

    Attributes:
        range: Some of the object's tokens with their blocks, or its state.
        fields: Which of the `GroupShare.fields`, [first, stop).
    """

    range: BlockRange
    fields: tuple[int, int]


def shares_of(
    layout: ModelLayout, geometry: CacheGeometry, rank: int = 0, drafter: Sequence[Entries] = ()
) -> tuple[GroupShare, ...]:
    """What a rank has of the objects of each group.

    Args:
        layout: What a rank stores of the model.
        geometry: The cache's geometry; it says how many ranks there are.
        rank: The rank, among all of them.
        drafter: What a drafter keeps, which every rank has all of.

    Returns:
        One per group of the geometry, in its order.
    """
    found: dict[str, list[Field]] = {group.spec.name: [] for group in geometry.groups}
    kept = [entries for layer in layout.layers for entries in (layer.tokens, layer.state) if entries is not None]
    for entries in (*kept, *drafter):
        found[entries.group] += entries.fields
    return tuple(_share(group, found[group.spec.name], geometry, rank) for group in geometry.groups)


def _share(group: GroupGeometry, fields: Sequence[Field], geometry: CacheGeometry, rank: int) -> GroupShare:
    table, layout = group.table, geometry.layout
    copy, index = divmod(rank, layout.tp)  # each rank of prefill context parallelism has what `tp` ranks have
    shard, size = 0, layout.tp
    if table.shards > 1:
        shard, index, size = copy * layout.dcp + index % layout.dcp, index // layout.dcp, layout.tp // layout.dcp
    certified = all(field.parts is not None for field in fields)
    if not certified:  # what the ranks hold, one after another
        fields = [replace(field, parts=(Part(size * field.shape[0], size),)) for field in fields]
    state = table.kind is TableKind.STATE
    mine = table.shards > 1 or copy == 0
    made, end, described = [], 0, []
    for field in fields:
        share = _field(field, size, index, -(-end // STATE_ALIGNMENT) * STATE_ALIGNMENT if state else end)
        made.append(share if mine else replace(share, mine=()))
        end = share.whole_offset + share.whole_bytes
        made_as = field.dtype if field.computed is None else f"{field.dtype} of {field.computed}"
        described.append(f"{field.name} {share.whole_bytes} {field.shape[1:]} {made_as}")
    held = max((share.offset + share.bytes for share in made), default=0)
    expected = table.state_bytes if state else getattr(group.spec, "bytes_per_token", 0)
    assert 0 <= expected - held < STATE_ALIGNMENT, f"{group.spec.name}: fields of {held} bytes in {expected}"
    whole = -(-end // STATE_ALIGNMENT) * STATE_ALIGNMENT if state else end
    form = hashlib.blake2b("\n".join(described).encode(), digest_size=8).hexdigest()
    pcp = f"-pcp{layout.pcp}" if layout.pcp > 1 else ""
    family = "whole" if certified else f"tp{layout.tp}-dcp{layout.dcp}{pcp}-interleave{layout.interleave}"
    canonical = CanonicalGroup(
        name=group.spec.name,
        kind=table.kind.value,
        bytes=whole,
        window=table.window,
        chunk=table.chunk,
        lookahead=group.spec.lookahead,
        certified=certified,
        family=f"{_VERSION}-{family}-{form}",
    )
    return GroupShare(canonical, shard, tuple(made) if state else _together(made))


def _field(field: Field, size: int, index: int, whole_offset: int) -> FieldShare:
    """The share of the `index`-th of `size` ranks that do not split tokens among them."""
    width = field.bytes // field.shape[0]
    pieces, mine, local, whole = [], [], 0, 0
    for part in field.parts or (Part(field.shape[0], 1, shared=True),):
        run = part.of(index, size)
        assert run is not None, f"{field.name} is not cut into {size}"
        pieces.append(Piece(local * width, (whole + run[0]) * width, (run[1] - run[0]) * width))
        if part.owner(index, size):
            mine.append(pieces[-1])
        local, whole = local + run[1] - run[0], whole + part.length
    sizes = {"bytes": local * width, "whole_bytes": whole * width}
    return FieldShare(
        1, field.offset, 0, sizes["bytes"], whole_offset, 0, sizes["whole_bytes"], tuple(pieces), tuple(mine)
    )


def _together(fields: Sequence[FieldShare]) -> tuple[FieldShare, ...]:
    """The same with fields alike at equal distances as one: keys and values alternate, and are copied at once."""
    made: list[FieldShare] = []
    last: dict[object, int] = {}
    for field in fields:
        number = last.get(field.alike)
        if number is not None:
            run = made[number]
            steps = field.offset - run.offset, field.whole_offset - run.whole_offset
            if run.count == 1 or steps == (run.count * run.step, run.count * run.whole_step):
                step, whole_step = steps[0] // run.count, steps[1] // run.count
                made[number] = replace(run, count=run.count + 1, step=step, whole_step=whole_step)
                continue
        last[field.alike] = len(made)
        made.append(field)
    return tuple(made)


def object_bytes(group: CanonicalGroup, asked: BlockRange) -> int:
    """Bytes of the object of a range."""
    return group.bytes * asked.tokens


def local_tokens(asked: BlockRange, shard: int, table: TableGeometry) -> tuple[int, int]:
    """Which tokens of a range are a rank's, by their number in its own order: [first, stop)."""
    if table.kind is TableKind.STATE:
        return 0, 1
    return int(table.local_length(asked.first, shard)), int(table.local_length(asked.stop, shard))


def portions_of(asked: BlockRange, share: GroupShare, table: TableGeometry, most: int) -> Iterator[Portion]:
    """Cut what is asked for into portions of at most `most` bytes over all ranks, as far as that is possible.

    A run of tokens is cut at blocks, a state at fields; a block or a field is never torn.
    """
    count = len(share.fields)
    if table.kind is TableKind.STATE:
        first, held = 0, 0
        for number, field in enumerate(share.fields):
            if held and held + field.whole_bytes > most:
                yield Portion(asked, (first, number))
                first, held = number, 0
            held += field.whole_bytes
        yield Portion(asked, (first, count))
        return
    step = max(1, most // (share.group.bytes * table.span)) * table.span
    base = asked.first // table.span * table.span
    for start in range(base, asked.stop, step):
        low, high = max(start, asked.first), min(start + step, asked.stop)
        blocks = asked.blocks[(start - base) // table.span : -(-(high - base) // table.span)]
        yield Portion(replace(asked, first=low, stop=high, blocks=blocks), (0, count))


def add_portion(
    whole: Bytes, of: BlockRange, portion: Portion, share: GroupShare, table: TableGeometry, data: Bytes
) -> None:
    """Put what a rank has read of an object to its place.

    Args:
        whole: uint8, the object; only what the rank calls its own is changed.
        of: The range of the object.
        portion: What was read.
        share: The rank's share of the group.
        table: The group's block table.
        data: uint8, the rank's bytes: of each field its `mine` pieces, [count, tokens, bytes].
    """
    for in_object, in_data in _pairs(whole, of, portion, share, table, data, mine=True):
        in_object[...] = in_data


def take_portion(whole: Bytes, of: BlockRange, portion: Portion, share: GroupShare, table: TableGeometry) -> Bytes:
    """What a rank is to write of an object (see `add_portion`): of each field all pieces, [count, tokens, bytes]."""
    data = np.empty(portion_bytes(portion, share, table, mine=False), dtype=np.uint8)
    for in_object, in_data in _pairs(whole, of, portion, share, table, data, mine=False):
        in_data[...] = in_object
    return data


def portion_bytes(portion: Portion, share: GroupShare, table: TableGeometry, *, mine: bool) -> int:
    """Bytes that a rank reads of a portion (`mine`), or writes."""
    first, stop = local_tokens(portion.range, share.shard, table)
    fields = share.fields[slice(*portion.fields)]
    return (stop - first) * sum(field.count * sum(p.length for p in field.moved(mine)) for field in fields)


def parts_of_portion(
    portion: Portion, share: GroupShare, table: TableGeometry, data: Bytes, *, mine: bool
) -> Iterator[tuple[FieldShare, Bytes, Runs]]:
    """Cut the bytes of a portion, as a rank reads (`mine`) or writes them, into fields.

    Yields:
        Each field, its bytes [count, tokens, any], and for each of its pieces where that begins in the last dimension.
    """
    first, stop = local_tokens(portion.range, share.shard, table)
    at = 0
    for field in share.fields[slice(*portion.fields)]:
        pieces = field.moved(mine)
        ends = [0, *accumulate(piece.length for piece in pieces)]
        shape = field.count, stop - first, ends[-1]
        part = data[at : at + math.prod(shape)].reshape(shape)
        at += part.size
        yield field, part, list(zip(pieces, ends, strict=False))
    assert at == len(data), f"{len(data)} bytes were moved of {share.group.name}, expected {at}"


def parts_of_object(share: GroupShare, tokens: int, whole: Bytes) -> Iterator[tuple[FieldShare, Bytes, Runs]]:
    """The same of an object of so many tokens, for a rank that is alone."""
    for field in share.fields:
        yield field, _field_view(whole, tokens, field), [(piece, piece.whole) for piece in field.pieces]


def _pairs(
    whole: Bytes, of: BlockRange, portion: Portion, share: GroupShare, table: TableGeometry, data: Bytes, mine: bool
) -> Iterator[tuple[Bytes, Bytes]]:
    """The same bytes in an object and in a portion of a rank: [count, stripes, tokens, bytes] both."""
    stripes = list(_stripes(of, portion, share, table))
    for field, part, runs in parts_of_portion(portion, share, table, data, mine=mine):
        target = _field_view(whole, of.tokens, field)
        for at, count, width, column, step in stripes:
            strides = target.strides[0], step * field.whole_bytes, field.whole_bytes, 1
            for piece, inside in runs:
                shape = field.count, count, width, piece.length
                offset = field.whole_offset * of.tokens + column * field.whole_bytes + piece.whole
                there: Bytes = np.ndarray(shape, np.uint8, whole, offset, strides)
                own = part[:, at : at + count * width, inside : inside + piece.length]
                yield there, own.reshape(shape)


def _stripes(
    of: BlockRange, portion: Portion, share: GroupShare, table: TableGeometry
) -> Iterator[tuple[int, int, int, int, int]]:
    """Where in an object the tokens of a rank's portion are, in runs at equal distances.

    Yields:
        Tokens of the portion that came before, runs, tokens of each, column of the first in the object, and the
        distance from run to run in columns.
    """
    first, stop = local_tokens(portion.range, share.shard, table)
    if table.kind is TableKind.STATE:
        yield 0, 1, 1, 0, 1
    elif table.shards == 1:
        yield 0, 1, stop - first, first - of.first, stop - first
    else:
        size, at = table.interleave, first
        while at < stop:
            whole = 1 if at % size else max(1, (stop - at) // size)
            width = size if whole > 1 else min(size - at % size, stop - at)
            column = int(table.global_index(at, share.shard)) - of.first
            yield at - first, whole, width, column, size * table.shards
            at += whole * width


def _field_view(whole: Bytes, tokens: int, field: FieldShare) -> Bytes:
    """The bytes of a field in an object, uint8 [count, tokens, whole_bytes]."""
    view: Bytes = np.ndarray(
        (field.count, tokens, field.whole_bytes),
        np.uint8,
        whole,
        field.whole_offset * tokens,
        (field.whole_step * tokens, field.whole_bytes, 1),
    )
    return view
