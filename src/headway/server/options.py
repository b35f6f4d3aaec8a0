"""The options of `headway serve`, in the records in which they belong together: what each means is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.engine import EngineConfig, ParallelConfig

__all__ = [
    "LOG_LEVELS",
    "CacheFlags",
    "DraftFlags",
    "LimitFlags",
    "ModelFlags",
    "ModelSource",
    "RankFlags",
    "RecordFlags",
    "ServerFlags",
]

LOG_LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` may be."""


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


ModelSource = Annotated[
    str | None, typer.Argument(help="A directory, a hub id, or nothing for the small built-in model.")
]

_SERVER = "Server"


@dataclass(frozen=True)
class ServerFlags:
    """Where and how the server listens."""

    host: Annotated[str, _option(_SERVER, "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _option(_SERVER, "Port to listen on; 0 for any that is free.", min=0, max=65535)] = 8000
    api_key: Annotated[str | None, _option(_SERVER, "Key that clients must send.", envvar="HEADWAY_API_KEY")] = None
    served_model_name: Annotated[str | None, _option(_SERVER, "Name of the model in the API.")] = None
    grace: Annotated[int, _option(_SERVER, "Seconds that running requests get at shutdown.", min=0)] = 30
    log_level: Annotated[str, _option(_SERVER, f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}.")] = "info"


_MODEL = "Model"


@dataclass(frozen=True)
class ModelFlags:
    """How the model is loaded."""

    device: Annotated[str, _option(_MODEL, "cpu, cuda, cuda:1, ...")] = EngineConfig.device
    dtype: Annotated[str, _option(_MODEL, "fp32, bf16, or auto: fp32 on a CPU, else bf16.")] = EngineConfig.dtype
    max_model_len: Annotated[
        int | None, _option(_MODEL, "Most tokens of prompt and answer together; the model's own limit by default.")
    ] = None


_CACHE = "Cache"


@dataclass(frozen=True)
class CacheFlags:
    """The prefix cache."""

    memory: Annotated[
        str | None,
        _option(
            _CACHE,
            "Memory of the cache, such as 4GiB; by default most of a GPU's free memory, or half of the free host "
            "memory up to 4 GiB.",
        ),
    ] = None
    block_tokens: Annotated[int, _option(_CACHE, "Tokens in a block.")] = EngineConfig.block_tokens
    placement: Annotated[
        str, _option(_CACHE, "Which positions get a checkpoint, separated by commas; interval:N for every N tokens.")
    ] = ",".join(EngineConfig.placement)
    eviction: Annotated[str, _option(_CACHE, "What goes first when memory runs out: value, lru or greedy-dual.")] = (
        EngineConfig.eviction
    )
    checkpoint_alignment: Annotated[int, _option(_CACHE, "Checkpoints lie at multiples of this many tokens.")] = (
        EngineConfig.checkpoint_alignment
    )
    prefix_reuse: Annotated[bool, _option(_CACHE, "Reuse what is cached, or compute every prompt anew.")] = (
        EngineConfig.prefix_reuse
    )


_DRAFTS = "Speculative decoding"


@dataclass(frozen=True)
class DraftFlags:
    """Speculative decoding."""

    draft: Annotated[
        str,
        _option(
            _DRAFTS,
            "Who drafts tokens for the model to verify: none; lookup (repeats of the text itself); mtp or dspark (what "
            "the model brings along); or the folder of a drafter. Answers have the same distribution as without.",
        ),
    ] = EngineConfig.draft
    draft_tokens: Annotated[
        int | None, _option(_DRAFTS, "Most tokens of a draft; the drafter's own number by default.", min=1)
    ] = EngineConfig.draft_tokens
    draft_rule: Annotated[
        str,
        _option(
            _DRAFTS,
            "How drafts of sampled answers are judged. match: a seed gives the very answer it gives without drafts. "
            "token or block: more drafts are accepted, and a seed may give another answer.",
        ),
    ] = EngineConfig.draft_rule


_LIMITS = "Batches and limits"


@dataclass(frozen=True)
class LimitFlags:
    """Batches and limits."""

    max_batched_tokens: Annotated[int, _option(_LIMITS, "Most tokens computed in one step.")] = (
        EngineConfig.max_batched_tokens
    )
    max_running: Annotated[int, _option(_LIMITS, "Most requests that run at once.")] = EngineConfig.max_running
    max_waiting: Annotated[int, _option(_LIMITS, "Most requests that wait; more are refused.")] = (
        EngineConfig.max_waiting
    )
    max_body: Annotated[str, _option(_LIMITS, "Largest body of a request.")] = "16MiB"


_RANKS = "Ranks"


@dataclass(frozen=True)
class RankFlags:
    """The ranks that compute."""

    dcp: Annotated[
        int,
        _option(
            _RANKS,
            "Decode-context-parallel size: ranks over which the tokens of full attention are split. Without --tp each "
            "holds the whole model; with the same memory a rank, the cache holds about that many times the tokens.",
        ),
    ] = ParallelConfig.dcp
    interleave: Annotated[
        int, _option(_RANKS, "Consecutive tokens that one rank stores; must divide --block-tokens.")
    ] = ParallelConfig.interleave
    dcp_comm: Annotated[
        str,
        _option(_RANKS, "How ranks merge their attention: ag_rs (all-gather, reduce-scatter) or a2a (all-to-all)."),
    ] = ParallelConfig.communication
    tp: Annotated[
        int,
        _option(
            _RANKS,
            "Tensor-parallel size: ranks that share the weights by the plan that transformers has for the model, and "
            "recurrent states by heads. --dcp divides it.",
        ),
    ] = ParallelConfig.tp
    pcp: Annotated[int, _option(_RANKS, "Prefill-context-parallel size. Only 1 is served yet.")] = ParallelConfig.pcp
    executor: Annotated[
        str,
        _option(_RANKS, "Who computes: local (this process), processes (one a rank), ray (one actor a rank), or auto."),
    ] = ParallelConfig.executor
    rank_timeout: Annotated[float, _option(_RANKS, "Seconds that a step may take before the ranks count as lost.")] = (
        ParallelConfig.rank_timeout
    )
    on_rank_failure: Annotated[
        str, _option(_RANKS, "When a rank is lost: restart (new ranks, empty cache) or exit (with an error status).")
    ] = ParallelConfig.on_rank_failure

    def config(self) -> ParallelConfig:
        """What the engine is told of them.

        Raises:
            ConfigError: What cannot run.
        """
        return ParallelConfig(
            dcp=self.dcp,
            interleave=self.interleave,
            communication=self.dcp_comm,
            executor=self.executor,
            rank_timeout=self.rank_timeout,
            on_rank_failure=self.on_rank_failure,
            tp=self.tp,
            pcp=self.pcp,
        )


_RECORD = "Recording"


@dataclass(frozen=True)
class RecordFlags:
    """A recording of the traffic."""

    record: Annotated[
        Path | None, _option(_RECORD, "Record the traffic to this new file, for `headway replay`.", "--record")
    ] = None
    record_form: Annotated[
        str,
        _option(_RECORD, "hashes (salted: who shares which prefix, not what it says) or tokens (everything said)."),
    ] = "hashes"
