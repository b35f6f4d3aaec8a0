"""Builds an engine from a model's name and the options: model, self-check, memory, cache, scheduler.

A model that one process computes is loaded here. With ranks elsewhere, the driver reads the model's config and the
ranks load its weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headway.cache import CacheConfig, CacheGeometry, LayerSpec, PrefixCache
from headway.engine.config import EngineConfig, ParallelConfig
from headway.engine.engine import Engine, ModelFacts
from headway.engine.executor import Executor
from headway.engine.lower_build import lower_tiers
from headway.engine.ranks.drafting import DraftSource, ReadyDrafter, planner_of, require_verifiable, speculator_of
from headway.engine.ranks.driver import RankedExecutor, RankGroup
from headway.engine.ranks.in_process import LocalExecutor
from headway.engine.ranks.messages import Loaded, Prepare
from headway.engine.ranks.processes import ProcessRanks, devices_of_ranks
from headway.engine.ranks.ray_actors import RayRanks
from headway.engine.scheduling.drafts import DraftPlanner
from headway.engine.tokenizer import HubTokenizer
from headway.errors import ConfigError
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.identity import weights_identity
from headway.runtime.loading import (
    LoadedModel,
    end_tokens,
    layout_of_rank,
    load_model,
    load_tokenizer,
    read_device,
    resolve_dtype,
    resolve_source,
)
from headway.runtime.model.layout import ModelLayout
from headway.runtime.model.memory import (
    Capacity,
    available_host_memory,
    blocks_that_fit,
    capacity,
    default_memory,
)
from headway.runtime.model.stored import stored_layout
from headway.runtime.quality import Quality, quality_of
from headway.runtime.selfcheck import SelfCheck, self_check
from headway.sizes import counted, format_bytes

__all__ = ["BuiltEngine", "build_engine", "engine_of"]

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]

_WHERE_ONE_PIECE_ENDS = ("prompt_end", "answer_end", "breakpoint", "boundary")
"""Kinds of checkpoints of a model that continues token by token only. Others lie where a prompt in one piece would have
to stop early, and all tokens behind them be computed one by one."""

_TOLD_MEANWHILE = 8
"""Ended requests of which the compared policies hear while ranks compute a step: a millisecond or two."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what was found out while it was built.

    Attributes:
        name: What the model is called.
        engine: The engine, not started.
        tokenizer: The model's tokenizer, for the caller's threads.
        layout: What the model stores.
        check: What the self-check found.
        capacity: What the cache's memory holds.
        drafts: Who chooses the lengths of drafts; None without drafts.
        quality: What the types that the cache stores as cost; None where it stores as the model computes.
    """

    name: str
    engine: Engine
    tokenizer: HubTokenizer
    layout: ModelLayout
    check: SelfCheck
    capacity: Capacity
    drafts: DraftPlanner | None = None
    quality: Quality | None = None


def build_engine(source: str | None, config: EngineConfig, progress: Progress = lambda text: None) -> BuiltEngine:
    """Load a model, check it, and build an engine for it.

    Args:
        source: A directory, a hub id, or None for the built-in model.
        config: The options; `config.parallel` says what ranks there are.
        progress: Called with a few words before each stage.

    Raises:
        ModelError: The model cannot be loaded or served.
        ConfigError: Options that cannot work, or not enough memory.
        RanksLostError: A rank died on the way.
    """
    _drafter_groups(DraftSource.of(config), source, config)  # a drafter that is not there is told before anything loads
    config.tiers.require()
    _require_host_memory(config)
    progress(f"loading {source or 'the built-in model'}")
    if config.parallel.kind != "local":
        return _build_on_ranks(source, config, progress)
    return engine_of(load_model(source, config.device, config.dtype), config, progress)


def engine_of(loaded: LoadedModel, config: EngineConfig, progress: Progress = lambda text: None) -> BuiltEngine:
    """Build an engine for a model that is loaded.

    Raises:
        ModelError: The model contradicts itself in a way that cannot be served, or cannot verify drafts.
        ConfigError: Options that cannot work, or not enough memory; or ranks of their own, which load it themselves.
    """
    if config.parallel.kind != "local":
        raise ConfigError("a loaded model runs in this process alone: name it to `build_engine` for ranks to load it")
    layout = stored_layout(loaded.layout, config.stored)
    progress("checking that the model continues from what it has cached")
    check = self_check(loaded.model, loaded.layout)
    drafts = DraftSource.of(config)
    require_verifiable(drafts, loaded.name, check)
    drafter = drafts.load(loaded)
    config = _after_check(config, layout, check)
    if layout != loaded.layout:
        progress("measuring what storing as smaller types costs in quality")
    quality = _told(quality_of(loaded, config.stored, check.single_steps))
    progress("making room for the cache")
    memory = default_memory(loaded.model.device) if config.memory is None else config.memory
    cache = PrefixCache(_cache_config(layout, config, memory, () if drafter is None else drafter.groups))
    runner = ModelRunner(loaded.model, layout, cache.geometry, cache.config.blocks, check.single_steps)
    host = _host_blocks(config, cache.geometry)
    if drafter is not None:
        progress("measuring what a draft costs")
    source = str(loaded.folder or loaded.name)
    whole = _Model(loaded.name, layout, loaded.tokenizer, end_tokens(loaded), check, source, quality)
    grammars = whole.grammars(config)
    speculator, measured = speculator_of(drafts, runner, drafter, config.max_running, grammars=grammars)
    return whole.on(cache, LocalExecutor(runner, speculator, grammars, host), config, measured, grammars)


def _build_on_ranks(source: str | None, config: EngineConfig, progress: Progress) -> BuiltEngine:
    """Start the ranks, load the model on each, and build an engine that drives them."""
    parallel = config.parallel
    name, computed = layout_of_rank(source, config.dtype, parallel.tp, parallel.dcp, config.device)
    layout = stored_layout(computed, config.stored)
    tokenizer = load_tokenizer(source)
    drafts = DraftSource.of(config)
    drafter = _drafter_groups(drafts, source, config)
    _refuse_impossible(name, layout, config, drafter)
    executor = RankedExecutor(_launcher(config), source, config.dtype, parallel, drafts, config.stored)
    try:
        progress(f"starting {parallel.ranks} ranks ({parallel.kind}), which load the model and check it")
        loaded = executor.load()
        check = loaded[0].check
        assert check is not None, "rank 0 checks the model"
        require_verifiable(drafts, name, check)
        _require_shareable(parallel, name, check)
        config = _after_check(config, layout, check)
        quality = _told(loaded[0].quality)
        progress("making room for the cache on every rank")
        cache = PrefixCache(_cache_config(layout, config, _memory(loaded, config), drafter))
        measured = _make_room(executor, cache, config, check)
        whole = _Model(name, layout, tokenizer, loaded[0].eos, check, source, quality)
        return whole.on(cache, executor, config, measured, whole.grammars(config))
    except BaseException:
        executor.close()
        raise


@dataclass(frozen=True)
class _Model:
    """What is known of a model, wherever its weights are.

    Attributes:
        source: Where its weights are, as for `load_model`.
        quality: See `BuiltEngine`.
    """

    name: str
    layout: ModelLayout
    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    check: SelfCheck
    source: str | None
    quality: Quality | None = None

    def grammars(self, config: EngineConfig) -> Grammars:
        """Forms of answers in the model's tokens. On a tokenizer of their own: it is read by other threads."""
        return Grammars(copy.deepcopy(self.tokenizer), self.layout.vocab_size, self.eos, config.max_running)

    def on(
        self,
        cache: PrefixCache,
        executor: Executor,
        config: EngineConfig,
        measured: ReadyDrafter | None,
        grammars: Grammars,
    ) -> BuiltEngine:
        """Put an engine together; `grammars` checks constraints.

        Its tokenizer is a copy: what the caller sets on another is no matter of it.
        """
        words, tokenizer = HubTokenizer(copy.deepcopy(self.tokenizer)), copy.deepcopy(self.tokenizer)
        layout, shown = self.layout, partial(words.decode, special=True)
        facts = ModelFacts(
            layout.vocab_size,
            words.decode,
            self.eos,
            layout.max_tokens,
            layout.long_rope,
            compile=grammars.compile,
            decode_all=shown,
        )
        planner = planner_of(measured)
        lower = lower_tiers(
            cache,
            executor,
            config.tiers,
            _host_blocks(config, cache.geometry),
            partial(_identity, self.source, DraftSource.of(config)),
            self.name,
        )
        if isinstance(executor, RankedExecutor):
            executor.meanwhile = partial(cache.catch_up, _TOLD_MEANWHILE)
        engine = Engine(cache, executor, config, facts, planner=planner, lower=lower)
        room = capacity(cache.config.blocks, cache.geometry)
        tokens = HubTokenizer(tokenizer)
        return BuiltEngine(self.name, engine, tokens, self.layout, self.check, room, planner, self.quality)


def _told(quality: Quality | None) -> Quality | None:
    """The same, with a warning where a type does harm."""
    if quality is not None and quality.warning is not None:
        logger.warning("%s", quality.warning)
    return quality


def _identity(source: str | None, drafts: DraftSource) -> bytes:
    """Which weights compute entries: the model's, and those of a drafter that has its own.

    Raises:
        ModelError: Nothing tells them.
    """
    path = resolve_source(source)[1]
    return weights_identity(path) + drafts.identity(Path(path) if Path(path).is_dir() else None)


def _host_blocks(config: EngineConfig, geometry: CacheGeometry) -> int:
    """Blocks in the host memory of every rank."""
    asked = config.tiers.host_memory
    try:
        return 0 if asked is None else blocks_that_fit(asked, geometry)
    except ConfigError as error:
        raise ConfigError(f"--host-memory: {error}") from error


def _require_host_memory(config: EngineConfig) -> None:
    """Refuse host memory that this machine has not: the system would give it, and end a rank that fills it.

    Raises:
        ConfigError: As said.
    """
    asked, ranks = config.tiers.host_memory, config.parallel.ranks
    if asked is None or config.parallel.kind == "ray":  # whose ranks may be on other machines
        return
    if ranks * asked > (there := available_host_memory()):
        raise ConfigError(
            f"--host-memory: {counted(ranks, 'rank')} of {format_bytes(asked)} are {format_bytes(ranks * asked)}, and "
            f"this machine has {format_bytes(there)} to spare: give at most {format_bytes(there // ranks)} per rank"
        )


def _after_check(config: EngineConfig, layout: ModelLayout, check: SelfCheck) -> EngineConfig:
    """The options that a model's self-check leaves, with a warning where that is not what was asked for."""
    if layout.dynamic_rope and layout.max_tokens is not None:
        logger.warning(
            "%s changes its rotary frequencies with every token behind %d (dynamic NTK scaling), so that answers would "
            "depend on earlier requests: requests are limited to %d tokens",
            *(layout.model, layout.max_tokens, layout.max_tokens),
        )
    if check.warning is None:
        return config
    logger.warning("%s", check.warning)
    placed = tuple(kind for kind in config.placement if kind in _WHERE_ONE_PIECE_ENDS)
    return replace(config, step_price=check.step_price, placement=placed)


def _geometry(layout: ModelLayout, config: EngineConfig, drafter: Sequence[LayerSpec]) -> CacheGeometry:
    return CacheGeometry((*layout.groups, *drafter), config.parallel.layout, block_tokens=config.block_tokens)


def _cache_config(
    layout: ModelLayout, config: EngineConfig, memory: int, drafter: Sequence[LayerSpec] = ()
) -> CacheConfig:
    """How the cache of a model, and of its drafter's groups, is set up in `memory` bytes on every rank.

    Raises:
        ConfigError: Sizes that do not go together, or too little memory.
    """
    return CacheConfig(
        groups=(*layout.groups, *drafter),
        layout=config.parallel.layout,
        blocks=blocks_that_fit(memory, _geometry(layout, config, drafter)),
        block_tokens=config.block_tokens,
        checkpoint_alignment=config.checkpoint_alignment,
        placement=config.placement,
        eviction=config.eviction,
        pin_share=config.pin_share,
        pin_seconds=config.pin_seconds,
        cost=layout.cost,
        check=config.check,
    )


def _drafter_groups(drafts: DraftSource, source: str | None, config: EngineConfig) -> Sequence[LayerSpec]:
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


def _refuse_impossible(name: str, layout: ModelLayout, config: EngineConfig, drafter: Sequence[LayerSpec]) -> None:
    """Refuse before any rank starts what can be known to be impossible; it may take minutes to load a model."""
    if config.parallel.dcp > 1 and not any(spec.sharded for spec in layout.groups):
        raise ConfigError(
            f"dcp={config.parallel.dcp}: {name} has no full attention, and nothing else is split by tokens; leave "
            f"--dcp out"
        )
    geometry = _geometry(layout, config, drafter)
    if config.memory is not None:
        blocks_that_fit(config.memory, geometry)


def _require_shareable(parallel: ParallelConfig, name: str, check: SelfCheck) -> None:
    """Refuse prefill context parallelism for a model in which a rank cannot go on from another's states.

    Raises:
        ConfigError: It cannot.
    """
    if parallel.pcp > 1 and check.single_steps:
        raise ConfigError(
            f"pcp={parallel.pcp}: model {name!r} cannot continue by several tokens at once, so ranks cannot compute a "
            f"share each of a prompt; leave --pcp out"
        )


def _memory(loaded: Sequence[Loaded], config: EngineConfig) -> int:
    """Bytes for the cache on every rank: the rank with the least decides, and ranks of one machine share its memory."""
    if config.memory is not None:
        return config.memory
    shared = config.device == "cpu"
    return min(each.memory for each in loaded) // (len(loaded) if shared else 1)


def _make_room(
    executor: RankedExecutor, cache: PrefixCache, config: EngineConfig, check: SelfCheck
) -> ReadyDrafter | None:
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
        host_blocks=_host_blocks(config, cache.geometry),
        pcp=parallel.pcp,
    )
    made = executor.prepare(cache.geometry, room)
    planned = capacity(cache.config.blocks, cache.geometry).bytes
    assert all(each.bytes == planned for each in made), f"planned {planned} bytes per rank, made {made}"
    return made[0].drafter
