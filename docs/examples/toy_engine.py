"""A toy engine around `headway.cache`: batches, hits, exhaustion handled by preemption, and explanations.

The model is fake but not careless: its next token depends on a recurrent state and on every attention entry that it
reads through the block table. A wrong block, a stale state or a hit too deep would change the answers below.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import CacheConfig, FullAttention, LayerSpec, Lease, PrefixCache, Prompt, Recurrent, Step

CHUNK = 16  # most tokens of one request in one step


@dataclass
class Request:
    """A request: `tokens` is the prompt, then the answer as it grows to `end` tokens in all."""

    name: str
    tokens: list[int]
    end: int
    lease: Lease


class ToyEngine:
    """One rank, one model, one cache."""

    def __init__(self, blocks: int) -> None:
        """Make an engine whose pool has `blocks` blocks."""
        groups: list[LayerSpec] = [FullAttention("attention", bytes_per_token=8), Recurrent("state", state_bytes=8)]
        self.cache = PrefixCache(CacheConfig(groups, blocks, block_tokens=4))
        self.memory = np.zeros((blocks, self.cache.geometry.block_bytes // 8), np.int64)
        self.attention, self.state = self.cache.geometry.tables
        self.waiting: deque[tuple[str, list[int], int]] = deque()
        self.running: list[Request] = []
        self.done: dict[str, Request] = {}
        self.full = False
        self.preemptions = 0

    def step(self) -> None:
        """Admit what waits, compute one batch, end what is complete, preempt if memory ran out."""
        while self.waiting and not (self.full and self.running):
            name, tokens, end = self.waiting.popleft()
            self.running.append(Request(name, tokens, end, self.cache.lease(Prompt(np.array(tokens)))))
        leases = [request.lease for request in self.running]
        counts = [min(CHUNK, lease.next_stop - lease.computed) for lease in leases]
        step = self.cache.extend([lease.row for lease in leases], counts)
        sampled = self.forward(step)
        self.cache.commit(step, sampled=sampled)
        for request, reached, token in zip(self.running, step.starts + step.counts, sampled, strict=True):
            if reached == len(request.tokens):  # all that is known is computed: this token is the next one
                request.tokens.append(int(token))
        if step.exhausted.any():
            self.make_way(self.running[-1])
        for request in [r for r in self.running if len(r.tokens) >= r.end]:
            self.cache.finish([request.lease.row])
            self.running.remove(request)
            self.done[request.name] = request
            self.full = False

    def make_way(self, request: Request) -> None:
        """Preempt `request`, to come back later with all its tokens; alone in the pool, it ends here."""
        if len(self.running) == 1:
            request.end = len(request.tokens)
            return
        self.cache.preempt([request.lease.row])
        self.running.remove(request)
        self.waiting.appendleft((request.name, request.tokens, request.end))
        self.full = True
        self.preemptions += 1

    def forward(self, step: Step) -> NDArray[np.int32]:
        """Do what the ranks do: the copies, the model, the exports. Returns int32 [n], a next token for each row."""
        entries, tables = self.memory.reshape(-1), self.cache.tables
        self.memory[step.copies[:, 1]] = self.memory[step.copies[:, 0]]
        sampled = np.zeros(len(step.rows), np.int32)
        for i, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            if count == 0:
                continue  # nothing was granted, nothing changed
            state = self.memory[tables[self.state.index][row, 0]]
            if row in step.fresh:
                state[:] = 0
            slots = self.attention.slots(np.arange(start + count), 0, tables[self.attention.index][row])
            entries[slots[start:]] = self.running[i].tokens[start : start + count]
            for token in entries[slots[start:]]:
                state[0] = (state[0] * 31 + token) % 1_000_003
            sampled[i] = (state[0] + entries[slots].sum()) % 1000
        for export in step.exports:
            self.memory[export.destination] = self.memory[export.source]
        return sampled

    def run(self, prompts: dict[str, list[int]], answer: int) -> list[Request]:
        """Serve `prompts` together, with answers of `answer` tokens, and return the requests."""
        self.waiting.extend((name, list(tokens), len(tokens) + answer) for name, tokens in prompts.items())
        while self.waiting or self.running:
            self.step()
        return [self.done[name] for name in prompts]


def main() -> None:
    """Serve a few prompts one by one, then six at once in much and in little memory."""
    rng = np.random.default_rng(0)
    system, *rest = (rng.integers(0, 1000, n).tolist() for n in (40, 20, 20, 20, 10))
    one, two, three, follow_up = rest

    engine = ToyEngine(blocks=256)
    asked = {"first": system + one, "again": system + one, "other": system + two, "third": system + three}
    for name, prompt in asked.items():
        (request,) = engine.run({name: prompt}, answer=8)
        print(f"{name}: answer {request.tokens[60:63]}..., {request.lease.explanation}")
    (request,) = engine.run({"next turn": engine.done["first"].tokens + follow_up}, answer=8)
    print(f"next turn: {request.lease.explanation}")

    crowd = {f"r{i}": system + rng.integers(0, 1000, 20).tolist() for i in range(6)}
    answers = []
    for blocks in (4096, 48):
        engine = ToyEngine(blocks)
        answers.append([request.tokens[60:] for request in engine.run(crowd, answer=40)])
        print(f"six requests at once in {blocks} blocks: {engine.preemptions} preemptions")
    print(f"answers equal: {answers[0] == answers[1]}")


if __name__ == "__main__":
    main()
