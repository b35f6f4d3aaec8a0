"""Options for the cache, given as vLLM's `--additional-config '{"headway": {...}}'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headway.cache import DEFAULT_PLACEMENT
from headway.errors import ConfigError

__all__ = ["Options", "read_options"]


@dataclass(frozen=True)
class Options:
    """What a user can choose. The defaults need no tuning.

    Attributes:
        eviction: "value", "lru" or "greedy-dual".
        placement: Kinds of position that get a checkpoint.
        alignment: Checkpoints lie at multiples of this alone.
        pins: Requests may pin their prompts, and name breakpoints.
        pin_share: Largest share of the pool that pins may protect.
        pin_seconds: Time to live of a pin that does not say.
        explain: To whom it is told in full what became of its tokens: "own" (who has a cache_salt), "all" or "off".
        check: Check every invariant of the cache after every call (slow; to find faults).
    """

    eviction: str = "value"
    placement: Sequence[str] = DEFAULT_PLACEMENT
    alignment: int = 1
    pins: bool = True
    pin_share: float = 0.5
    pin_seconds: float = 3600.0
    explain: str = "own"
    check: bool = False

    def __post_init__(self) -> None:
        """Refuse what the cache would not refuse.

        Raises:
            ConfigError: Names the option.
        """
        for name in ("pins", "check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"additional-config, headway: {name} is {getattr(self, name)!r}, not true or false")
        if self.explain not in ("own", "all", "off"):
            raise ConfigError(f"additional-config, headway: explain is {self.explain!r}, not one of own, all, off")


def read_options(additional_config: Any) -> Options:
    """The options in vLLM's `additional_config`, or the defaults.

    Raises:
        ConfigError: Not a mapping, or an unknown option; names those that exist.
    """
    given = additional_config.get("headway", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'additional-config: "headway" must be an object with options, not {given!r}')
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"additional-config, headway: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    return Options(**given)
