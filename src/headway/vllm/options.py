"""What a user configures: options for the cache, and what of vLLM's own configuration cannot be served with it.

Options are given as vLLM's `--additional-config '{"headway": {...}}'`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headway.cache import DEFAULT_PLACEMENT, CacheConfig, FullAttention, PrefixCache
from headway.errors import ConfigError

__all__ = ["Options", "check_config", "is_ours", "read_options"]

_PACKAGE = "headway.vllm"


@dataclass(frozen=True)
class Options:
    """What a user can choose. The defaults need no tuning.

    Attributes:
        eviction: "adaptive", "value", "shared-value", "lru" or "greedy-dual".
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

    def of_cache(self) -> dict[str, Any]:
        """Those that the cache knows, by its own names."""
        return {
            "checkpoint_alignment": self.alignment,
            "placement": self.placement,
            "eviction": self.eviction,
            "pin_share": self.pin_share,
            "pin_seconds": self.pin_seconds,
            "check": self.check,
        }


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


def is_ours(vllm_config: Any) -> bool:
    """Whether vLLM is told to take a scheduler of this package."""
    name = vllm_config.scheduler_config.scheduler_cls
    return (name if isinstance(name, str) else str(getattr(name, "__module__", ""))).startswith(_PACKAGE)


def check_config(vllm_config: Any) -> None:
    """Refuse options and configurations that cannot be served, as far as they are known before the model is loaded.

    Raises:
        ConfigError: Names the thing, and what to do.
    """
    parallel, without = vllm_config.parallel_config, "leave it out, or serve without --scheduler-cls"
    if vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "vLLM's own prefix caching is on, and two caches cannot share one memory: add --no-enable-prefix-caching"
        )
    refused = {
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "a KV connector (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "a pooling model": vllm_config.model_config.runner_type == "pooling",
        "an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "a diffusion model": vllm_config.model_config.is_diffusion,
        "routed experts in answers (aux outputs)": vllm_config.aux_output_config.enabled,
        "multi-module MTP": vllm_config.num_prefill_lookahead_tokens > 1,
    }
    for name, found in refused.items():
        if found:
            raise ConfigError(f"headway.vllm cannot serve {name} yet: {without} headway.vllm.Scheduler")
    options = read_options(vllm_config.additional_config)
    PrefixCache(CacheConfig([FullAttention("any", 1)], 1, **options.of_cache()))  # which refuses values
