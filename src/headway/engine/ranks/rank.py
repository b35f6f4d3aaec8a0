"""One rank: it loads the model, makes room, and computes the steps it is sent. It decides nothing.

Messages are bytes both ways (`headway.engine.ranks.messages`), so a rank is the same in a process of this machine and
in a Ray actor of another. It answers every message: with a record, or with a `RankFault` that says what was raised and
where. With every answer goes the number of collectives that the rank has begun, by which the driver sees whether the
ranks are still in step (`headway.engine.ranks.driver`).

Tokens are chosen on rank 0 alone, and only their ids travel. Were every rank to choose, a difference in the last bit of
a logit (another GPU, another kernel) could give two ranks two different sequences, and neither would notice.
"""

from __future__ import annotations

import os

import msgspec
import numpy as np
import torch

from headway.cache import CacheGeometry, ParallelLayout
from headway.engine.executor import StepWork
from headway.engine.ranks.drafting import DraftSource, speculator_of
from headway.engine.ranks.in_process import LocalExecutor
from headway.engine.ranks.messages import (
    Answer,
    FaultSite,
    Load,
    Loaded,
    MoveBlocks,
    Moved,
    Prepare,
    Prepared,
    RankFault,
    ReadPortions,
    StepDone,
    WritePortions,
    decode,
    encode,
)
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.moves import BlockMover
from headway.runtime.forward.runner import IN_FORWARD, ModelRunner
from headway.runtime.interface import AS_COMPUTED
from headway.runtime.loading import LoadedModel, end_tokens, load_model
from headway.runtime.model.memory import default_memory
from headway.runtime.model.stored import stored_layout
from headway.runtime.parallel.communicator import Communicator, Rehearsal
from headway.runtime.parallel.context_parallel import HeadMerge
from headway.runtime.parallel.distributed import CollectiveError, TorchCommunicator, join_group
from headway.runtime.parallel.prefill_context import TokenRanks
from headway.runtime.quality import quality_of
from headway.runtime.selfcheck import self_check

__all__ = ["Rank", "moved"]


class Rank:
    """One rank's side of the conversation. Any message may fail; the next is answered all the same.

    Args:
        rank: Its number.
        device: Its device.
        threads: Threads that it may compute with on a CPU; None for torch's own choice.
    """

    def __init__(self, rank: int, device: str, threads: int | None = None) -> None:
        self._rank = rank
        self._device = device
        if threads is not None and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        self._model: LoadedModel | None = None
        self._group: TorchCommunicator | None = None
        self._merge: HeadMerge | None = None
        self._executor: LocalExecutor | None = None
        self._drafts: DraftSource | None = None
        self._stored = AS_COMPUTED
        self._drafter: Drafter | None = None

    def answer(self, message: bytes) -> bytes:
        """Do what a message asks for and return the answer. Raises nothing that a rank can survive."""
        try:
            return _encoded(self._answer(decode(message)))
        except Exception as error:
            return _encoded(RankFault(type(error).__name__, str(error), _site(error)))

    def _answer(self, asked: object) -> Loaded | Prepared | StepDone | Moved:
        if isinstance(asked, StepWork):
            return self._run(asked)
        if isinstance(asked, MoveBlocks | ReadPortions | WritePortions):
            assert self._executor is not None, "a rank is asked to move blocks before it has made room"
            return moved(self._executor.mover, asked)
        if isinstance(asked, Load):
            return self._load(asked)
        assert isinstance(asked, Prepare), f"a rank was sent a {type(asked).__name__}"
        return self._prepare(asked)

    def _load(self, asked: Load) -> Loaded:
        if asked.ranks > 1:
            device = torch.device(self._device)
            self._group = join_group(asked.meeting, self._rank, asked.ranks, device, asked.timeout)
            self._merge = _merge(self._group, asked)
        sharing = self._group.parted(asked.tp) if self._group is not None and asked.tp > 1 else None
        loaded = self._model = load_model(asked.source, self._device, asked.dtype, sharing)
        # Ranks that share the weights compute nothing without each other; what each of them finds is the same.
        checks = self._rank == 0 or sharing is not None
        check = self_check(loaded.model, loaded.layout) if checks else None
        quality = None if check is None else quality_of(loaded, asked.stored, check.single_steps)
        self._stored = asked.stored
        self._drafts, self._drafter = asked.drafts, asked.drafts.load(loaded)  # before what is left is measured
        found = (check, quality) if self._rank == 0 else (None, None)
        return Loaded(default_memory(loaded.model.device), end_tokens(loaded), *found)

    def _prepare(self, asked: Prepare) -> Prepared:
        assert self._model is not None, "a rank makes room before it has a model"
        assert self._drafts is not None
        layout = stored_layout(self._model.layout.over(asked.dcp), self._stored)
        parallel = ParallelLayout(asked.tp, asked.dcp, asked.pcp, asked.interleave)
        groups = (*layout.groups, *(() if self._drafter is None else self._drafter.groups))
        geometry = CacheGeometry(groups, parallel, block_tokens=asked.block_tokens)
        runner = ModelRunner(self._model.model, layout, geometry, asked.blocks, asked.single_steps, self._merge)
        grammars = None
        if self._rank == 0:  # which chooses the tokens
            loaded = self._model
            grammars = Grammars(loaded.tokenizer, layout.vocab_size, end_tokens(loaded), asked.max_running)
        speculator, measured = speculator_of(
            self._drafts, runner, self._drafter, asked.max_running, self._group, grammars
        )
        self._executor = LocalExecutor(runner, speculator, grammars, asked.host_blocks, self._rank)
        return Prepared(runner.arena.bytes, measured, tuple(self._executor.mover.shares.values()))

    def _run(self, work: StepWork) -> StepDone:
        assert self._executor is not None, "a rank is sent a step before it has made room"
        if self._rank > 0 and self._drafter is None:  # with drafts, rank 0 tells what it chose
            work = msgspec.structs.replace(work, samples=[None] * len(work.samples))
        rows = self._executor.run(work)
        faults = {i: row.fault for i, row in enumerate(rows) if row.fault is not None}
        return StepDone(rows if self._rank == 0 else (), faults)


def _merge(group: TorchCommunicator, asked: Load) -> HeadMerge | None:
    """The ranks that split tokens, or None where none do."""
    if asked.dcp * asked.pcp == 1:
        return None
    near: Communicator = Rehearsal(1) if asked.dcp == 1 else group.parted(asked.dcp)
    far = None if asked.pcp == 1 else TokenRanks(group.parted(asked.pcp, asked.ranks // asked.pcp))
    return HeadMerge(near, asked.communication, far)


def moved(mover: BlockMover, asked: MoveBlocks | ReadPortions | WritePortions) -> Moved:
    """Do what a message says with the blocks of one rank."""
    if isinstance(asked, ReadPortions):
        return Moved([mover.read_portion(portion).data for portion in asked.portions])
    if isinstance(asked, WritePortions):
        for portion, data in zip(asked.portions, asked.data, strict=True):
            mover.write_portion(portion, np.frombuffer(data, dtype=np.uint8))
    else:
        mover.move(asked.out, asked.back)
    return Moved()


def _encoded(result: Loaded | Prepared | StepDone | Moved | RankFault) -> bytes:
    return encode(Answer(result, TorchCommunicator.begun))


def _site(error: Exception) -> FaultSite:
    if isinstance(error, CollectiveError):
        return FaultSite.COLLECTIVE
    return FaultSite.FORWARD if IN_FORWARD in getattr(error, "__notes__", ()) else FaultSite.BETWEEN
