"""The block tables of one request, rank by rank: which ids it holds, and what lies under each id on each rank."""

from __future__ import annotations

from headway.cache import GroupGeometry, Hit, TableGeometry, TableKind
from headway.formats import Trace
from headway.incident.sessions import BLOCK
from headway.replay.config import ReplayConfig
from headway.replay.run.order import PausedRun
from headway.tell.tables import Table

__all__ = ["found_by", "tables_of", "two_sizes"]


def found_by(trace: Trace, config: ReplayConfig, request: int) -> Hit:
    """What the cache finds for a request when it arrives."""
    paused = PausedRun(trace, config, request)
    return paused.cache.lookup(paused.prompt)


def tables_of(hit: Hit, ranks: int) -> list[Table]:
    """The blocks under a hit, one table for each block table of the cache."""
    geometry = hit.index.geometry
    return [_drawn(table, hit, ranks, _names(geometry.groups, table)) for table in geometry.tables]


def two_sizes(ranks: int, tokens: int) -> Table:
    """Where the fault kept a state, and where it looked for one, as far as the prompt of `tokens` tokens goes."""
    wide = BLOCK * ranks
    count = max(1, tokens // wide)
    head = ("", *(f"block {number}" for number in range(count)))
    kept, looked, states = (
        (name, *(_range(number * size, (number + 1) * size) for number in range(count)))
        for name, size in (
            ("latents: kept as and looked for as", wide),
            ("states: kept as", wide),
            ("states: looked for as", BLOCK),
        )
    )
    return Table("The fault: the same block number, and which tokens it stands for", head, (kept, looked, states))


def _names(groups: tuple[GroupGeometry, ...], table: TableGeometry) -> str:
    return " and ".join(group.spec.name for group in groups if group.table is table)


def _drawn(table: TableGeometry, hit: Hit, ranks: int, names: str) -> Table:
    ids = hit.blocks(table.index).tolist()
    if table.kind is TableKind.STATE:
        title = f"{names}: not split by tokens; a rank has the whole state of its own heads"
        rows = [(f"rank {rank}", f"its heads' state after token {hit.tokens - 1}") for rank in range(ranks)]
        return Table(title, ("", "ids " + ", ".join(map(str, ids))), rows)
    split = f"split by tokens over {table.shards} ranks" if table.shards > 1 else "whole on every rank"
    title = f"{names}: {split}; an id covers {table.span} tokens, {table.block_tokens} per rank"
    parts = [(start, min(start + table.span, hit.tokens)) for start in range(0, hit.tokens, table.span)]
    head = ("", *(f"id {id}" for id in ids))
    held = [(f"rank {rank}", *(_held(table, rank, *part) for part in parts)) for rank in range(table.shards)]
    return Table(title, head, [("all ranks", *(_range(*part) for part in parts)), *held])


def _held(table: TableGeometry, rank: int, start: int, stop: int) -> str:
    """The tokens of [start, stop) that a rank holds: the first, the last, and the distance from one to the next."""
    low, high = (int(table.local_length(edge, rank)) for edge in (start, stop))
    found = [int(table.global_index(local, rank)) for local in range(low, high)]
    if len(found) < 3:
        return ", ".join(map(str, found)) or "-"
    return f"{found[0]}-{found[-1]} by {found[1] - found[0]}"


def _range(start: int, stop: int) -> str:
    return f"{start}-{stop - 1}"
