"""The plug-in of vLLM's front-end that tells its metrics and the live page what the cache does.

Its entry point is `vllm.stat_logger_plugins`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from headway.vllm.metrics import Exporter

__all__ = ["StatLogger"]


class StatLogger(AggregateStatLoggerBase):
    """Takes the cache's numbers out of the statistics of steps; with another scheduler there are none."""

    _exporter: Exporter

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        """As vLLM asks for it."""
        self._exporter = Exporter(str(vllm_config.model_config.served_model_name))

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """The statistics of a step of an engine have arrived."""
        if scheduler_stats is not None:
            self._exporter.add(scheduler_stats.num_kv_fetch_reqs_by_stage, engine_idx)
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._exporter.add_queue(scheduler_stats.num_running_reqs, waiting, engine_idx)

    def log_engine_initialized(self) -> None:
        """Nothing to log: the scheduler has done so."""
