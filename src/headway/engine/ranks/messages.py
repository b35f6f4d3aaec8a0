"""What the driver and its ranks say to each other: one record per message, as bytes.

The driver sends `Load`, `Prepare` and, for each step, a `StepWork` without what no rank reads (`compact`); between
steps `MoveBlocks`, `ReadPortions` and `WritePortions`. A rank answers each with an `Answer`. Messages are MessagePack
of these very records, arrays as their dtype, shape and bytes: a message can hold nothing else, so that reading one runs
no code of whoever wrote it.

Rejected: pickle, which does run code and would make every connection between machines a way in; and safetensors, which
has no place for what is not an array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import numpy as np

from headway.cache import CacheGeometry, TableKind
from headway.engine.executor import Int32s, StepWork
from headway.engine.ranks.drafting import DraftSource, ReadyDrafter
from headway.errors import ConfigError, HeadwayError, ModelError
from headway.runtime.forward.canonical import GroupShare, Portion
from headway.runtime.interface import AS_COMPUTED, RowAnswer, RowFault, SampleRow, StoredTypes
from headway.runtime.parallel.distributed import Rendezvous
from headway.runtime.quality import Quality
from headway.runtime.selfcheck import SelfCheck

__all__ = [
    "Answer",
    "Asked",
    "FaultSite",
    "Load",
    "Loaded",
    "MoveBlocks",
    "Moved",
    "Prepare",
    "Prepared",
    "RankFault",
    "ReadPortions",
    "StepDone",
    "WritePortions",
    "compact",
    "decode",
    "encode",
]

_MENDABLE: dict[str, type[HeadwayError]] = {"ConfigError": ConfigError, "ModelError": ModelError}
"""Faults that the user can do something about, by the name of their class."""
_NOTHING = np.empty(0, dtype=np.int32)


class Load(msgspec.Struct, frozen=True, tag=True):
    """Join the other ranks and load the model.

    Attributes:
        source: As for `load_model`, or None for the built-in model.
        dtype: As for `load_model`.
        ranks: How many ranks there are.
        tp: Ranks that share the weights: groups of as many consecutive ranks; 1 where each has the whole model.
        dcp: Ranks that split the tokens of full attention: groups of as many consecutive ranks.
        meeting: Where they meet.
        communication: How they merge attention: `ag_rs` or `a2a`.
        timeout: Seconds after which a collective counts as lost.
        drafts: Who drafts.
        pcp: Ranks that share the tokens of long forwards, as far apart as there are other ranks.
        stored: What the cache stores as.
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
    pcp: int = 1
    stored: StoredTypes = AS_COMPUTED


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded.

    Attributes:
        memory: Bytes that the device has for a cache, if nobody says how many: beside the model and its drafter.
        eos: Tokens that end an answer.
        check: Rank 0's self-check; None on other ranks.
        quality: What the types that the cache stores as cost, by rank 0; None where it stores as the model computes.
    """

    memory: int
    eos: tuple[int, ...]
    check: SelfCheck | None
    quality: Quality | None = None


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Make room for the cache.

    Attributes:
        blocks: Blocks of the pool.
        block_tokens: Tokens of the first table in a block.
        tp: As in the cache's layout, also where each rank has the whole model (see `ParallelConfig.layout`).
        dcp: Its ranks that split the tokens of full attention.
        interleave: Consecutive tokens that one of them stores.
        single_steps: What the self-check says.
        max_running: Most requests that run at once.
        host_blocks: Blocks in host memory.
        pcp: Ranks that share the tokens of long forwards.
    """

    blocks: int
    block_tokens: int
    tp: int
    dcp: int
    interleave: int
    single_steps: bool
    max_running: int
    host_blocks: int = 0
    pcp: int = 1


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Room is made.

    Attributes:
        bytes: Bytes that the rank's blocks take.
        drafter: The drafter, and what it costs here; None without one.
        shares: What the rank has of the objects of each group.
    """

    bytes: int
    drafter: ReadyDrafter | None
    shares: tuple[GroupShare, ...] = ()


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has done its part of a step.

    Attributes:
        rows: Rank 0's: what it did for each row; empty on other ranks.
        faults: Rows whose numbers are not finite on this rank, which may be the only one: it has states of its own.
    """

    rows: Sequence[RowAnswer] = ()
    faults: dict[int, RowFault] = msgspec.field(default_factory=dict)


class MoveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks between device and host memory: as for `Executor.move_blocks`."""

    out: Int32s
    back: Int32s


class ReadPortions(msgspec.Struct, frozen=True, tag=True):
    """Read what the rank has of portions of objects."""

    portions: Sequence[Portion]


class WritePortions(msgspec.Struct, frozen=True, tag=True):
    """Write portions of objects.

    Attributes:
        portions: Where to.
        data: The rank's part of each: every rank is sent its own.
    """

    portions: Sequence[Portion]
    data: Sequence[memoryview]


class Moved(msgspec.Struct, frozen=True, tag=True):
    """What was to be moved has been.

    Attributes:
        data: What the rank has of each portion that was to be read; nothing else.
    """

    data: Sequence[memoryview] = ()


class FaultSite(Enum):
    """Where a rank was when it raised something."""

    BETWEEN = "between forwards"
    """Reading a message, allocating, drafting, choosing tokens. All collectives here are counted."""
    FORWARD = "in a forward"
    """Inside the model, where libraries may make collectives that nobody counts."""
    COLLECTIVE = "in a collective"
    """In a collective that it had begun and did not end."""


class RankFault(msgspec.Struct, frozen=True, tag=True):
    """What a rank raised: the name of the class, the message, and where it was."""

    kind: str
    message: str
    site: FaultSite = FaultSite.BETWEEN

    @property
    def mendable(self) -> bool:
        """Whether the user can do something about it, and the message says what."""
        return self.kind in _MENDABLE

    def as_exception(self, rank: int) -> Exception:
        """The exception to raise in the driver: of the same class where the user can mend it."""
        if self.mendable:
            return _MENDABLE[self.kind](self.message)
        return RuntimeError(f"rank {rank}: {self.kind}: {self.message}")


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What a rank says to a message.

    Attributes:
        result: `Loaded`, `Prepared`, `StepDone`, `Moved` or `RankFault`.
        collectives: Collectives that it has begun since it joined the others.
    """

    result: Loaded | Prepared | StepDone | Moved | RankFault
    collectives: int


Asked: TypeAlias = Load | Prepare | StepWork | MoveBlocks | ReadPortions | WritePortions
"""What the driver sends."""
Message: TypeAlias = Asked | Answer


def encode(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        TypeError: It holds something that is no plain record.
    """
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Return the message.

    Its arrays are its own and may be written; a `memoryview` is one of `data`. Sequences come back as lists or tuples.

    Raises:
        ValueError: Not a message of `encode`.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise ValueError(f"a message between ranks cannot be read: {type(error).__name__}: {error}") from error


def _written(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"a {type(value).__name__} is no plain record: it cannot be sent to a rank")


def _read(kind: type, value: tuple[str, list[int], bytes]) -> Any:
    """The array of `_written`."""
    name, shape, data = value
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_written)
_DECODER = msgspec.msgpack.Decoder(Message, dec_hook=_read)


def compact(work: StepWork, geometry: CacheGeometry) -> StepWork:
    """A step without what no rank reads: rows are 0 to n - 1, tables have these rows and the columns in use.

    A prompt is left out where no penalty asks for it, and an answer where no random number or constraint asks for it. A
    row with room for a draft keeps both: that is what drafters read.
    """
    step = work.step
    place = {int(row): i for i, row in enumerate(step.rows)}
    reached = int(np.max(step.starts + step.counts, initial=0))
    columns = [t.state_blocks if t.kind is TableKind.STATE else -(-reached // t.span) for t in geometry.tables]
    return msgspec.structs.replace(
        work,
        step=dataclasses.replace(
            step,
            rows=np.arange(len(step.rows)),
            fresh=np.flatnonzero(np.isin(step.rows, step.fresh)),
            exports=tuple(dataclasses.replace(export, row=place.get(export.row, -1)) for export in step.exports),
        ),
        tables=[table[step.rows, :count] for table, count in zip(work.tables, columns, strict=True)],
        samples=[
            row if row is None or len(tokens) < count else _needed(row)
            for row, tokens, count in zip(work.samples, work.tokens, step.counts, strict=True)
        ],
        leases=np.asarray(step.rows, dtype=np.int64),
    )


def _needed(row: SampleRow) -> SampleRow:
    if row.params.shapes_logits:
        return row
    read = not row.params.greedy or row.constraint is not None
    return dataclasses.replace(row, prompt=_NOTHING, output=row.output if read else _NOTHING)
