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
from headway.conformance.fields import Fields

__all__ = ["configuration"]


def _full(fields: Fields, name: str) -> LayerSpec:
    return FullAttention(
        name, fields.integer("bytes_per_token"), fields.integer("lookahead", 0), fields.flag("sharded", True)
    )


def _window(fields: Fields, name: str) -> LayerSpec:
    return SlidingWindow(
        name, fields.integer("bytes_per_token"), fields.integer("window"), fields.integer("lookahead", 0)
    )


def _chunked(fields: Fields, name: str) -> LayerSpec:
    return ChunkedLocal(
        name, fields.integer("bytes_per_token"), fields.integer("chunk"), fields.integer("lookahead", 0)
    )


def _recurrent(fields: Fields, name: str) -> LayerSpec:
    return Recurrent(name, fields.integer("state_bytes"))


_KINDS: dict[str, Callable[[Fields, str], LayerSpec]] = {
    "full": _full,
    "sliding_window": _window,
    "chunked_local": _chunked,
    "recurrent": _recurrent,
}


def configuration(world: Mapping[str, Any], where: str) -> CacheConfig:
    """The configuration that `world` describes.

    Raises:
        ScenarioError: A key that the form does not know, or a value of the wrong kind.
        ConfigError: Sizes that contradict each other, as from the cache itself.
    """
    fields = Fields(world, where)
    items = fields.items("groups", required=True)
    groups = tuple(_group(item, f"{where}: group {number}") for number, item in enumerate(items, 1))
    options: dict[str, Any] = {}
    if fields.has("layout"):
        options["layout"] = _layout(fields.child("layout"))
    if fields.has("cost"):
        options["cost"] = _cost(fields.child("cost"))
    for key in ("block_tokens", "block_bytes", "checkpoint_alignment", "history_tokens", "answer_stretch"):
        if fields.has(key):
            options[key] = fields.integer(key)
    for key in ("pin_share", "pin_seconds"):
        if fields.has(key):
            options[key] = fields.number(key, 0.0)
    if fields.has("placement"):
        options["placement"] = fields.texts("placement")
    if fields.has("eviction"):
        options["eviction"] = fields.text("eviction")
    if fields.has("exports_inside"):
        options["exports_inside"] = fields.flag("exports_inside")
    blocks = fields.integer("blocks")
    fields.done()
    return CacheConfig(groups=groups, blocks=blocks, **options)


def _layout(fields: Fields) -> ParallelLayout:
    sizes = {key: fields.integer(key, 1) for key in ("tp", "dcp", "pcp", "interleave")}
    fields.done()
    return ParallelLayout(**sizes)


def _cost(fields: Fields) -> ComputeCost:
    cost = ComputeCost(fields.number("linear", 1.0), fields.number("quadratic", 1e-5))
    fields.done()
    return cost


def _group(value: object, where: str) -> LayerSpec:
    fields = Fields(value, where)
    kind = fields.text("kind")
    if kind not in _KINDS:
        raise fields.error(f"'kind' is {kind!r}, it must be one of {', '.join(_KINDS)}")
    group = _KINDS[kind](fields, fields.text("name"))
    fields.done()
    return group
