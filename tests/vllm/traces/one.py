"""One cell of judge 1, in the process of its own: build the engine, serve the workload, return what was found."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.vllm.traces.cells import Cell
from tests.vllm.traces.drive import Driver, Faults, Runner, Sample
from tests.vllm.traces.layouts import ENGINES, LAYOUTS, LONGEST, Options, build
from tests.vllm.traces.workload import Workload
from tests.vllm.worker import EmulatedWorker, WorkerGroup
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

__all__ = ["run_cell"]

_FAULTS = Faults(stop=0.02, abort=0.02, reset=0.02)


def run_cell(cell: Cell, workload: Workload, answer: int) -> dict[str, Any]:
    """Serve a workload as a cell says."""
    options = Options(asynchronous=cell.asynchronous, drafts=cell.drafts)
    built = build(LAYOUTS[cell.model], ENGINES[cell.engine], int(cell.memory * 1e9), options)
    scheduler = built.scheduler

    def emulated(sample: Sample, chances: np.random.Generator) -> Runner:
        return EmulatedWorker(
            [_worker_group(group, scheduler.dcp_world_size) for group in scheduler.kv_cache_config.kv_cache_groups],
            sample,
            lambda drafts: int(chances.integers(0, drafts + 1)),
            slots_ahead=scheduler.num_lookahead_tokens,
            max_model_len=LONGEST,
        )

    driver = Driver(
        built,
        workload,
        options,
        answer=32 if cell.checked else answer,
        faults=_FAULTS if cell.checked else None,
        runner=emulated if cell.checked else None,
    )
    counts = driver.run()
    per_request = 1e3 / len(workload)
    return {
        "requests": len(workload),
        "prompt_tokens": workload.prompt_tokens,
        "reused": sum(counts.hits.values()),
        "requests_with_hit": sum(hit > 0 for hit in counts.hits.values()),
        "blocks": scheduler.kv_cache_config.num_blocks,
        "steps": counts.steps,
        "scheduled_tokens": counts.tokens,
        "preemptions": counts.preemptions,
        "rejected": counts.rejected,
        "aborted": counts.aborted,
        "resets": counts.resets,
        "checked": getattr(driver.runner, "checked", 0),
        "ms_arriving": counts.arriving * per_request,
        "ms_scheduling": counts.scheduling * per_request,
        "ms_updating": counts.updating * per_request,
        "waterfall": _waterfall(scheduler),
    }


def _worker_group(group: KVCacheGroupSpec, dcp: int) -> WorkerGroup:
    """How vLLM's worker uses a group. One with a draft layer is held to what that layer needs."""
    spec = group.kv_cache_spec
    if isinstance(spec, MambaSpec):
        return WorkerGroup("state", columns=1 + spec.num_speculative_blocks)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    draft = any(name.startswith("draft.") for name in group.layer_names)
    return WorkerGroup("window" if window else "full", spec.block_size * (1 if window else dcp), window, draft)


def _waterfall(scheduler: Any) -> dict[str, int]:
    """Tokens on each line of Headway's own waterfall; nothing for vLLM's scheduler."""
    cache = getattr(scheduler.kv_cache_manager, "cache", None)
    if cache is None:
        return {}
    return {str(reason.value): lost for reason, lost in cache.waterfall.lost.items() if lost}
