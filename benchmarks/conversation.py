"""A conversation of 20 turns on ranks, against what its tokens allow: `python benchmarks/conversation.py --dcp 4`.

The built-in model answers 20 user messages in a row; each prompt is all that was said before, and the next message.
The tokens allow a turn to reuse all that it shares with the turn before, prompt and answer. Printed are the sums over
all turns, the waterfall of what was not reused, and whether one rank gives the same tokens and the same hits.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from headway.cache import Waterfall
from headway.engine import EngineConfig, GenerationRequest, ParallelConfig
from headway.engine.build import build_engine

TURNS, MESSAGE, ANSWER = 20, 40, 24
MEMORY = 64 * 2**20


@dataclass
class Run:
    """What a conversation gave: the hit and the prompt of each turn, all tokens, and what was lost."""

    hits: list[int]
    prompts: list[int]
    allowed: list[int]
    tokens: list[int]
    waterfall: Waterfall


def converse(parallel: ParallelConfig) -> Run:
    """Talk to the built-in model on these ranks."""
    engine = build_engine(None, EngineConfig(memory=MEMORY, parallel=parallel), print).engine.start()
    said, rng = np.empty(0, dtype=np.int32), np.random.default_rng(0)
    run = Run([], [], [], [], Waterfall())
    try:
        for _ in range(TURNS):
            prompt = np.concatenate([said, rng.integers(16, 1200, MESSAGE).astype(np.int32)])
            asked = GenerationRequest(prompt, ANSWER, ignore_eos=True, boundaries=(len(prompt),))
            result = engine.submit(asked).result(600)
            run.hits.append(result.cached_tokens or 0)
            run.prompts.append(len(prompt))
            run.allowed.append(len(said))
            if result.explanation is not None:
                run.waterfall.add(result.explanation)
            said = np.concatenate([prompt, np.array(result.tokens, dtype=np.int32)])
    finally:
        engine.close()
    run.tokens = said.tolist()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the weights; 1: each has all of them")
    parser.add_argument("--dcp", type=int, default=4, help="ranks that split the tokens")
    parser.add_argument("--interleave", type=int, default=16, help="consecutive tokens on one rank")
    options = parser.parse_args()
    parallel = ParallelConfig(tp=options.tp, dcp=options.dcp, interleave=options.interleave)
    run, one = converse(parallel), converse(ParallelConfig())
    asked, reused, allowed = sum(run.prompts), sum(run.hits), sum(run.allowed)
    print(f"{TURNS} turns on {parallel.ranks} ranks: {asked:,} tokens of prompts, {allowed:,} said before")
    print(f"reused: {reused:,}, {reused / asked:.1%} of the prompts and {reused / allowed:.1%} of what was said before")
    for reason, tokens in run.waterfall.lost.items():
        if tokens:
            print(f"  not reused, {reason.value}: {tokens:,}")
    print(f"same tokens as one rank: {run.tokens == one.tokens}; same hits: {run.hits == one.hits}")


if __name__ == "__main__":
    main()
