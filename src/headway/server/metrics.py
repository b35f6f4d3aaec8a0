"""The server's metrics, for Prometheus.

Totals and levels are read from one snapshot of the engine at each scrape, so that they agree with each other; only
distributions are kept here. Names use the words of the rest of Headway; those of vLLM stand beside them
(`headway.server.vllm_metrics`). The process is told by prometheus_client's own collector, whose names every dashboard
knows: memory and files of this process, without those of ranks elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.engine import Engine, EngineSnapshot, RequestResult
from headway.server.kv_publisher import KvEventPublisher
from headway.server.tier_metrics import tier_metrics
from headway.server.vllm_metrics import VllmMetrics
from headway.tell.metrics import METRICS, Values, cache_values, waterfall_values

__all__ = ["Metrics", "values_of"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
_OTHER = "other"
"""Paths that are not there, and methods that nobody has heard of: clients must not make up labels."""


class Metrics(Collector):
    """Metrics of one engine; its `Observer` and a Prometheus collector."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine, model: str, kv_events: KvEventPublisher | None = None) -> None:
        self._engine = engine
        self._kv_events = kv_events
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._queue = self._histogram("queue_seconds", "Time from arrival to admission.", _SECONDS)
        self._first = self._histogram("time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS)
        self._total = self._histogram("request_seconds", "Time from arrival to the end.", _SECONDS)
        self._step = self._histogram("step_seconds", "Time of one step.", _SECONDS)
        self._step_tokens = self._histogram("step_tokens", "Tokens computed in one step.", _TOKENS)
        self._vllm = VllmMetrics(self._registry, model, engine)
        labels = ("handler", "method", "status")
        text = "Responses by route, method and status, counted when they begin."
        self._responses = Counter("http_requests", text, labels, registry=self._registry)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def request_finished(self, result: RequestResult) -> None:
        """Take the times of a request that ended."""
        times = result.timings
        for histogram, value in (
            (self._queue, times.queue),
            (self._first, times.to_first_token),
            (self._total, times.total),
        ):
            if value is not None:
                histogram.observe(value)
        self._vllm.request_finished(result)

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with its responses counted when they begin."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path, method = getattr(scope.get("route"), "path", _OTHER), scope["method"]
                    method = "HEAD" if scope.get("head") else method if method in _METHODS else _OTHER
                    self._responses.labels(path, method, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, send_counted)

        return counted

    def step_done(self, seconds: float, tokens: int) -> None:
        """Take the time and size of a step."""
        self._step.observe(seconds)
        self._step_tokens.observe(tokens)
        self._vllm.step_done(tokens)

    def forgotten(self, salt: str | None) -> None:
        """Not counted."""

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Totals and levels of this moment."""
        now = self._engine.snapshot()
        yield from _requests(now)
        block_bytes = self._engine.cache.geometry.block_bytes
        yield from _cache(values_of(now, block_bytes))
        yield from tier_metrics(now, block_bytes)
        yield from _tokens(now)
        if self._kv_events is not None:
            yield from _published(self._kv_events)
        yield from self._vllm.collect(now)
        info = GaugeMetricFamily("headway_model_info", "The model that is served.", labels=["model"])
        info.add_metric([self._model], 1)
        yield info

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"headway_{name}", text, buckets=buckets, registry=self._registry)


def _requests(now: EngineSnapshot) -> Iterator[Metric]:
    counters = now.counters
    yield _gauge("requests_running", "Requests that run.", now.running)
    yield _gauge("requests_waiting", "Requests that wait.", now.waiting)
    yield _counters("requests_finished", "Requests that ended, by reason.", "reason", dict(counters.finished))
    yield _counters("requests_refused", "Requests refused at submission, by reason.", "reason", dict(counters.refused))
    yield _counter("preemptions", "Running requests that gave way to others.", counters.preemptions)
    yield _counter("prefill_waits", "Requests that waited for another to compute what both need.", counters.waits)
    yield _counter("steps", "Steps done.", counters.steps)
    yield _counter("steps_failed", "Steps that failed.", counters.failed_steps)
    yield _counter("not_finite", "Requests that failed because of NaN or infinite numbers.", counters.not_finite)
    yield _counter("damaged_prefixes", "Of these, resumed from a damaged prefix, now gone.", counters.damaged_prefixes)
    yield _counter("rank_losses", "Times that ranks were lost.", counters.rank_losses)


def _tokens(now: EngineSnapshot) -> Iterator[Metric]:
    counters = now.counters
    yield _counter(
        "prompt_waited_tokens", "Cached prompt tokens that another computed while they waited.", counters.waited_tokens
    )
    yield _counter("computed_tokens", "Tokens computed.", counters.computed_tokens)
    yield _counter("generation_tokens", "Tokens of answers.", counters.generated_tokens)
    if now.drafter is not None:
        drafted, accepted = {now.drafter: counters.drafted_tokens}, {now.drafter: counters.accepted_tokens}
        yield _counters("draft_tokens", "Tokens that were drafted and verified, by drafter.", "drafter", drafted)
        yield _counters("draft_accepted_tokens", "Of these, tokens that became answers.", "drafter", accepted)


def _published(events: KvEventPublisher) -> Iterator[Metric]:
    counts = events.counts
    yield _gauge("kv_event_blocks", "Blocks that readers of KV events know of.", events.usable)
    yield _counter("kv_event_batches", "Batches of KV events published, empty ones included.", counts.batches)
    yield _counter("kv_event_batches_missed", "Of these, batches that a slow reader did not get.", counts.missed)
    yield _counter("kv_event_replays", "Answers to readers that had missed KV events.", counts.replays)
    yield _counter("kv_event_snapshots", "Of these, answers that told all there is.", counts.snapshots)
    yield _counter("kv_event_overflows", "Times that the queue of KV events was full.", counts.overflows)
    yield _counter("kv_events_untold", "Changes not told because their salt is too long.", counts.untold)


def values_of(now: EngineSnapshot, block_bytes: int) -> Values:
    """What vLLM's users see as well, as names and numbers."""
    counters = now.counters
    waterfall = waterfall_values(
        requests=counters.requests,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens=counters.hit_tokens,
        lost_tokens=counters.lost_tokens,
        resumed_tokens=counters.resumed_tokens,
        resumed_hit_tokens=counters.resumed_hit_tokens,
    )
    return waterfall | cache_values(now.cache, block_bytes)


def _cache(told: Values) -> Iterator[Metric]:
    for name, values in told.items():
        metric = METRICS[name]
        make = CounterMetricFamily if metric.grows else GaugeMetricFamily
        family = make(f"headway_{name}", metric.text, labels=[metric.label] if metric.label else [])
        for key, value in sorted(values.items()):
            family.add_metric([key] if metric.label else [], value)
        yield family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"headway_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"headway_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headway_{name}", text, value=value)
