"""Hit rate of vLLM's CPU offloading tier under its own policies and under Headway's value.

    PYTHONPATH=UNPACKED_VLLM:src python benchmarks/vllm/offload.py TRACE [--limit 3993] [--chunks 683,2731,10924]

Real: vLLM's `CPUOffloadingManager` and its policies "lru" and "arc". The policy of `value_policy.py`, beside this file,
is loaded as vLLM loads it, by its path. Made up: the connector and the GPU. Requests come one after another, with
nothing cached on the GPU, so that the tier alone answers. As vLLM's connector does, a request looks its prefix up,
loads what it hits, stores the chunks it computes in steps of 8,192 tokens, and then ends.

Two layouts: `states` is Kimi-K3 (TP 8, fp8): one group of attention with chunks of 1,536 tokens, three of states that
are stored at the last chunk boundary of a prompt and where it parts from what the tier knows. `plain` is full attention
alone, in chunks of 256 tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from headway.formats import Trace, read_trace
from headway.replay.trace.prefixes import PrefixKeys, endless_matches, read_outputs

STEP = 8192
LAYOUTS = {"states": (1536, 3), "plain": (256, 0)}
"""Tokens of a chunk, and groups of states."""
POLICIES = {"lru": ("lru", None), "arc": ("arc", None), "value": ("ValueCachePolicy", "value_policy")}


class Tier:
    """vLLM's manager of the tier, and the flow of requests through it."""

    def __init__(self, policy: str, chunks: int, tokens: int, states: int) -> None:
        """A tier of `chunks` chunks of `tokens` tokens, or of one of `states` groups of states."""
        self._base: Any = import_module("vllm.v1.kv_offload.base")
        manager: Any = import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
        name, path = POLICIES[policy]
        self._manager = manager(chunks, name, path)
        self._hits = (self._base.LookupResult.HIT,)
        self._tokens, self._states = tokens, states

    def serve(self, request: int, prompt: int, names: Sequence[int]) -> int:
        """Run a request whose chunk boundaries have these names. Returns the tokens it did not have to compute."""
        base, manager, tokens = self._base, self._manager, self._tokens
        groups = range(1 + self._states)
        keys = [
            [base.make_offload_key(name.to_bytes(12, "big", signed=True), group) for name in names] for group in groups
        ]
        context = base.ReqContext(str(request))
        manager.on_new_request(context)
        for group in keys:
            for index, key in enumerate(group):
                context.set_offload_key_position(key, (index + 1) * tokens)
        known = 0
        most = (prompt - 1) // tokens
        while known < most and self._found(keys[0][known], context):
            known += 1
        hit = known
        while hit and not all(self._found(group[hit - 1], context) for group in keys[1:]):
            hit -= 1
        loaded = keys[0][:hit] + [group[hit - 1] for group in keys[1:] if hit]
        if loaded:
            manager.prepare_load(loaded, context)
            manager.complete_load(loaded, context)
        places = {most, known if known > hit else 0} - {0, hit}
        for start in range(hit * tokens, prompt, STEP):
            first, stop = -(-start // tokens), min(start + STEP, prompt) // tokens
            stored = keys[0][max(first, hit) : stop]
            stored += [group[place - 1] for place in sorted(places) if first < place <= stop for group in keys[1:]]
            out = manager.prepare_store(stored, context) if stored else None
            if out is not None and out.keys_to_store:
                manager.complete_store(out.keys_to_store, context)
        manager.on_request_finished(context)
        return hit * tokens

    def _found(self, key: Any, context: Any) -> bool:
        return self._manager.lookup(key, context) in self._hits


def run(trace: Trace, policy: str, chunks: int, layout: str) -> tuple[float, float]:
    """Share of the prompts' tokens that the tier had, and milliseconds of processor time per request."""
    tokens, states = LAYOUTS[layout]
    keys = PrefixKeys(trace, read_outputs(trace, "never"))
    tier, prompts, hit = Tier(policy, chunks, tokens, states), trace.prompt_tokens.tolist(), 0
    began = time.process_time()
    for request, prompt in enumerate(prompts):
        hit += tier.serve(request, prompt, keys.multiples(request, tokens, prompt))
    return hit / sum(prompts), 1000 * (time.process_time() - began) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, help="requests of the trace; all if not given")
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append", help="one of them; both if not given")
    parser.add_argument("--chunks", default="683,2731,10924", help="sizes of the tier, for `plain` six times as many")
    asked = parser.parse_args()
    trace = read_trace(asked.trace, limit=asked.limit)
    endless = int(endless_matches(trace, read_outputs(trace, "never")).sum()) / int(np.sum(trace.prompt_tokens))
    print(f"{trace.name}, {len(trace)} requests; an endless memory would have {endless:.1%}")
    print(
        f"| layout | chunks | {' | '.join(POLICIES)} | ms per request |\n| --- | --- |{' --- |' * (len(POLICIES) + 1)}"
    )
    for layout in asked.layout or LAYOUTS:
        for size in map(int, asked.chunks.split(",")):
            chunks = size if layout == "states" else 6 * size
            found = [run(trace, policy, chunks, layout) for policy in POLICIES]
            rates = " | ".join(f"{100 * rate:.2f}" for rate, _ in found)
            print(f"| {layout} | {chunks:,} | {rates} | {' / '.join(f'{ms:.1f}' for _, ms in found)} |", flush=True)


if __name__ == "__main__":
    main()
