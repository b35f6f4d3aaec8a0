"""An executor of N ranks in one process: a thread, a copy of the model and an arena each."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.runtime.rank_threads import RankedRunner
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.engine import StepOutput, StepWork
from headway.engine.local import LocalExecutor
from headway.runtime.batch import RunBatch, RunResult


class ThreadRanks:
    """As a `RankedExecutor` over processes: every rank computes every step, and rank 0 chooses the tokens.

    The memory of all ranks starts full of NaN. `first` has the logits of first tokens by prompt.
    """

    def __init__(self, model: PreTrainedModel, geometry: CacheGeometry, blocks: int, form: str = "ag_rs") -> None:
        self.ranked = RankedRunner(model, geometry, blocks, form)
        for data in self.ranked.arenas:
            data.fill_(0xFF)
        self.first: dict[tuple[int, ...], torch.Tensor] = {}
        self._logits: torch.Tensor | None = None
        run = self.ranked.runners[0].run

        def keep(batch: RunBatch) -> RunResult:
            result = run(batch)
            self._logits = result.logits
            return result

        self.ranked.runners[0].run = keep  # type: ignore[method-assign]
        self._executors = [LocalExecutor(runner) for runner in self.ranked.runners]

    def run(self, work: StepWork) -> StepOutput:
        silent = replace(work, samples=[None] * len(work.samples))
        outputs = self.ranked.ranks(lambda rank: self._executors[rank].run(work if rank == 0 else silent))
        assert self._logits is not None
        granted = [sample for sample, count in zip(work.samples, work.step.counts, strict=True) if count > 0]
        for sample, logits in zip(granted, self._logits, strict=True):
            if sample is not None and len(sample.output) == 0:
                self.first[tuple(sample.prompt.tolist())] = logits
        return outputs[0]

    def restart(self) -> None: ...

    def close(self) -> None: ...
