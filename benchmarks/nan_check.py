"""What looking for NaN and infinite numbers costs, as a share of a step: `python benchmarks/nan_check.py`.

The built-in model computes on one thread. Times are CPU time of that thread, and medians of all steps are compared, so
other work on the machine counts little. A decode step computes one token for each request, a chunk many tokens of one
prompt.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from headway.engine import Engine, EngineConfig, GenerationRequest
from headway.engine.build import build_engine
from headway.runtime.forward import runner

MEMORY = 256 * 2**20
RUNNING, CHUNK = (1, 8, 64), 512


class Timed:
    """A function whose calls are timed.

    Attributes:
        seconds: CPU time of each call.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        started = time.thread_time()
        try:
            return self._inner(*arguments)
        finally:
            self.seconds.append(time.thread_time() - started)


def timed(owner: Any, name: str) -> Timed:
    """Time a function from now on."""
    made = Timed(getattr(owner, name))
    setattr(owner, name, made)
    return made


def answers(engine: Engine, rng: np.random.Generator, requests: int, prompt: int, tokens: int) -> list[Any]:
    """Ask for so many answers at once. Returns the handles."""
    prompts = rng.integers(16, 1200, (requests, prompt)).astype(np.int32)
    return [engine.submit(GenerationRequest(one, tokens, ignore_eos=True, no_store=True)) for one in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(memory=MEMORY, max_batched_tokens=CHUNK)
    engine = build_engine(None, config, print).engine
    check, states = timed(runner, "extremes"), timed(runner, "finite_states")
    step = timed(engine._executor, "run")
    engine.start()
    rng = np.random.default_rng(0)

    def measure(name: str, requests: int, prompt: int, tokens: int) -> None:
        handles = answers(engine, rng, requests, prompt, tokens)
        if tokens > 1:
            for handle in handles:
                next(iter(handle))  # the prompts are computed
        for each in (check, states, step):
            each.seconds.clear()
        for handle in handles:
            handle.result(600)
        share = median(check.seconds) / median(step.seconds)
        print(f"{name}: {share:.2%} of {median(step.seconds) * 1e3:.1f} ms")

    try:
        answers(engine, rng, 2, 40, 8)[0].result(600)  # the first steps take longer
        for running in RUNNING:
            measure(f"decode steps of {running} requests", running, 8, options.steps)
        measure(f"chunks of {CHUNK} tokens", 1, CHUNK * max(1, options.steps // 10), 1)
        kept = GenerationRequest(rng.integers(16, 1200, 200).astype(np.int32), 1, breakpoints=(50, 100, 150))
        states.seconds.clear()
        engine.submit(kept).result(600)
        print(f"a state that is exported: {median(states.seconds) * 1e3:.2f} ms, once")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
