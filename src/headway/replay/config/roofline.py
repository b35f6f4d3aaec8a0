"""How long a step takes, from a roofline of model and GPU: the longer of computing and of moving bytes.

A step computes tokens [s, s + c) of each of its rows. With F(n) = linear x n + quadratic x n^2 / 2 for the first n
tokens of a prompt (`ComputeCost`, in FLOPs of the whole model):

    compute    sum of F(s + c) - F(s)            /  (ranks x peak FLOP/s x share reached)
    memory     weights + attention + states      /  (peak bytes/s of one rank x share reached)

    weights    W x min(1, tokens x active / parameters): every expert is read once some token needs it; with few tokens
               at most what each reads by itself (an upper bound: tokens may choose the same experts)
    attention  (s + c) x bytes of a token on one rank; of a window at most its reach
    states     2 x bytes of a state for each row: read and written

Prompts are bound by the first line, decoding by the second. The shares of the peaks that are reached (0.5 and 0.7
unless told otherwise) are assumptions, not measurements. Not modelled: communication between ranks, launches and
scheduling on the host, overlap of anything, the last layer's vocabulary. So the times are estimates, more often too
short than too long; what they are good for is the comparison of two settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import ComputeCost, FullAttention, LayerSpec, ParallelLayout, Recurrent
from headway.engine import DEFAULT_WAIT_TOKENS
from headway.errors import ConfigError
from headway.replay.config.gpus import Gpu
from headway.replay.config.groups import reach_of

__all__ = ["Roofline", "Timing", "roofline_of"]

_FP8_WEIGHT = 1.25
"""Bytes of a weight below which matrices are taken to be multiplied in fp8."""


@dataclass(frozen=True)
class Roofline:
    """What a step costs.

    Attributes:
        cost: FLOPs of tokens, of the whole model.
        flops: FLOP/s that all ranks reach together.
        bandwidth: Bytes/s that one rank reaches.
        weight_bytes: Bytes of the weights on one rank.
        active: Share of the weights that a token needs.
        token_bytes: Bytes of a token's attention entries on one rank.
        state_bytes: Bytes of a state on one rank.
        windows: Bytes of a token on one rank, and tokens within reach, of each kind of window.
        source: Where it is from, for people.
        gpu: Name of the GPU.
    """

    cost: ComputeCost
    flops: float
    bandwidth: float
    weight_bytes: float
    active: float
    token_bytes: float
    state_bytes: float
    windows: Sequence[tuple[float, int]] = ()
    source: str = ""
    gpu: str = ""

    def prefill_seconds(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps of one row each, float64 [n]: step i computes tokens [starts[i], starts[i] + counts[i])."""
        ends, cost = (starts + counts).astype(np.float64), self.cost
        computed = counts * (cost.linear + 0.5 * cost.quadratic * (ends + starts))
        moved = self.weight_bytes * np.minimum(1.0, counts * self.active) + self._held(ends, counts)
        seconds: NDArray[np.float64] = np.maximum(computed / self.flops, moved / self.bandwidth)
        return seconds

    def decode_seconds(self, contexts: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Seconds per token of answers behind `contexts` tokens, each with `rows` like it in a step, float64 [n]."""
        computed = rows * (self.cost.linear + self.cost.quadratic * contexts)
        moved = self.weight_bytes * min(1.0, rows * self.active) + rows * self._held(contexts, np.ones(1))
        seconds: NDArray[np.float64] = np.maximum(computed / self.flops, moved / self.bandwidth) / rows
        return seconds

    def _held(self, ends: NDArray[np.float64], counts: NDArray[Any]) -> NDArray[np.float64]:
        """Bytes of attention and states that a row reads, float64 [n]."""
        held: NDArray[np.float64] = ends * self.token_bytes + 2 * self.state_bytes
        for size, reach in self.windows:
            held = held + size * np.minimum(ends, reach + counts)
        return held

    def seconds(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> float:
        """Seconds of a step whose row i computes tokens [starts[i], starts[i] + counts[i])."""
        ends = (starts + counts).astype(np.float64)
        cost = self.cost
        computed = counts * (cost.linear + 0.5 * cost.quadratic * (ends + starts))
        moved = self.weight_bytes * min(1.0, float(counts.sum()) * self.active)
        moved += float(ends.sum()) * self.token_bytes + 2 * self.state_bytes * int((counts > 0).sum())
        moved += sum(size * float(np.minimum(ends, reach + counts).sum()) for size, reach in self.windows)
        return max(float(computed.sum()) / self.flops, moved / self.bandwidth)


@dataclass(frozen=True)
class Timing:
    """Replay with arrival times.

    Attributes:
        roofline: What a step costs.
        speed: Arrivals are compressed by this factor: 2 is twice the traffic.
        max_running: Most requests that run at once.
        step_tokens: Most tokens of one step.
        wait_tokens: A request waits where a running one is about to compute so many of its tokens; 0: never.
    """

    roofline: Roofline
    speed: float = 1.0
    max_running: int = 64
    step_tokens: int = 8192
    wait_tokens: int = DEFAULT_WAIT_TOKENS

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the option.
        """
        if not self.speed > 0:
            raise ConfigError(f"speed is {self.speed}, it must be positive: 2 is twice the recorded traffic")
        if self.max_running < 1 or self.step_tokens < self.max_running:
            raise ConfigError(
                f"max_running={self.max_running} and step_tokens={self.step_tokens}: at least one request must run, "
                f"and each that runs needs one token of every step"
            )


def roofline_of(
    groups: Sequence[LayerSpec],
    layout: ParallelLayout,
    cost: ComputeCost,
    gpu: Gpu,
    *,
    parameters: float,
    weight_bytes: float,
    reached: tuple[float, float] = (0.5, 0.7),
) -> Roofline:
    """The roofline of a model on `layout`'s ranks, one GPU each.

    Args:
        groups: Cache groups: bytes of one rank, before context parallelism.
        layout: The parallel layout.
        cost: FLOPs of tokens, of the whole model. Half of `linear` is taken for the parameters that a token needs.
        gpu: The GPU.
        parameters: Parameters of the model.
        weight_bytes: Bytes of the weights, each counted once.
        reached: Shares of the peak FLOP/s and of the peak bandwidth that are reached.

    Raises:
        ConfigError: A share outside (0, 1], or no parameters.
    """
    if not all(0.0 < share <= 1.0 for share in reached):
        raise ConfigError(f"efficiency {reached[0]},{reached[1]}: shares of the peak rates lie in (0, 1]")
    if parameters <= 0 or weight_bytes <= 0:
        raise ConfigError("a roofline needs the model's parameters and the bytes of its weights")
    token = state = 0.0
    windows = []
    for group in groups:
        if isinstance(group, Recurrent):
            state += group.state_bytes
        elif isinstance(group, FullAttention):
            token += group.bytes_per_token / (layout.shards if group.sharded else 1)
        else:
            windows.append((float(group.bytes_per_token), reach_of(group)))
    ranks = layout.tp * layout.pcp
    in_fp8 = gpu.fp8_flops is not None and weight_bytes / parameters < _FP8_WEIGHT
    peak = gpu.fp8_flops if in_fp8 and gpu.fp8_flops is not None else gpu.bf16_flops
    return Roofline(
        cost=cost,
        flops=ranks * peak * reached[0],
        bandwidth=gpu.memory_bandwidth * reached[1],
        weight_bytes=weight_bytes / layout.tp,  # prefill context parallelism has all of them again
        active=min(1.0, 0.5 * cost.linear / parameters),
        token_bytes=token,
        state_bytes=state,
        windows=tuple(windows),
        gpu=gpu.name,
        source=(
            f"roofline of {ranks} x {gpu.name} ({gpu.source}): {peak / 1e12:,.0f} TFLOP/s in "
            f"{'fp8' if in_fp8 else 'bf16'} and {gpu.memory_bandwidth / 1e12:.2f} TB/s each, of which "
            f"{reached[0]:.0%} and {reached[1]:.0%} are taken to be reached"
        ),
    )
