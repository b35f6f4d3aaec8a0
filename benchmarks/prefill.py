"""What a prefill costs each rank: `python benchmarks/prefill.py`, with `--pcp 2` and without, of one long prompt.

Every layout computes the same prompts, of random tokens and with nothing to reuse, on processes of this machine.
Printed are the processor time of each rank, user and system, from the request to its first token, and the elapsed time;
of both the least of several prompts. Ranks compute with one thread each, so that processor time is work and not
waiting. Processor time is what prefill context parallelism divides; elapsed time follows where each rank has a core.

    python benchmarks/prefill.py                        the built-in model, 8,192 tokens, one rank against two
    python benchmarks/prefill.py --model FOLDER --tokens 4096 --layouts 1,pcp=2,pcp=4,dcp=2
"""

import argparse
import os
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headway.engine import EngineConfig, GenerationRequest, ParallelConfig
from headway.engine.build import build_engine
from headway.engine.ranks.driver import RankedExecutor
from headway.engine.ranks.processes import ProcessRanks

MEMORY = 256 * 2**20


def used(pid: int) -> float:
    """Seconds of processor time that a process has used (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(model: str | None, layout: str, tokens: int, prompts: int) -> tuple[list[float], float]:
    """Least processor time of each rank, and least elapsed time, of a prompt on ranks such as `pcp=2` or `1`."""
    name, _, count = layout.partition("=")
    sizes: dict[str, Any] = {name: int(count)} if count else {}
    parallel = ParallelConfig(executor="processes", **sizes)
    config = EngineConfig(memory=MEMORY, parallel=parallel, prefix_reuse=False)
    engine = build_engine(model, config).engine.start()
    executor, rng = engine._executor, np.random.default_rng(0)
    assert isinstance(executor, RankedExecutor)
    assert isinstance(executor._group, ProcessRanks)
    pids = [process.pid for process in executor._group.processes]
    computed, elapsed = [], []
    try:
        for _ in range(prompts + 1):
            asked = GenerationRequest(rng.integers(16, 250, tokens).astype(np.int32), 1)
            before, started = [used(pid) for pid in pids], time.perf_counter()
            engine.submit(asked).result(3600)
            elapsed.append(time.perf_counter() - started)
            computed.append([used(pid) - was for pid, was in zip(pids, before, strict=True)])
    finally:
        engine.close()
    return np.min(computed[1:], axis=0).tolist(), min(elapsed[1:])  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; the built-in model by default")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prompt")
    parser.add_argument("--prompts", type=int, default=3, help="how many are measured; the least counts")
    parser.add_argument("--layouts", default="1,pcp=2", help="such as 1,pcp=2,dcp=2; 1 is one rank")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = Table(title=f"A prompt of {options.tokens:,} tokens, computed")
    for column in ("ranks", "processor time per rank (s)", "all ranks (s)", "elapsed (s)"):
        table.add_column(column, justify="right")
    for layout in options.layouts.split(","):
        ranks, elapsed = measure(options.model, layout, options.tokens, options.prompts)
        shown = ", ".join(f"{seconds:.2f}" for seconds in ranks)
        table.add_row(layout, shown, f"{sum(ranks):.2f}", f"{elapsed:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
