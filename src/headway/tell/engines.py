"""How each engine is told: flags and metrics, as their public sources and documentation spell them in late 2026.

vLLM 0.33: `vllm/config/cache.py` and the page *Production Metrics*. SGLang 0.5: its server arguments, the page
*Production Metrics* and `metrics_collector.py`. Both move quickly; `headway advise` says which versions it speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.cache import DEFAULT_PLACEMENT
from headway.errors import ConfigError
from headway.sizes import counted

__all__ = ["SLOTS", "UNSERVED", "VERSIONS", "WATCH", "Setup", "beside_running", "fewer_running", "flags"]

VERSIONS = {"Headway": "this release", "vLLM": "0.33", "SGLang": "0.5"}
"""Releases whose flags and metrics are named."""

WATCH = {
    "Headway": (
        "headway_prompt_hit_tokens_total / headway_prompt_tokens_total: the hit rate",
        "headway_prompt_lost_tokens_total by reason: where the rest goes",
        "headway_checkpoints_evicted_unused_total / headway_checkpoints_taken_total by kind: kinds that do not pay",
        "headway_preemptions_total: running requests take the memory that the cache would use",
    ),
    "vLLM": (
        "vllm:prefix_cache_hits_total / vllm:prefix_cache_queries_total: the hit rate in tokens",
        "vllm:kv_cache_usage_perc and vllm:num_preemptions_total: running requests against the cache",
    ),
    "SGLang": (
        "sglang:cached_tokens_total / sglang:prompt_tokens_total: the hit rate (start with --enable-metrics)",
        "sglang:mamba_usage against sglang:full_token_usage: if one pool is full and the other is not, move the split",
    ),
}
"""By engine: its metrics, and what they say."""

UNSERVED = "not served by this release: fp8_ds_mla entries (the figures are the cache's own)"
"""What stands in place of a command that `headway serve` would refuse."""

_HEADWAY_RUNNING = 64
"""Most requests that run at once in `headway serve`, unless somebody says otherwise."""
SLOTS = {"sglang": 5, "vllm": 3, "headway": 1}
"""States that a running request holds: in SGLang with `extra_buffer` and overlapped scheduling, in vLLM at most."""


@dataclass(frozen=True)
class Setup:
    """What an engine should be told.

    Attributes:
        model: The checkpoint's path, or a placeholder.
        values: Settings of the grid.
        memory: Bytes of one rank for the cache; None for endless.
        share: Share of the GPU's memory for weights and cache where that is how the memory was given, else None.
        state_bytes: Bytes of a request's recurrent states on one rank; 0 for a model without.
        token_bytes: Bytes of a token's attention on one rank.
        ratio: Memory of states over memory of attention.
        running: Requests that run at once, for SGLang's state slots.
        sequences: The same in vLLM, where fewer than usual reuse more; 0: as it comes.
    """

    model: str
    values: Mapping[str, Any]
    memory: int | None
    share: float | None
    state_bytes: int
    token_bytes: float
    ratio: float
    running: int
    sequences: int = 0


def flags(setup: Setup) -> dict[str, str]:
    """The command line of each engine."""
    return {"Headway": _headway(setup), "vLLM": _vllm(setup), "SGLang": _sglang(setup)}


def fewer_running(memory: int, running: int, state_bytes: int, slots: int) -> int:
    """How many requests may run at once so that their states take at most a quarter of the memory, halving `running`.

    Args:
        memory: Bytes of one rank for the cache.
        running: The most.
        state_bytes: Bytes of a request's states on one rank.
        slots: States that a running request holds.
    """
    while running > 1 and 4 * running * slots * state_bytes > memory:
        running //= 2
    return running


def beside_running(memory: int, running: int, state_bytes: int) -> int:
    """Bytes of SGLang's memory that are left for its cache: running requests hold states in the same memory.

    Raises:
        ConfigError: They leave no room for two states.
    """
    left = memory - SLOTS["sglang"] * running * state_bytes
    if left < 2 * state_bytes:
        states = f"the states of {counted(running, 'running request')}"
        raise ConfigError(f"{states} alone fill the memory: give more memory, or --running with fewer")
    return left


def _headway(setup: Setup) -> str:
    if setup.values["kv_dtype"] == "fp8_ds_mla":
        return UNSERVED
    parts = [f"headway serve {setup.model}"]
    parts += [f"--{name} {setup.values[name]}" for name in ("tp", "dcp", "pcp") if setup.values.get(name, 1) > 1]
    parts += [f"--memory {setup.memory}"] if setup.memory is not None else []
    parts += ["--kv-dtype fp8_e4m3"] if setup.values["kv_dtype"].startswith("fp8") else []
    parts += ["--state-dtype bf16"] if setup.values["state_dtype"] == "bf16" and setup.state_bytes else []
    parts += [f"--host-memory {size}"] if (size := setup.values.get("host_memory", "0")) != "0" else []
    parts += ["--disk FOLDER:SIZE"] if setup.values.get("disk", "0") != "0" else []
    parts += ["--store URL"] if setup.values.get("store", "0") != "0" else []
    placement = setup.values.get("placement", ",".join(DEFAULT_PLACEMENT))
    parts += [f"--placement {placement}"] if placement != ",".join(DEFAULT_PLACEMENT) else []
    eviction = setup.values.get("eviction", "adaptive")
    parts += [f"--eviction {eviction}"] if eviction != "adaptive" else []
    running = setup.memory and fewer_running(setup.memory, _HEADWAY_RUNNING, setup.state_bytes, SLOTS["headway"])
    parts += [f"--max-running {running}"] if running and running < _HEADWAY_RUNNING else []
    return " ".join(parts)


def _vllm(setup: Setup) -> str:
    parts = [f"vllm serve {setup.model} --tensor-parallel-size {setup.values['tp']}"]
    parts += [f"--decode-context-parallel-size {setup.values['dcp']}"] if setup.values["dcp"] > 1 else []
    if setup.share is not None:
        parts.append(f"--gpu-memory-utilization {setup.share:g}")
    elif setup.memory is not None:
        parts.append(f"--kv-cache-memory-bytes {setup.memory}")
    parts += ["--kv-cache-dtype fp8"] if setup.values["kv_dtype"].startswith("fp8") else []
    if setup.state_bytes:
        parts.append("--enable-prefix-caching")
        parts += [f"--max-num-seqs {setup.sequences}"] if setup.sequences else []
        parts += ["--mamba-ssm-cache-dtype bfloat16"] if setup.values["state_dtype"] == "bf16" else []
    return " ".join(parts)


def _sglang(setup: Setup) -> str:
    parts = [f"sglang serve --model-path {setup.model} --tp-size {setup.values['tp']}"]
    parts += [f"--dcp-size {setup.values['dcp']}"] if setup.values["dcp"] > 1 else []
    parts += [f"--mem-fraction-static {setup.share:g}"] if setup.share is not None else []
    parts += ["--kv-cache-dtype fp8_e4m3"] if setup.values["kv_dtype"].startswith("fp8") else []
    if setup.state_bytes:
        parts.append("--mamba-radix-cache-strategy extra_buffer")
        parts += ["--mamba-ssm-dtype bfloat16"] if setup.values["state_dtype"] == "bf16" else []
        parts.append(_split(setup))
    return " ".join(parts)


def _split(setup: Setup) -> str:
    """The split of memory: a number of slots where the memory is known, else a ratio.

    Running requests hold slots of the same pool. Theirs come out of the memory first, the ratio splits what is left.
    """
    if setup.memory is None:
        return f"--mamba-full-memory-ratio {setup.ratio:.2g}"
    left = beside_running(setup.memory, setup.running, setup.state_bytes)
    slots = max(1, int(left * setup.ratio / (1 + setup.ratio)) // setup.state_bytes)
    return f"--max-running-requests {setup.running} --max-mamba-cache-size {SLOTS['sglang'] * setup.running + slots}"
