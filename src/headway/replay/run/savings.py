"""What reuse saves in time, by the roofline, also where requests are replayed one after another.

Prefill is each prompt alone on the ranks, in chunks, once whole and once from where it resumes. Decoding is each answer
in steps with others like it. Together they say what a hit rate is worth: where answers take most of the time, a high
hit rate changes throughput little, and first tokens much.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.formats import Trace
from headway.replay.config import Roofline
from headway.tell.latency import Percentiles, TimeSaved

__all__ = ["AT_ONCE", "time_saved"]

Longs = NDArray[np.int64]

AT_ONCE = 16
"""Answers that are decoded together."""
_CHUNK = 8192
"""Tokens of a prompt that are computed in one step."""


def time_saved(trace: Trace, roofline: Roofline, hits: Longs) -> TimeSaved:
    """What reuse saves. O(R x chunks of the longest prompt).

    Args:
        trace: The trace.
        roofline: What steps cost.
        hits: int64 [R], tokens of each prompt that are reused.
    """
    prompts = trace.prompt_tokens
    whole = _prefill(roofline, np.zeros_like(prompts), prompts)
    rest = _prefill(roofline, hits, prompts)
    decoding = float((roofline.decode_seconds(prompts + trace.answer_tokens / 2, AT_ONCE) * trace.answer_tokens).sum())
    return TimeSaved(
        prefill=float(whole.sum()),
        saved=float((whole - rest).sum()),
        decoding=decoding,
        at_once=AT_ONCE,
        first_token=Percentiles.of(rest.tolist()),
        first_token_before=Percentiles.of(whole.tolist()),
        estimate=roofline.source,
    )


def _prefill(roofline: Roofline, starts: Longs, stops: Longs) -> NDArray[np.float64]:
    seconds = np.zeros(len(starts))
    for done in range(0, int((stops - starts).max(initial=0)), _CHUNK):
        counts = np.clip(stops - starts - done, 0, _CHUNK)
        some = counts > 0
        seconds[some] += roofline.prefill_seconds((starts + done)[some], counts[some])
    return seconds
