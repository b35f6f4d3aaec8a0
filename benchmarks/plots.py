"""Draw every figure of the documentation: `make plots`, with `ARGS="NAME ..."` for some of them.

A figure script is `docs/figures/make.py`, or a file `plot_*.py` in this folder: run without arguments it draws all that
it has, as SVG in `docs/figures/`. NAME chooses scripts by a part of their path.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def scripts() -> list[Path]:
    return [ROOT / "docs" / "figures" / "make.py", *sorted((ROOT / "benchmarks").glob("plot_*.py"))]


def main(names: list[str]) -> int:
    failed = 0
    for script in scripts():
        shown = script.relative_to(ROOT).as_posix()
        if names and not any(name in shown for name in names):
            continue
        start = time.monotonic()
        code = subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False).returncode
        print(f"{shown}: {'failed' if code else 'done'} in {time.monotonic() - start:.0f} s")
        failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
