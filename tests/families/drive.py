"""An engine driven without its thread: random batches, sharing, preemption, failed steps and scarce memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.engine import Engine, GenerationRequest, RequestHandle, RequestResult, RowAnswer, StepWork
from headway.engine.build import BuiltEngine
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.memory import capacity

__all__ = ["drive", "scarce_memory"]


def scarce_memory(model: PreTrainedModel) -> int:
    """Bytes for two or three requests, so that they evict and preempt one another."""
    geometry = CacheGeometry(inspect_model(model).groups, block_tokens=16)
    return capacity((3 if geometry.tail_tables else 2) * geometry.peak_blocks(170), geometry).bytes


def drive(built: BuiltEngine, seed: int, requests: int = 6) -> list[RequestResult]:
    """Serve requests on two shared stems, then follow-ups to two answers, under randomness that `seed` fixes.

    The memory starts full of NaN, so that a read of what nobody wrote shows.
    """
    return _Drive(built, seed).run(requests)


class _Flaky:
    """An executor some of whose steps fail after they have written to memory."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._dice = inner, np.random.default_rng(seed)
        inner._runner.arena.data.fill_(0xFF)

    def run(self, work: StepWork) -> Any:
        answers: list[RowAnswer] = self._inner.run(work)
        if self._dice.random() < 0.03:
            raise RuntimeError("the device says no")
        return answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Drive:
    """Requests on two shared stems and follow-ups to answers, through an engine without its thread."""

    def __init__(self, built: BuiltEngine, seed: int) -> None:
        self._engine: Engine = built.engine
        self._engine._executor = _Flaky(self._engine._executor, seed)
        self._vocabulary = built.layout.vocab_size
        self._longest = self._engine.max_model_len
        self._rng = np.random.default_rng(seed)
        self._handles: list[RequestHandle] = []
        self._steps = 0

    def run(self, requests: int) -> list[RequestResult]:
        """Drive all to their ends."""
        stems = self._tokens(2, 100)
        for i in range(requests):
            own = self._tokens(int(self._rng.integers(1, 30)))
            self._submit(stems[i % 2][: int(self._rng.integers(20, 100))] + own, int(self._rng.integers(1, 10)))
            for _ in range(int(self._rng.integers(3))):
                self._step()
        self._finish()
        for first in [handle.result(0) for handle in self._handles[:2]]:
            self._submit([*first.request.tokens.tolist(), *first.tokens, *self._tokens(5)], 4)
        self._finish()
        return [handle.result(0) for handle in self._handles]

    def _tokens(self, *shape: int) -> list[Any]:
        drawn: list[Any] = self._rng.integers(3, self._vocabulary, shape).tolist()
        return drawn

    def _submit(self, prompt: list[int], count: int) -> None:
        prompt = prompt[: self._longest - count]
        request = GenerationRequest(
            np.array(prompt, dtype=np.int32), count, ignore_eos=True, breakpoints=(max(1, len(prompt) // 2),)
        )
        running, handle = self._engine._enter(request)
        self._engine._scheduler.add(running)
        self._handles.append(handle)

    def _step(self) -> bool:
        """One turn of the engine's thread; every tenth as if the oldest had got no memory in the one before."""
        engine, self._steps = self._engine, self._steps + 1
        if self._steps % 10 == 0:
            engine._scheduler._starved = engine._scheduler.running[:1]
        scheduled = engine._scheduler.schedule()
        engine._publish(engine._scheduler.take_news())
        if scheduled is not None:
            engine._publish(engine._step(scheduled))
        return not engine._scheduler.idle

    def _finish(self) -> None:
        while self._step():
            if self._steps > 5000:
                raise RuntimeError("requests do not end")
