"""From what a user gives to a clock: which GPU, how fast requests arrive, what a step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cache import ParallelLayout
from headway.errors import ConfigError
from headway.replay.catalogue import Model
from headway.replay.clock.roofline import Timing, roofline_of
from headway.replay.gpus import gpu_of
from headway.replay.sizing import Hardware, checked_ranks, weights_of

__all__ = ["ClockChoice", "timing_of"]


@dataclass(frozen=True)
class ClockChoice:
    """How a user sets the clock.

    Attributes:
        clock: "order" or "trace".
        speed: Arrivals are compressed by this factor.
        max_running: Most requests that run at once.
        step_tokens: Most tokens of one step.
        efficiency: Shares of the peak FLOP/s and bandwidth that are reached, as FLOPS,BANDWIDTH.
    """

    clock: str = "order"
    speed: float = 1.0
    max_running: int = 64
    step_tokens: int = 8192
    efficiency: str = "0.5,0.7"

    @property
    def timed(self) -> bool:
        """Whether arrival times count."""
        return self.clock == "trace"


def timing_of(choice: ClockChoice, hardware: Hardware, model: Model, layout: ParallelLayout) -> Timing | None:
    """The clock, or None for "order".

    Raises:
        ConfigError: An unknown clock, options of the other clock, or a model or GPU of which too little is known.
    """
    if choice.clock == "order":
        if choice != ClockChoice():
            raise ConfigError("--speed, --max-running, --step-tokens and --efficiency need --clock trace")
        return None
    if choice.clock != "trace":
        raise ConfigError(f"clock {choice.clock!r}: use 'order' or 'trace'")
    if hardware.gpu is None:
        raise ConfigError("--clock trace estimates how long steps take: name the GPU, such as --gpu h200")
    if not model.cost_source:
        raise ConfigError(
            f"how much {model.name} computes for a token is not known here: give --active-parameters, such as 3B"
        )
    checked_ranks(hardware, layout)
    weights = weights_of(hardware, model)
    roofline = roofline_of(
        model.groups,
        layout,
        model.cost,
        gpu_of(hardware.gpu),
        parameters=model.parameters or weights / 2,
        weight_bytes=weights,
        reached=_shares(choice.efficiency),
    )
    return Timing(roofline, choice.speed, choice.max_running, choice.step_tokens)


def _shares(text: str) -> tuple[float, float]:
    try:
        flops, bandwidth = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--efficiency {text!r}: write two shares of the peak rates, such as 0.5,0.7") from None
    return flops, bandwidth
