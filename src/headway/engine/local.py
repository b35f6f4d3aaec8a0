"""The executor that runs the model in this process, on the engine's thread."""

from __future__ import annotations

import numpy as np

from headway.engine.executor import SampleSpec, StepOutput, StepWork
from headway.engine.request import TokenLogprob
from headway.runtime.batch import batch_of
from headway.runtime.runner import ModelRunner
from headway.runtime.sampling import SampleRow, SamplingParams, sample

__all__ = ["LocalExecutor"]

_GREEDY = SamplingParams(temperature=0.0)


class LocalExecutor:
    """Computes steps with one `ModelRunner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(self, work: StepWork) -> StepOutput:
        """Copy, compute, export and sample.

        Raises:
            Exception: Whatever the model raises; out of memory for example.
        """
        rows = len(work.step.rows)
        batch, places = batch_of(work.step, work.tables, work.tokens)
        logits = self._runner.run(batch).logits
        sampled = np.zeros(rows, dtype=np.int32)
        logprobs: list[TokenLogprob | None] = [None] * rows
        wanted = [(i, int(place), spec) for i, place in enumerate(places) if (spec := work.samples[place]) is not None]
        if wanted:
            chosen = sample(logits[[i for i, _, _ in wanted]], [_sample_row(spec) for _, _, spec in wanted])
            for (_, place, _), token, record in zip(wanted, chosen.tokens.tolist(), chosen.logprobs, strict=True):
                sampled[place] = token
                if record is not None:
                    logprobs[place] = TokenLogprob(record.token, record.logprob, record.top)
        return StepOutput(sampled, logprobs)

    def restart(self) -> None:
        """Do nothing: the one rank is this process, and cannot be lost."""

    def close(self) -> None:
        """Let go of the model and its memory."""
        del self._runner


def _sample_row(spec: SampleSpec) -> SampleRow:
    return SampleRow(spec.params or _GREEDY, spec.seed, spec.prompt, spec.output)
