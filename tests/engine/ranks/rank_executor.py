"""An executor of N ranks in one process: a thread, a copy of the model and an arena each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from tests.runtime.parallel.rank_threads import RankedRunner
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.engine import RowAnswer, StepWork
from headway.engine.executor import BlockRange, CanonicalGroup, Int32s
from headway.engine.ranks.in_process import LocalExecutor
from headway.engine.ranks.messages import Answer, ReadPortions, WritePortions, compact, decode, encode
from headway.engine.ranks.objects import RankObjects
from headway.engine.ranks.rank import moved
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.forward.batch import RunBatch, RunResult
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.runner import Judge
from headway.runtime.interface import AS_COMPUTED, StoredTypes


class ThreadRanks:
    """As a `RankedExecutor` over processes: every rank computes every step, and rank 0 chooses the tokens.

    The memory of all ranks starts full of NaN. `first` has the logits of first tokens by prompt.

    `drafters` are one a rank, or none; `rule` says how their drafts are judged. With `split`, each rank has its share
    of the weights. `grammars` are those of rank 0. Each has `host_blocks` blocks in host memory. All store as `types`.
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
        host_blocks: int = 0,
        types: StoredTypes = AS_COMPUTED,
    ) -> None:
        self.ranked = RankedRunner(model, geometry, blocks, form, split=split, types=types)
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
        self.executors = [
            LocalExecutor(runner, speculator, host_blocks=host_blocks, rank=rank)
            for rank, (runner, speculator) in enumerate(zip(self.ranked.runners, speculators, strict=True))
        ]
        self.executors[0]._grammars = grammars
        self.movers = [executor.mover for executor in self.executors]
        self._objects = RankObjects(geometry, [tuple(mover.shares.values()) for mover in self.movers])

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        sent = decode(encode(compact(work, self._geometry)))
        silent = sent if self._drafts else msgspec.structs.replace(sent, samples=[None] * len(work.samples))
        outputs = self.ranked.ranks(lambda rank: self.executors[rank].run(sent if rank == 0 else silent))
        assert self._logits is not None
        granted = [sample for sample, count in zip(work.samples, work.step.counts, strict=True) if count > 0]
        for sample, logits in zip(granted, self._logits, strict=True):
            if sample is not None and len(sample.output) == 0:
                self.first[tuple(sample.prompt.tolist())] = logits
        return outputs[0]

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        return self._objects.canonical

    def move_blocks(self, out: Int32s, back: Int32s) -> None:
        self.ranked.ranks(lambda rank: self.executors[rank].move_blocks(out, back))

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        return self._objects.read(ranges, lambda portions: self._ask([ReadPortions(portions)]))

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        self._objects.write(
            ranges,
            objects,
            lambda portions, parts: self._tell([WritePortions(portions, [p.data for p in each]) for each in parts]),
        )

    def _tell(self, messages: Sequence[WritePortions]) -> None:
        assert not any(self._ask(messages)), "what is written is not sent back"

    def _ask(self, messages: Sequence[ReadPortions | WritePortions]) -> Sequence[Sequence[memoryview]]:
        sent = [encode(message) for message in messages]

        def answer(rank: int) -> bytes:
            asked = decode(sent[rank % len(sent)])
            assert isinstance(asked, ReadPortions | WritePortions)
            return encode(Answer(moved(self.movers[rank], asked), 0))

        answers = [decode(data) for data in self.ranked.ranks(answer)]
        return [each.result.data for each in answers]  # type: ignore[union-attr]

    def check(self) -> None: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...
