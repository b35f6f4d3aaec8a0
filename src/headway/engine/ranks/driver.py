"""The executor whose ranks are elsewhere: it sends each step to all of them, once, and waits for all answers.

The driver holds no weights. It has the only scheduler and the only cache; a step goes out as arrays of block ids, which
mean the same on every rank, and token ids come back from rank 0. The driver talks to each rank directly, and the ranks
talk to each other only inside attention and about drafts. So a step has an end that the driver sees on every rank,
and a rank that is gone or stuck is noticed by name.

What ends a step badly is of two kinds. If every rank has answered, some with a fault (the model raised, memory ran out
for a moment), and they are *in step*, the scheduler may try again. If any has not answered in time, is gone, or is out
of step, nothing that any of them holds can be trusted: `RanksLostError`, and only `restart` helps.

Collectives pair by their order alone. A backend that does not block lets a rank go on before the others have joined, so
two ranks can fail before different collectives and both answer; the next step of one would then meet the rest of this
step of the other. So ranks are in step if

- all have begun equally many collectives (every answer says how many), and none failed inside one; and
- if one failed inside a forward, all failed there, with the same fault. Inside the model, libraries may make
  collectives that nobody counts, and a rank that got through would have made more of them than one that did not. A
  fault that a request brings about by itself is the same on all ranks, and its step is tried again.

One rank alone is always in step with itself.

Rejected: rank 0 inside the driver, as engines do that save one process. A collective that never returns would then hold
the thread that has to notice it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headway.cache import CacheGeometry
from headway.engine.config import ParallelConfig
from headway.engine.errors import RanksLostError
from headway.engine.executor import Int32s, StepWork
from headway.engine.ranks.drafting import DraftSource
from headway.engine.ranks.messages import (
    Answer,
    Asked,
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
    compact,
    decode,
    encode,
)
from headway.engine.ranks.objects import RankObjects
from headway.runtime.forward.canonical import Bytes, Portion
from headway.runtime.interface import AS_COMPUTED, BlockRange, CanonicalGroup, RowAnswer, RowFault, StoredTypes
from headway.runtime.parallel.distributed import Rendezvous

__all__ = ["RankGroup", "RankedExecutor"]

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 3600.0
"""Patience while a model is loaded, which may have to be fetched first. A rank that dies is noticed at once."""
_MEETING_SECONDS = 120.0
"""Least patience of a collective: the first one waits for ranks that are still importing their libraries."""
_STARTS = 3
"""How often in a row ranks are started in the place of lost ones. What ends them so early may well do it again."""
_GRACE_SECONDS = 10.0
"""After the first fault of a step, ranks that wait in a collective for the faulty one get this long to answer."""


class RankGroup(Protocol):
    """Ranks that run, seen from the driver.

    Attributes:
        size: Number of ranks.
        meeting: Where they form their group.
    """

    size: int
    meeting: Rendezvous

    def send(self, messages: Sequence[bytes], timeout: float) -> None:
        """Send every rank a message: one for all, or one for each in order of rank.

        Raises:
            RanksLostError: A rank is gone, or has not taken it within `timeout` seconds.
        """
        ...

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next answer and the rank it is from, or None if none comes within `timeout` seconds.

        Raises:
            RanksLostError: A rank is gone.
        """
        ...

    def check(self) -> None:
        """Look whether all ranks are there, while none has anything to answer. Returns at once.

        Raises:
            RanksLostError: A rank is gone.
        """
        ...

    def stopped(self) -> Sequence[int]:
        """Ranks that are there and do not run, such as after SIGSTOP, as far as the system tells."""
        ...

    def kill(self) -> None:
        """End all ranks now. May be called again."""
        ...


def _nothing() -> None:
    """Wait, and do nothing else."""


class RankedExecutor:
    """Computes steps on a group of ranks.

    Args:
        launch: Starts the ranks.
        source: The model, as for `load_model`; every rank loads it.
        dtype: As for `load_model`.
        config: How many ranks, how they communicate, and the driver's patience.
        drafts: Who drafts.
        stored: What the cache stores as.

    Attributes:
        meanwhile: Called once in each step, while the ranks compute; it should take less time than they do.
    """

    def __init__(
        self,
        launch: Callable[[], RankGroup],
        source: str | None,
        dtype: str,
        config: ParallelConfig,
        drafts: DraftSource,
        stored: StoredTypes = AS_COMPUTED,
    ) -> None:
        self._launch = launch
        self._source = source
        self._dtype = dtype
        self._config = config
        self._drafts = drafts
        self._stored = stored
        self._group: RankGroup | None = None
        self._geometry: CacheGeometry | None = None
        self._room: Prepare | None = None
        self._objects: RankObjects | None = None
        self.meanwhile: Callable[[], object] = _nothing

    def load(self) -> Sequence[Loaded]:
        """Start the ranks and load the model on each. Returns what each says, in order of rank.

        Raises:
            HeadwayError: What a rank raised, or ranks that cannot be started.
        """
        self.close()
        group = self._group = self._launch()
        config = self._config
        patience = max(config.rank_timeout, _MEETING_SECONDS)
        load = Load(
            source=self._source,
            dtype=self._dtype,
            ranks=group.size,
            tp=config.tp,
            dcp=config.dcp,
            meeting=group.meeting,
            communication=config.communication,
            timeout=patience,
            drafts=self._drafts,
            pcp=config.pcp,
            stored=self._stored,
        )
        return self._ask(load, Loaded, _LOAD_SECONDS)

    def prepare(self, geometry: CacheGeometry, room: Prepare) -> Sequence[Prepared]:
        """Make room for the cache on every rank. Returns what each says.

        Raises:
            HeadwayError: What a rank raised.
        """
        self._geometry, self._room = geometry, room
        made: list[Prepared] = self._ask(room, Prepared, _LOAD_SECONDS)
        self._objects = RankObjects(geometry, [each.shares for each in made]) if made[0].shares else None
        return made

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        """Compute a step on all ranks; rank 0 chooses the tokens.

        Raises:
            RanksLostError: A rank is gone, stuck, or out of step with the others.
            Exception: What a rank raised, while all ranks answered and are in step.
        """
        assert self._geometry is not None, "`prepare` comes before the first step"
        step, patience = compact(work, self._geometry), self._config.rank_timeout
        answers: list[StepDone] = self._ask(step, StepDone, patience, self.meanwhile)
        rows = list(answers[0].rows)
        for i in {row for answer in answers for row in answer.faults}:
            faults = [a.faults[i] for a in answers if i in a.faults]
            damaged = min((fault.damaged for fault in faults if fault.damaged is not None), default=None)
            form = faults[0].form if all(fault.form is not None for fault in faults) else None
            rows[i] = RowAnswer(fault=RowFault(damaged, form))
        return rows

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        """What the objects of each group are."""
        return self._shared.canonical

    @property
    def _shared(self) -> RankObjects:
        assert self._objects is not None, "`prepare` comes before objects"
        return self._objects

    def move_blocks(self, out: Int32s, back: Int32s) -> None:
        """Copy whole blocks on every rank (see `Executor.move_blocks`).

        Raises:
            RanksLostError: As for `run`.
            Exception: As for `run`.
        """
        self._ask(MoveBlocks(out, back), Moved, self._config.rank_timeout)

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        """Put together what the ranks have of the objects of some ranges (see `Executor.read_objects`).

        Raises:
            RanksLostError: As for `run`.
            Exception: As for `run`.
        """

        def ask(portions: Sequence[Portion]) -> Sequence[Sequence[memoryview]]:
            answers: list[Moved] = self._ask(ReadPortions(portions), Moved, self._config.rank_timeout)
            return [answer.data for answer in answers]

        return self._shared.read(ranges, ask)

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        """Send every rank its part of some objects (see `Executor.write_objects`).

        Raises:
            RanksLostError: As for `run`.
            Exception: As for `run`.
        """

        def tell(portions: Sequence[Portion], parts: Sequence[Sequence[Bytes]]) -> None:
            messages = [WritePortions(portions, [part.data for part in each]) for each in parts]
            self._ask(messages, Moved, self._config.rank_timeout)

        self._shared.write(ranges, objects, tell)

    def check(self) -> None:
        """Look whether all ranks are there, between steps. Returns at once.

        Raises:
            RanksLostError: A rank is gone. One that hangs is noticed by the next step.
        """
        if self._group is None:
            raise _no_ranks()
        try:
            self._group.check()
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Replace all ranks by new ones, whose memory is empty. Some of these may be lost again, but not for ever.

        Raises:
            HeadwayError: They cannot be started.
        """
        assert self._geometry is not None, "`prepare` comes before a restart"
        assert self._room is not None
        for left in reversed(range(_STARTS)):
            try:
                self.load()
                self.prepare(self._geometry, self._room)
                break
            except RanksLostError as error:
                if not left:
                    raise
                logger.error("new ranks are lost while they start, which is tried again: %s", error)

    def close(self) -> None:
        """End the ranks. May be called again."""
        if self._group is not None:
            self._group.kill()
            self._group = None

    def _ask(
        self,
        asked: Asked | Sequence[Asked],
        expected: Any,
        timeout: float,
        meanwhile: Callable[[], object] = _nothing,
    ) -> list[Any]:
        """Send a message to every rank, or one to each, and wait for all answers, in order of rank."""
        if self._group is None:
            raise _no_ranks()
        try:
            messages = [encode(each) for each in (asked if isinstance(asked, Sequence) else [asked])]
            answers = self._exchange(self._group, messages, timeout, meanwhile)
            _require_in_step(answers)
        except BaseException:  # answers may be left unread, and would be taken for those to the next message
            self.close()
            raise
        results = [answer.result for answer in answers]
        for rank, each in enumerate(results):
            if isinstance(each, RankFault):
                raise each.as_exception(rank)
            assert isinstance(each, expected), f"rank {rank} answered with a {type(each).__name__}"
        return results

    @staticmethod
    def _exchange(
        group: RankGroup, messages: Sequence[bytes], timeout: float, meanwhile: Callable[[], object]
    ) -> list[Answer]:
        deadline = time.monotonic() + timeout
        group.send(messages, timeout)
        meanwhile()
        answers: dict[int, Answer] = {}
        while len(answers) < group.size:
            received = group.receive(max(0.0, deadline - time.monotonic()))
            if received is None:
                raise _overdue(group, answers, timeout)
            rank, data = received
            answers[rank] = _decoded(rank, data)
            if isinstance(answers[rank].result, RankFault):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return [answers[rank] for rank in range(group.size)]


def _no_ranks() -> RanksLostError:
    return RanksLostError("there are no ranks: they were lost and have not been started again")


def _decoded(rank: int, data: bytes) -> Answer:
    try:
        answer = decode(data)
    except ValueError as error:
        raise RanksLostError(f"rank {rank} answered with what is no message: {error}") from error
    if not isinstance(answer, Answer):
        raise RanksLostError(f"rank {rank} answered with a {type(answer).__name__}, which is no answer")
    return answer


def _require_in_step(answers: Sequence[Answer]) -> None:
    """See the head of this module.

    Raises:
        RanksLostError: The ranks are not in step.
    """
    if len(answers) == 1:
        return
    faults = {rank: answer.result for rank, answer in enumerate(answers) if isinstance(answer.result, RankFault)}
    why = "".join(f"; rank {rank} failed {f.site.value} with {f.kind}: {f.message}" for rank, f in faults.items())
    if len({answer.collectives for answer in answers}) > 1:
        counts = ", ".join(str(answer.collectives) for answer in answers)
        raise RanksLostError(f"the ranks are out of step, they have begun {counts} collectives{why}")
    sites = {fault.site for fault in faults.values()}
    alike = len(faults) == len(answers) and len(set(faults.values())) == 1
    if FaultSite.COLLECTIVE in sites or (FaultSite.FORWARD in sites and not alike):
        raise RanksLostError(f"the ranks may be out of step{why}")


def _overdue(group: RankGroup, answers: dict[int, Answer], timeout: float) -> Exception:
    late = ", ".join(str(rank) for rank in range(group.size) if rank not in answers)
    if stopped := ", ".join(map(str, group.stopped())):
        return RanksLostError(
            f"no answer within {timeout:g} seconds: rank {stopped} is stopped (SIGSTOP, a debugger or a frozen "
            f"container), and the others wait for it"
        )
    fault = next((a.result for a in answers.values() if isinstance(a.result, RankFault)), None)
    if fault is not None:
        if fault.mendable:  # of a start: the group is ended, and the user should hear what to change
            return fault.as_exception(0)
        return RanksLostError(f"rank {late} waits for a rank that failed with {fault.kind}: {fault.message}")
    return RanksLostError(
        f"no answer from rank {late} within {timeout:g} seconds; raise --rank-timeout if steps may take that long"
    )
