"""All that one run is made with, as it was asked for, and what it is replayed against."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from headway.replay.ask.catalogue import Model
from headway.replay.ask.options import ClockChoice, Hardware, ModelChoice, PolicyChoice, RankChoice, TraceChoice
from headway.replay.ask.sizing import known_roofline, memory_of, sized_model, tiers_of, timing_of
from headway.replay.config import ReplayConfig

__all__ = ["Setting"]

_EXAMPLE_MODEL = "kimi-linear"
"""Model of a command without a trace and a model."""


@dataclass(frozen=True)
class Setting:
    """All that one run is made with, as it was asked for.

    Attributes:
        model: The model.
        ranks: Layout and data types.
        hardware: Memory or GPUs.
        policy: What the cache keeps and drops.
        clock: Whether arrival times count.
        preset: The engine to imitate, with settings; None for the cache itself.
        outputs: How answers are read, see `ReplayConfig`.
    """

    model: ModelChoice
    ranks: RankChoice = field(default_factory=RankChoice)
    hardware: Hardware = field(default_factory=Hardware)
    policy: PolicyChoice = field(default_factory=PolicyChoice)
    clock: ClockChoice = field(default_factory=ClockChoice)
    preset: str | None = None
    outputs: str | None = None

    def with_example(self, trace: TraceChoice, usual: str) -> Setting:
        """The setting as a command takes it: that of the example where neither a trace nor a model was given.

        Args:
            trace: The trace; it is not read.
            usual: Memory of the example.

        Raises:
            TraceError: There is no such trace. It is told before a model is asked for, and before a long run.
            ConfigError: Options that would do nothing.
        """
        trace.require()
        self.hardware.check()
        if trace.trace is not None or self.model.model or self.model.by_hand:
            return self
        memory = self.hardware.memory or (None if self.hardware.gpu else usual)
        return self.changed(model=replace(self.model, model=_EXAMPLE_MODEL), memory=memory)

    def changed(self, **values: Any) -> Setting:
        """This setting with other values of some fields, its own or those of its records."""
        parts = {}
        for part in fields(self):
            record = getattr(self, part.name)
            if part.name in values:
                parts[part.name] = values[part.name]
            elif is_dataclass(record) and not isinstance(record, type):
                inner = {one.name: values[one.name] for one in fields(record) if one.name in values}
                parts[part.name] = replace(record, **inner)
        return replace(self, **parts)

    def configure(self) -> tuple[ReplayConfig, Model]:
        """What to replay against, and the model.

        Raises:
            ConfigError: What cannot work.
        """
        layout, model = self.ranks.layout(), sized_model(self.model, self.ranks)
        timing = timing_of(self.clock, self.hardware, model, layout)
        room = memory_of(self.hardware, model, layout)
        policies = self.policy.kinds, self.policy.eviction, self.policy.alignment, self.outputs
        roofline = known_roofline(self.clock, self.hardware, model, layout)
        config = ReplayConfig(model.groups, room, layout, model.cost, *policies, preset=self.preset, timing=timing)
        config = replace(config, layers=model.layers, kinds=model.kinds, roofline=roofline)
        config = replace(config, tiers=tiers_of(self.hardware, layout))
        return config, model
