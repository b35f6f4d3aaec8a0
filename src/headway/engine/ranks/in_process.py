"""The executor that runs the model in this process, on the engine's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.engine.executor import Int32s, StepWork
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.batch import batch_of
from headway.runtime.forward.canonical import shares_of
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.moves import BlockMover
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.forward.sampling import sample, score_rows
from headway.runtime.interface import BlockRange, CanonicalGroup, RowAnswer

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """Computes steps with one `ModelRunner`, and with drafts if it is given a `Speculator` on that runner.

    `grammars` knows the forms of answers that must have one; the speculator has the same. None where none is chosen.

    Args:
        runner: Runs the model.
        speculator: Runs it with drafts; None without.
        grammars: See above.
        host_blocks: Blocks in host memory.
        rank: Its number among the ranks of the runner's geometry.

    Attributes:
        mover: Moves what the blocks hold.

    Raises:
        ConfigError: There is no room in host memory for its blocks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        speculator: Speculator | None = None,
        grammars: Grammars | None = None,
        host_blocks: int = 0,
        rank: int = 0,
    ) -> None:
        self._runner = runner
        self._speculator = speculator
        self._grammars = grammars
        arena, layout = runner.arena, runner.layout
        host = None
        if host_blocks:
            pinned = arena.device.type == "cuda"
            host = Arena(layout, arena.geometry, host_blocks, pinned=pinned, option="--host-memory")
        entries = () if speculator is None else speculator.drafter.entries
        self.mover = BlockMover(arena, host, shares_of(layout, arena.geometry, rank, entries))

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        """Copy, compute, export and sample (see `Executor.run`).

        Raises:
            Exception: Whatever the model raises; out of memory for example.
        """
        if self._grammars is not None:  # those that this process has not seen are compiled during the forward
            for constraint in {ask.constraint for ask in work.samples if ask is not None}:
                if constraint is not None:
                    self._grammars.begin(constraint)
        if self._speculator is not None:
            following = np.full(len(work.samples), -1, dtype=np.int64) if work.following is None else work.following
            asked = (work.step, work.tables, work.tokens, work.samples)
            return self._speculator.run(*asked, following, work.leases, work.long, work.scored)
        scored = None if work.scored is None else np.array([top is not None for top in work.scored])
        batch, places = batch_of(work.step, work.tables, work.tokens, scored, work.long)
        result = self._runner.run(batch)
        logits = result.logits
        answers = [RowAnswer(kept=count) for count in work.step.counts.tolist()]
        asks = [(i, place, ask) for i, place in enumerate(places.tolist()) if (ask := work.samples[place]) is not None]
        if asks:
            chosen = sample(logits[[i for i, _, _ in asks]], [ask for _, _, ask in asks], self._grammars)
            for (_, place, _), token, record in zip(asks, chosen.tokens.tolist(), chosen.logprobs, strict=True):
                records = () if record is None else (record,)
                answers[place] = RowAnswer((token,), answers[place].kept, records)
        if work.scored is not None and work.following is not None:
            score_rows(answers, result.all_logits, places.tolist(), work.tokens, work.following, work.scored)
        for row, fault in self._runner.faults(batch, result).items():
            answers[int(places[row])] = RowAnswer(fault=fault)
        for place, fault in ({} if self._grammars is None else self._grammars.faults(work.samples, answers)).items():
            answers[place] = RowAnswer(fault=fault)
        return answers

    def check(self) -> None:
        """Do nothing: the one rank is this process, and cannot be lost."""

    def restart(self) -> None:
        """Do nothing, as `check`."""

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        """What the objects of each group are."""
        return {name: share.group for name, share in self.mover.shares.items()}

    def move_blocks(self, out: Int32s, back: Int32s) -> None:
        """Copy whole blocks to host memory and back (see `Executor.move_blocks`)."""
        self.mover.move(out, back)

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        """Read the object of each range, of a rank that is alone (see `Executor.read_objects`)."""
        return [self.mover.read(asked).data for asked in ranges]

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        """Write an object to each range, of a rank that is alone (see `Executor.write_objects`)."""
        for asked, data in zip(ranges, objects, strict=True):
            self.mover.write(asked, np.frombuffer(data, dtype=np.uint8))

    def close(self) -> None:
        """Let go of the model and its memory."""
        if self._speculator is not None:
            self._speculator.close()
        del self._runner, self._speculator, self.mover
