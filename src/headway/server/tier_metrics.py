"""Metrics of the tiers below the device's memory, by tier."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.engine import EngineSnapshot, LowerStats
from headway.engine.scheduling.lower import HOST

__all__ = ["tier_metrics"]


def tier_metrics(now: EngineSnapshot, block_bytes: int) -> Iterator[Metric]:
    """What lies below and what was moved; nothing where nothing lies below."""
    if (lower := now.lower) is None:
        return
    loaded = dict.fromkeys(_names(lower), 0) | dict(now.counters.loaded_tokens)
    yield _by_tier(CounterMetricFamily, "loaded_tokens", "Tokens read back instead of computed.", loaded)
    yield GaugeMetricFamily(
        "headway_requests_loading", "Requests that wait for what disks and stores have.", value=now.loading
    )
    yield from _moved(lower, block_bytes)
    failures = CounterMetricFamily("headway_tier_failures", "What failed, by reason.", labels=["tier", "reason"])
    for tier, count in lower.failures.items():
        failures.add_metric([tier, "copy"], count)
    if lower.host is not None:
        failures.add_metric([HOST, "store"], lower.host_moves.failed)
    for one in () if lower.objects is None else lower.objects.tiers:
        for reason, count in sorted(one.failures.items()):
            failures.add_metric([one.name, reason], count)
    yield failures
    if lower.objects is not None:
        yield from _objects(lower)


def _names(lower: LowerStats) -> list[str]:
    objects = () if lower.objects is None else lower.objects.tiers
    return [*([HOST] if lower.host is not None else []), *(one.name for one in objects)]


def _moved(lower: LowerStats, block_bytes: int) -> Iterator[Metric]:
    """What both kinds of tiers have: bytes, checkpoints, and what was moved."""
    tiers = () if lower.objects is None else lower.objects.tiers
    used = {one.name: one.used_bytes for one in tiers}
    kept = {one.name: one.checkpoints for one in tiers}
    limits = {one.name: one.capacity for one in tiers if one.capacity is not None}
    loads, stores = {one.name: one.loads for one in tiers}, {one.name: one.stores for one in tiers}
    read = {one.name: one.loaded_bytes for one in tiers}
    written = {one.name: one.stored_bytes for one in tiers}
    evicted = {one.name: one.evictions for one in tiers}
    if lower.host is not None:
        moves, host = lower.host_moves, lower.host
        used[HOST], limits[HOST] = (host.blocks - host.free) * block_bytes, host.blocks * block_bytes
        kept[HOST], evicted[HOST] = host.checkpoints, sum(host.counters.evicted.values())
        loads[HOST], stores[HOST] = moves.loaded, moves.stored
        read[HOST], written[HOST] = moves.loaded_blocks * block_bytes, moves.stored_blocks * block_bytes
    yield _by_tier(GaugeMetricFamily, "used_bytes", "Bytes held, of host memory on every rank.", used)
    yield _by_tier(GaugeMetricFamily, "capacity_bytes", "Bytes that may be held, where that is bounded.", limits)
    yield _by_tier(GaugeMetricFamily, "checkpoints", "Checkpoints held.", kept)
    yield _by_tier(CounterMetricFamily, "loads", "Reads: by requests of host memory, of objects elsewhere.", loads)
    yield _by_tier(CounterMetricFamily, "stores", "Checkpoints written.", stores)
    yield _by_tier(CounterMetricFamily, "loaded_bytes", "Bytes read back.", read)
    yield _by_tier(CounterMetricFamily, "stored_bytes", "Bytes written.", written)
    yield _by_tier(CounterMetricFamily, "evictions", "Checkpoints that had to make room.", evicted)


def _objects(lower: LowerStats) -> Iterator[Metric]:
    """What disks and stores have besides."""
    assert lower.objects is not None
    tiers = lower.objects.tiers
    switched_off = {one.name: int(one.circuit != "closed") for one in tiers}
    yield _by_tier(GaugeMetricFamily, "off", "1 while a tier that failed or stalled is switched off.", switched_off)
    openings = {one.name: one.openings for one in tiers}
    yield _by_tier(CounterMetricFamily, "switched_off", "Times that a tier was switched off.", openings)
    speed = {one.name: one.bytes_per_second for one in tiers}
    yield _by_tier(GaugeMetricFamily, "bytes_per_second", "What loads reached lately.", speed)
    answers = {one.name: one.answer_seconds for one in tiers}
    yield _by_tier(GaugeMetricFamily, "answer_seconds", "What a store takes to say what it has of a prompt.", answers)
    unasked = {one.name: one.unasked for one in tiers}
    yield _by_tier(CounterMetricFamily, "unasked", "Lookups that did not ask a store, as that would not pay.", unasked)
    for name, text, value in (
        ("staging_bytes", "Memory in use for loads.", lower.objects.staging_bytes),
        ("backlog_bytes", "Bytes that wait to be written.", lower.objects.backlog_bytes),
        ("checkpoints_waiting", "Checkpoints that wait to be read for writing.", lower.waiting),
    ):
        yield GaugeMetricFamily(f"headway_tiers_{name}", text, value=value)
    yield CounterMetricFamily(
        "headway_tiers_writes_refused",
        "Checkpoints not written because too much was waiting to be.",
        value=lower.objects.refused_writes,
    )


def _by_tier(
    make: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, values: dict[str, int] | dict[str, float]
) -> Metric:
    family = make(f"headway_tier_{name}", text, labels=["tier"])
    for tier, value in values.items():
        family.add_metric([tier], value)
    return family
