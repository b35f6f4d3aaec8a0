"""Judge 2: vLLM's own tests of its scheduler, with vLLM's scheduler and with ours, compared test by test.

    make judge-vllm JUDGE=own-tests [ARGS="-k EXPRESSION"]

It needs the folder that `tools/vllm_env.py` makes, which VLLM names. The tests run unmodified, on one core, for five
minutes; models are folders without weights. A test that vLLM's scheduler passes and ours does not must stand in
`differences.toml` with the reason, and what stands there must still differ. Ends with 1 if one does not.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent.parent / "src"
FILES = [
    *["core/test_scheduler.py", "core/test_async_scheduler.py", "core/test_deferred_block_free.py"],
    *["core/test_priority_scheduler_random.py", "core/test_priority_preemption_bug.py"],
    *["core/test_swa_inflight_window_free.py", "streaming_input/test_scheduler_streaming.py"],
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=os.environ.get("VLLM", "build/vllm"), help="made by tools/vllm_env.py (VLLM)"
    )
    parser.add_argument("-k", default="", help="only tests whose names match, as in pytest")
    parser.add_argument("--keep", type=Path, help="keep vLLM's own results in this file, and use them if it is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        own = given.keep or place / "own.xml"
        if not own.exists():
            run(given.folder.resolve(), place, "vllm", own, given.k)
        run(given.folder.resolve(), place, "headway", place / "ours.xml", given.k)
        return report(read(own), read(place / "ours.xml"), differences(), whole=not given.k)


def run(folder: Path, place: Path, judged: str, results: Path, select: str) -> None:
    """Run the tests in a process of their own, with results as JUnit XML."""
    python, files = folder / "venv" / "bin" / "python", place / "hf"
    paths = [folder / "vllm33", folder / "torchvision", files / "site", HERE, SOURCE]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JUDGED": judged,
        "HF_HOME": str(files),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(place / "cache"),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not files.exists():
        only = {**environment, "PYTHONPATH": str(folder / "vllm33")}
        subprocess.run([python, HERE / "models.py", files], env=only, check=True)
        (place / "tests").symlink_to(folder / "sdist" / "tests")
    tests = [f"tests/v1/{name}" for name in FILES]
    words = [
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "inject",
        "-q",
        "-W",
        "ignore",
        "--tb=short",
        "--show-capture=no",
    ]
    words += ["-o", "junit_family=xunit2", f"--junitxml={results.resolve()}", *(["-k", select] if select else [])]
    print(f"headway: vLLM's tests with the scheduler of {judged}", flush=True)
    subprocess.run([python, "-m", "pytest", *words, *tests], cwd=place, env=environment, check=False)


def read(results: Path) -> dict[str, str]:
    """Test to "passed", "skipped", or what went wrong."""
    found = {}
    for case in ET.parse(results).iter("testcase"):
        bad = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        state = (
            (bad.get("message") or "failed")
            if bad is not None
            else "passed"
            if case.find("skipped") is None
            else "skipped"
        )
        module = next(part for part in str(case.get("classname")).split(".") if part.startswith("test_"))
        found[f"{module}::{case.get('name')}"] = state
    return found


def differences() -> dict[str, str]:
    """Test, or test function, to the reason why ours may differ."""
    listed = tomllib.loads((HERE / "differences.toml").read_text())["difference"]
    return {test: one["reason"] for one in listed for test in one["tests"]}


def report(own: dict[str, str], ours: dict[str, str], listed: dict[str, str], *, whole: bool) -> int:
    """Print the comparison; return 1 if something differs that is not listed, or is listed and does not differ."""
    reasons: Counter[str] = Counter()
    unlisted, used = [], set()
    passed = [test for test, state in own.items() if state == "passed"]
    for test in passed:
        state = ours.get(test, "did not run")
        name = next((name for name in (test, test.partition("[")[0]) if name in listed), None)
        if state != "passed" and name is None:
            unlisted.append(f"{test}: {state.splitlines()[0][:160]}")
        elif state != "passed" and name is not None:
            used.add(name)
            reasons[listed[name]] += 1
    stale = sorted(set(listed) - used) if whole else []
    for line in [*_table(own, ours), "", *[f"- {count} differ: {reason}" for reason, count in reasons.most_common()]]:
        print(line)
    for line in [
        *[f"differs, unlisted: {text}" for text in unlisted],
        *[f"listed, but passes: {text}" for text in stale],
    ]:
        print(line)
    return int(bool(unlisted or stale))


def _table(own: dict[str, str], ours: dict[str, str]) -> list[str]:
    """How many tests of each file passed, as lines of Markdown."""
    lines = [
        "| vLLM's tests | run | pass with vLLM's scheduler | of these with Headway's |",
        "| --- | --- | --- | --- |",
    ]
    for name in [*dict.fromkeys(test.partition("::")[0] for test in own), ""]:
        tests = [test for test in own if test.startswith(f"{name}::" if name else "")]
        passed = [test for test in tests if own[test] == "passed"]
        both = sum(ours.get(test) == "passed" for test in passed)
        lines.append(f"| {f'`{name}.py`' if name else 'all'} | {len(tests)} | {len(passed)} | {both} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
