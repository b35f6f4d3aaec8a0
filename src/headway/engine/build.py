"""From a model's name and an `EngineConfig` to an engine that is ready to start."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headway.cache import CacheConfig, CacheGeometry, PrefixCache
from headway.engine.config import EngineConfig
from headway.engine.drafts import DraftPlanner
from headway.engine.engine import Engine, Vocabulary
from headway.engine.local import LocalExecutor
from headway.engine.measuring import measure_costs
from headway.engine.tokenizer import HubTokenizer
from headway.errors import ConfigError, ModelError
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.layout import ModelLayout
from headway.runtime.loading import LoadedModel, load_model
from headway.runtime.memory import Capacity, blocks_that_fit, capacity, default_memory, format_bytes
from headway.runtime.runner import ModelRunner
from headway.runtime.selfcheck import SelfCheck, self_check

__all__ = ["BuiltEngine", "build_engine", "engine_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what was found out while it was built.

    Attributes:
        name: What the model is called.
        engine: The engine, not started.
        tokenizer: The model's tokenizer, for one thread of the caller.
        layout: What the model stores.
        check: What the self-check found.
        capacity: What the cache's memory holds.
        drafter: Who drafts, or None.
    """

    name: str
    engine: Engine
    tokenizer: HubTokenizer
    layout: ModelLayout
    check: SelfCheck
    capacity: Capacity
    drafter: Drafter | None = None


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
    return engine_of(load_model(source, config.device, config.dtype), config, progress)


def engine_of(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None] = lambda text: None
) -> BuiltEngine:
    """Build an engine for a model that is loaded.

    Raises:
        ModelError: The model contradicts itself in a way that cannot be served.
        ConfigError: Options that cannot work, or not enough memory.
    """
    progress("checking that the model continues from what it has cached")
    check = self_check(loaded.model, loaded.layout)
    drafter = _drafter(loaded, config, check)
    if check.warning is not None:
        logger.warning("%s", check.warning)
        config = replace(config, prefix_reuse=False, chunked_prefill=False)
    progress("making room for the cache")
    cache = PrefixCache(_cache_config(loaded, config, drafter))
    blocks = cache.config.blocks
    try:
        runner = ModelRunner(loaded.model, loaded.layout, cache.geometry, blocks, check.single_steps)
    except (RuntimeError, MemoryError) as error:
        size = format_bytes(capacity(blocks, cache.geometry).bytes)
        raise ConfigError(f"there is no room for a cache of {size} on {config.device}: lower --memory") from error
    speculator = planner = None
    if drafter is not None:
        speculator = Speculator(runner, drafter, AcceptanceRule(config.draft_rule))
        progress("measuring what a draft costs")
        planner = DraftPlanner(drafter.name, drafter.most, measure_costs(speculator, config.max_running))
    executor = LocalExecutor(runner, speculator)
    engine = Engine(cache, executor, config, _vocabulary(loaded), planner=planner)
    tokenizer = HubTokenizer(copy.deepcopy(loaded.tokenizer))
    room = capacity(blocks, cache.geometry)
    return BuiltEngine(loaded.name, engine, tokenizer, loaded.layout, check, room, drafter)


def _drafter(loaded: LoadedModel, config: EngineConfig, check: SelfCheck) -> Drafter | None:
    """The drafter that was asked for.

    Raises:
        ModelError: There is none, or the model cannot verify drafts.
    """
    if config.draft == "none":
        return None
    if check.single_steps:
        raise ModelError(
            f"model {loaded.name!r} cannot continue by several tokens at once, so it cannot verify drafts: "
            "use --draft none"
        )
    return load_drafter(config.draft, loaded.model, loaded.folder, config.draft_tokens)


def _cache_config(loaded: LoadedModel, config: EngineConfig, drafter: Drafter | None) -> CacheConfig:
    groups = (*loaded.layout.groups, *(() if drafter is None else drafter.groups))
    geometry = CacheGeometry(groups, block_tokens=config.block_tokens)
    memory = default_memory(loaded.model.device) if config.memory is None else config.memory
    return CacheConfig(
        groups=groups,
        blocks=blocks_that_fit(memory, geometry),
        block_tokens=config.block_tokens,
        checkpoint_alignment=config.checkpoint_alignment,
        placement=config.placement,
        eviction=config.eviction,
        cost=loaded.layout.cost,
        check=config.check,
    )


def _vocabulary(loaded: LoadedModel) -> Vocabulary:
    return Vocabulary(
        size=loaded.layout.vocab_size,
        decode=HubTokenizer(copy.deepcopy(loaded.tokenizer)).decode,
        eos=_end_tokens(loaded),
        max_model_len=loaded.layout.max_tokens,
    )


def _end_tokens(loaded: LoadedModel) -> tuple[int, ...]:
    """Tokens that end an answer: those of the generation config, or the model's, and the tokenizer's."""
    generation: Any = getattr(loaded.model, "generation_config", None)
    given: Any = getattr(generation, "eos_token_id", None)
    if given is None:
        given = getattr(loaded.model.config, "eos_token_id", None)
    found = set(given) if isinstance(given, list | tuple) else {given}
    found.add(loaded.tokenizer.eos_token_id)
    return tuple(sorted(token for token in found if token is not None))
