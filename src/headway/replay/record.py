"""One run with all that it was made from: what `--json` prints, a sweep keeps, and a report is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from headway.cache import LayerSpec
from headway.errors import TraceError
from headway.replay.catalogue import Model
from headway.replay.result import ReplayResult
from headway.replay.scaling import ReplayConfig
from headway.replay.specs import reach_of, size_of
from headway.replay.trace import Trace

__all__ = ["GroupSize", "ModelName", "RunRecord", "decode", "record_of", "settings_of"]

T = TypeVar("T")
_OWN = ("groups", "memory", "layout", "cost", "layers")
"""Fields of a configuration that a record keeps apart from its policy."""


@dataclass(frozen=True)
class ModelName:
    """The model.

    Attributes:
        name: Its name.
        source: Where its sizes are from.
        notes: What to know about them.
    """

    name: str
    source: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GroupSize:
    """A cache group on one rank, before context parallelism.

    Attributes:
        name: Its name.
        kind: Class of its spec.
        bytes: Bytes of one token, or of one state.
        lookahead: Later tokens that an entry depends on.
        reach: Tokens of a window or chunk, 0 for other kinds.
        sharded: Its tokens are split over context-parallel ranks.
        layers: Layers that it has; 0: not known.
    """

    name: str
    kind: str
    bytes: int
    lookahead: int = 0
    reach: int = 0
    sharded: bool = True
    layers: int = 0


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        model: The model.
        groups: Its cache groups.
        layout: Sizes tp, dcp and pcp.
        memory: Bytes of one rank for the cache; None for endless.
        cost: Compute of a prompt (linear, quadratic) and where it is from.
        policy: The other fields of the configuration, by name. Of its clock: GPU, speed and what a step may hold.
        trace: Format of the trace and tokens in a block of it.
        result: What was found.
    """

    model: ModelName
    groups: list[GroupSize]
    layout: dict[str, int]
    memory: int | None
    cost: dict[str, Any]
    policy: dict[str, Any]
    trace: dict[str, Any]
    result: ReplayResult

    @property
    def token_bytes(self) -> float:
        """Bytes that a token of full attention takes on one rank."""
        shards = self.layout["dcp"] * self.layout["pcp"]
        attention = (group for group in self.groups if group.kind == "FullAttention")
        return sum(group.bytes / (shards if group.sharded else 1) for group in attention)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that a checkpoint holds on one rank, beside entries of full attention."""
        sizes = (g.bytes * max(1, g.reach - 1) for g in self.groups if g.kind != "FullAttention")
        return sum(sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's recurrent states on one rank; 0 for a model without."""
        return sum(group.bytes for group in self.groups if group.kind == "Recurrent")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"result": self.result.as_dict()}

    @classmethod
    def from_dict(cls, found: Any, where: str = "run") -> RunRecord:
        """A record from what `as_dict` gave, through JSON or not. Unknown fields are left out.

        Raises:
            TraceError: Something else; names the field.
        """
        return decode(cls, found, where)


def record_of(result: ReplayResult, config: ReplayConfig, model: Model, trace: Trace) -> RunRecord:
    """The record of a run."""
    return RunRecord(
        model=ModelName(model.name, model.source, list(model.notes)),
        groups=_sizes(config),
        layout={"tp": config.layout.tp, "dcp": config.layout.dcp, "pcp": config.layout.pcp},
        memory=config.memory,
        cost={
            "linear": config.cost.linear,
            "quadratic": config.cost.quadratic,
            "source": model.cost_source or "assumed",
        },
        policy=_policy(config),
        trace={"format": trace.format, "block_tokens": trace.width},
        result=result,
    )


def settings_of(config: ReplayConfig) -> dict[str, Any]:
    """Everything in a configuration that a result depends on, as plain values: two equal ones give equal results."""
    return {
        "groups": [asdict(size) for size in _sizes(config)],
        "layout": asdict(config.layout),
        "memory": config.memory,
        "cost": asdict(config.cost),
        "policy": _policy(config) | {"timing": None if config.timing is None else str(config.timing)},
    }


def decode(kind: type[T], found: Any, where: str = "run") -> T:
    """A dataclass from plain values, by its annotations.

    Raises:
        TraceError: A field is missing or of another kind; names it.
    """
    if not isinstance(found, dict):
        raise TraceError(f"{where}: expected an object, found {type(found).__name__}")
    hints, given = get_type_hints(kind), {}
    for part in fields(kind):  # type: ignore[arg-type]
        if part.name in found:
            given[part.name] = _decoded(hints[part.name], found[part.name], f"{where}.{part.name}")
    try:
        return kind(**given)
    except TypeError as error:
        raise TraceError(f"{where}: not a run as `headway replay --json` prints it: {error}") from None


def _decoded(hint: Any, found: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return found
    if origin is UnionType:
        if found is None and NoneType in parts:
            return None
        return _decoded(next(part for part in parts if part is not NoneType), found, where)
    if is_dataclass(hint):
        return decode(hint, found, where)  # type: ignore[arg-type]
    if origin is list and isinstance(found, list):
        return [_decoded(parts[0], item, f"{where}[{i}]") for i, item in enumerate(found)]
    if origin is dict and isinstance(found, dict):
        return {key: _decoded(parts[1], item, f"{where}.{key}") for key, item in found.items()}
    wanted = origin or hint
    if isinstance(found, int) and wanted is float:
        return float(found)
    if not isinstance(found, wanted):
        raise TraceError(f"{where}: expected {wanted.__name__}, found {type(found).__name__}")
    return found


def _sizes(config: ReplayConfig) -> list[GroupSize]:
    return [_size(group, config.layers.get(group.name, 0)) for group in config.groups]


def _size(group: LayerSpec, layers: int) -> GroupSize:
    kind = type(group).__name__
    return GroupSize(group.name, kind, size_of(group), group.lookahead, reach_of(group), group.sharded, layers)


def _policy(config: ReplayConfig) -> dict[str, Any]:
    values = {part.name: getattr(config, part.name) for part in fields(config) if part.name not in _OWN}
    if config.timing is not None:
        clock = config.timing
        values["timing"] = {"gpu": clock.roofline.gpu, "speed": f"x{clock.speed:g}"}
        values["timing"] |= {"at once": clock.max_running, "tokens a step": clock.step_tokens}
    plain = {name: list(v) if isinstance(v, list | tuple) else v for name, v in values.items()}
    return {name: v if isinstance(v, str | int | float | list | dict | None) else str(v) for name, v in plain.items()}
