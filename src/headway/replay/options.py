"""The options of `headway replay`: what each means, in the words of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.replay.catalogue import KV_DTYPES, STATE_DTYPES, catalogue
from headway.replay.generate import WORKLOADS
from headway.replay.presets import PRESETS
from headway.replay.readers import FORMATS

__all__ = [
    "ActiveParameters",
    "Alignment",
    "AsJson",
    "AttentionBytes",
    "BlockTokens",
    "Clock",
    "Dcp",
    "Draft",
    "Efficiency",
    "Eviction",
    "FormatName",
    "Gpu",
    "GpuShare",
    "Gpus",
    "Html",
    "KvDtype",
    "Limit",
    "ListModels",
    "MaxAnswer",
    "MaxRunning",
    "MemorySize",
    "ModelName",
    "Outputs",
    "Pcp",
    "PlacementKinds",
    "Preset",
    "Seed",
    "Speed",
    "StateBytes",
    "StateDtype",
    "StepTokens",
    "Tokenizer",
    "Tp",
    "TracePath",
    "Weights",
    "Window",
    "Workload",
]


def _option(panel: str | None, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def _list_models(asked: bool) -> None:
    if asked:
        for name, entry in catalogue()["models"].items():
            others = ", ".join(entry.get("aliases", ()))
            typer.echo(f"{name}  (also {others})" if others else name)
        raise typer.Exit


_TRACE, _MODEL, _MEMORY, _POLICY = "Trace", "Model and layout", "Memory", "Policies"
_CLOCK = "Clock (estimates of time, with --gpu)"


def _by_hand(text: str, default: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_MODEL, show_default=default)


TracePath = Annotated[
    Path | None, typer.Argument(help="A trace: a file (plain, .gz or .zst) or a folder. Nothing: a generated one.")
]
FormatName = Annotated[
    str,
    _option(
        _TRACE,
        "Who wrote the trace; auto tells it from the first object. "
        + "; ".join(f"{name}: {form.summary}" for name, form in FORMATS.items())
        + ".",
    ),
]
Workload = Annotated[str, _option(_TRACE, f"What to generate without a trace: {', '.join(WORKLOADS)}.")]
Seed = Annotated[int, _option(_TRACE, "Seed of the generated workload.")]
Limit = Annotated[int | None, _option(_TRACE, "Requests to replay: all of a trace, 3,000 generated ones.")]
BlockTokens = Annotated[int | None, _option(_TRACE, "Tokens in a block of the trace, if not the usual.")]
Tokenizer = Annotated[str | None, _option(_TRACE, "For chat logs: a folder, a hub id, or bytes.")]
Outputs = Annotated[
    str | None,
    _option(_TRACE, "Whether prompts contain earlier answers, if the trace does not say: never or continuation."),
]
MaxAnswer = Annotated[int | None, _option(_TRACE, "Cut answers to that many tokens.")]

Clock = Annotated[str, _option(_CLOCK, "order: each request ends before the next. trace: arrivals as recorded.")]
Speed = Annotated[float, _option(_CLOCK, "Compress arrivals: 2 is twice the traffic.")]
MaxRunning = Annotated[int, _option(_CLOCK, "Most requests that run at once.")]
StepTokens = Annotated[int, _option(_CLOCK, "Most tokens of one step.")]
Efficiency = Annotated[str, _option(_CLOCK, "Shares of the GPU's peak FLOP/s and bandwidth that are reached.")]

ModelName = Annotated[
    str | None,
    _option(_MODEL, "A name such as kimi-k3, a checkpoint's folder, a config.json, or what `headway inspect` printed."),
]
AttentionBytes = Annotated[
    int, _by_hand("By hand, instead of --model: bytes of a token's attention on one rank, before --dcp.", "none")
]
StateBytes = Annotated[int, _by_hand("By hand: bytes of one recurrent state on one rank.", "none")]
Window = Annotated[list[str] | None, _option(_MODEL, "By hand: BYTES:TOKENS of a sliding window.")]
Tp = Annotated[int, _option(_MODEL, "Tensor-parallel size.")]
Dcp = Annotated[int, _option(_MODEL, "Decode-context-parallel size; divides --tp.")]
Pcp = Annotated[int, _option(_MODEL, "Prefill-context-parallel size.")]
Draft = Annotated[str | None, _option(_MODEL, "Draft: kimi-k3-mla, or BYTES[:LOOKAHEAD[:replicated]].")]
KvDtype = Annotated[str, _option(_MODEL, f"Attention entries: {', '.join(KV_DTYPES)}.")]
ActiveParameters = Annotated[str | None, _option(_MODEL, "Parameters that work on a token, if not known: 3B.")]
StateDtype = Annotated[str, _option(_MODEL, f"Recurrent states: {', '.join(STATE_DTYPES)}.")]

MemorySize = Annotated[str | None, _option(_MEMORY, "Of one rank, for the cache: 20GB, 16GiB, or endless.")]
Gpu = Annotated[str | None, _option(_MEMORY, "Instead: a GPU such as h200; weights are taken off.")]
Gpus = Annotated[
    int,
    typer.Option(
        help="How many GPUs you have, to check the layout: it takes --tp x --pcp.",
        rich_help_panel=_MEMORY,
        show_default="not checked",
    ),
]
Weights = Annotated[str | None, _option(_MEMORY, "Bytes of the weights on all GPUs together.")]
GpuShare = Annotated[float, _option(_MEMORY, "Share of a GPU for weights and cache.")]

Preset = Annotated[
    str | None,
    _option(_POLICY, f"Imitate another engine: {', '.join(PRESETS)}; with settings as in vllm,running=32."),
]
PlacementKinds = Annotated[
    str, _option(_POLICY, "Positions that get a checkpoint, with commas; interval:N for a grid.")
]
Eviction = Annotated[str, _option(_POLICY, "value or lru.")]
Alignment = Annotated[int, _option(_POLICY, "States can be exported at multiples of that many tokens.")]
Html = Annotated[Path | None, _option(None, "Write a report with figures to this file.", "--html")]
ListModels = Annotated[
    bool,
    typer.Option("--models", callback=_list_models, is_eager=True, help="List the models that --model knows."),
]
AsJson = Annotated[bool, _option(None, "Print one JSON object.", "--json")]
