"""Judge 1: vLLM's scheduler with and without Headway's cache on request traces, without a model.

    make judge-vllm JUDGE=traces ARGS="--traces FOLDER"

FOLDER holds `conversation_trace.jsonl` and `synthetic_trace.jsonl` of Mooncake, and `agents/`, the sessions of
kv-cache-tester. Each cell (model, trace, memory) is run by each engine in a process of its own, in turns, and written
to `build/vllm_traces.jsonl` when it is done. A cell that is there is not run again, unless vLLM or, for Headway, the
code of the cache has changed. The table of all that is there is printed at the end and written beside it.

A checked cell runs Headway alone, on an emulated worker that asserts every read, with two steps under way, drafts that
are accepted at random, answers that end at random, aborts and resets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.vllm.traces.cells import LONGEST, SESSION_REQUESTS, SESSIONS, Cell, cells
from tests.vllm.traces.table import render
from tests.vllm.traces.workload import Workload, conversation, sessions

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "build" / "vllm_traces.jsonl"
MEASURE = 1
"""Raised when this folder changes what is measured: older lines do not count then."""
_FORK = multiprocessing.get_context("fork")


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


@cache
def load(trace: str, requests: int, traces: Path) -> Workload:
    """The workload of a cell."""
    if trace == "agents":
        files, most = min(SESSIONS, requests), min(SESSION_REQUESTS, requests)
        return sessions(traces / "agents", files=files, requests=most, longest=LONGEST)
    return conversation(traces / f"{trace}_trace.jsonl", requests)


def run_apart(cell: Cell, workload: Workload, answer: int) -> dict[str, Any] | None:
    """Run a cell in a process of its own, forked when vLLM is imported: what it found, or None if it failed."""
    from tests.vllm.traces.one import run_cell  # imports vLLM, which `--show` does not need

    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=lambda: sender.send(run_cell(cell, workload, answer)))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and print the table. 1 if a cell failed."""
    options = _options(argv)
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
        found = run_apart(cell, load(cell.trace, cell.requests, options.traces), options.answer)
        if found is None:
            failed += 1
            print(f"    failed: {cell.name}", file=sys.stderr, flush=True)
            continue
        identity = key(cell, options.answer)
        record = known[_line(identity)] = identity | found
        with options.out.open("a", encoding="utf-8") as file:
            print(json.dumps(record), file=file, flush=True)
        reused = record["reused"] / record["prompt_tokens"]
        print(f"    {reused:.2%} reused, {time.monotonic() - started:.0f} s", flush=True)
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
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
