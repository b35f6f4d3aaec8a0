"""Eviction policies side by side: every trace x model x memory x policy, by one command that goes on where it stopped.

    python benchmarks/policies.py TRACES OUT                  # run what is missing, then print the tables
    python benchmarks/policies.py TRACES OUT --rows lru,value --traces agents-b
    python benchmarks/policies.py TRACES OUT --find-memory    # find the sizes of memory that are not known

TRACES is a folder with `conversation_trace.jsonl` and `synthetic_trace.jsonl` (Mooncake's, FAST25-release) and
`agents/` (sessions of kv-cache-tester). OUT gets one line a finished run in `runs.jsonl`. Runs of another release of
the code are made anew unless `--any-release` is given.

The sizes of memory are those at which LRU saves 25, 60 and 90% of the compute that it saves with endless memory; they
stand in `policies_memory.json` beside this file. The metric is the share of compute saved; tokens stand beside it.
Policies that are not this cache's own are run at the middle size alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import Candidate, EvictionPolicy, ParallelLayout
from headway.errors import ConfigError
from headway.formats import Trace, read_trace
from headway.replay import ReplayConfig, generate, replay_trace
from headway.replay.ask.catalogue import Model, model_of
from headway.replay.ask.folder import release_mark
from headway.replay.run.clairvoyant import clairvoyant_hits
from headway.replay.run.figures import figures
from headway.replay.trace.prefixes import endless_matches, read_outputs
from headway.tell.run import Figures

_MEMORY = Path(__file__).with_name("policies_memory.json")
_SHARES = {"tight": 0.25, "middle": 0.60, "ample": 0.90}
_SEED = 41_908
"""Of the generated workloads; nothing was chosen on it. What is chosen is chosen on seed 77."""
_CHOOSING_SEED = 77
_GENERATED = 3_000


@dataclass(frozen=True)
class Served:
    """A model as it is served: its name in the catalogue, the layout, and the longest request that it takes."""

    model: str
    layout: ParallelLayout
    context: int


MODELS = {
    "kimi-k3": Served("kimi-k3", ParallelLayout(tp=8, dcp=8), 1_048_576),
    "qwen3-next": Served("qwen3-next", ParallelLayout(tp=2), 262_144),
    "gpt-oss-120b": Served("gpt-oss-120b", ParallelLayout(tp=1), 131_072),
    "minimax-m2": Served("minimax-m2", ParallelLayout(tp=8), 204_800),
}
TRACES = ("conversation", "synthetic", "agents-a", "agents-b", "chat", "search", "mixed")
CHOOSING = ("chat77", "search77", "mixed77")


class S3Fifo(EvictionPolicy):
    """S3-FIFO (SOSP 2023), by expiry: what was never wanted stays a tenth as long as what was.

    The two queues and the ghosts become one order. What was not wanted yet goes a tenth of the main queue's span after
    it came, what was wanted a whole span after its last use. A use of what had gone counts (`Candidate.uses`), as an
    entry found among the ghosts goes to the main queue at once.
    """

    learns = False
    _span = 0.0
    _latest = 0

    def priority(self, candidate: Candidate) -> float:
        """The tick at which it expires."""
        self._latest = max(self._latest, candidate.used)
        return candidate.used + (self._span if candidate.uses else 0.1 * self._span)

    def evicted(self, candidate: Candidate) -> None:
        """The main queue's span is the age at which what was wanted goes."""
        if candidate.uses:
            self._span += 0.05 * (self._latest - candidate.used - self._span)
        elif not self._span:
            self._span = float(self._latest - candidate.used)


@dataclass(frozen=True)
class Row:
    """A policy of the table.

    Attributes:
        source: Where it is from.
        change: What of a configuration makes it.
        sizes: Sizes of memory at which it is run.
        models: Models that it is for; all if empty.
    """

    source: str
    change: Callable[[ReplayConfig], ReplayConfig]
    sizes: tuple[str, ...] = ("tight", "middle", "ample")
    models: tuple[str, ...] = ()


def _eviction(name: str) -> Callable[[ReplayConfig], ReplayConfig]:
    return lambda config: replace(config, eviction=name)


def _preset(name: str) -> Callable[[ReplayConfig], ReplayConfig]:
    return lambda config: replace(config, preset=name)


_MIDDLE, _STATES = ("middle",), ("kimi-k3", "qwen3-next")
_ENDS = ("answer_end", "junction")
ROWS = {
    "adaptive": Row("the default", _eviction("adaptive")),
    "lru": Row("this cache, least recently used", _eviction("lru")),
    "greedy-dual": Row("Cao and Irani 1997, with frequency", _eviction("greedy-dual")),
    "value": Row("the default until now", _eviction("value")),
    "marconi": Row("arXiv 2411.19379", _preset("marconi"), _MIDDLE),
    "lru-ends": Row(
        "SGLang's states at forks and ends of requests (sglang#17898), LRU",
        lambda config: replace(config, eviction="lru", placement=_ENDS),
        _MIDDLE,
    ),
    "s3-fifo": Row("Yang et al., SOSP 2023", lambda config: replace(config, eviction=S3Fifo()), _MIDDLE),
    "vllm": Row("vLLM 0.33", _preset("vllm"), _MIDDLE),
    "vllm-unit": Row("vLLM 0.33, prefix_match_unit=256", _preset("vllm,match_unit=256"), _MIDDLE, _STATES),
    "sglang": Row("SGLang 0.5.23", _preset("sglang"), _MIDDLE, _STATES),
}
_ESTIMATE = "estimate"
"""Knowing the future: the best of a heuristic and of all rows."""


# ---- traces


def load(name: str, folder: Path) -> Trace:
    """A trace of the matrix."""
    if name in ("conversation", "synthetic"):
        return read_trace(folder / f"{name}_trace.jsonl")
    if not name.startswith("agents"):
        chosen = name.endswith(str(_CHOOSING_SEED))
        kind = name.removesuffix(str(_CHOOSING_SEED))
        return generate(kind, _GENERATED, seed=_CHOOSING_SEED if chosen else _SEED)
    sessions = sorted((folder / "agents").glob("session_*"))
    half = len(sessions) // 2
    part = {"agents-a": sessions[:half], "agents-b": sessions[half:], "agents": sessions}[name]
    with tempfile.TemporaryDirectory() as place:
        for session in part:
            (Path(place) / session.name).symlink_to(session)
        return replace(read_trace(place), name=name)


def fitting(trace: Trace, context: int) -> Trace:
    """The requests that are not longer than a model's context."""
    keep = trace.prompt_tokens + trace.answer_tokens <= context
    if keep.all():
        return trace
    columns = {name: getattr(trace, name)[keep] for name in ("prompt_tokens", "answer_tokens", "times", "ordinals")}
    for values, ends in (("symbols", "offsets"), ("answers", "answer_offsets"), ("boundaries", "boundary_offsets")):
        columns[values], columns[ends] = _rows(getattr(trace, values), getattr(trace, ends), keep)
    return replace(trace, **columns)


def _rows(values: NDArray[Any], ends: NDArray[np.int64], keep: NDArray[np.bool_]) -> tuple[Any, Any]:
    lengths = np.diff(ends)
    return values[np.repeat(keep, lengths)], np.concatenate(([0], np.cumsum(lengths[keep])))


# ---- runs


@dataclass
class Bench:
    """One trace under one model, ready to run."""

    trace: Trace
    config: ReplayConfig
    matches: NDArray[np.int64]
    left_out: int

    @classmethod
    def of(cls, whole: Trace, served: Served) -> Bench:
        trace = fitting(whole, served.context)
        model: Model = model_of(served.model, served.layout)
        config = ReplayConfig(model.groups, None, served.layout, model.cost, layers=model.layers, kinds=model.kinds)
        return cls(trace, config, endless_matches(trace, read_outputs(trace)), len(whole) - len(trace))

    def run(self, row: Row, memory: int | None) -> dict[str, Any]:
        """What came of one row."""
        config = row.change(replace(self.config, memory=memory))
        result = replay_trace(self.trace, config, matches=self.matches)
        seconds = {"refused": result.refused, "seconds": round(result.seconds, 2)}
        return self._figures(result.whole) | seconds

    def estimate(self, memory: int) -> dict[str, Any]:
        """What the heuristic that knows the future reaches."""
        hits = clairvoyant_hits(self.trace, replace(self.config, memory=memory), self.matches)
        return self._figures(figures(self.trace, self.config.cost, hits, self.matches, None, 0)) | {"seconds": 0}

    def _figures(self, whole: Figures) -> dict[str, Any]:
        return {
            "tokens": round(100 * whole.token_hit_rate, 3),
            "compute": round(100 * whole.compute_saved, 3),
            "endless_tokens": round(100 * whole.endless_tokens / max(1, whole.prompt_tokens), 3),
            "endless_compute": round(100 * whole.endless_compute, 3),
            "requests": whole.requests,
            "left_out": self.left_out,
        }


def find_memory(bench: Bench) -> dict[str, int]:
    """Bytes at which LRU saves the shares of what it saves with endless memory, to within 1% of the bytes."""
    seen: dict[int, float] = {}

    def saved(memory: int) -> float:
        if memory not in seen:
            seen[memory] = bench.run(ROWS["lru"], memory)["compute"]
        return seen[memory]

    endless, found = bench.run(ROWS["lru"], None)["compute"], {}
    for size, share in _SHARES.items():
        wanted = share * endless
        low, high = 1 << 27, 1 << 42
        for memory, compute in seen.items():
            low, high = (max(low, memory), high) if compute < wanted else (low, min(high, memory))
        while high > 1.02 * low:
            middle = int((low * high) ** 0.5)
            low, high = (middle, high) if saved(middle) < wanted else (low, middle)
        found[size] = int(float(f"{high:.3g}"))
    return found


class Folder:
    """Finished runs."""

    def __init__(self, path: Path, *, any_release: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._file = path / "runs.jsonl"
        self.runs: dict[str, dict[str, Any]] = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            run = json.loads(line)
            if any_release or run["release"] == release_mark():
                self.runs[run["key"]] = run

    def add(self, key: str, run: dict[str, Any]) -> None:
        run = {"key": key, "release": release_mark()} | run
        with self._file.open("a") as file:
            file.write(json.dumps(run) + "\n")
        self.runs[key] = run


@dataclass(frozen=True)
class Cell:
    """A trace under a model at a size of memory, and what came of each row there, by name."""

    name: str
    runs: dict[str, dict[str, Any]]

    def compute(self, row: str) -> float:
        """Share of compute saved, in percent."""
        if row == _ESTIMATE:
            return max(float(run["compute"]) for run in self.runs.values())
        return float(self.runs[row]["compute"])

    @property
    def online(self) -> dict[str, float]:
        """The rows that do not know the future, but for the default."""
        return {row: self.compute(row) for row in self.runs if row not in (_ESTIMATE, "adaptive")}

    @property
    def behind(self) -> float:
        """Points by which the default is behind the best of them; negative: ahead."""
        return max(self.online.values()) - self.compute("adaptive")

    @property
    def share(self) -> float:
        """Share of the distance from LRU to the estimate that the default covers, in percent."""
        low, high = self.compute("lru"), self.compute(_ESTIMATE)
        return 100 * (self.compute("adaptive") - low) / (high - low) if high - low > 0.05 else 100.0


def cells_of(folder: Folder, traces: list[str], models: list[str]) -> list[Cell]:
    """The cells of which there are runs of the default and of LRU."""
    found = []
    for trace, model, size in product(traces, models, _SHARES):
        name = f"{trace}/{model}/{size}"
        runs = {row: folder.runs[f"{name}/{row}"] for row in (*ROWS, _ESTIMATE) if f"{name}/{row}" in folder.runs}
        if {"adaptive", "lru"} <= runs.keys():
            found.append(Cell(name, runs))
    return found


def show(cells: list[Cell]) -> None:
    """Print the table as Markdown, and what it comes to. Shares are told where the estimate was run."""
    rows = [row for row in ROWS if any(row in cell.runs for cell in cells)]
    print("| cell | memory | " + " | ".join(rows) + " | best other row - adaptive | estimate | share |")
    print("| --- | ---: |" + " ---: |" * (len(rows) + 3))
    for cell in cells:
        best = max(cell.compute(row) for row in rows if row in cell.runs)
        values = []
        for row in rows:
            text = f"{cell.compute(row):.1f}" if row in cell.runs else ""
            values.append(f"**{text}**" if text and cell.compute(row) > best - 0.05 else text)
        memory = f"{cell.runs['lru']['memory'] / 1e9:.3g} GB"
        known = f"{cell.compute(_ESTIMATE):.1f} | {cell.share:.0f}%" if _ESTIMATE in cell.runs else " | "
        print(f"| {cell.name} | {memory} | " + " | ".join(values) + f" | {cell.behind:+.2f} | {known} |")
    behind = [cell.behind for cell in cells] or [0.0]
    within = sum(value <= 0.5 for value in behind)
    print(f"\nat most 0.5 points behind: {within} of {len(cells)}; furthest behind: {max(behind):.2f}", end="; ")
    print(f"mean: {np.mean(behind):+.2f}")
    if kimi := [cell.share for cell in cells if "kimi" in cell.name and _ESTIMATE in cell.runs]:
        print(f"share of the distance from LRU to the estimate on Kimi-K3: {np.mean(kimi):.0f}%")


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the traces")
    parser.add_argument("out", type=Path, help="folder of finished runs")
    parser.add_argument("--rows", default=",".join((*ROWS, _ESTIMATE)))
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default=",".join(_SHARES))
    parser.add_argument("--find-memory", action="store_true", help="find the sizes of memory that are not known")
    parser.add_argument("--any-release", action="store_true", help="use runs of other releases of the code too")
    parser.add_argument("--table", action="store_true", help="print the table of what there is, and run nothing")
    given = parser.parse_args()
    folder = Folder(given.out, any_release=given.any_release)
    traces, models = given.traces.split(","), given.models.split(",")
    if not given.table:
        for trace in traces:
            run_trace(trace, models, given.sizes.split(","), given.rows.split(","), folder, given)
    show(cells_of(folder, traces, models))


def run_trace(
    trace: str, models: list[str], sizes: list[str], rows: list[str], folder: Folder, given: argparse.Namespace
) -> None:
    """Run what is missing of one trace."""
    memory: dict[str, dict[str, int]] = json.loads(_MEMORY.read_text()) if _MEMORY.exists() else {}
    whole = None
    for model in models:
        cell = f"{trace}/{model}"
        missing = [
            (size, row)
            for size, row in product(sizes, rows)
            if f"{cell}/{size}/{row}" not in folder.runs
            and (row == _ESTIMATE or (size in ROWS[row].sizes and model in (ROWS[row].models or MODELS)))
        ]
        if not (given.find_memory and cell not in memory) and (given.find_memory or not missing):
            continue
        whole = load(trace, given.folder) if whole is None else whole
        bench = Bench.of(whole, MODELS[model])
        if given.find_memory:
            memory[cell] = find_memory(bench)
            _MEMORY.write_text(json.dumps(memory, indent=2, sort_keys=True) + "\n")
            continue
        for size, row in missing:
            size_bytes = memory[cell][size]
            try:
                run = bench.estimate(size_bytes) if row == _ESTIMATE else bench.run(ROWS[row], size_bytes)
            except ConfigError as error:
                print(f"{cell}/{size}/{row}: {error}", file=sys.stderr)
                continue
            folder.add(f"{cell}/{size}/{row}", {"memory": size_bytes} | run)
            print(f"{cell}/{size}/{row}", run["compute"], run["tokens"], run["seconds"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
