"""`make families`: judge every row of the table, going on where it was stopped, and write the page.

Each judgement is a line of `build/families.jsonl`, with the version of transformers and a digest of the code that
computes. A line of another version or other code does not count, and its row is judged again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tests.families.judge import Judgement, judge
from tests.families.page import PAGE, render
from tests.families.scan import Case, cases

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "families.jsonl"
_CODE = (
    *("src/headway/cache", "src/headway/engine", "src/headway/runtime"),
    *("tests/families", "tests/runtime/tiny_models.py", "tests/server/tiny.py"),
)
_WITHOUT_EFFECT = ("page.py", "run.py", "test_families.py", "test_bf16.py")
"""Files among these that judge nothing."""


def code_digest() -> str:
    """A digest of all that decides a judgement."""
    digest = hashlib.sha256()
    for path in sorted(path for part in _CODE for path in [ROOT / part, *(ROOT / part).rglob("*.py")]):
        if path.is_file() and path.name not in _WITHOUT_EFFECT:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def earlier(key: dict[str, str]) -> dict[str, Judgement]:
    """Judgements of earlier runs that still count, by the row's name."""
    found = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
        record = json.loads(line)
        if all(record.pop(name) == value for name, value in key.items()):
            name = record.pop("case")
            found[name] = Judgement(**record)
    return found


def main() -> int:
    """Judge what is missing, tell of each, and write the page once all rows are there. 1 if any is a fault."""
    parser = argparse.ArgumentParser(description="Judge every family of models and write docs/families.md.")
    parser.add_argument("--only", nargs="*", help="Judge these rows anew (llama, gemma3_text+yarn); write no page.")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    key = {"transformers": transformers.__version__, "code": code_digest()}
    wanted = [case for case in cases() if only is None or case.name in only]
    known = {} if only else earlier(key)
    missing = [case for case in wanted if case.name not in known]
    print(f"{len(wanted)} rows, {len(missing)} to judge, transformers {key['transformers']}, code {key['code']}")
    _judge_all(missing, known, key)
    faults = [case for case in wanted if known[case.name].outcome == "fault"]
    print(", ".join(f"{n} {outcome}" for outcome, n in Counter(known[c.name].outcome for c in wanted).items()))
    for case in faults:
        print(f"fault: {case.name}: {known[case.name].reason}", file=sys.stderr)
    if only is None and not faults:
        PAGE.write_text(
            render([(case, known[case.name]) for case in wanted], transformers.__version__), encoding="utf-8"
        )
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if faults else 0


def _judge_all(missing: list[Case], known: dict[str, Judgement], key: dict[str, str]) -> None:
    started = time.monotonic()
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        for i, case in enumerate(missing, start=1):
            found = known[case.name] = judge(case, seed=0)
            print(json.dumps({**key, "case": case.name, **asdict(found)}), file=file, flush=True)
            left = (time.monotonic() - started) / i * (len(missing) - i)
            print(
                f"[{i}/{len(missing)}, {left / 60:.0f} min left] {case.name}: {found.outcome} {found.reason[:90]}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
