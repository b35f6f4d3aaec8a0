"""Traces in, hit rates and reasons out: the cache that serves, run on recorded requests without an accelerator.

trace = read_trace("trace.jsonl")
config = ReplayConfig([FullAttention("attention", 27_648), Recurrent("state", 56_171_520)], memory=20_000_000_000,
                      layout=ParallelLayout(tp=8, dcp=8))
result = replay_trace(trace, config, clairvoyant=True)
result.whole.token_hit_rate, result.whole.lost, result.clairvoyant.token_hit_rate
"""

from headway.replay.clairvoyant import clairvoyant_hits
from headway.replay.clock import Latency, Roofline, Timing, roofline_of
from headway.replay.endless import endless_matches, read_outputs
from headway.replay.generate import WORKLOADS, generate
from headway.replay.presets import PRESETS, MarconiPreset, SglangPreset, VllmPreset
from headway.replay.readers import FORMATS, RecordingWriter, read_trace
from headway.replay.record import RunRecord, record_of
from headway.replay.result import Figures, Kind, Memory, ReplayResult
from headway.replay.run import replay_trace
from headway.replay.scaling import ReplayConfig
from headway.replay.trace import Trace, TraceBuilder

__all__ = [
    "FORMATS",
    "PRESETS",
    "WORKLOADS",
    "Figures",
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
    "read_outputs",
    "read_trace",
    "record_of",
    "replay_trace",
    "roofline_of",
]
