"""What drafts bring on the built-in model: tokens a step and tokens a second, with each drafter and without.

Prompts are passages of texts; answers have a fixed length. A drafter does well on text like that of its training, so
there are figures for each text: `pydoc` is the manual that Python brings along, which is of the kind that the built-in
model and its drafters were trained on; a file is any text of yours. `--held` takes the tokens that `training/corpus.py`
held out. The engine that `headway serve` runs computes the answers in this process, on one thread. Seconds are seconds
of CPU time, so that other work on the machine does not count; the same requests run first once without being counted.
Tokens a step counts all steps but those of the prompts, so also those in which a state catches up.

    python benchmarks/drafts.py --text pydoc docs/drafting.md             prints a table
    python benchmarks/drafts.py --held build/training/held.npz --json     prints JSON
"""

import argparse
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.engine import Engine, EngineConfig, GenerationRequest
from headway.engine.build import build_engine
from headway.runtime.interface import SamplingParams
from headway.runtime.loading import load_tokenizer

PROMPT_TOKENS = 48
CASES = [
    ("greedy", 0.0, "match"),
    ("temperature 1, match", 1.0, "match"),
    ("temperature 1, token", 1.0, "token"),
    ("temperature 1, block", 1.0, "block"),
]


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        text: What the prompts are from.
        drafter: Who drafted.
        case: How answers were chosen and drafts judged.
        running: Requests at once.
        tokens_a_step: Tokens that a request got out of a step after its prompt's.
        accepted: Share of drafted tokens that were accepted.
        tokens_a_second: Tokens of answers a second of CPU time.
    """

    text: str
    drafter: str
    case: str
    running: int
    tokens_a_step: float
    accepted: float
    tokens_a_second: float


def run(engine: Engine, prompts: NDArray[np.int32], tokens: int, temperature: float, running: int) -> tuple[float, Any]:
    """Answer all prompts, `running` at once. Returns the seconds and what the engine counted."""
    before, start = engine.snapshot(60).counters, time.process_time()
    for group in np.array_split(prompts, max(1, len(prompts) // running)):
        asked = [
            GenerationRequest(
                p, tokens, SamplingParams(temperature=temperature, seed=i), ignore_eos=True, no_store=True
            )
            for i, p in enumerate(group)
        ]
        for handle in [engine.submit(request) for request in asked]:
            handle.result(600)
    after = engine.snapshot(60).counters
    counted = {
        name: getattr(after, name) - getattr(before, name) for name in ("steps", "drafted_tokens", "accepted_tokens")
    }
    return time.process_time() - start, counted


def texts(args: argparse.Namespace) -> dict[str, NDArray[np.int32]]:
    """The prompts of each text."""
    words = load_tokenizer(args.model)
    found = {"held out": np.load(args.held)["ids"].astype(np.int32)} if args.held else {}
    for name in args.text:
        written = "\n\n".join(topics.values()) if name == "pydoc" else Path(name).read_text(encoding="utf-8")
        found[name] = np.array(words(written, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
    passages = {}
    for name, ids in found.items():
        starts = np.linspace(0, len(ids) - PROMPT_TOKENS - 1, args.prompts).astype(int)
        passages[name] = np.stack([ids[s : s + PROMPT_TOKENS] for s in starts])
    return passages


def measure(args: argparse.Namespace, text: str, prompts: NDArray[np.int32]) -> list[Line]:
    lines: list[Line] = []
    prompt_steps: dict[int, int] = {}
    for drafter in args.drafters:
        for case, temperature, rule in CASES[: 1 if args.greedy else None]:
            if rule != "match" and drafter in ("none", "lookup"):
                continue
            most = None if drafter == "none" else args.draft_tokens
            config = EngineConfig(memory=256 << 20, draft=drafter, draft_rule=rule, draft_tokens=most)
            built = build_engine(args.model, config)
            if args.full and built.drafts is not None:
                built.drafts.costs = None
            engine = built.engine.start()
            for running in args.running:
                run(engine, prompts[:running], 8, temperature, running)
                seconds, counted = run(engine, prompts, args.tokens, temperature, running)
                groups = max(1, len(prompts) // running)
                if drafter == "none":
                    prompt_steps[running] = counted["steps"] - groups * (args.tokens - 1)
                steps = counted["steps"] - prompt_steps[running]
                lines.append(
                    Line(
                        text, drafter, case, running,
                        round(groups * (args.tokens - 1) / steps, 2),
                        round(counted["accepted_tokens"] / max(1, counted["drafted_tokens"]), 2),
                        round(len(prompts) * args.tokens / seconds, 1),
                    )
                )  # fmt: skip
                if not args.json:
                    print("| " + " | ".join(str(value) for value in asdict(lines[-1]).values()) + " |", flush=True)
            engine.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["pydoc"], help="files of text, or pydoc (%(default)s)")
    parser.add_argument("--held", type=Path, help="also held-out tokens, such as build/training/held.npz")
    parser.add_argument(
        "--full",
        action="store_true",
        help="drafts of full length whatever they cost: the same figures on every machine",
    )
    parser.add_argument("--greedy", action="store_true", help="greedy answers alone")
    parser.add_argument("--model", help="target; the built-in model by default")
    parser.add_argument("--drafters", nargs="+", default=["none", "lookup", "mtp", "dspark"], help="none comes first")
    parser.add_argument("--draft-tokens", type=int, help="most tokens of a draft; the drafter's own number by default")
    parser.add_argument("--prompts", type=int, default=16, help="passages (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (%(default)s)")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8], help="requests at once (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not args.json:
        print("| text | drafter | answers | at once | tokens per step | accepted | tokens per CPU second |")
        print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    lines = [line for text, prompts in texts(args).items() for line in measure(args, text, prompts)]
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
