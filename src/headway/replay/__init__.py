"""Traces in, hit rates and reasons out: the cache that serves, run on recorded requests without an accelerator.

trace = read_trace("trace.jsonl")
config = ReplayConfig([FullAttention("attention", 27_648), Recurrent("state", 56_171_520)], memory=20_000_000_000,
                      layout=ParallelLayout(tp=8, dcp=8))
result = replay_trace(trace, config, clairvoyant=True)
result.whole.token_hit_rate, result.whole.lost, result.clairvoyant.token_hit_rate
"""

from headway.formats import FORMATS, RecordingWriter, Trace, TraceBuilder
from headway.replay.ask.record import record_of
from headway.replay.ask.rendering import read_trace
from headway.replay.config import (
    PRESETS,
    HeadwayInVllmPreset,
    MarconiPreset,
    ReplayConfig,
    Roofline,
    SglangPreset,
    Timing,
    VllmPreset,
    gpu_of,
    roofline_of,
)
from headway.replay.replay import replay_trace
from headway.replay.run.clairvoyant import clairvoyant_hits
from headway.replay.trace.generate import WORKLOADS, generate
from headway.replay.trace.prefixes import endless_matches, read_outputs
from headway.tell.latency import Latency
from headway.tell.run import Figures, Kind, Memory, ReplayResult, RunRecord

__all__ = [
    "FORMATS",
    "PRESETS",
    "WORKLOADS",
    "Figures",
    "HeadwayInVllmPreset",
    "Kind",
    "Latency",
    "MarconiPreset",
    "Memory",
    "RecordingWriter",
    "ReplayConfig",
    "ReplayResult",
    "Roofline",
    "RunRecord",
    "SglangPreset",
    "Timing",
    "Trace",
    "TraceBuilder",
    "VllmPreset",
    "clairvoyant_hits",
    "endless_matches",
    "generate",
    "gpu_of",
    "read_outputs",
    "read_trace",
    "record_of",
    "replay_trace",
    "roofline_of",
]
