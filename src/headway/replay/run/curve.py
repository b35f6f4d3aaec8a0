"""The capacity curve: what a trace reuses at many sizes of memory, in one pass and in tokens alone.

Least recently used is run at every size by a directory of its own (`headway.cache.directory`), and all of them
lie on one tree, so a request is looked up once. The same can be done for the cache's own policy, which compares
several. Sizes stand a factor of 1.6 apart; between them a straight line will do.

Rejected: byte-weighted stack distances, which give every size at once. With checkpoints, least recently used is no
stack algorithm: a larger memory resumes further on, and then leaves the shallower checkpoint as old as it was.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import Directory, Prompt
from headway.formats import Trace
from headway.replay.config import ReplayConfig
from headway.replay.config.scale import scale
from headway.replay.run.figures import figures
from headway.replay.run.ledger import Progress
from headway.replay.run.order import SymbolSource
from headway.replay.trace.prefixes import Reading, endless_matches, read_outputs
from headway.tell.run import CapacityPoint

__all__ = ["capacity_curve", "sizes_around"]

_FACTOR, _STEPS = 1.6, 6
_TOLD_EVERY = 500


def sizes_around(memory: int) -> list[int]:
    """Thirteen sizes of memory, from a sixteenth of `memory` to sixteen times as much, that one in the middle."""
    return [int(memory * _FACTOR**step) for step in range(-_STEPS, _STEPS + 1)]


def capacity_curve(
    trace: Trace,
    config: ReplayConfig,
    sizes: list[int],
    *,
    adaptive: bool = True,
    reading: Reading | None = None,
    matches: NDArray[np.int64] | None = None,
    progress: Progress | None = None,
) -> list[CapacityPoint]:
    """What least recently used and the default policy reuse at each size of memory.

    It is what a replay at that size finds, to within 0.3 points: the memory of requests that run is taken as that of
    one, and message boundaries but the first get no checkpoint.

    Args:
        trace: The trace.
        config: Model, layout and placement; its memory, policy, preset and clock are not used.
        sizes: Bytes of one rank, ascending.
        adaptive: Run the default policy too.
        reading: How answers are read.
        matches: What `endless_matches` gave for this trace and reading.
        progress: Called now and then.

    Raises:
        ConfigError: Memory for less than one block.
    """
    reading = reading or read_outputs(trace, config.outputs)
    matches = endless_matches(trace, reading) if matches is None else matches
    sized = scale(replace(config, memory=max(sizes), preset=None), trace.width)
    source = SymbolSource(trace, sized, reading)
    directory = Directory(sized.cache, [size // sized.block_bytes for size in sizes], adaptive=adaptive)
    hits = np.zeros((2, len(sizes), len(trace)), dtype=np.int64)
    for i in range(len(trace)):
        symbols, answer, stop = source.sequence(i)
        prompt = Prompt(symbols, boundaries=source.boundaries(i, len(symbols)))
        lru, own = directory.request(prompt, np.concatenate((symbols, answer))[:stop].tobytes())
        hits[0, :, i] = lru
        if adaptive:
            hits[1, :, i] = own
        if progress and i % _TOLD_EVERY == 0:
            progress(i, len(trace))
    hits = np.minimum(hits * sized.symbol, trace.prompt_tokens - 1)
    points = []
    for number, size in enumerate(sizes):
        lru_figures, own_figures = (figures(trace, config.cost, hits[k, number], matches, None, 0) for k in (0, 1))
        points.append(
            CapacityPoint(
                size,
                lru_figures.token_hit_rate,
                lru_figures.compute_saved,
                own_figures.token_hit_rate if adaptive else None,
                own_figures.compute_saved if adaptive else None,
            )
        )
    return points
