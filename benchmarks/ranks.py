"""What ranks cost the driver, and what merging their attention costs: `python benchmarks/ranks.py`.

The driver's part of a step: everything between the scheduler's step and its tokens that is not computing. The ranks
here are processes that answer at once, so what is measured is packing the step, sending it to every rank, and waiting
for all answers; it is shown against the batch and the number of ranks, with the bytes that travel. Rows decode, each
with 4,096 tokens behind it (256 block ids of 16 tokens on one rank).

Merging: real ranks over gloo, each with partial outputs of random numbers, in both forms of communication, against the
attention to the rank's own part of the history, which is what context parallelism makes smaller.

The driver's figures are the processor time that its process uses for a step, user and system, as a mean: what it would
take away from the scheduler. Those of attention and merging are elapsed time, the fastest of many calls: on a machine
with other users, the slower ones measure these.

    python benchmarks/ranks.py            prints two tables, takes a few minutes
    python benchmarks/ranks.py --quick    fewer and smaller
"""

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from headway.cache import CacheGeometry, FullAttention, LayerSpec, Recurrent, Step
from headway.engine import ParallelConfig, RowAnswer, StepWork
from headway.engine.ranks.drafting import DraftSource
from headway.engine.ranks.driver import RankedExecutor
from headway.engine.ranks.messages import Answer, Loaded, Prepare, Prepared, StepDone, compact, encode
from headway.runtime.interface import COMMUNICATIONS, SampleRow, SamplingParams
from headway.runtime.model.attention import Scores
from headway.runtime.parallel.context_parallel import HeadMerge, Partial, partial_attention
from headway.runtime.parallel.distributed import Rendezvous, join_group, leave_group

HISTORY = 4096
SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")  # a rank that computes nothing needs no libraries of its own


def used(action: Callable[[], object], repeats: int) -> float:
    """Microseconds of this process's processor time for one call."""
    action()
    started = time.process_time()
    for _ in range(repeats):
        action()
    return (time.process_time() - started) / repeats * 1e6


def timed(action: Callable[[], object], repeats: int) -> float:
    """Microseconds of the fastest call."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return min(taken) * 1e6


# -- the driver --------------------------------------------------------------------------------------------------------


def echo(end: socket.socket, answer: bytes, loading: bytes, making_room: bytes) -> None:
    """Be a rank that computes nothing."""
    connection: Connection[bytes, bytes] = Connection(end.detach())
    answers = iter([loading, making_room])
    while True:
        try:
            connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(next(answers, answer))


class EchoRanks:
    """A group of processes that answer at once."""

    meeting = Rendezvous("nowhere")

    def __init__(self, size: int, rows: int) -> None:
        self.size = size
        self._ends: list[Connection[bytes, bytes]] = []
        self._processes: list[ForkProcess] = []
        start = [encode(Answer(record, 0)) for record in (Loaded(1, (), None), Prepared(1, None))]
        for rank in range(size):
            ours, theirs = socket.socketpair()
            output = StepDone([RowAnswer((0,), 1)] * rows if rank == 0 else ())
            process = FORK.Process(target=echo, args=(theirs, encode(Answer(output, 0)), *start), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(Connection(ours.detach()))

    def send(self, messages: Sequence[bytes], timeout: float) -> None:
        for i, end in enumerate(self._ends):
            end.send_bytes(messages[i % len(messages)])

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        ready = wait(self._ends, timeout)
        return (self._ends.index(ready[0]), ready[0].recv_bytes()) if ready else None  # type: ignore[arg-type, union-attr]

    def check(self) -> None: ...

    def stopped(self) -> tuple[int, ...]:
        return ()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()


def decoding(rows: int, geometry: CacheGeometry, params: SamplingParams) -> StepWork:
    """A step of `rows` requests that decode."""
    width = HISTORY // geometry.tables[0].span + 1
    step = Step(
        rows=np.arange(rows),
        starts=np.full(rows, HISTORY),
        counts=np.ones(rows, dtype=np.int64),
        copies=np.empty((0, 2), dtype=np.int32),
        fresh=np.empty(0, dtype=np.int64),
        exports=(),
        serial=1,
    )
    tables = [np.zeros((rows, width + 10), dtype=np.int32), np.zeros((rows, 8), dtype=np.int32)]
    prompt, output = np.zeros(HISTORY - 100, dtype=np.int32), np.zeros(100, dtype=np.int32)
    sample = SampleRow(params, 5, prompt, output)
    return StepWork(step, tables, [np.ones(1, dtype=np.int32)] * rows, [sample] * rows)


def _pack(work: StepWork, geometry: CacheGeometry) -> bytes:
    return encode(compact(work, geometry))


def driver_table(batches: list[int], sizes: list[int], repeats: int) -> Table:
    table = Table(title="Driver, microseconds of processor time a step")
    for column in ("rows", "message", "packing", *(f"{size} rank(s)" for size in sizes)):
        table.add_column(column, justify="right")
    groups: list[LayerSpec] = [FullAttention("full", 1024), Recurrent("state", 8 * 16 * 1024)]
    for rows in batches:
        cells: list[str] = []
        for size in sizes:
            parallel = ParallelConfig(dcp=size).layout
            geometry = CacheGeometry(groups, parallel, block_tokens=16)
            work = decoding(rows, geometry, SamplingParams(temperature=0.8))
            nobody = DraftSource("none", None, "match")
            executor = RankedExecutor(partial(EchoRanks, size, rows), None, "fp32", ParallelConfig(dcp=size), nobody)
            executor.load()
            executor.prepare(geometry, Prepare(1, 16, parallel.tp, parallel.dcp, 1, False, rows))
            if not cells:
                packed = encode(compact(work, geometry))
                packing = used(partial(_pack, work, geometry), repeats)
                cells += [f"{len(packed) / 1024:,.0f} KiB", f"{packing:,.0f}"]
            cells.append(f"{used(partial(executor.run, work), repeats):,.0f}")
            executor.close()
        table.add_row(f"{rows:,}", *cells)
    return table


# -- merging -----------------------------------------------------------------------------------------------------------


def merge_rank(rank: int, size: int, path: str, shapes: list[tuple[int, int]], repeats: int, out: object) -> None:
    """Be a rank that merges random parts; rank 0 reports microseconds by shape and way, and of its own attention."""
    torch.set_num_threads(1)
    ranks = join_group(Rendezvous(path), rank, size, torch.device("cpu"), 600.0)
    found = []
    heads, width = 16, 128
    for rows, history in shapes:
        local = history // size
        query, key = torch.randn(rows, heads, 1, width), torch.randn(rows, 2, local, width)
        own = timed(partial(partial_attention, query, key, key, Scores(0.1), None), repeats)
        part = Partial(torch.randn(rows, heads, 1, width), torch.randn(rows, heads, 1))
        merges = [HeadMerge(ranks, communication) for communication in COMMUNICATIONS]
        merging = [timed(partial(merge, part), repeats) for merge in merges]
        found.append((rows, history, own, merging))
    if rank == 0:
        out.put(found)  # type: ignore[attr-defined]
    leave_group()


def merge_table(shapes: list[tuple[int, int]], sizes: list[int], repeats: int) -> Table:
    table = Table(title="One layer, 16 heads (2 of keys and values) of 128, fp32, one token a row: microseconds")
    for column in ("ranks", "rows", "history", "own attention", *(f"merge, {name}" for name in COMMUNICATIONS)):
        table.add_column(column, justify="right")
    for size in sizes:
        out = SPAWN.Queue()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "meeting")
            ranks = [
                SPAWN.Process(target=merge_rank, args=(rank, size, path, shapes, repeats, out)) for rank in range(size)
            ]
            for process in ranks:
                process.start()
            for rows, history, own, merging in out.get():
                cells = (size, rows, f"{history:,}", f"{own:,.0f}", *(f"{each:,.0f}" for each in merging))
                table.add_row(*(str(cell) for cell in cells))
            for process in ranks:
                process.join()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    quick = parser.parse_args().quick
    console = Console()
    batches, repeats = ([1, 16], 20) if quick else ([1, 16, 64, 256, 1024], 200)
    console.print(driver_table(batches, [1, 2] if quick else [1, 2, 4], repeats))
    shapes = [(1, 1024)] if quick else [(1, 1024), (1, 16384), (16, 1024), (16, 16384)]
    console.print(merge_table(shapes, [2] if quick else [2, 4], repeats // 4))


if __name__ == "__main__":
    main()
