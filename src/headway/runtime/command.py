"""`headway inspect MODEL`: what a model's cache consists of, before anything is served.

What imports torch is imported once the cheap checks have passed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.runtime.interface import StoredTypes, require_ranks, require_stripes
from headway.runtime.sources import resolve_source
from headway.sizes import parse_bytes

__all__ = ["inspect"]


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub id, or nothing for the built-in model. Only its config is read."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: ranks that share the weights.")] = 1,
    dcp: Annotated[
        int,
        typer.Option(help="Decode-context-parallel size; divides --tp. Without --tp, every rank has the whole model."),
    ] = 1,
    pcp: Annotated[
        int,
        typer.Option(
            help="Prefill-context-parallel size: ranks that compute a share each of the tokens of a long prompt."
        ),
    ] = 1,
    interleave: Annotated[int, typer.Option(help="Consecutive tokens that one --dcp or --pcp rank stores.")] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens of the first group in one block on one rank.")] = 16,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the cache on one rank, such as 4GiB; by default as headway serve would take on a CPU."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Attention entries are stored as auto, bf16 or fp8_e4m3.")] = "auto",
    state_dtype: Annotated[str, typer.Option(help="Recurrent states are stored as auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option(help="The device it would run on; decides what auto means.")] = "cpu",
    draft: Annotated[
        str, typer.Option(help="Drafter, as for headway serve: none, lookup, mtp, dspark, or the folder of a drafter.")
    ] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's layer kinds, groups, geometry, bytes and capacity, and the shortest prefix that it can reuse.

    Nothing is downloaded but the config, and no weights are loaded. With --tp, --dcp and --pcp it is what each rank of
    headway serve would store, and what that refuses is refused here.
    """
    size = None if memory is None else parse_bytes(memory, "--memory")
    require_ranks(tp, dcp, interleave, pcp)
    require_stripes(interleave, block_tokens)
    types = StoredTypes.read(kv_dtype, state_dtype)
    path = Path(resolve_source(model)[1])
    if not as_json:
        Console(stderr=True).print("starting ...", highlight=False)
    from headway.runtime.drafting.loading import groups_without_weights  # these import torch, which takes seconds
    from headway.runtime.loading import layout_of_rank
    from headway.runtime.model.layout import layout_of_ranks
    from headway.runtime.model.memory import default_memory
    from headway.runtime.model.overview import inspection_of
    from headway.runtime.model.stored import stored_layout

    parallel = layout_of_ranks(tp, dcp, interleave, pcp)
    name, layout = layout_of_rank(model, dtype, tp, dcp, device)
    drafter = () if draft == "none" else groups_without_weights(draft, path if path.is_dir() else None, layout.dtype)
    ranks = parallel.tp * parallel.pcp
    if size is None:
        size = default_memory("cpu") // ranks  # as headway serve does: ranks on CPUs of one machine share its memory
    found = inspection_of(name, stored_layout(layout, types), parallel, size, block_tokens, drafter=drafter)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
        return
    found.show(Console())
    if memory is None:
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        typer.echo(f"  that memory is the default on this machine{shared}; --memory takes another")
