"""What a model's cache consists of, as tables and as JSON: `headway inspect` and the first lines of `headway serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headway.cache import CacheGeometry, GroupGeometry, LayerSpec, ParallelLayout, Recurrent, TableKind
from headway.runtime.model.layout import LayerLayout, ModelLayout
from headway.runtime.model.memory import Capacity, blocks_that_fit, capacity, row_bytes
from headway.sizes import counted, format_bytes

__all__ = ["Inspection", "inspection_of"]


@dataclass(frozen=True)
class Inspection:
    """A model's layout placed in memory.

    Attributes:
        name: The model's name.
        layout: What it stores, on one rank.
        geometry: Where.
        capacity: What the memory holds.
        checkpoint_alignment: Checkpoints lie at multiples of this many tokens.
    """

    name: str
    layout: ModelLayout
    geometry: CacheGeometry
    capacity: Capacity
    checkpoint_alignment: int = 1

    @property
    def shortest_prefix(self) -> int:
        """Tokens of the shortest prefix that can be reused."""
        return self.checkpoint_alignment if self.capacity.checkpoints is not None else 1

    @property
    def shortest_prompt(self) -> int:
        """Tokens of the shortest prompt that reuses it: it must go on for what is always computed anew."""
        return self.shortest_prefix + max(1, self.geometry.lookahead)

    @property
    def tokens_on_one_rank(self) -> int:
        """Tokens of full attention that the same memory holds where nothing is split by tokens."""
        if not self.geometry.prefix_tables:
            return 0
        alone = {spec.name: spec for spec in self.layout.over(1).groups}
        groups = [alone.get(group.spec.name, group.spec) for group in self.geometry.groups]
        geometry = CacheGeometry(groups, block_tokens=self.geometry.tables[0].block_tokens)
        return capacity(self.capacity.bytes // row_bytes(geometry), geometry).tokens

    @property
    def _splits(self) -> str:
        """The options that split tokens."""
        parallel = self.geometry.layout
        return " and ".join(f"--{name}" for name in ("dcp", "pcp") if getattr(parallel, name) > 1)

    @property
    def _share(self) -> str:
        interleave = self.geometry.layout.interleave
        return "one token each" if interleave == 1 else f"{interleave} tokens each"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for `--json`."""
        layout, layers = self.layout, self.layout.layers
        parallel = self.geometry.layout
        return {
            "model": self.name,
            "class": layout.model,
            "dtype": str(layout.dtype).removeprefix("torch."),
            "parameters": layout.parameters,
            "active_parameters": layout.active_parameters,
            "parameters_on_a_rank": layout.rank_parameters,
            "max_tokens": layout.max_tokens,
            "flops": {"linear": layout.cost.linear, "quadratic": layout.cost.quadratic},
            "parallel": {"tp": layout.tp} | {n: getattr(parallel, n) for n in ("dcp", "pcp", "interleave")},
            "layers": [{"index": x.index, "kind": x.kind, "keeps": _keeps(x)} for x in layers],
            "groups": [_group_dict(group) for group in self.geometry.groups],
            "block_bytes": self.geometry.block_bytes,
            "capacity": {
                "blocks": self.capacity.blocks,
                "bytes": self.capacity.bytes,
                "tokens": self.capacity.tokens,
                "checkpoint_blocks": self.capacity.checkpoint_blocks,
                "checkpoints": self.capacity.checkpoints,
            },
            "tokens_on_one_rank": self.tokens_on_one_rank,
            "shortest_reusable_prefix": self.shortest_prefix,
            "shortest_prompt_with_a_hit": self.shortest_prompt,
        }

    def show(self, console: Console) -> None:
        """Print tables for people."""
        for table in (_layer_table(self.layout), _group_table(self.geometry, self.layout.tp)):
            console.print(table)
        held = self.capacity
        console.print(f"[bold]{self.name}[/] ({self.layout.model}, {str(self.layout.dtype).removeprefix('torch.')})")
        console.print(
            f"  parameters: {self.layout.parameters:,}, of which {self.layout.active_parameters:,} work on a token"
        )
        if self.layout.tp > 1:
            console.print(f"  a rank holds {self.layout.rank_parameters:,} of the parameters")
        console.print(f"  block: {format_bytes(self.geometry.block_bytes)} on every rank")
        console.print(f"  memory: {format_bytes(held.bytes)} = {counted(held.blocks, 'block')} on every rank")
        if held.tokens:
            console.print(f"  room for {counted(held.tokens, 'token')} of full attention, if it held nothing else")
            if self.geometry.layout.shards > 1:
                times = held.tokens / max(1, self.tokens_on_one_rank)
                alone = "on one rank" if self.layout.tp == 1 else f"without {self._splits}"
                console.print(
                    f"  that is {times:.2f} times as many as {alone} with the same memory "
                    f"({self.tokens_on_one_rank:,}); the ranks store {self._share} in turn"
                )
        if held.checkpoints is not None:
            console.print(
                f"  room for {counted(held.checkpoints, 'checkpoint')} of {counted(held.checkpoint_blocks, 'block')}, "
                f"if it held nothing else"
            )
        console.print(
            f"  shortest reusable prefix: {counted(self.shortest_prefix, 'token')}, "
            f"in a prompt of at least {self.shortest_prompt}"
        )


def inspection_of(
    name: str,
    layout: ModelLayout,
    parallel: ParallelLayout,
    memory: int,
    block_tokens: int = 16,
    checkpoint_alignment: int = 1,
    drafter: Sequence[LayerSpec] = (),
) -> Inspection:
    """Place a layout, and the groups of a drafter, in `memory` bytes per rank.

    Raises:
        ConfigError: Sizes that do not go together, or too little memory.
    """
    geometry = CacheGeometry((*layout.groups, *drafter), parallel, block_tokens=block_tokens)
    blocks = blocks_that_fit(memory, geometry)
    return Inspection(name, layout, geometry, capacity(blocks, geometry), checkpoint_alignment)


def _keeps(layer: LayerLayout) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for entries in (layer.tokens, layer.state):
        if entries is not None:
            kept[entries.group] = {
                field.name: {"shape": list(field.shape), "dtype": str(field.dtype).removeprefix("torch.")}
                for field in entries.fields
            }
    if layer.entries_of is not None:
        kept["shares"] = layer.entries_of
    return kept


def _group_dict(group: GroupGeometry) -> dict[str, Any]:
    spec, table = group.spec, group.table
    found: dict[str, Any] = {
        "name": spec.name,
        "kind": table.kind.value,
        "table": table.index,
        "lookahead": spec.lookahead,
    }
    if isinstance(spec, Recurrent):
        return found | {"state_bytes": spec.state_bytes, "state_blocks": table.state_blocks}
    found |= {"bytes_per_token": spec.bytes_per_token, "block_tokens": table.block_tokens}
    found |= {"shards": table.shards, "span": table.span}
    reach = table.window or table.chunk
    return found | ({"reach": reach} if reach else {})


def _layer_table(layout: ModelLayout) -> Table:
    """Layers that keep the same, counted."""
    table = Table(title="Layers")
    for column in ("layers", "cache class", "group", "keeps (one token or one state)"):
        table.add_column(column)
    counted: Counter[tuple[str, str, str]] = Counter(_layer_row(layer) for layer in layout.layers)
    for (kind, group, keeps), count in counted.items():
        table.add_row(str(count), kind, group, keeps)
    return table


def _layer_row(layer: LayerLayout) -> tuple[str, str, str]:
    parts = [entries for entries in (layer.tokens, layer.state) if entries is not None]
    if not parts:
        return layer.kind, "-", "nothing" if layer.entries_of is None else "uses another layer's entries"
    texts = [f"{f.name} {'x'.join(map(str, f.shape))} {_short(f.dtype)}" for part in parts for f in part.fields]
    return layer.kind, ", ".join(part.group for part in parts), ", ".join(texts)


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8_e4m3"}.get(name, name)


def _group_table(geometry: CacheGeometry, tp: int) -> Table:
    layout = geometry.layout
    table = Table(title=f"Cache groups on one rank (tp {tp}, dcp {layout.dcp}, pcp {layout.pcp})")
    for column in ("group", "to resume at p it needs", "bytes", "in one block", "one block id covers"):
        table.add_column(column)
    for group in geometry.groups:
        spec, where = group.spec, group.table
        if isinstance(spec, Recurrent):
            table.add_row(
                spec.name,
                "the state after p",
                f"{spec.state_bytes:,} per state",
                "-",
                f"1/{where.state_blocks} of a state",
            )
            continue
        span = counted(where.span, "token") + (f" over {where.shards} ranks" if where.shards > 1 else "")
        table.add_row(
            spec.name,
            _need(group),
            f"{spec.bytes_per_token:,} per token",
            counted(where.block_tokens, "token"),
            span,
        )
    return table


def _need(group: GroupGeometry) -> str:
    table = group.table
    if table.kind is TableKind.WINDOW:
        return f"the last {table.window - 1} tokens"
    if table.kind is TableKind.CHUNK:
        return f"its chunk of {table.chunk} up to p"
    return "every token before p"
