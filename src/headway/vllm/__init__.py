"""Headway's prefix cache in vLLM's scheduler.

    vllm serve MODEL --no-enable-prefix-caching --scheduler-cls headway.vllm.Scheduler \
        --worker-extension-cls headway.vllm.WholePages

vLLM's kernels and pages stay as they are. Its scheduler gets another KV cache manager: one that answers the same calls
from a `PrefixCache`. Models with states need the extension of the workers as well. vLLM is imported when one of these
names is asked for, and nowhere else.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AsyncScheduler", "Scheduler", "WholePages"]


def __getattr__(name: str) -> Any:
    """The schedulers, and the extension of workers: they need vLLM."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headway.vllm.interface import check_version

    check_version()
    if name == "WholePages":
        from headway.vllm import worker

        worker.install()
        return worker.WholePages
    from headway.vllm import scheduler

    return getattr(scheduler, name)
