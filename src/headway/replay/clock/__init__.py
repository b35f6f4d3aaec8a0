"""The clock `trace`: arrivals as recorded, steps that take as long as a roofline says, the engine's own scheduler."""

from headway.replay.clock.latency import Latency, Percentiles, Wait
from headway.replay.clock.roofline import Roofline, Timing, roofline_of

__all__ = ["Latency", "Percentiles", "Roofline", "Timing", "Wait", "roofline_of"]
