"""From the options of a command to one run: what `headway replay` and `headway explain` take alike."""

from __future__ import annotations

from dataclasses import replace

from headway.replay.catalogue import Model
from headway.replay.options import (
    ClockFlags,
    LayoutFlags,
    MemoryFlags,
    ModelFlags,
    PolicyFlags,
    TraceFlags,
    example_memory,
)
from headway.replay.scaling import ReplayConfig
from headway.replay.sizing import memory_of, sized_model
from headway.replay.timing import timing_of

__all__ = ["asked_run"]


def asked_run(
    trace: TraceFlags,
    model: ModelFlags,
    layout: LayoutFlags,
    memory: MemoryFlags,
    policy: PolicyFlags,
    usual: str,
    *,
    clock: ClockFlags | None = None,
    preset: str | None = None,
) -> tuple[ReplayConfig, Model]:
    """The configuration and the model that somebody asked for.

    Args:
        trace: The trace; it is not read.
        model: The model.
        layout: Layout and data types.
        memory: The memory.
        policy: Placement, eviction and alignment.
        usual: Memory of the example, where neither a trace nor a model is given.
        clock: The clock, where the command has one.
        preset: The engine to imitate.

    Raises:
        TraceError: There is no such trace.
        ConfigError: What cannot work, or would do nothing.
    """
    model, size = example_memory(trace, model, memory.memory, memory.gpu, usual)
    ranks, hardware = layout.layout(), replace(memory, memory=size).hardware()
    sized = sized_model(model.choice(layout.kv_dtype, layout.state_dtype), ranks)
    timing = None if clock is None else timing_of(clock.choice(), hardware, sized, ranks)
    room = memory_of(hardware, sized, ranks, timed=timing is not None)
    policies = policy.kinds, policy.eviction, policy.alignment, trace.outputs
    config = ReplayConfig(
        sized.groups, room, ranks, sized.cost, *policies, preset=preset, timing=timing, layers=sized.layers
    )
    return config, sized
