"""An executor of N ranks in one process: a thread, a copy of the model and an arena each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from tests.runtime.parallel.rank_threads import RankedRunner
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.engine import RowAnswer, StepWork
from headway.engine.ranks.in_process import LocalExecutor
from headway.engine.ranks.messages import compact, decode, encode
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.forward.batch import RunBatch, RunResult
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.runner import Judge


class ThreadRanks:
    """As a `RankedExecutor` over processes: every rank computes every step, and rank 0 chooses the tokens.

    The memory of all ranks starts full of NaN. `first` has the logits of first tokens by prompt.

    `drafters` are one a rank, or none; `rule` says how their drafts are judged. With `split`, each rank has its share
    of the weights. `grammars` are those of rank 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: CacheGeometry,
        blocks: int,
        form: str = "ag_rs",
        drafters: Sequence[Drafter] = (),
        rule: AcceptanceRule = AcceptanceRule.MATCH,
        split: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self.ranked = RankedRunner(model, geometry, blocks, form, split=split)
        self._geometry = geometry
        for data in self.ranked.arenas:
            data.fill_(0xFF)
        self.first: dict[tuple[int, ...], torch.Tensor] = {}
        self._logits: torch.Tensor | None = None
        run = self.ranked.runners[0].run

        def keep(batch: RunBatch, judge: Judge | None = None) -> RunResult:
            result = run(batch, judge)
            self._logits = result.logits
            return result

        self.ranked.runners[0].run = keep  # type: ignore[method-assign]
        speculators: list[Speculator | None] = [None] * len(self.ranked.runners)
        if drafters:
            ranks = self.ranked.ranks.all if len(drafters) > 1 else [None]
            parts = zip(self.ranked.runners, drafters, ranks, strict=True)
            speculators = [Speculator(runner, drafter, rule, rank) for runner, drafter, rank in parts]
            speculators[0].grammars = grammars  # type: ignore[union-attr]
        self._drafts = bool(drafters)
        self._executors = [LocalExecutor(*pair) for pair in zip(self.ranked.runners, speculators, strict=True)]
        self._executors[0]._grammars = grammars

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        sent = decode(encode(compact(work, self._geometry)))
        silent = sent if self._drafts else msgspec.structs.replace(sent, samples=[None] * len(work.samples))
        outputs = self.ranked.ranks(lambda rank: self._executors[rank].run(sent if rank == 0 else silent))
        assert self._logits is not None
        granted = [sample for sample, count in zip(work.samples, work.step.counts, strict=True) if count > 0]
        for sample, logits in zip(granted, self._logits, strict=True):
            if sample is not None and len(sample.output) == 0:
                self.first[tuple(sample.prompt.tolist())] = logits
        return outputs[0]

    def check(self) -> None: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...
