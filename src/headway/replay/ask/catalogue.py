"""The built-in catalogue: what popular hybrid models keep for a token and for a state, each with its source.

Sizes are per layer and before tensor parallelism, so one entry gives the bytes of one rank under any layout and dtype:

    MLA                one latent row a layer; every tensor-parallel rank holds it whole; dcp up to tp
    GQA                key/value heads are split by tp, and duplicated where tp exceeds them; dcp splits only duplicates
    states             split by heads; groups of Mamba-2 are duplicated where tp exceeds them
    windows, chunks    as GQA, never split by tokens

An unknown number stays unknown: such a model is refused with what to give instead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.cache import (
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.errors import ConfigError, TraceError
from headway.formats.lines import read_lines
from headway.sizes import counted

__all__ = [
    "KV_DTYPES",
    "STATE_DTYPES",
    "Model",
    "catalogue",
    "check_copies",
    "draft_layers",
    "draft_of",
    "inspected_model",
    "model_of",
]

KV_DTYPES = ("bf16", "fp8", "fp8_e4m3", "fp8_ds_mla", "fp32")
STATE_DTYPES = ("fp32", "bf16")
_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1, "fp8_e4m3": 1}
_DS_MLA_EXTRA = 80
"""fp8_ds_mla keeps a row's 64 rotary numbers in bf16 and four fp32 scales: 80 bytes more than plain fp8."""


@dataclass(frozen=True)
class Model:
    """A model as the replay needs it.

    Attributes:
        name: Its name.
        groups: Cache groups: bytes on one rank, before context parallelism.
        cost: Floating-point operations of a prompt's tokens.
        cost_source: Where the cost is from; empty where it is the cache's default ratio.
        parameters: Parameters, 0 if unknown.
        source: Where the sizes are from.
        notes: What to know about them.
        layers: Layers in each group, by its name, where that is known.
        kinds: What kind of layers these are: "mla", "gqa", "kda", "gdn", "mamba2", ...; likewise.
    """

    name: str
    groups: tuple[LayerSpec, ...]
    cost: ComputeCost
    cost_source: str
    parameters: int
    source: str
    notes: tuple[str, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)


class _InspectedGroup(msgspec.Struct):
    name: str
    kind: Literal["state", "prefix", "window", "chunk"]
    state_bytes: int = 0
    bytes_per_token: int = 0
    reach: int = 0
    lookahead: int = 0


class _Inspected(msgspec.Struct):
    """What is needed of the output of `headway inspect MODEL --json`."""

    groups: list[_InspectedGroup]
    parallel: dict[str, int]
    flops: ComputeCost
    parameters: int
    model: str = ""
    dtype: str | None = None
    layers: list[dict[str, Any]] = []


@cache
def catalogue() -> dict[str, Any]:
    """The catalogue as it is packaged: models and drafts."""
    loaded: dict[str, Any] = json.loads((files("headway.replay.ask") / "catalogue.json").read_text(encoding="utf-8"))
    return loaded


def model_of(name: str, layout: ParallelLayout, *, kv_dtype: str = "bf16", state_dtype: str = "fp32") -> Model:
    """A model of the catalogue under a layout.

    Args:
        name: Its name or an alias, in any case.
        layout: The parallel layout.
        kv_dtype: One of `KV_DTYPES`.
        state_dtype: One of `STATE_DTYPES`, of recurrent states (convolution states stay bf16).

    Raises:
        ConfigError: Unknown name or sizes, or a layout that the model's heads do not allow.
    """
    found = _entry(name)
    if "unknown" in found:
        raise ConfigError(
            f"{name}: {found['unknown']} is not known here, so its memory cannot be computed; give "
            f"--attention-bytes and --state-bytes, or the output of `headway inspect MODEL --json`"
        )
    for dtype, known in ((kv_dtype, KV_DTYPES), (state_dtype, STATE_DTYPES)):
        if dtype not in known:
            raise ConfigError(f"unknown dtype {dtype!r}: use one of {', '.join(known)}")
    counts, kinds = {"attention": int(found["attention"]["layers"])}, {"attention": str(found["attention"]["kind"])}
    groups: list[LayerSpec] = [FullAttention("attention", _token_bytes(name, found["attention"], layout, kv_dtype))]
    for number, layers in enumerate(found.get("windows", ())):
        size = _token_bytes(name, layers, layout, kv_dtype, local=True)
        if "window" in layers:
            groups.append(SlidingWindow(f"window{number}", size, layers["window"]))
        else:
            groups.append(ChunkedLocal(f"chunk{number}", size, layers["chunk"]))
        counts[groups[-1].name], kinds[groups[-1].name] = int(layers["layers"]), str(layers["kind"])
    if "state" in found:
        groups.append(Recurrent("state", _state_bytes(name, found["state"], layout, state_dtype)))
        counts["state"], kinds["state"] = int(found["state"]["layers"]), str(found["state"]["kind"])
    flops = found.get("flops")
    cost = ComputeCost(flops["linear"], flops["quadratic"]) if flops else ComputeCost()
    notes = tuple(filter(None, (found.get("note"),)))
    source = flops["source"] if flops else ""
    return Model(name, tuple(groups), cost, source, found.get("parameters", 0), found["source"], notes, counts, kinds)


def check_copies(name: str, heads: int, layout: ParallelLayout) -> None:
    """Only copies of a key/value head can be split by tokens; a latent row counts as one head.

    Raises:
        ConfigError: There are fewer copies of the `heads` heads of model `name` than `layout.dcp`.
    """
    copies = max(1, layout.tp // max(1, heads))
    if layout.dcp > copies:
        raise ConfigError(
            f"dcp={layout.dcp}: {name} has {counted(heads, 'key/value head')}, so each is on {copies} of "
            f"{counted(layout.tp, 'rank')}, and only ranks with the same head can split its tokens: lower dcp to "
            f"{copies}, or raise tp"
        )


def inspected_model(path: Path, layout: ParallelLayout) -> Model:
    """A model from what `headway inspect MODEL --json` printed.

    The file has the sizes of one rank, from which one cannot tell how many key/value heads are copies. But `inspect`
    refuses a decode-context-parallel size that these do not allow: the file vouches for its own, and what divides it.

    Raises:
        ConfigError: The file is something else, or was printed for another layout.
    """
    try:
        found = next(read_lines(path)).to(_Inspected)
    except (TraceError, StopIteration) as error:
        raise ConfigError(f"{path} is not the output of `headway inspect MODEL --json`: {error}") from None
    tp, dcp = found.parallel.get("tp", 1), found.parallel.get("dcp", 1)
    if tp != layout.tp or dcp % layout.dcp:
        wanted = f"--tp {layout.tp}" + (f" --dcp {layout.dcp}" if layout.dcp > 1 else "")
        raise ConfigError(
            f"{path} was printed for tp={tp}, dcp={dcp}, not tp={layout.tp}, dcp={layout.dcp}: inspect with {wanted}"
        )
    groups = tuple(_inspected_group(group) for group in found.groups)
    layers = Counter(kept for layer in found.layers for kept in layer["keeps"])
    source, dtype = f"headway inspect, {path.name}", found.dtype
    notes = (f"sizes are in {dtype}, as the file has them; `headway inspect --dtype` prints others",) if dtype else ()
    return Model(found.model or path.stem, groups, found.flops, source, found.parameters, source, notes, layers)


def draft_of(text: str, kv_dtype: str = "bf16") -> LayerSpec:
    """The cache group of a draft: a name of the catalogue, or BYTES[:LOOKAHEAD[:replicated]] of one token on one rank.

    Raises:
        ConfigError: Neither.
    """
    known = catalogue()["drafts"]
    if text.lower() in known:
        draft = known[text.lower()]
        row = _row_bytes(draft["elements"], kv_dtype, latent=True)
        return FullAttention("draft", draft["layers"] * row, draft["lookahead"], draft["sharded"])
    size, _, rest = text.partition(":")
    lookahead, _, word = rest.partition(":")
    if not size.isdigit() or not (lookahead or "0").isdigit() or word not in ("", "replicated"):
        raise ConfigError(
            f"unknown draft {text!r}: use one of {', '.join(known)}, or write its bytes of one token on one rank, its "
            f"lookahead (1 for EAGLE and MTP, 0 for DFlash and DSpark) and whether every rank keeps every token, as in "
            f"5760, 2048:1 or 4096:0:replicated"
        )
    return FullAttention("draft", int(size), int(lookahead or 0), word != "replicated")


def draft_layers(text: str) -> int:
    """Layers of a draft of the catalogue; 0 for one that is given by its bytes."""
    return int(catalogue()["drafts"].get(text.lower(), {}).get("layers", 0))


def _entry(name: str) -> dict[str, Any]:
    models: dict[str, dict[str, Any]] = catalogue()["models"]
    names = {alias: key for key, entry in models.items() for alias in (key, *entry.get("aliases", ()))}
    key = names.get(name.lower().rpartition("/")[2])
    if key is None:
        if name.startswith((".", "/", "~")) or name.endswith(".json"):
            raise ConfigError(f"model {name!r}: there is no such file or folder")
        near = get_close_matches(name.lower(), names, n=3, cutoff=0.0)
        raise ConfigError(
            f"model {name!r} is not in the catalogue (nearest: {', '.join(near)}; `headway replay "
            f"--models` lists all); give --attention-bytes and --state-bytes, or a file that `headway inspect {name} "
            f"--json` printed"
        )
    return models[key]


def _row_bytes(elements: int, dtype: str, *, latent: bool) -> int:
    if dtype == "fp8_ds_mla":
        if not latent:
            raise ConfigError("fp8_ds_mla is a format for latent attention (MLA): use fp8 or bf16 here")
        return elements + _DS_MLA_EXTRA
    return elements * _BYTES[dtype]


def _token_bytes(name: str, layers: dict[str, Any], layout: ParallelLayout, dtype: str, *, local: bool = False) -> int:
    if layers["kind"] == "mla":
        return int(layers["layers"]) * _row_bytes(layers["elements"], dtype, latent=True)
    heads, tp = int(layers["kv_heads"]), layout.tp
    if heads % tp and tp % heads:
        raise ConfigError(f"tp={tp}: {name} has {heads} key/value heads; choose a tp that divides or multiplies it")
    if not local:
        check_copies(name, heads, layout)
    return int(layers["layers"]) * max(1, heads // tp) * _row_bytes(layers["elements"], dtype, latent=False)


def _state_bytes(name: str, state: dict[str, Any], layout: ParallelLayout, dtype: str) -> int:
    tp = layout.tp
    if state["heads"] % tp:
        raise ConfigError(f"tp={tp}: {name} splits its states by {state['heads']} heads; choose a tp that divides it")
    groups = max(1, int(state.get("groups", 1)) // tp)
    conv = state["conv"] // tp + state.get("conv_group", 0) * groups
    return int(state["layers"]) * (int(conv) * _BYTES["bf16"] + int(state["recurrent"]) // tp * _BYTES[dtype])


def _inspected_group(group: _InspectedGroup) -> LayerSpec:
    if group.kind == "state":
        return Recurrent(group.name, group.state_bytes)
    if group.kind == "prefix":
        return FullAttention(group.name, group.bytes_per_token, group.lookahead)
    local = SlidingWindow if group.kind == "window" else ChunkedLocal
    return local(group.name, group.bytes_per_token, group.reach, group.lookahead)
