"""The cache's metrics under vLLM's `/metrics`.

The cache lives in the process of the engine, and metrics are read in that of the front-end. What vLLM sends between
them is `SchedulerStats`, decoded by its declared fields: those of a subclass would be dropped, and what the fields for
connectors hold is read by connectors alone, which fail where there are none. One field is a dictionary from the names
of stages to numbers of requests, `num_kv_fetch_reqs_by_stage`, of which vLLM reads the names that it knows. So the
numbers travel as the name of one more stage, with no requests in it: whatever else reads the field sees nothing new.

Totals travel as what was added since they were last sent. With several front-ends vLLM sends the statistics of each
step to one of them, and the sum over all is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from headway.tell.metrics import METRICS, Values, cache_values, waterfall_values
from headway.vllm.live import board_of
from headway.vllm.manager import KVCacheManager

__all__ = ["Exporter", "Meter"]

_STAGE = "headway "
_SECONDS = 0.1
_LABELS = ("model_name", "engine")
Numbers = dict[str, dict[str, int]]


class Meter:
    """In the process of the engine: what is to be sent."""

    def __init__(self, manager: KVCacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        """Read `manager`; `clock` in seconds."""
        self._manager, self._clock = manager, clock
        self._sent: dict[tuple[str, str], int] = {}
        self._next = 0.0

    def stage(self, *, last: bool) -> dict[str, int]:
        """One more stage for the statistics of a step, or none: what is sent often enough is not sent again yet.

        Args:
            last: No step may follow for a while, so it is sent in any case.
        """
        now = self._clock()
        if now < self._next and not last:
            return {}
        self._next = now + _SECONDS
        told: Numbers = {}
        for name, values in self._values().items():
            for key, value in values.items():
                before, self._sent[name, key] = self._sent.get((name, key)), value
                if before != value:  # what is 0 from the start is sent as well, so that its rate begins there
                    told.setdefault(name, {})[key] = value - (before or 0) if METRICS[name].grows else value
        return {_STAGE + msgspec.json.encode(told).decode(): 0} if told else {}

    def _values(self) -> Values:
        manager, found = self._manager, self._manager.waterfall
        waterfall = waterfall_values(
            requests=found.requests,
            prompt_tokens=found.prompt_tokens,
            hit_tokens=found.reused + found.loaded,
            lost_tokens={reason.value: tokens for reason, tokens in found.lost.items() if tokens},
            resumed_tokens=manager.resumed_tokens,
            resumed_hit_tokens=manager.resumed_hit_tokens,
        )
        return waterfall | cache_values(manager.cache.stats(), manager.groups.block_bytes)


class Exporter:
    """In the process of the front-end: what was sent, as Prometheus's metrics. There are none before the first."""

    def __init__(self, model: str, registry: CollectorRegistry = REGISTRY) -> None:
        """`model`: the name under which it is served."""
        self._model, self._registry, self._board = model, registry, board_of(registry)

    def add(self, stages: Iterable[str], engine: int) -> None:
        """Take what `stages` hold of engine number `engine`; those of others are left alone."""
        for stage in stages:
            if stage.startswith(_STAGE):
                told = msgspec.json.decode(stage.removeprefix(_STAGE), type=Numbers)
                for name, values in told.items():
                    self._set(name, values, engine)
                self._board.add(told, engine, self._model)

    def add_queue(self, running: int, waiting: int, engine: int) -> None:
        """Take how many requests run and wait in engine number `engine`. The live page shows it; vLLM has metrics."""
        self._board.add_queue(running, waiting, engine)

    def _set(self, name: str, values: dict[str, int], engine: int) -> None:
        metric = _metrics(self._registry)[name]
        for key, value in values.items():
            labels = (self._model, str(engine), key) if METRICS[name].label else (self._model, str(engine))
            child = metric.labels(*labels)
            if isinstance(child, Counter):
                child.inc(value)
            else:
                child.set(value)


@cache
def _metrics(registry: CollectorRegistry) -> dict[str, Counter | Gauge]:
    """All metrics, registered once: a process may make several engines, one after another."""
    made: dict[str, Counter | Gauge] = {}
    for name, metric in METRICS.items():
        labels = (*_LABELS, metric.label) if metric.label else _LABELS
        if metric.grows:
            made[name] = Counter(f"headway_{name}", metric.text, labels, registry=registry)
        else:
            made[name] = Gauge(
                f"headway_{name}", metric.text, labels, registry=registry, multiprocess_mode="mostrecent"
            )
    return made
