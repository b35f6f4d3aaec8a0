"""Make the built-in model from nothing: texts, tokenizer, weights, the shipped folder and its figures.

Runs the six steps in this folder one after the other; each can be run alone and has its own --help:

  corpus.py     fetch Debian packages and read them into a corpus        about a minute
  tokenizer.py  learn the vocabulary and encode the corpus               half a minute
  fit.py        train the Kimi-Linear model                              --minutes
  export.py     write the model folder in bf16 and check it              half a minute
  draft.py      train both drafters for the exported model               two times --draft-minutes
  evaluate.py   compare it with a 5-gram model on held-out documents     two minutes

Needs apt-get and dpkg-deb (Debian or Ubuntu, no root), two cores and 4 GB of memory. Nothing is left outside --work and
--out. The schedule follows the clock, so a slower or busier machine gives a somewhat weaker model in the same time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

BUILTIN = Path(__file__).parents[1] / "packages/builtin-model/src/headway_builtin_model"
STEPS = ("corpus", "tokenizer", "fit", "export", "draft", "evaluate")


def command(step: str, args: argparse.Namespace) -> list[str]:
    """The command line of one step."""
    words = [sys.executable, str(Path(__file__).with_name(f"{step}.py")), "--work", str(args.work)]
    if step == "fit":
        words += ["--minutes", str(args.minutes), "--threads", str(args.threads)]
    elif step == "export":
        words += ["--out", str(args.out)]
    elif step == "draft":
        words += ["--model", str(args.out), "--minutes", str(args.draft_minutes), "--threads", str(args.threads)]
    elif step == "evaluate":
        words += ["--model", str(args.out)]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="model folder (%(default)s)")
    parser.add_argument("--minutes", type=float, default=70.0, help="length of the training itself (%(default)s)")
    parser.add_argument("--draft-minutes", type=float, default=12.0, help="training of each drafter (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads at most (%(default)s)")
    parser.add_argument("--start", choices=STEPS, default=STEPS[0], help="begin at this step (%(default)s)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    # Waiting threads sleep rather than spin: on a machine with other work to do, spinning costs more than it saves.
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    for step in STEPS[STEPS.index(args.start) :]:
        print(f"== {step}", flush=True)
        done = subprocess.run(command(step, args), env=environment, check=False)
        if done.returncode:
            sys.exit(f"the step {step} failed; when it is mended, go on with --start {step}")


if __name__ == "__main__":
    main()
