"""The engine's numbers under the names that others look for: routers, autoscalers and dashboards know those of vLLM.

Meanings, labels and bounds are those of vLLM 0.33, so that what is set up for it reads this server unchanged. What
exists in vLLM alone (adapters, media, connectors, sleep) is left out, not shown as zero. Names move between releases:
they stand in this module and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from headway.engine import TOKEN_SECONDS, Distribution, Engine, EngineSnapshot, RequestResult

__all__ = ["VllmMetrics"]

_LABELS = ("model_name", "engine")
_ENGINE = "0"
"""Number of the engine: a server has one."""
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_ANSWERS = (1, 2, 5, 10, 20)
_ENDS = ("stop", "length", "abort", "error")


class VllmMetrics:
    """vLLM's metrics of one engine; what ends or steps is told to it, the rest it reads from snapshots."""

    def __init__(self, registry: CollectorRegistry, model: str, engine: Engine) -> None:
        """Register in `registry` what is told of an engine; `model`: the name under which its model is served."""
        self._labels = (model, _ENGINE)
        self._cache_config = _cache_config(engine)
        tokens = _one_two_five(engine.max_model_len)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, _LABELS, buckets=bounds, registry=registry)
            return made.labels(*self._labels)

        self._step = histogram("iteration_tokens_total", "Tokens computed in one step.", _STEP_TOKENS)
        self._times = {
            "total": histogram("e2e_request_latency_seconds", "Time from arrival to the end.", _SECONDS),
            "queue": histogram("request_queue_time_seconds", "Time from arrival to admission.", _SECONDS),
            "prefill": histogram("request_prefill_time_seconds", "Time from admission to the first token.", _SECONDS),
            "decode": histogram("request_decode_time_seconds", "Time from the first token to the last.", _SECONDS),
        }
        self._inference = histogram("request_inference_time_seconds", "Time from admission to the last.", _SECONDS)
        text = "Mean time of a token after the first, per request."
        self._per_token = histogram("request_time_per_output_token_seconds", text, TOKEN_SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of the prompt, per request.", tokens)
        self._answer = histogram("request_generation_tokens", "Tokens of the answer, per request.", tokens)
        self._most = histogram("request_params_max_tokens", "Most tokens that were asked for, per request.", tokens)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached, per admitted request.", tokens
        )
        self._answers = histogram("request_params_n", "Answers that were asked for, per prompt.", _ANSWERS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer, per prompt.", tokens
        )
        self._groups: dict[int, tuple[int, int]] = {}
        """By prompt with several answers, some of which have ended: tokens of the longest, and how many run."""
        self._preempted = histogram("request_num_preemptions", "How often a request gave way.", _PREEMPTIONS)

    def request_finished(self, result: RequestResult) -> None:
        """Take the times and lengths of a request that ended, in whatever way; those that it does not have are left."""
        times, answered = result.timings, len(result.tokens)
        for name, histogram in self._times.items():
            if (seconds := getattr(times, name)) is not None:
                histogram.observe(seconds)
        if times.prefill is not None and times.decode is not None:
            self._inference.observe(times.prefill + times.decode)
        if times.decode is not None and answered > 1:
            self._per_token.observe(times.decode / (answered - 1))
        self._prompt.observe(result.prompt_tokens)
        self._answer.observe(answered)
        self._most.observe(result.request.max_tokens)
        self._preempted.observe(result.preemptions)
        if times.admitted is not None:
            self._computed.observe(result.prompt_tokens - result.cached_tokens)

        most, left = self._groups.pop(id(result.request.tokens), (0, result.request.answers))
        most, left = max(most, answered), left - 1
        if left:
            self._groups[id(result.request.tokens)] = most, left
        else:
            self._answers.observe(result.request.answers)
            self._longest.observe(most)

    def step_done(self, tokens: int) -> None:
        """Take the size of a step."""
        self._step.observe(tokens)

    def collect(self, now: EngineSnapshot) -> Iterator[Metric]:
        """Totals and levels of a moment."""
        counters, cache = now.counters, now.cache
        computed = counters.prompt_tokens - counters.hit_tokens
        yield self._gauge("num_requests_running", "Requests that run.", {"": now.running})
        yield self._gauge("num_requests_waiting", "Requests that wait.", {"": now.waiting})
        reasons = {"capacity": now.waiting - now.held - now.loading, "deferred": now.held + now.loading}
        text = "Requests that wait, for room (capacity), or for another to compute what both need (deferred)."
        yield self._gauge("num_requests_waiting_by_reason", text, reasons, "reason")
        used = (cache.leased + cache.pinned) / cache.blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the cache that is needed now, 0 to 1.", {"": used})
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache.", labels=list(self._cache_config))
        info.add_metric(list(self._cache_config.values()), 1)
        yield info
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", {"": counters.prompt_tokens})
        yield self._counter("prefix_cache_hits", "Of these, tokens that were cached.", {"": counters.hit_tokens})
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests.", {"": counters.prompt_tokens})
        yield self._counter("prompt_tokens_cached", "Of these, tokens that were cached.", {"": counters.hit_tokens})
        sources = {"local_compute": computed, "local_cache_hit": counters.hit_tokens, "external_kv_transfer": 0}
        yield self._counter("prompt_tokens_by_source", "Prompt tokens by source.", sources, "source")
        yield self._counter("generation_tokens", "Tokens of answers.", {"": counters.generated_tokens})
        yield self._counter("num_preemptions", "Running requests that gave way.", {"": counters.preemptions})
        ends = dict.fromkeys(_ENDS, 0) | counters.finished
        yield self._counter("request_success", "Requests that ended, by finish reason.", ends, "finished_reason")
        refused = {"queue_full": 0} | counters.refused
        yield self._counter("admission_rejections", "Requests refused by a limit of the queue.", refused, "reason")
        yield self._spread("time_to_first_token_seconds", "Time from arrival to the first token.", counters.first_token)
        yield self._spread("inter_token_latency_seconds", "Time between two tokens of an answer.", counters.token_gap)

    def _gauge(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> Metric:
        return self._filled(GaugeMetricFamily, name, text, values, label)

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> Metric:
        return self._filled(CounterMetricFamily, name, text, values, label)

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str,
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=[*_LABELS, label] if label else _LABELS)
        for key, value in values.items():
            family.add_metric([*self._labels, key] if label else self._labels, value)
        return family

    def _spread(self, name: str, text: str, values: Distribution) -> Metric:
        family, below, buckets = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS), 0, []
        for bound, count in zip((*map(float, values.bounds), "+Inf"), values.counts, strict=True):
            below += count
            buckets.append((str(bound), below))
        family.add_metric(self._labels, buckets, values.total)
        return family


def _cache_config(engine: Engine) -> dict[str, str]:
    """Labels that tell the size of the cache: `block_size` times `num_gpu_blocks` tokens of full attention.

    Several tables of full attention share the pool, so a token may take parts of several blocks. For a model without
    full attention vLLM's blocks are as long as a request; so they are here.
    """
    blocks, spans = engine.cache.config.blocks, [table.span for table in engine.cache.geometry.prefix_tables]
    size = min(spans, default=engine.max_model_len)
    return {
        "block_size": str(size),
        "num_gpu_blocks": str(int(blocks / sum(1 / span for span in spans)) // size if spans else blocks),
        "enable_prefix_caching": str(engine.config.prefix_reuse),
        "engine": _ENGINE,
    }


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    powers = (10**i for i in range(len(str(most))))
    return tuple(float(digit * power) for power in powers for digit in (1, 2, 5) if digit * power <= most) or (1.0,)
