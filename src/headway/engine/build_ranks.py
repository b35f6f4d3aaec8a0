"""An engine whose ranks are elsewhere: the driver reads the model's config, and the ranks load its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.cache import CacheGeometry, LayerSpec, PrefixCache
from headway.engine.build_drafts import DraftSource, Measured, planner_of, require_verifiable
from headway.engine.built import BuiltEngine, after_check, cache_config, vocabulary
from headway.engine.config import EngineConfig
from headway.engine.engine import Engine
from headway.engine.messages import Loaded, Prepare
from headway.engine.processes import ProcessRanks, devices_of_ranks
from headway.engine.ranked import RankedExecutor, RankGroup
from headway.engine.ray_ranks import RayRanks
from headway.engine.tokenizer import HubTokenizer
from headway.errors import ConfigError
from headway.runtime.layout import ModelLayout
from headway.runtime.loading import layout_of_rank, load_tokenizer, read_device, resolve_dtype, resolve_source
from headway.runtime.memory import blocks_that_fit, capacity
from headway.runtime.selfcheck import SelfCheck

__all__ = ["build_on_ranks"]


def build_on_ranks(
    source: str | None, config: EngineConfig, progress: Callable[[str], None] = lambda text: None
) -> BuiltEngine:
    """Start the ranks, load the model on each, and build an engine that drives them.

    Args:
        source: As for `headway.engine.build.build_engine`.
        config: The options; `config.parallel` says what ranks there are.
        progress: As for `build_engine`.

    Raises:
        ModelError: The model cannot be loaded or served.
        ConfigError: Options that cannot work, or not enough memory.
        RanksLostError: A rank died on the way.
    """
    parallel = config.parallel
    name, layout = layout_of_rank(source, config.dtype, parallel.tp, parallel.dcp, config.device)
    tokenizer = load_tokenizer(source)
    drafts = DraftSource.of(config)
    drafter = _groups(drafts, source, config)
    _check(name, layout, config, drafter)
    executor = RankedExecutor(_launcher(config), source, config.dtype, parallel, drafts)
    try:
        progress(f"starting {parallel.ranks} ranks ({parallel.kind}), which load the model and check it")
        loaded = executor.load()
        check = loaded[0].check
        assert check is not None, "rank 0 checks the model"
        require_verifiable(drafts, name, check)
        config = after_check(config, check)
        progress("making room for the cache on every rank")
        cache = PrefixCache(cache_config(layout, config, _memory(loaded, config), drafter))
        planner = planner_of(_make_room(executor, cache, config, check))
        engine = Engine(cache, executor, config, vocabulary(layout, tokenizer, loaded[0].eos), planner=planner)
    except BaseException:
        executor.close()
        raise
    held = capacity(cache.config.blocks, cache.geometry)
    return BuiltEngine(name, engine, HubTokenizer(copy.deepcopy(tokenizer)), layout, check, held, planner)


def _groups(drafts: DraftSource, source: str | None, config: EngineConfig) -> Sequence[LayerSpec]:
    """What the drafter keeps in the cache."""
    folder = Path(resolve_source(source)[1])
    dtype = resolve_dtype(config.dtype, read_device(config.device))
    return drafts.groups(folder if folder.is_dir() else None, dtype)


def _launcher(config: EngineConfig) -> Callable[[], RankGroup]:
    ranks = config.parallel.ranks
    if config.parallel.kind == "ray":
        return lambda: RayRanks(config.device, ranks)
    devices = devices_of_ranks(config.device, ranks)
    return lambda: ProcessRanks(devices)


def _check(name: str, layout: ModelLayout, config: EngineConfig, drafter: Sequence[LayerSpec]) -> None:
    """Refuse before any rank starts what can be known to be impossible; it may take minutes to load a model."""
    parallel = config.parallel
    if parallel.dcp > 1 and not any(spec.sharded for spec in layout.groups):
        raise ConfigError(
            f"dcp={parallel.dcp}: {name} has no full attention, and nothing else is split by tokens; leave --dcp out"
        )
    geometry = CacheGeometry((*layout.groups, *drafter), parallel.layout, block_tokens=config.block_tokens)
    if config.memory is not None:
        blocks_that_fit(config.memory, geometry)


def _memory(loaded: Sequence[Loaded], config: EngineConfig) -> int:
    """Bytes for the cache on every rank: the rank with the least decides, and ranks of one machine share its memory."""
    if config.memory is not None:
        return config.memory
    shared = config.device == "cpu"
    return min(each.memory for each in loaded) // (len(loaded) if shared else 1)


def _make_room(executor: RankedExecutor, cache: PrefixCache, config: EngineConfig, check: SelfCheck) -> Measured | None:
    """Make room on every rank; returns what drafting costs on rank 0."""
    parallel = cache.geometry.layout
    room = Prepare(
        blocks=cache.config.blocks,
        block_tokens=config.block_tokens,
        tp=parallel.tp,
        dcp=parallel.dcp,
        interleave=parallel.interleave,
        single_steps=check.single_steps,
        max_running=config.max_running,
    )
    made = executor.prepare(cache.geometry, room)
    planned = capacity(cache.config.blocks, cache.geometry).bytes
    assert all(each.bytes == planned for each in made), f"planned {planned} bytes a rank, made {made}"
    return made[0].drafter
