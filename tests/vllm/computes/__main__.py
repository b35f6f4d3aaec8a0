"""`make judge-vllm JUDGE=computes`: a vLLM that computes, with no cache, its own and Headway's, against transformers.

First every family without a cache; then, on those that vLLM computes as transformers does, random requests with each
cache. A cell that was judged is a line of `build/vllm_computes.jsonl` and is not run again while the code and the
versions are the same.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from tests.vllm.computes import engine, families, models, tokens

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build"
RESULTS, FOLDERS, LOGS = BUILD / "vllm_computes.jsonl", BUILD / "vllm_models", BUILD / "vllm_logs"
CACHES = ("none", "vllm", "headway", "broken")
POOLS = {"roomy": (4.0, 96), "small": (1.3, 64)}
"""Name to the longest requests that fit, and tokens per step."""


def main() -> int:
    """Run what is missing and print both tables. 1 if a cache is at fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", help="these families (all)")
    parser.add_argument("--caches", nargs="*", default=CACHES, choices=CACHES, help="these caches (all)")
    parser.add_argument("--seeds", type=int, default=2, help="workloads per cell (2)")
    arguments = parser.parse_args()
    for folder in (FOLDERS, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    known = _Known()
    found = [_family(name, known) for name in models.FAMILIES if not arguments.only or name in arguments.only]
    print(f"\n{families.table(found)}\n", flush=True)
    cells: dict[tokens.Run, tokens.Outcome] = {}
    faults: list[str] = []
    for run in _runs([one for one in found if one.equal], arguments.caches, arguments.seeds):
        fault = _cell(run, known, cells)
        if fault:
            faults.append(f"{run}: {fault}")
            print(f"  FAULT {fault}", flush=True)
    print(f"\n{tokens.table(cells)}\n")
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def _runs(found: list[families.Family], caches: list[str], seeds: int) -> Iterator[tokens.Run]:
    for family in found:
        longest = sum(-(-engine.LENGTH // size) for size in family.groups.values())
        model = (family.name, family.dtype, family.near)
        for pool, (requests, chunk) in POOLS.items():
            for seed in range(seeds):
                for cache in caches:
                    if cache != "broken" or (pool == "roomy" and seed == 0):
                        yield tokens.Run(*model, cache, int(requests * longest) + 1, chunk, seed)


def _family(name: str, known: _Known) -> families.Family:
    key = {"family": name}
    if (record := known.get(key)) is None:
        record = asdict(families.compare(name, FOLDERS / name, LOGS / f"{name}.log"))
        known.put(key, record)
    one = families.Family(**record)
    print(f"{name}: {one.error or f'{one.whole:.1e} whole, {one.chunked:.1e} chunked'}", flush=True)
    return one


def _cell(run: tokens.Run, known: _Known, cells: dict[tokens.Run, tokens.Outcome]) -> str:
    """Judge a cell. Returns what is wrong with it."""
    key = asdict(run)
    if (record := known.get(key)) is None:
        try:
            outcome, answers = tokens.compare_caches(run, FOLDERS / run.family, LOGS / f"{run.family}.log")
        except RuntimeError as error:
            if run.cache == "vllm":  # whose own fault it is
                print(f"{run}: vLLM's own cache does not run: {str(error)[:300]}", flush=True)
                return ""
            return str(error)[:300]
        digest = {name: hashlib.sha256(str(text).encode()).hexdigest()[:8] for name, text in answers.items()}
        record = {"outcome": asdict(outcome), "answers": digest}
        known.put(key, record)
    one = cells[run] = tokens.Outcome(**record["outcome"])
    print(f"{run}: {one}", flush=True)
    right = one.wrong == 0 and one.gap < run.near
    if run.cache == "broken":
        return "" if not right else "the missing copies were not seen"
    plain = known.get(key | {"cache": "none"})
    differ = [name for name, text in record["answers"].items() if plain and plain["answers"].get(name, text) != text]
    if not right or len(differ) > one.ties:
        return (
            f"{one.wrong} wrong tokens, largest difference {one.gap:.1e}, other answers than without a cache: {differ}"
        )
    return ""


@functools.cache
def _digest(parts: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        place = Path(__file__).parent / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _Known:
    """Records of earlier runs with the same code and versions."""

    def __init__(self) -> None:
        self._versions = {"vllm": engine.vllm_version(), "transformers": transformers.__version__}
        self._records: dict[str, Any] = {}
        for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
            record = json.loads(line)
            self._records[record["key"]] = record["value"]

    def _key(self, key: dict[str, Any]) -> str:
        parts = ["models.py", "engine.py", "families.py"]
        if "cache" in key:
            parts += ["tokens.py", "requests.py"]
        if key.get("cache") in ("headway", "broken"):
            parts += ["../../../src/headway/cache", "../../../src/headway/vllm"]
        return json.dumps({**self._versions, "code": _digest(tuple(parts)), **key}, sort_keys=True)

    def get(self, key: dict[str, Any]) -> Any:
        return self._records.get(self._key(key))

    def put(self, key: dict[str, Any], value: Any) -> None:
        self._records[self._key(key)] = value
        with RESULTS.open("a", encoding="utf-8") as file:
            print(json.dumps({"key": self._key(key), "value": value}), file=file)


if __name__ == "__main__":
    sys.exit(main())
