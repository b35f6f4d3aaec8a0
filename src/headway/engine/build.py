"""Builds an engine from a model's name and the options: model, self-check, memory, cache, scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable

from headway.cache import PrefixCache
from headway.engine.build_drafts import DraftSource, planner_of, require_verifiable, speculator_of
from headway.engine.build_ranks import build_on_ranks
from headway.engine.built import BuiltEngine, after_check, cache_config, vocabulary
from headway.engine.config import EngineConfig
from headway.engine.engine import Engine
from headway.engine.local import LocalExecutor
from headway.engine.tokenizer import HubTokenizer
from headway.errors import ConfigError
from headway.runtime.loading import LoadedModel, end_tokens, load_model
from headway.runtime.memory import capacity, default_memory
from headway.runtime.runner import ModelRunner
from headway.runtime.selfcheck import self_check

__all__ = ["BuiltEngine", "build_engine", "engine_of"]


def build_engine(
    source: str | None, config: EngineConfig, progress: Callable[[str], None] = lambda text: None
) -> BuiltEngine:
    """Load a model, check it, and build an engine for it.

    Args:
        source: A directory, a hub id, or None for the built-in model.
        config: The options.
        progress: Called with a few words before each stage.

    Raises:
        ModelError: The model cannot be loaded or served.
        ConfigError: Options that cannot work, or not enough memory.
    """
    progress(f"loading {source or 'the built-in model'}")
    if config.parallel.kind != "local":
        return build_on_ranks(source, config, progress)
    return engine_of(load_model(source, config.device, config.dtype), config, progress)


def engine_of(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None] = lambda text: None
) -> BuiltEngine:
    """Build an engine for a model that is loaded.

    Raises:
        ModelError: The model contradicts itself in a way that cannot be served, or cannot verify drafts.
        ConfigError: Options that cannot work, or not enough memory; or ranks of their own, which load it themselves.
    """
    if config.parallel.kind != "local":
        raise ConfigError("a loaded model runs in this process alone: name it to `build_engine` for ranks to load it")
    progress("checking that the model continues from what it has cached")
    check = self_check(loaded.model, loaded.layout)
    drafts = DraftSource.of(config)
    require_verifiable(drafts, loaded.name, check)
    drafter = drafts.load(loaded)
    config = after_check(config, check)
    progress("making room for the cache")
    memory = default_memory(loaded.model.device) if config.memory is None else config.memory
    cache = PrefixCache(cache_config(loaded.layout, config, memory, () if drafter is None else drafter.groups))
    blocks = cache.config.blocks
    runner = ModelRunner(loaded.model, loaded.layout, cache.geometry, blocks, check.single_steps)
    if drafter is not None:
        progress("measuring what a draft costs")
    speculator, measured = speculator_of(drafts, runner, drafter, config.max_running)
    planner = planner_of(measured)
    known = vocabulary(loaded.layout, loaded.tokenizer, end_tokens(loaded))
    engine = Engine(cache, LocalExecutor(runner, speculator), config, known, planner=planner)
    tokenizer = HubTokenizer(copy.deepcopy(loaded.tokenizer))
    room = capacity(blocks, cache.geometry)
    return BuiltEngine(loaded.name, engine, tokenizer, loaded.layout, check, room, planner)
