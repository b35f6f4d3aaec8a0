"""The numbers of a cache under the names that metrics have: the same in our server and in vLLM's.

What a metric is (its text, its label, whether it only grows) is one table, so that numbers may travel as plain pairs of
a name and a value and become metrics elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway.cache import CacheStats

__all__ = ["METRICS", "Metric", "Values", "cache_values", "waterfall_values"]

Values = dict[str, Mapping[str, int]]
"""By name of a metric: by value of its label (of a metric without one: "") its number."""


class Metric(NamedTuple):
    """What a metric is.

    Attributes:
        text: What it says.
        label: Name of its label, or "".
        grows: It is a total since the start, not a level.
    """

    text: str
    label: str = ""
    grows: bool = True


METRICS = {
    "requests_admitted": Metric("Requests admitted, each once."),
    "prompt_tokens": Metric("Prompt tokens of admitted requests."),
    "prompt_hit_tokens": Metric("Of these, tokens that were cached."),
    "prompt_lost_tokens": Metric("Prompt tokens that were not cached, by reason.", "reason"),
    "resumed_tokens": Metric("Tokens of requests that came back after a preemption."),
    "resumed_hit_tokens": Metric("Of these, tokens that were still cached."),
    "blocks": Metric("Blocks of the pool, by state.", "state", grows=False),
    "block_bytes": Metric("Bytes of a block on every rank.", grows=False),
    "checkpoints": Metric("Checkpoints kept.", grows=False),
    "checkpoints_taken": Metric("Checkpoints taken, by kind of placement.", "kind"),
    "checkpoints_reused": Metric("Checkpoints resumed from at least once, by kind of placement.", "kind"),
    "checkpoints_evicted": Metric("Checkpoints evicted, by kind of placement.", "kind"),
    "checkpoints_evicted_unused": Metric(
        "Checkpoints evicted that nobody had resumed from, by kind of placement.", "kind"
    ),
    "resumed": Metric("Requests that resumed from a checkpoint, by its kind.", "kind"),
    "blocks_evicted": Metric("Blocks freed by eviction."),
    "pins_refused": Metric("Pins refused because of the cap."),
}
"""The metrics, by their names without the prefix `headway_`."""


def waterfall_values(
    *,
    requests: int,
    prompt_tokens: int,
    hit_tokens: int,
    lost_tokens: Mapping[str, int],
    resumed_tokens: int,
    resumed_hit_tokens: int,
) -> Values:
    """What became of the tokens of admitted requests.

    Args:
        requests: Requests admitted, each once.
        prompt_tokens: Their prompt tokens.
        hit_tokens: Of these, tokens that were cached.
        lost_tokens: The others, by reason.
        resumed_tokens: Tokens of requests that came back after a preemption.
        resumed_hit_tokens: Of these, tokens that were still cached.
    """
    return {
        "requests_admitted": {"": requests},
        "prompt_tokens": {"": prompt_tokens},
        "prompt_hit_tokens": {"": hit_tokens},
        "prompt_lost_tokens": lost_tokens,
        "resumed_tokens": {"": resumed_tokens},
        "resumed_hit_tokens": {"": resumed_hit_tokens},
    }


def cache_values(cache: CacheStats, block_bytes: int) -> Values:
    """Memory, and what happened in it; a block has `block_bytes` bytes."""
    events = cache.counters
    none = dict.fromkeys(events.taken, 0)  # told from the first checkpoint of a kind on, so that rates begin there
    return {
        "blocks": {
            "free": cache.free,
            "leased": cache.leased,
            "pinned": cache.pinned,
            "evictable": cache.evictable,
        },
        "block_bytes": {"": block_bytes},
        "checkpoints": {"": cache.checkpoints},
        "checkpoints_taken": events.taken,
        "checkpoints_reused": none | events.reused,
        "checkpoints_evicted": none | events.evicted,
        "checkpoints_evicted_unused": none | events.evicted_unused,
        "resumed": none | events.resumed,
        "blocks_evicted": {"": events.blocks_evicted},
        "pins_refused": {"": events.pins_refused},
    }
