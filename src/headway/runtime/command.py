"""`headway inspect MODEL`: what a model's cache consists of, before anything is served."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from headway.cache import CacheGeometry, GroupGeometry, ParallelLayout, Recurrent, TableKind
from headway.errors import ConfigError
from headway.runtime.layout import LayerLayout, ModelLayout, layout_of_ranks
from headway.runtime.loading import layout_without_weights
from headway.runtime.memory import (
    Capacity,
    blocks_that_fit,
    capacity,
    default_memory,
    format_bytes,
    parse_bytes,
)

__all__ = ["Inspection", "inspect", "inspection_of"]


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
        spans = [(table.block_tokens, table.span) for table in self.geometry.prefix_tables]
        if not spans:
            return 0
        return self.capacity.blocks // len(spans) * min(tokens for tokens, _ in spans)

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
        console.print(f"  block: {format_bytes(self.geometry.block_bytes)} on every rank")
        console.print(f"  memory: {format_bytes(held.bytes)} = {held.blocks:,} blocks on every rank")
        if held.tokens:
            console.print(f"  room for {held.tokens:,} tokens of full attention, if it held nothing else")
            if self.geometry.layout.shards > 1:
                times = held.tokens / max(1, self.tokens_on_one_rank)
                console.print(
                    f"  that is {times:.2f} times as many as on one rank with the same memory "
                    f"({self.tokens_on_one_rank:,}); the ranks store {self._share} in turn"
                )
        if held.checkpoints is not None:
            console.print(
                f"  room for {held.checkpoints:,} checkpoints of {held.checkpoint_blocks:,} blocks, if it held "
                f"nothing else"
            )
        console.print(
            f"  shortest reusable prefix: {self.shortest_prefix} token(s), in a prompt of at least "
            f"{self.shortest_prompt}"
        )


def inspection_of(
    name: str,
    layout: ModelLayout,
    parallel: ParallelLayout,
    memory: int,
    block_tokens: int = 16,
    checkpoint_alignment: int = 1,
) -> Inspection:
    """Place a layout in `memory` bytes a rank.

    Raises:
        ConfigError: Sizes that do not go together, or too little memory.
    """
    geometry = CacheGeometry(layout.groups, parallel, block_tokens=block_tokens)
    blocks = blocks_that_fit(memory, geometry)
    return Inspection(name, layout, geometry, capacity(blocks, geometry), checkpoint_alignment)


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub id, or nothing for the built-in model. Only its config is read."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    dcp: Annotated[
        int,
        typer.Option(help="Decode-context-parallel size; divides --tp. Without --tp, every rank has the whole model."),
    ] = 1,
    pcp: Annotated[int, typer.Option(help="Prefill-context-parallel size.")] = 1,
    interleave: Annotated[int, typer.Option(help="Consecutive tokens that one context-parallel rank stores.")] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens of the first group in one block on one rank.")] = 16,
    memory: Annotated[str | None, typer.Option(help="Memory of the cache on one rank, such as 4GiB.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option(help="The device it would run on; decides what auto means.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's layer kinds, groups, geometry, bytes and capacity, and the shortest prefix that it can reuse.

    Nothing is downloaded but the config, and no weights are loaded.
    """
    parallel = layout_of_ranks(tp, dcp, pcp, interleave)
    name, layout = layout_without_weights(model, dtype, tp, device)
    if tp > 1:
        _check_dcp(name, model, parallel, dtype, device)
    size = default_memory("cpu") if memory is None else parse_bytes(memory)
    found = inspection_of(name, layout, parallel, size, block_tokens)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        found.show(Console())


def _check_dcp(name: str, model: str | None, parallel: ParallelLayout, dtype: str, device: str) -> None:
    """Refuse a decode-context-parallel size for which no key/value head is duplicated often enough."""
    if parallel.dcp == 1:
        return
    _, whole = layout_without_weights(model, dtype, 1, device)
    heads = [x.tokens.fields[0].shape[0] for x in whole.layers if x.tokens is not None and x.tokens.group == "full"]
    if heads and parallel.dcp > max(1, parallel.tp // max(heads)):
        raise ConfigError(
            f"dcp={parallel.dcp}: {name} has {max(heads)} key/value heads in full attention, so tp={parallel.tp} ranks "
            f"hold {max(1, parallel.tp // max(heads))} copies of each, and only copies can be split by tokens: lower "
            f"dcp to that"
        )


def _keeps(layer: LayerLayout) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for entries in (layer.tokens, layer.state):
        if entries is not None:
            kept[entries.group] = {
                field.name: {"shape": list(field.shape), "dtype": str(field.dtype).removeprefix("torch.")}
                for field in entries.fields
            }
    if layer.shares is not None:
        kept["shares"] = layer.shares
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
        return layer.kind, "-", "nothing" if layer.shares is None else "uses another layer's entries"
    texts = [f"{f.name} {'x'.join(map(str, f.shape))} {_short(f.dtype)}" for part in parts for f in part.fields]
    return layer.kind, ", ".join(part.group for part in parts), ", ".join(texts)


def _short(dtype: torch.dtype) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."), str(dtype))


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
                f"{spec.state_bytes:,} a state",
                "-",
                f"1/{where.state_blocks} of a state",
            )
            continue
        span = f"{where.span} tokens" + (f" over {where.shards} ranks" if where.shards > 1 else "")
        table.add_row(
            spec.name, _need(group), f"{spec.bytes_per_token:,} a token", f"{where.block_tokens} tokens", span
        )
    return table


def _need(group: GroupGeometry) -> str:
    table = group.table
    if table.kind is TableKind.WINDOW:
        return f"the last {table.window - 1} tokens"
    if table.kind is TableKind.CHUNK:
        return f"its chunk of {table.chunk} up to p"
    return "every token before p"
