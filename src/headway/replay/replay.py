"""One way in: a trace through the cache, with or without a clock, or through an imitated engine, and what was found."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.formats import Trace
from headway.replay.config import HeadwayInVllmPreset, MarconiPreset, ReplayConfig, SglangPreset, VllmPreset
from headway.replay.config.presets import described, preset_of
from headway.replay.config.scale import page_plan_of, scale
from headway.replay.imitate.marconi import ALPHAS, marconi_config
from headway.replay.imitate.sglang import run_sglang, sglang_pools
from headway.replay.imitate.vllm import run_vllm, vllm_pages
from headway.replay.run.clairvoyant import clairvoyant_hits
from headway.replay.run.figures import figures, kinds, lost_by_prefix, over_time
from headway.replay.run.ledger import Ledger, Progress
from headway.replay.run.order import OrderedRun
from headway.replay.run.savings import time_saved
from headway.replay.run.timed import TimedRun
from headway.replay.trace.prefixes import Reading, endless_matches, read_outputs
from headway.tell.run import LostPrefixes, ReplayResult, TierUse

__all__ = ["check_preset", "replay_trace"]

Longs = NDArray[np.int64]

_COLLECT_AFTER = 100_000
"""New containers after which Python looks for garbage in cycles."""


def replay_trace(
    trace: Trace,
    config: ReplayConfig,
    *,
    matches: Longs | None = None,
    clairvoyant: bool = False,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay `trace` under `config`.

    Args:
        trace: The trace.
        config: Model, memory and policies.
        matches: What `endless_matches` gave for this trace and reading, to compare many configurations.
        clairvoyant: Estimate as well what knowing the future would reach: by a heuristic, or what this run itself
            reached, if that saved more compute.
        progress: Called now and then.

    Raises:
        ConfigError: A configuration that cannot work.
    """
    reading = read_outputs(trace, config.outputs)
    if matches is None:
        matches = endless_matches(trace, reading)
    with _rare_collections():
        result, refused = _replayed(trace, config, reading, matches, progress)
    if refused:
        return _without(refused, result, trace, config, clairvoyant=clairvoyant, progress=progress)
    if not clairvoyant:
        return result
    below = sum(tier.memory for tier in config.tiers)
    bound = replace(config, tiers=(), memory=config.memory + below) if below and config.memory else config
    hits, half = clairvoyant_hits(trace, bound, matches, reading), len(trace) // 2
    whole, second = (figures(trace, config.cost, hits, matches, None, first) for first in (0, half))
    if result.whole.compute_saved > whole.compute_saved:
        whole = replace(result.whole, lost={})
    if result.second_half.compute_saved > second.compute_saved:
        second = replace(result.second_half, lost={})
    return replace(result, clairvoyant=whole, second_half_clairvoyant=second)


def _without(
    refused: Mapping[int, int],
    result: ReplayResult,
    trace: Trace,
    config: ReplayConfig,
    *,
    clairvoyant: bool,
    progress: Progress | None,
) -> ReplayResult:
    """Replay what can be served: what was refused is no part of what traffic has to give, and no loss of the cache.

    Without it, symbols may get another width, and then another request may be refused as well.
    """
    gone = np.zeros(len(trace), dtype=bool)
    gone[list(refused)] = True
    kept = np.flatnonzero(~gone)
    if len(kept):
        served = replay_trace(trace.take(kept), config, clairvoyant=clairvoyant, progress=progress)
    else:
        none = np.zeros(len(trace), dtype=np.int64)
        nothing = figures(trace, config.cost, none, none, None, len(trace))
        known = nothing if clairvoyant else None
        served = replace(result, whole=nothing, second_half=nothing, over_time=[], prefixes=LostPrefixes())
        served = replace(served, clairvoyant=known, second_half_clairvoyant=known, times=None)
    worst = [
        replace(one, first_request=int(kept[one.first_request]), last_request=int(kept[one.last_request]))
        for one in served.prefixes.worst
    ]
    return replace(
        served,
        prefixes=replace(served.prefixes, worst=worst),
        refused=len(refused) + served.refused,
        refused_tokens=int(trace.prompt_tokens[gone].sum()) + served.refused_tokens,
        needed=max(served.needed or 0, *refused.values()),
    )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage less often: a run leaves next to none in cycles, and every search walks over the whole tree."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _replayed(
    trace: Trace, config: ReplayConfig, reading: Reading, matches: Longs, progress: Progress | None
) -> tuple[ReplayResult, Mapping[int, int]]:
    """Run the cache, or a preset. Returns what was found, and the bytes that refused requests need."""
    settings = preset_of(config.preset)
    if isinstance(settings, MarconiPreset):
        alpha = settings.alpha if settings.alpha >= 0 else _tuned(trace, config, settings)
        result, refused = _replayed(trace, marconi_config(config, settings, alpha), reading, matches, progress)
        return replace(result, preset=described(replace(settings, alpha=alpha))), refused
    began, latency, preset = time.process_time(), None, ""
    tiers: list[TierUse] = []
    limited = config.memory is not None
    if isinstance(settings, SglangPreset):
        ledger = run_sglang(trace, config, settings, reading, matches, progress)
        size, preset = (settings.grain_tokens, 1, config.memory or 0), described(settings)
    elif isinstance(settings, VllmPreset):
        pages = vllm_pages(config, settings)
        ledger = run_vllm(trace, pages, settings, reading, matches, progress)
        plan = page_plan_of(config, settings)
        found = replace(settings, block_tokens=plan.block_tokens, state_groups=plan.state_groups)
        size, preset = (pages.block_tokens, pages.page_bytes, pages.count), described(found)
    elif config.timing is not None:
        timed = TimedRun(trace, config, config.timing, reading, matches, progress)
        latency, ledger = timed.all(), timed.ledger
        tiers = timed.lower.uses(1) if timed.lower else []
        size = 1, timed.scale.block_bytes, timed.scale.cache.blocks if limited else 0
    else:
        sized = scale(config, trace.width, len(trace.symbols), len(trace))
        run = OrderedRun(trace, sized, reading, matches, progress, config)
        ledger, tiers = run.all(), run.lower.uses(sized.symbol) if run.lower else []
        size = sized.symbol, sized.block_bytes, sized.cache.blocks if limited else 0
    if isinstance(settings, HeadwayInVllmPreset):
        plan = page_plan_of(config, settings)
        preset = described(replace(settings, block_tokens=plan.block_tokens, state_groups=plan.state_groups))
    seconds = time.process_time() - began
    result = _result(trace, config, size, reading, matches, ledger, seconds)
    if result.times is not None and tiers:
        paid = sum(tier.paid_seconds for tier in tiers)
        result = replace(result, times=replace(result.times, saved=result.times.saved - paid))
    return replace(result, latency=latency, preset=preset, tiers=tiers), ledger.refused


def check_preset(config: ReplayConfig) -> None:
    """Notice before anything is run that the preset of a configuration cannot work with its model or memory.

    Raises:
        ConfigError: It cannot.
    """
    settings = preset_of(config.preset)
    if isinstance(settings, VllmPreset):
        vllm_pages(config, settings)
    elif isinstance(settings, HeadwayInVllmPreset):
        page_plan_of(config, settings)
    elif isinstance(settings, SglangPreset):
        sglang_pools(config, settings)


def _tuned(trace: Trace, config: ReplayConfig, settings: MarconiPreset) -> float:
    """The alpha that reuses most on the first part of the trace; the smallest of equals."""
    head = trace.head(max(1, int(len(trace) * settings.bootstrap)))
    config, reading = replace(config, timing=None), read_outputs(head, config.outputs)
    matches = endless_matches(head, reading)
    hits = {
        alpha: _replayed(head, marconi_config(config, settings, alpha), reading, matches, None)[0].whole.hit_tokens
        for alpha in ALPHAS
    }
    return max(ALPHAS, key=lambda alpha: (hits[alpha], -alpha))


def _result(
    trace: Trace,
    config: ReplayConfig,
    size: tuple[int, int, int],
    reading: Reading,
    matches: Longs,
    found: Ledger,
    seconds: float,
) -> ReplayResult:
    half = len(trace) // 2
    symbol, block_bytes, blocks = size
    return ReplayResult(
        trace=trace.name,
        outputs=reading.outputs,
        symbol=symbol,
        block_bytes=block_bytes,
        blocks=blocks,
        whole=figures(trace, config.cost, found.hits, matches, found.lost, 0, found.loaded),
        second_half=figures(trace, config.cost, found.hits, matches, found.lost, half, found.loaded),
        kinds=kinds(found.counters),
        second_half_kinds=kinds(found.counters, found.half),
        memory=found.memory,
        refused=0,
        seconds=seconds,
        over_time=over_time(trace, found.hits, matches),
        prefixes=lost_by_prefix(trace, reading, found.hits, matches),
        times=None if config.roofline is None else time_saved(trace, config.roofline, found.hits),
    )
