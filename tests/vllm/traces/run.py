"""Judge 1: vLLM's scheduler with and without Headway's cache on request traces, without a model.

    make judge-vllm JUDGE=traces ARGS="--traces FOLDER"

FOLDER holds `conversation_trace.jsonl` and `synthetic_trace.jsonl` of Mooncake, and `agents/`, the sessions of
kv-cache-tester. Each cell (model, trace, memory) is run by each engine in a process of its own, in turns, and written
to `build/vllm-traces.jsonl` when it is done. A cell that is there is not run again, unless vLLM or, for Headway, the
code of the cache has changed. The table of all that is there is printed at the end and written beside it.

A checked cell runs Headway alone, on an emulated worker that asserts every read, with two steps under way, drafts that
are accepted at random, answers that end at random, aborts and resets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.vllm.traces.table import render

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "build" / "vllm-traces.jsonl"
MEASURE = 1
"""Raised when this folder changes what is measured: older lines do not count then."""
SESSIONS, SESSION_REQUESTS, LONGEST = 60, 600, 131_072
REQUESTS = 3993
"""Of a Mooncake trace: all of `synthetic`, the first third of `conversation`."""


@dataclass(frozen=True)
class Cell:
    """What is run.

    Attributes:
        model: A name of `LAYOUTS`.
        trace: "conversation", "synthetic" or "agents".
        memory: GB per rank.
        engine: A name of `ENGINES`.
        requests: The first requests of the trace; of sessions, the most.
        asynchronous: Two steps under way.
        drafts: Drafted tokens per step.
        checked: On the emulated worker, with faults.
    """

    model: str
    trace: str
    memory: float
    engine: str = "vllm"
    requests: int = REQUESTS
    asynchronous: bool = False
    drafts: int = 0
    checked: bool = False

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        mode = ("asynchronous/" if self.asynchronous else "") + ("checked/" if self.checked else "")
        drafts = f"drafts {self.drafts}/" if self.drafts else ""
        return f"{self.model}/{self.trace}/{self.memory:g} GB/{mode}{drafts}{self.engine}"


def cells() -> list[Cell]:
    """All of them, those that matter most first; engines in turns."""
    k3 = [
        *(("conversation", 14.5), ("conversation", 58.0), ("agents", 14.5), ("agents", 58.0)),
        *(("synthetic", 14.5), ("synthetic", 58.0)),
        *(("conversation", 232.0), ("agents", 232.0), ("synthetic", 232.0)),
    ]
    plain = [Cell("kimi-k3", trace, memory) for trace, memory in k3]
    plain += [Cell(model, trace, 58.0) for model in ("gpt-oss-120b", "qwen3-next") for trace in ("conversation", "agents")]
    plain += [Cell("kimi-k3", "conversation", 58.0, asynchronous=True)]
    both = []
    for turn, cell in enumerate(plain):
        pair = [cell, replace(cell, engine="headway")]
        both += pair if turn % 2 == 0 else pair[::-1]
    checked = [
        Cell("kimi-k3", "conversation", 4.5, "headway", 400, checked=True),
        Cell("kimi-k3", "conversation", 4.5, "headway", 400, asynchronous=True, checked=True),
        Cell("gpt-oss-120b", "conversation", 9.0, "headway", 200, asynchronous=True, checked=True),
        Cell("gpt-oss-120b", "conversation", 9.0, "headway", 200, asynchronous=True, drafts=3, checked=True),
        Cell("kimi-k3", "agents", 4.5, "headway", 100, asynchronous=True, checked=True),
    ]
    fine = [replace(cell, engine="vllm-512") for cell in plain if cell.model == "kimi-k3" and not cell.asynchronous]
    return both + checked + fine


def key(cell: Cell, answer: int) -> dict[str, Any]:
    """All that decides what a cell gives: a line with the same key is its result."""
    own = {"code": code_digest()} if cell.engine == "headway" else {}
    return {"cell": asdict(cell), "answer": answer, "measure": MEASURE, "vllm": version("vllm")} | own


@cache
def code_digest() -> str:
    """A digest of the code of Headway that decides."""
    digest = hashlib.sha256()
    for path in sorted(path for part in ("cache", "vllm") for path in (ROOT / "src/headway" / part).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def measure(cell: Cell, traces: Path, answer: int) -> dict[str, Any]:
    """Run a cell in this process."""
    # Only the process of a cell needs vLLM.
    from tests.vllm.traces.one import run_cell
    from tests.vllm.traces.workload import conversation, sessions

    if cell.trace == "agents":
        files = min(SESSIONS, cell.requests)
        workload = sessions(traces / "agents", files=files, requests=min(cell.requests, SESSION_REQUESTS), longest=LONGEST)
    else:
        workload = conversation(traces / f"{cell.trace}_trace.jsonl", cell.requests)
    return run_cell(cell, workload, answer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and print the table. 1 if a cell failed."""
    options = _options(argv)
    if options.cell:
        print(json.dumps(measure(Cell(**json.loads(options.cell)), options.traces, options.answer)), flush=True)
        return 0
    wanted = [cell for cell in cells() if all(part in cell.name for part in options.only)]
    if options.requests:
        wanted = [replace(cell, requests=min(cell.requests, options.requests)) for cell in wanted]
    known = _known(options.out)
    missing = [cell for cell in wanted if _line(key(cell, options.answer)) not in known]
    print(f"{len(wanted)} cells, {len(missing)} to run, vLLM {version('vllm')}, code {code_digest()}", flush=True)
    failed = 0 if options.show else _run_all(missing, options, known)
    found = [known[line] for cell in wanted if (line := _line(key(cell, options.answer))) in known]
    text = render(found)
    print("\n" + text)
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 1 if failed else 0


def _run_all(missing: Iterable[Cell], options: argparse.Namespace, known: dict[str, dict[str, Any]]) -> int:
    failed = 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(missing, start=1):
        started = time.monotonic()
        print(f"[{number}] {cell.name}: {cell.requests} requests ...", flush=True)
        command = [sys.executable, "-m", "tests.vllm.traces.run", "--traces", str(options.traces)]
        command += ["--answer", str(options.answer), "--cell", json.dumps(asdict(cell))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
        if done.returncode:
            failed += 1
            print(f"    failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
            continue
        identity = key(cell, options.answer)
        record = known[_line(identity)] = identity | json.loads(done.stdout.splitlines()[-1])
        with options.out.open("a", encoding="utf-8") as file:
            print(json.dumps(record), file=file, flush=True)
        print(f"    {record['reused'] / record['prompt_tokens']:.2%} reused, {time.monotonic() - started:.0f} s", flush=True)
    return failed


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """Finished cells by what decides them."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    names = ("cell", "answer", "measure", "vllm", "code")
    return {_line({name: record[name] for name in names if name in record}): record for record in records}


def _line(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make judge-vllm JUDGE=traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="Folder of the traces.")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="Cells whose names have all of these.")
    parser.add_argument("--requests", type=int, help="At most so many requests per cell (fewer than the table says).")
    parser.add_argument("--answer", type=int, default=2, help="Answers are cut to so many tokens (%(default)s).")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Finished cells, as JSON lines (%(default)s).")
    parser.add_argument("--show", action="store_true", help="Run nothing: the table of what is there.")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
