"""One rank: it loads the model, makes room, and computes the steps it is sent. It decides nothing.

Messages are bytes both ways (`headway.engine.wire`), so a rank is the same in a process of this machine and in a Ray
actor of another. It answers every message: with a record, or with a `RankFault` that says what was raised and where.
With every answer goes the number of collectives that the rank has begun, by which the driver sees whether the ranks are
still in step (`headway.engine.ranked`).

Tokens are chosen on rank 0 alone, and only their ids travel. Were every rank to choose, a difference in the last bit of
a logit (another GPU, another kernel) could give two ranks two different sequences, and neither would notice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from headway.cache import CacheGeometry, ParallelLayout, StateExport, Step, TableKind
from headway.engine.build_drafts import DraftSource, Measured, speculator_of
from headway.engine.drafts import StepCosts
from headway.engine.executor import DraftOutput, StepOutput, StepWork
from headway.engine.local import LocalExecutor
from headway.engine.wire import Codec
from headway.errors import ConfigError, HeadwayError, ModelError
from headway.runtime.context_parallel import HeadMerge
from headway.runtime.distributed import CollectiveError, Rendezvous, TorchCommunicator, join_group
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.loading import LoadedModel, end_tokens, load_model
from headway.runtime.memory import default_memory
from headway.runtime.runner import IN_FORWARD, ModelRunner
from headway.runtime.sampling import SampleRow, SamplingParams, TokenLogprob
from headway.runtime.selfcheck import SelfCheck, Verdict, self_check

__all__ = [
    "CODEC",
    "Answer",
    "Load",
    "Loaded",
    "Place",
    "Prepare",
    "Prepared",
    "Rank",
    "RankFault",
    "StepDone",
    "compact",
]


@dataclass(frozen=True)
class Load:
    """Join the other ranks and load the model.

    Attributes:
        source: As for `load_model`, or None for the built-in model.
        dtype: As for `load_model`.
        ranks: How many ranks there are.
        tp: Ranks that share the weights: all, or 1 where each has the whole model.
        dcp: Ranks that split the tokens of full attention: groups of as many consecutive ranks.
        meeting: Where they meet.
        communication: How they merge attention: `ag_rs` or `a2a`.
        timeout: Seconds after which a collective counts as lost.
        drafts: Who drafts.
    """

    source: str | None
    dtype: str
    ranks: int
    tp: int
    dcp: int
    meeting: Rendezvous
    communication: str
    timeout: float
    drafts: DraftSource


@dataclass(frozen=True)
class Loaded:
    """The model is loaded.

    Attributes:
        memory: Bytes that the device has for a cache, if nobody says how many: beside the model and its drafter.
        eos: Tokens that end an answer.
        check: Rank 0's self-check; None on other ranks.
    """

    memory: int
    eos: tuple[int, ...]
    check: SelfCheck | None


@dataclass(frozen=True)
class Prepare:
    """Make room for the cache.

    Attributes:
        blocks: Blocks of the pool.
        block_tokens: Tokens of the first table in a block.
        tp: The layout's sizes.
        dcp: As `tp`.
        interleave: As `tp`.
        single_steps: What the self-check says.
        max_running: Most requests that run at once.
    """

    blocks: int
    block_tokens: int
    tp: int
    dcp: int
    interleave: int
    single_steps: bool
    max_running: int


@dataclass(frozen=True)
class Prepared:
    """Room is made.

    Attributes:
        bytes: Bytes that the rank's blocks take.
        drafter: The drafter, and what it costs here; None without one.
    """

    bytes: int
    drafter: Measured | None


@dataclass(frozen=True)
class StepDone:
    """A rank that does not report tokens has done its part of a step."""


class Place(Enum):
    """Where a rank was when it raised something."""

    BETWEEN = "between forwards"
    """Reading a message, allocating, drafting, choosing tokens. All collectives here are counted."""
    FORWARD = "in a forward"
    """Inside the model, where libraries may make collectives that nobody counts."""
    COLLECTIVE = "in a collective"
    """In a collective that it had begun and did not end."""


@dataclass(frozen=True)
class RankFault:
    """What a rank raised: the name of the class, the message, and where it was."""

    kind: str
    message: str
    place: Place = Place.BETWEEN

    @property
    def mendable(self) -> bool:
        """Whether the user can do something about it, and the message says what."""
        return self.kind in _MENDABLE

    def as_exception(self, rank: int) -> Exception:
        """The exception to raise in the driver: of the same class where the user can mend it."""
        if self.mendable:
            return _MENDABLE[self.kind](self.message)
        return RuntimeError(f"rank {rank}: {self.kind}: {self.message}")


@dataclass(frozen=True)
class Answer:
    """What a rank says to a message.

    Attributes:
        said: `Loaded`, `Prepared`, `StepOutput`, `StepDone` or `RankFault`.
        collectives: Collectives that it has begun since it joined the others.
    """

    said: object
    collectives: int


_MENDABLE: dict[str, type[HeadwayError]] = {"ConfigError": ConfigError, "ModelError": ModelError}

CODEC = Codec(
    (
        *(Load, Rendezvous, Loaded, SelfCheck, Verdict),
        *(Prepare, DraftSource, Prepared, Measured, StepCosts),
        *(StepWork, Step, StateExport, SampleRow, SamplingParams),
        *(StepOutput, DraftOutput, TokenLogprob, StepDone, RankFault, Place, Answer),
    )
)
"""All that the driver and its ranks say to each other."""


def compact(work: StepWork, geometry: CacheGeometry) -> StepWork:
    """A step without what no rank reads: rows are 0 to n - 1, tables have these rows and the columns in use.

    A prompt is left out where no penalty asks for it, and an answer where it does not even count for a random number. A
    row with room for a draft keeps both: that is what drafters read.
    """
    step = work.step
    place = {int(row): i for i, row in enumerate(step.rows)}
    reached = int(np.max(step.starts + step.counts, initial=0))
    columns = [t.state_blocks if t.kind is TableKind.STATE else -(-reached // t.span) for t in geometry.tables]
    return replace(
        work,
        step=replace(
            step,
            rows=np.arange(len(step.rows)),
            fresh=np.flatnonzero(np.isin(step.rows, step.fresh)),
            exports=tuple(replace(export, row=place.get(export.row, -1)) for export in step.exports),
        ),
        tables=[table[step.rows, :count] for table, count in zip(work.tables, columns, strict=True)],
        samples=[
            row if row is None or len(tokens) < count else _needed(row)
            for row, tokens, count in zip(work.samples, work.tokens, step.counts, strict=True)
        ],
        leases=np.asarray(step.rows, dtype=np.int64),
    )


_NOTHING = np.empty(0, dtype=np.int32)


def _needed(row: SampleRow) -> SampleRow:
    if row.params.shapes_logits:
        return row
    return replace(row, prompt=_NOTHING, output=_NOTHING if row.params.greedy else row.output)


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
        self._drafter: Drafter | None = None

    def answer(self, message: bytes) -> bytes:
        """Do what a message asks for and return the answer. Raises nothing that a rank can survive."""
        try:
            return _encoded(self._answer(CODEC.decode(message)))
        except Exception as error:
            return _encoded(RankFault(type(error).__name__, str(error), _place(error)))

    def _answer(self, asked: object) -> object:
        if isinstance(asked, StepWork):
            return self._run(asked)
        if isinstance(asked, Load):
            return self._load(asked)
        assert isinstance(asked, Prepare), f"a rank was sent a {type(asked).__name__}"
        return self._prepare(asked)

    def _load(self, asked: Load) -> Loaded:
        if asked.ranks > 1:
            device = torch.device(self._device)
            self._group = join_group(asked.meeting, self._rank, asked.ranks, device, asked.timeout)
            if asked.dcp > 1:
                self._merge = HeadMerge(self._group.parted(asked.dcp), asked.communication)
        sharing = self._group if asked.tp > 1 else None
        loaded = self._model = load_model(asked.source, self._device, asked.dtype, sharing)
        # Ranks that share the weights compute nothing without each other; what each of them finds is the same.
        check = self_check(loaded.model, loaded.layout) if self._rank == 0 or sharing is not None else None
        self._drafts, self._drafter = asked.drafts, asked.drafts.load(loaded)  # before what is left is measured
        return Loaded(default_memory(loaded.model.device), end_tokens(loaded), check if self._rank == 0 else None)

    def _prepare(self, asked: Prepare) -> Prepared:
        assert self._model is not None, "a rank makes room before it has a model"
        assert self._drafts is not None
        layout = self._model.layout.over(asked.dcp)
        parallel = ParallelLayout(tp=asked.tp, dcp=asked.dcp, interleave=asked.interleave)
        groups = (*layout.groups, *(() if self._drafter is None else self._drafter.groups))
        geometry = CacheGeometry(groups, parallel, block_tokens=asked.block_tokens)
        runner = ModelRunner(self._model.model, layout, geometry, asked.blocks, asked.single_steps, self._merge)
        speculator, measured = speculator_of(self._drafts, runner, self._drafter, asked.max_running, self._group)
        self._executor = LocalExecutor(runner, speculator)
        return Prepared(runner.arena.bytes, measured)

    def _run(self, work: StepWork) -> StepOutput | StepDone:
        assert self._executor is not None, "a rank is sent a step before it has made room"
        if self._rank == 0:
            return self._executor.run(work)
        if self._drafter is None:  # with drafts, rank 0 tells what it chose
            work = replace(work, samples=[None] * len(work.samples))
        self._executor.run(work)
        return StepDone()


def _encoded(said: object) -> bytes:
    return CODEC.encode(Answer(said, TorchCommunicator.begun))


def _place(error: Exception) -> Place:
    if isinstance(error, CollectiveError):
        return Place.COLLECTIVE
    return Place.FORWARD if IN_FORWARD in getattr(error, "__notes__", ()) else Place.BETWEEN
