"""vLLM's schedulers with the cache's manager.

vLLM has no plug point for its KV cache manager: its scheduler makes one by a name of its own module. So that name gives
ours while the scheduler is made. The rest are overrides of methods: where prompt chunks end, which step an output
belongs to, and what counts when it arrives.
"""

from __future__ import annotations

import threading
from typing import Any

import vllm.v1.core.sched.scheduler as vllm_scheduler
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.metrics.stats import PrefixCacheStats

from headway.cache import ParallelLayout
from headway.errors import ConfigError
from headway.vllm.events import KvEvents
from headway.vllm.groups import read_groups
from headway.vllm.manager import KVCacheManager
from headway.vllm.metrics import Meter
from headway.vllm.options import check_config, read_options
from headway.vllm.overview import start_lines

__all__ = ["AsyncScheduler", "Scheduler"]

WHOLE_PAGES = "headway.vllm.WholePages"
"""The extension of vLLM's workers that makes copies whole."""

_MAKING = threading.Lock()
logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


class Scheduler(vllm_scheduler.Scheduler):
    """vLLM's scheduler with the cache. With asynchronous scheduling it makes an `AsyncScheduler`."""

    kv_cache_manager: KVCacheManager
    _meter: Meter
    _dry_runs: list[tuple[int, EngineCoreOutput]]

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
        """An object of the class that fits the configuration."""
        chosen = AsyncScheduler if cls is Scheduler and vllm_config.scheduler_config.async_scheduling else cls
        made: Scheduler = super().__new__(chosen)
        return made

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's.

        Raises:
            ConfigError: A model or an option that cannot be served; says what to do.
        """
        manager = _make_manager(vllm_config, kv_cache_config, log_stats=kwargs.get("log_stats", False))
        with _MAKING:
            original, vllm_scheduler.KVCacheManager = vllm_scheduler.KVCacheManager, lambda **_: manager
            try:
                super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
            finally:
                vllm_scheduler.KVCacheManager = original
        self.need_mamba_block_aligned_split = bool(manager.groups.states)
        self._meter = Meter(manager)
        self._dry_runs = []
        for line in start_lines(manager):
            logger.info(line)

    def add_request(self, request: Any) -> None:
        """As vLLM's. A dry run is done at once, and told with the next step's outputs."""
        session = request.request_id in self.requests  # which gets more input
        told = None if session else self.kv_cache_manager.add_request(request)
        if told is None:
            super().add_request(request)
            return
        if self.log_stats:  # the front-end takes times from these
            request.record_event(EngineCoreEventType.QUEUED)
            request.record_event(EngineCoreEventType.SCHEDULED)
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.LENGTH,
            events=request.take_events(),
            kv_transfer_params={"headway": told},
        )
        self._dry_runs.append((request.client_index, output))

    def has_finished_requests(self) -> bool:
        """As vLLM's. There is a step to do for dry runs as well."""
        return bool(self._dry_runs) or super().has_finished_requests()

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *_: Any, **__: Any) -> int:
        """Where the next chunk of a prompt ends: at a checkpoint that is due, if one lies inside."""
        return self.kv_cache_manager.cut(request, num_new_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        output = super().schedule(*args, **kwargs)
        manager = self.kv_cache_manager
        manager.close_step(output)
        for request_id, why in manager.unservable.items():
            logger.error("Request %s cannot be served: %s", request_id, why)
            self.encoder_cache_mismatch_reqs.add(request_id)  # those end with an error when the step's output arrives
        manager.unservable.clear()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's; what was computed counts first."""
        index, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        self.kv_cache_manager.commit(scheduler_output, index, sampled)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client, output in self._dry_runs:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._dry_runs.clear()
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; the cache's numbers travel with them."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.num_kv_fetch_reqs_by_stage.update(self._meter.stage(last=not self.requests))
        return stats

    def _connector_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """What goes with a request's last output: what became of its tokens, if it asked."""
        told = self.kv_cache_manager.explain(request)
        return False, None if told is None else {"headway": told}

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """As vLLM's. A session that goes on loses its last token and gets others, so it is looked up anew."""
        super()._update_request_as_session(session, update)
        self.kv_cache_manager.free(session)
        session.num_computed_tokens = 0


class AsyncScheduler(Scheduler, VllmAsyncScheduler):
    """The same with vLLM's asynchronous scheduler: a step is planned before the outcome of the last one is known."""


def _make_manager(vllm_config: Any, kv_cache_config: Any, *, log_stats: bool) -> KVCacheManager:
    parallel = vllm_config.parallel_config
    check_config(vllm_config)
    dcp = parallel.decode_context_parallel_size
    layout = ParallelLayout(tp=dcp, dcp=dcp, interleave=parallel.cp_kv_cache_interleave_size if dcp > 1 else 1)
    speculative = vllm_config.speculative_config
    lookahead = int(speculative is not None and speculative.method in ("eagle", "eagle3", "mtp"))
    groups = read_groups(kv_cache_config, layout, lookahead)
    if groups.states and groups.attention and parallel.worker_extension_cls != WHOLE_PAGES:
        raise ConfigError(
            "vLLM's workers copy pages of a model with states and attention only in part (vllm#55112): answers would "
            f"be wrong. Add --worker-extension-cls {WHOLE_PAGES}"
        )
    manager = KVCacheManager(
        groups,
        read_options(vllm_config.additional_config),
        max_model_len=vllm_config.model_config.max_model_len,
        steps_in_flight=2,
        slots_ahead=vllm_config.num_lookahead_tokens,
        most_under_way=vllm_config.max_in_flight_tokens,
        watermark=vllm_config.scheduler_config.watermark,
        new_stats=PrefixCacheStats if log_stats else None,
        new_copy=KVCacheBlockCopy,
    )
    events_config = vllm_config.kv_events_config
    if events_config is not None and events_config.enable_kv_cache_events:
        manager.events = KvEvents(
            manager.cache,
            groups,
            stored=BlockStored,
            removed=BlockRemoved,
            cleared=AllBlocksCleared,
            kind=lambda spec: str(get_kv_cache_spec_kind(spec).value),
        )
    return manager
