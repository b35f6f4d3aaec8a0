"""The least engine over the real prefix cache: random batches, random chunks, random preemption, greedy answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.cache import CacheConfig, CheckpointRemoved, Event, Lease, PrefixCache, Prompt, ResidentShrunk
from headway.runtime.forward.batch import batch_of
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.interface import AS_COMPUTED, StoredTypes
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.stored import stored_layout

__all__ = ["MiniEngine", "Request"]


@dataclass
class Request:
    """One request: `answer` grows to `wanted` tokens; `first` holds the logits that chose its first token."""

    prompt: list[int]
    wanted: int
    answer: list[int] = field(default_factory=list)
    first: torch.Tensor | None = None
    lease: Lease | None = None
    hit: int = 0
    preempted: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


class MiniEngine:
    """Runs requests to their end under randomness that `seed` fixes; `blocks` small means pressure.

    The arena starts full of NaN, so a read of memory that nobody wrote shows in the answers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: int,
        seed: int,
        block_tokens: int = 16,
        max_chunk: int = 70,
        types: StoredTypes = AS_COMPUTED,
    ) -> None:
        self.layout = stored_layout(inspect_model(model), types)
        config = CacheConfig(self.layout.groups, blocks, block_tokens=block_tokens, cost=self.layout.cost, check=True)
        self.cache = PrefixCache(config)
        self.runner = ModelRunner(model, self.layout, self.cache.geometry, blocks)
        self.runner.arena.data.fill_(0xFF)
        self.rng = np.random.default_rng(seed)
        self.max_chunk = max_chunk
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.hits: list[int] = []
        self.evictions = 0
        self.cache.subscribe(self._note)

    def _note(self, event: Event) -> None:
        self.evictions += isinstance(event, CheckpointRemoved | ResidentShrunk)

    def submit(self, prompt: list[int], wanted: int) -> Request:
        self.waiting.append(Request(prompt, wanted))
        return self.waiting[-1]

    def run(self, preempt_rate: float = 0.0, concurrency: int = 4) -> None:
        """Run until nothing waits."""
        stuck = 0
        while self.running or self.waiting:
            if self.waiting and len(self.running) < concurrency and self.rng.random() < 0.6:
                self._admit(self.waiting.pop(0))
            if not self.running:
                continue
            if self.rng.random() < preempt_rate:
                self._preempt(self.running[int(self.rng.integers(len(self.running)))])
            elif not self._step():
                stuck += 1
                assert stuck < 200, "no request gets memory"
                self._preempt(self.running[-1])

    def _admit(self, request: Request) -> None:
        prompt = Prompt(np.array(request.tokens, dtype=np.int32), boundaries=(len(request.prompt),))
        request.lease = self.cache.lease(prompt)
        request.hit = request.lease.computed
        self.hits.append(request.hit)
        self.running.append(request)

    def _preempt(self, request: Request) -> None:
        assert request.lease is not None
        self.cache.preempt([request.lease.row])
        request.lease = None
        request.preempted += 1
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _step(self) -> bool:
        """Run one batch of a random part of the running requests; return whether any got memory."""
        some = [r for r in self.running if self.rng.random() < 0.8] or self.running[:1]
        leases = [r.lease for r in some if r.lease is not None]
        counts = [min(lease.next_stop - lease.computed, int(self.rng.integers(1, self.max_chunk))) for lease in leases]
        step = self.cache.extend([lease.row for lease in leases], counts)
        tokens = [
            np.array(r.tokens[start : start + count], dtype=np.int32)
            for r, start, count in zip(some, step.starts, step.counts, strict=True)
        ]
        batch, index = batch_of(step, self.cache.tables, tokens)
        if not batch.rows:
            return False
        logits = self.runner.run(batch).logits
        sampled = np.zeros(len(some), dtype=np.int32)
        real = np.zeros(len(some), dtype=np.int64)
        for place, i in enumerate(index):
            if step.starts[i] + step.counts[i] == len(some[i].tokens):
                sampled[i], real[i] = int(logits[place].argmax()), 1
                some[i].first = logits[place].clone() if some[i].first is None else some[i].first
        self.cache.commit(step, sampled=sampled, sampled_counts=real)
        for request, token, is_real in zip(some, sampled, real, strict=True):
            if is_real:
                request.answer.append(int(token))
                if len(request.answer) == request.wanted:
                    assert request.lease is not None
                    self.cache.finish([request.lease.row])
                    self.running.remove(request)
        return True
