"""From the keys of a scenario to a configuration of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.cache import (
    CacheConfig,
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.conformance.decoding import convert, made
from headway.errors import ScenarioError

__all__ = ["configuration"]

_KINDS: dict[str, Callable[..., LayerSpec]] = {
    "full": FullAttention,
    "sliding_window": SlidingWindow,
    "chunked_local": ChunkedLocal,
    "recurrent": Recurrent,
}


def configuration(world: Mapping[str, Any], where: str) -> CacheConfig:
    """The configuration that `world` describes: the fields of `CacheConfig`, each group with its `kind`.

    Raises:
        ScenarioError: A key that the form does not know, or a value of the wrong kind.
        ConfigError: Sizes that contradict each other, as from the cache itself.
    """
    given = dict(world)
    items = enumerate(convert(given.get("groups", ()), list[Any], f"{where}: groups"), 1)
    given["groups"] = [_group(item, f"{where}: group {number}") for number, item in items]
    for name, kind in (("layout", ParallelLayout), ("cost", ComputeCost)):
        if name in given:
            given[name] = made(given[name], kind, f"{where}: {name}")
    anything = dict.fromkeys(("groups", "layout", "cost"), Any)
    return made(given, CacheConfig, where, eviction=str, placement=tuple[str, ...], **anything)


def _group(value: object, where: str) -> LayerSpec:
    given = convert(value, dict[str, Any], where)
    kind = given.pop("kind", None)
    if kind not in _KINDS:
        raise ScenarioError(f"{where}: 'kind' is {kind!r}, it must be one of {', '.join(_KINDS)}")
    return made(given, _KINDS[kind], where)
