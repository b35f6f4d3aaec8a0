"""What a run is made with: model groups, memory, policies, clock, preset; and how the cache is sized for a trace."""

from headway.replay.config.config import ReplayConfig
from headway.replay.config.gpus import Gpu, gpu_of
from headway.replay.config.presets import PRESETS, HeadwayInVllmPreset, MarconiPreset, Preset, SglangPreset, VllmPreset
from headway.replay.config.roofline import Roofline, Timing, roofline_of
from headway.replay.config.tiers import LINKS, Tier, link_of

__all__ = [
    "LINKS",
    "PRESETS",
    "Gpu",
    "HeadwayInVllmPreset",
    "MarconiPreset",
    "Preset",
    "ReplayConfig",
    "Roofline",
    "SglangPreset",
    "Tier",
    "Timing",
    "VllmPreset",
    "gpu_of",
    "link_of",
    "roofline_of",
]
