"""The options of `headway serve`: what each means, in the words of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "LOG_LEVELS",
    "Alignment",
    "ApiKey",
    "BlockTokens",
    "Dcp",
    "DcpComm",
    "Device",
    "Draft",
    "DraftRule",
    "DraftTokens",
    "Dtype",
    "Eviction",
    "ExecutorKind",
    "Grace",
    "Host",
    "Interleave",
    "LogLevel",
    "MaxBatchedTokens",
    "MaxBody",
    "MaxModelLen",
    "MaxRunning",
    "MaxWaiting",
    "MemorySize",
    "ModelSource",
    "OnRankFailure",
    "Pcp",
    "PlacementKinds",
    "Port",
    "PrefixReuse",
    "RankTimeout",
    "RecordFile",
    "RecordForm",
    "ServedName",
    "Tp",
]

LOG_LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` may be."""

_SERVER, _MODEL, _CACHE, _LIMITS, _RANKS = "Server", "Model", "Cache", "Batches and limits", "Ranks"
_RECORD = "Recording"
_DRAFTS = "Speculative decoding"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


ModelSource = Annotated[
    str | None, typer.Argument(help="A directory, a hub id, or nothing for the small built-in model.")
]

Host = Annotated[str, _option(_SERVER, "Address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, _option(_SERVER, "Port to listen on; 0 for any that is free.", min=0, max=65535)]
ApiKey = Annotated[str | None, _option(_SERVER, "Key that clients must send.", envvar="HEADWAY_API_KEY")]
ServedName = Annotated[str | None, _option(_SERVER, "Name of the model in the API.")]
Grace = Annotated[int, _option(_SERVER, "Seconds that running requests get at shutdown.", min=0)]
LogLevel = Annotated[str, _option(_SERVER, f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}.")]

Device = Annotated[str, _option(_MODEL, "cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, _option(_MODEL, "fp32, bf16, or auto: fp32 on a CPU, else bf16.")]
MaxModelLen = Annotated[
    int | None, _option(_MODEL, "Most tokens of prompt and answer together; the model's own limit by default.")
]

MemorySize = Annotated[
    str | None,
    _option(
        _CACHE,
        "Memory of the cache, such as 4GiB; by default most of a GPU's free memory, or half of the free host memory "
        "up to 4 GiB.",
    ),
]
BlockTokens = Annotated[int, _option(_CACHE, "Tokens in a block.")]
PlacementKinds = Annotated[
    str, _option(_CACHE, "Which positions get a checkpoint, separated by commas; interval:N for every N tokens.")
]
Eviction = Annotated[str, _option(_CACHE, "What goes first when memory runs out: value or lru.")]
Alignment = Annotated[int, _option(_CACHE, "Checkpoints lie at multiples of this many tokens.")]
PrefixReuse = Annotated[bool, _option(_CACHE, "Reuse what is cached, or compute every prompt anew.")]

RecordFile = Annotated[
    Path | None,
    typer.Option(
        "--record", help="Record the traffic to this new file, for `headway replay`.", rich_help_panel=_RECORD
    ),
]
RecordForm = Annotated[
    str, _option(_RECORD, "hashes (salted: who shares which prefix, not what it says) or tokens (everything said).")
]
Draft = Annotated[
    str,
    _option(
        _DRAFTS,
        "Who drafts tokens for the model to verify: none; lookup (repeats of the text itself); mtp or dspark (what the "
        "model brings along); or the folder of a drafter. Answers have the same distribution as without.",
    ),
]
DraftTokens = Annotated[
    int | None, _option(_DRAFTS, "Most tokens of a draft; the drafter's own number by default.", min=1)
]
DraftRule = Annotated[
    str,
    _option(
        _DRAFTS,
        "How drafts of sampled answers are judged. match: a seed gives the very answer it gives without drafts. token "
        "or block: more drafts are accepted, and a seed may give another answer.",
    ),
]

MaxBatchedTokens = Annotated[int, _option(_LIMITS, "Most tokens computed in one step.")]
MaxRunning = Annotated[int, _option(_LIMITS, "Most requests that run at once.")]
MaxWaiting = Annotated[int, _option(_LIMITS, "Most requests that wait; more are refused.")]
MaxBody = Annotated[str, _option(_LIMITS, "Largest body of a request.")]

Dcp = Annotated[
    int,
    _option(
        _RANKS,
        "Decode-context-parallel size: ranks over which the tokens of full attention are split. Each holds the whole "
        "model; with the same memory a rank, the cache holds about that many times the tokens.",
    ),
]
Interleave = Annotated[int, _option(_RANKS, "Consecutive tokens that one rank stores; must divide --block-tokens.")]
DcpComm = Annotated[
    str, _option(_RANKS, "How ranks merge their attention: ag_rs (all-gather, reduce-scatter) or a2a (all-to-all).")
]
Tp = Annotated[int, _option(_RANKS, "Tensor-parallel size. Only 1 is served yet; `headway inspect` shows others.")]
Pcp = Annotated[int, _option(_RANKS, "Prefill-context-parallel size. Only 1 is served yet.")]
ExecutorKind = Annotated[
    str, _option(_RANKS, "Who computes: local (this process), processes (one a rank), ray (one actor a rank), or auto.")
]
RankTimeout = Annotated[float, _option(_RANKS, "Seconds that a step may take before the ranks count as lost.")]
OnRankFailure = Annotated[
    str, _option(_RANKS, "When a rank is lost: restart (new ranks, empty cache) or exit (with an error status).")
]
