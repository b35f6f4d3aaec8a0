"""What every way of building an engine has in common."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from headway.cache import CacheConfig, CacheGeometry, LayerSpec
from headway.engine.config import EngineConfig
from headway.engine.drafts import DraftPlanner
from headway.engine.engine import Engine, Vocabulary
from headway.engine.tokenizer import HubTokenizer
from headway.runtime.layout import ModelLayout
from headway.runtime.memory import Capacity, blocks_that_fit
from headway.runtime.selfcheck import SelfCheck

__all__ = ["BuiltEngine", "after_check", "cache_config", "vocabulary"]

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
        drafts: Who chooses the lengths of drafts; None without drafts.
    """

    name: str
    engine: Engine
    tokenizer: HubTokenizer
    layout: ModelLayout
    check: SelfCheck
    capacity: Capacity
    drafts: DraftPlanner | None = None


def after_check(config: EngineConfig, check: SelfCheck) -> EngineConfig:
    """The options that a model's self-check leaves, with a warning where that is not what was asked for."""
    if check.warning is None:
        return config
    logger.warning("%s", check.warning)
    return replace(config, prefix_reuse=False, chunked_prefill=False)


def cache_config(
    layout: ModelLayout, config: EngineConfig, memory: int, drafter: Sequence[LayerSpec] = ()
) -> CacheConfig:
    """How the cache of a model, and of its drafter's groups, is set up in `memory` bytes on every rank.

    Raises:
        ConfigError: Sizes that do not go together, or too little memory.
    """
    parallel, groups = config.parallel.layout, (*layout.groups, *drafter)
    geometry = CacheGeometry(groups, parallel, block_tokens=config.block_tokens)
    return CacheConfig(
        groups=groups,
        layout=parallel,
        blocks=blocks_that_fit(memory, geometry),
        block_tokens=config.block_tokens,
        checkpoint_alignment=config.checkpoint_alignment,
        placement=config.placement,
        eviction=config.eviction,
        cost=layout.cost,
        check=config.check,
    )


def vocabulary(layout: ModelLayout, tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...]) -> Vocabulary:
    """What an engine has to know of a model's tokens. The tokenizer is copied."""
    return Vocabulary(
        size=layout.vocab_size,
        decode=HubTokenizer(copy.deepcopy(tokenizer)).decode,
        eos=eos,
        max_model_len=layout.max_tokens,
    )
