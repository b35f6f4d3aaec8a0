"""Change one line of the cache at a time and see whether a test notices.

    python tools/mutants.py               run all of `tools/mutations.py`, those already judged excepted
    python tools/mutants.py --only pin    those with "pin" in their name
    python tools/mutants.py --list        name them

Each change is made in a copy of the tree, where the tests that must notice it run until the first fails. A change that
no test notices survives, and says which test is missing. A change whose text is not in its file any more is an error:
write it anew. Results are kept in `.mutants.jsonl`, and used again while the changed file and the tests are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".mutants.jsonl"
COPIED = ("src", "tests", "pyproject.toml")
NOTICED, SURVIVED, BROKEN = "noticed", "survived", "broken"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    only: str
    again: bool
    limit: float
    listing: bool


def parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutations with TEXT in their name")
    parser.add_argument("--again", action="store_true", help="run those too whose result is known")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for the tests of one (300)")
    parser.add_argument("--list", action="store_true", dest="listing", help="name the mutations and end")
    return Options(**vars(parser.parse_args(arguments)))


def mutated(mutation: Mutation, tree: Path = ROOT) -> str:
    """The text of the mutated file of a tree.

    Raises:
        ValueError: What is to be replaced is not there, or is there more than once.
    """
    text = (tree / "src/headway/cache" / mutation.file).read_text(encoding="utf-8")
    found = text.count(mutation.old)
    if found != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} has {found} places that read {mutation.old!r}, not one")
    return text.replace(mutation.old, mutation.new)


def fingerprint(mutation: Mutation, text: str, tree: Path) -> str:
    """Equal while the mutated file and the tests that must notice it are equal, with the modules that help them."""
    parts = [text, " ".join(mutation.tests)]
    for test in mutation.tests:
        path = tree / test.partition("::")[0]
        helpers = [file for file in sorted(path.parent.glob("*.py")) if not file.name.startswith("test_")]
        parts += [file.read_text(encoding="utf-8") for file in (path, *helpers)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def known_results() -> dict[str, str]:
    """Results so far, by name and fingerprint."""
    if not RESULTS.exists():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {f"{line['name']} {line['fingerprint']}": line["result"] for line in lines}


def run(mutation: Mutation, text: str, tree: Path, limit: float) -> tuple[str, str]:
    """Run the tests of one mutation in a copy of the tree. Returns the result, and the test that noticed."""
    file = tree / "src/headway/cache" / mutation.file
    original = file.read_bytes()
    file.write_text(text, encoding="utf-8")
    # The state machine tries as many examples as find these faults, from one seed, and does not make them smaller.
    machine = {"HEADWAY_SEED": "77", "HEADWAY_EXAMPLES": "800", "HEADWAY_SHRINK": "0"}
    environment = {**os.environ, **machine, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    options = ("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist")
    command = [sys.executable, "-m", "pytest", *options, *mutation.tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=limit, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return NOTICED, f"no end within {limit:.0f} s"
    finally:
        file.write_bytes(original)
    if done.returncode not in (0, 1) and "ERROR " not in done.stdout:
        return BROKEN, done.stdout[-2000:] + done.stderr[-2000:]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (NOTICED if done.returncode else SURVIVED), (failed[0] if failed else "")


def judge(chosen: list[Mutation], options: Options) -> list[str]:
    """Run what is not known yet. Returns the names of those that survived or could not be run."""
    known = {} if options.again else known_results()
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source, target = ROOT / name, tree / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "builtin"))
            else:
                shutil.copy(source, target)
        for number, mutation in enumerate(chosen, 1):
            text = mutated(mutation, tree)
            mark, start, why = fingerprint(mutation, text, tree), time.monotonic(), "known"
            result = known.get(f"{mutation.name} {mark}", "")
            if not result:
                result, why = run(mutation, text, tree, options.limit)
                line = {"name": mutation.name, "fingerprint": mark, "result": result, "why": why}
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            took = time.monotonic() - start
            print(f"{number}/{len(chosen)} {result:8} {mutation.name} ({took:.0f} s) {why}", flush=True)
            if result != NOTICED:
                bad.append(mutation.name)
    return bad


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    try:
        for mutation in MUTATIONS:
            mutated(mutation)
    except ValueError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    if options.listing:
        for mutation in chosen:
            print(f"{mutation.name}  {mutation.file}  {' '.join(mutation.tests)}")
        return 0
    bad = judge(chosen, options)
    print(
        f"{len(chosen) - len(bad)} of {len(chosen)} were noticed" + "".join(f"\n  not noticed: {name}" for name in bad)
    )
    return min(1, len(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
