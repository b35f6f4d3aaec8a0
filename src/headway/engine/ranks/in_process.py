"""The executor that runs the model in this process, on the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.engine.executor import DraftOutput, StepOutput, StepWork
from headway.runtime.drafting.speculator import RowOutcome, Speculator
from headway.runtime.forward.batch import batch_of
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.forward.sampling import sample
from headway.runtime.interface import TokenLogprob

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """Computes steps with one `ModelRunner`, and with drafts if it is given a `Speculator` on that runner."""

    def __init__(self, runner: ModelRunner, speculator: Speculator | None = None) -> None:
        self._runner = runner
        self._speculator = speculator

    def run(self, work: StepWork) -> StepOutput:
        """Copy, compute, export and sample.

        Raises:
            Exception: Whatever the model raises; out of memory for example.
        """
        if self._speculator is not None:
            return _speculate(self._speculator, work)
        rows = len(work.step.rows)
        batch, places = batch_of(work.step, work.tables, work.tokens)
        logits = self._runner.run(batch).logits
        sampled = np.zeros(rows, dtype=np.int32)
        logprobs: list[TokenLogprob | None] = [None] * rows
        wanted = [(i, int(place), row) for i, place in enumerate(places) if (row := work.samples[place]) is not None]
        if wanted:
            chosen = sample(logits[[i for i, _, _ in wanted]], [row for _, _, row in wanted])
            for (_, place, _), token, record in zip(wanted, chosen.tokens.tolist(), chosen.logprobs, strict=True):
                sampled[place], logprobs[place] = token, record
        return StepOutput(sampled, logprobs)

    def check(self) -> None:
        """Do nothing: the one rank is this process, and cannot be lost."""

    def restart(self) -> None:
        """Do nothing, as `check`."""

    def close(self) -> None:
        """Let go of the model and its memory."""
        if self._speculator is not None:
            self._speculator.close()
        del self._runner, self._speculator


def _speculate(speculator: Speculator, work: StepWork) -> StepOutput:
    following = np.full(len(work.samples), -1, dtype=np.int64) if work.following is None else work.following
    outcomes = speculator.run(work.step, work.tables, work.tokens, work.samples, following, work.leases)
    drafts = _draft_output(outcomes)
    return StepOutput(drafts.tokens[:, 0], [None] * len(outcomes), drafts)


def _draft_output(outcomes: Sequence[RowOutcome]) -> DraftOutput:
    answers = [outcome.judgement.tokens for outcome in outcomes]
    tokens = np.zeros((len(answers), max(1, *map(len, answers))), dtype=np.int32)
    for row, answer in zip(tokens, answers, strict=True):
        row[: len(answer)] = answer
    return DraftOutput(
        tokens=tokens,
        counts=np.array([len(answer) for answer in answers], dtype=np.int64),
        logprobs=[outcome.judgement.logprobs for outcome in outcomes],
        kept=np.array([outcome.kept for outcome in outcomes], dtype=np.int64),
        proposed=np.array([len(outcome.proposal.tokens) for outcome in outcomes], dtype=np.int64),
        accepted=np.array([outcome.judgement.accepted for outcome in outcomes], dtype=np.int64),
        confidence=[outcome.proposal.confidence for outcome in outcomes],
    )
