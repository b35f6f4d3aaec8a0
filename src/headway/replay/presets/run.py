"""Running a preset: one way in for all of them, and a result of the same form as the cache's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.replay.endless import Reading
from headway.replay.presets.ledger import Progress
from headway.replay.presets.settings import SglangPreset, VllmPreset, preset_of
from headway.replay.presets.sglang import run_sglang, sglang_pools
from headway.replay.presets.vllm import run_vllm, vllm_pages
from headway.replay.result import Recording
from headway.replay.scaling import ReplayConfig
from headway.replay.trace import Trace

__all__ = ["PresetRun", "check_preset", "run_preset"]


@dataclass(frozen=True)
class PresetRun:
    """What a preset's run found.

    Attributes:
        recording: Hits, losses and counters.
        grain: Hits are multiples of that many tokens.
        block_bytes: Bytes of what memory is counted in, on one rank: a page, or a single byte where there are no pages.
        blocks: How many of them there are; 0: no limit.
        settings: The preset's settings, with what it found for itself in the place of each 0.
    """

    recording: Recording
    grain: int
    block_bytes: int
    blocks: int
    settings: VllmPreset | SglangPreset


def check_preset(config: ReplayConfig) -> None:
    """Notice before anything is run that the preset of a configuration cannot work with its model or memory.

    Raises:
        ConfigError: It cannot.
    """
    settings = preset_of(config.preset)
    if isinstance(settings, VllmPreset):
        vllm_pages(config, settings)
    elif isinstance(settings, SglangPreset):
        sglang_pools(config, settings)


def run_preset(
    trace: Trace,
    config: ReplayConfig,
    settings: VllmPreset | SglangPreset,
    reading: Reading,
    matches: NDArray[np.int64],
    progress: Progress | None,
) -> PresetRun:
    """Run a trace through a preset that has a model of its own.

    Raises:
        ConfigError: A model or memory that the preset cannot work with.
    """
    if isinstance(settings, SglangPreset):
        found = run_sglang(trace, config, settings, reading, matches, progress)
        return PresetRun(found, settings.grain_tokens, 1, config.memory or 0, settings)
    pages = vllm_pages(config, settings)
    found = run_vllm(trace, pages, settings, reading, matches, progress)
    told = replace(settings, block_tokens=pages.block_tokens, state_groups=pages.state_groups)
    return PresetRun(found, pages.block_tokens, pages.page_bytes, pages.count, told)
