"""Headway's prefix cache in vLLM's scheduler.

    vllm serve MODEL --no-enable-prefix-caching --scheduler-cls headway.vllm.Scheduler

vLLM's kernels, pages and workers stay as they are. Its scheduler gets another KV cache manager: one that answers the
same calls from a `PrefixCache`. vLLM is imported when the scheduler is asked for, and nowhere else.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AsyncScheduler", "Scheduler"]


def __getattr__(name: str) -> Any:
    """`Scheduler` and `AsyncScheduler`, which need vLLM."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headway.vllm.interface import check_version

    check_version()
    from headway.vllm import scheduler

    return getattr(scheduler, name)
