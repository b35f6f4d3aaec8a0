"""A grid of settings, and the configuration at each of its points."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from headway.errors import ConfigError
from headway.formats import Trace
from headway.replay.ask.catalogue import Model
from headway.replay.ask.folder import release_mark
from headway.replay.ask.record import settings_of
from headway.replay.ask.setting import Setting
from headway.replay.config import ReplayConfig
from headway.replay.config.scale import scale
from headway.replay.replay import check_preset

__all__ = ["Point", "fingerprint", "numbers", "points_of", "words"]


@dataclass(frozen=True)
class Point:
    """One run to do.

    Attributes:
        config: Its configuration.
        model: Its model.
        key: Name of trace, configuration and release together: equal keys mean equal results.
        values: Its values of the grid, by field.
    """

    config: ReplayConfig
    model: Model
    key: str
    values: dict[str, Any] = field(default_factory=dict)


def points_of(setting: Setting, axes: Mapping[str, Sequence[Any]], trace: Trace) -> list[Point]:
    """The points of a grid, each once.

    Args:
        setting: What is the same at all points.
        axes: Values of each field that is varied, see `Setting.changed`; every combination is a point.
        trace: The trace that will be run.

    Raises:
        ConfigError: A combination that cannot work; names it.
    """
    mark = fingerprint(trace)
    found: dict[str, Point] = {}
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        try:
            config, model = setting.changed(**values).configure()
            scale(config, trace.width, len(trace.symbols), len(trace))
            check_preset(config)
        except ConfigError as error:
            told = ", ".join(f"{name} {value}" for name, value in values.items() if len(axes[name]) > 1)
            raise ConfigError(f"{told}: {error}" if told else str(error)) from None
        made = {"trace": mark, "release": release_mark(), "model": model.name}
        text = json.dumps(made | settings_of(config), sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        found.setdefault(key, Point(config, model, key, values))
    return list(found.values())


def fingerprint(trace: Trace) -> str:
    """A name for what a trace says, whatever its file is called."""
    digest = hashlib.blake2b(f"{trace.width} {trace.outputs}".encode(), digest_size=12)
    for column in (trace.symbols, trace.offsets, trace.prompt_tokens, trace.answer_tokens, trace.times):
        digest.update(column.tobytes())
    for column in (trace.answers, trace.answer_offsets, trace.boundaries, trace.boundary_offsets):
        digest.update(column.tobytes())
    return digest.hexdigest()


def words(option: str, text: str) -> list[str]:
    """The values of an option, separated by commas.

    Raises:
        ConfigError: There are none.
    """
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"{option} is empty: write values separated by commas")
    return found


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers of an option, separated by commas.

    Raises:
        ConfigError: Something else.
    """
    found = words(option, text)
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in found):
        raise ConfigError(f"{option} {text!r}: write whole numbers above 0 separated by commas, such as 1,2,8")
    return [int(word) for word in found]
