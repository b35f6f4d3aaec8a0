"""Hand-made results, for tests of what is said about them."""

from dataclasses import replace
from typing import Any

from headway.tell.latency import Latency, Percentiles, Wait
from headway.tell.run import (
    Figures,
    GroupSize,
    Kind,
    LostPrefixes,
    Memory,
    ModelName,
    ReplayResult,
    RunRecord,
    SharedStretch,
    Span,
)

GB = 10**9


def figures(hit: int, lost: dict[str, int], endless: int | None = None) -> Figures:
    """1,000 prompt tokens unless `hit` and `lost` say otherwise; compute saved is taken to be the hit rate."""
    total = hit + sum(lost.values())
    ceiling = endless if endless is not None else hit + sum(n for k, n in lost.items() if k not in ("parted",))
    return Figures(10, total, hit, 4, hit / total, ceiling, ceiling / total, lost)


def latency(p50: float, growth: float = 1.0) -> Latency:
    """Every time is a multiple of `p50`: 95% within twice as long, 99% within three times. Late ones grow."""
    times = Percentiles(p50, 1.5 * p50, 2 * p50, 3 * p50, 1.1 * p50)
    over = [Wait(100.0 * n, 5, wait := p50 * (growth if n > 5 else 1.0), 2 * wait) for n in range(8)]
    return Latency(20, times, times, times, times, 400.0, 0.5, 900, 3, 5000.0, 250.0, "roofline of a toy", over)


def run(
    hit: int = 300,
    lost: dict[str, int] | None = None,
    *,
    memory: int | None = 20 * GB,
    layout: dict[str, int] | None = None,
    policy: dict[str, Any] | None = None,
    **result: Any,
) -> RunRecord:
    whole = figures(hit, {"parted": 500, "evicted": 200} if lost is None else lost)
    spans = [Span(i, i + 1, float(i), 100, hit // 10, 50) for i in range(10)]
    made = ReplayResult(
        trace="made.jsonl",
        outputs="never",
        symbol=64,
        block_bytes=1000,
        blocks=memory // 1000 if memory else 0,
        whole=whole,
        second_half=whole,
        kinds={"prompt_end": Kind(100, 10, 12, 90, 80), "junction": Kind(50, 40, 60, 10, 2)},
        second_half_kinds={},
        memory=[Memory(0, 0.0, 0, 0, 0), Memory(10, 9.0, 1000, 250, 5)],
        refused=0,
        seconds=0.1,
        clairvoyant=figures(400, {"parted": 500, "evicted": 100}, 500),
        over_time=spans,
        prefixes=LostPrefixes(2, 200, [SharedStretch(0, 64, 6, 0, 9, 150, 30), SharedStretch(64, 128, 2, 1, 5, 50, 0)]),
    )
    return RunRecord(
        model=ModelName("toy", "made up"),
        groups=[GroupSize("attention", "FullAttention", 8000), GroupSize("state", "Recurrent", 50_000_000)],
        layout=layout or {"tp": 8, "dcp": 8, "pcp": 1},
        memory=memory,
        cost={"linear": 1.0, "quadratic": 1e-5, "source": "assumed"},
        policy=policy or {"placement": ["prompt_end"], "eviction": "value"},
        trace={"format": "mooncake", "block_tokens": 64},
        result=replace(made, **result),
    )
