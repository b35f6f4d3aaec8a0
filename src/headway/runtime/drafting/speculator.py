"""A step with drafts: propose, compute, judge, keep.

A row of such a step is the sequence's pending tokens (told, but not computed into its state yet) and behind them a
draft; the target computes all of them as one chunk, and its logits from the last pending token on judge the draft.

Attention entries of rejected tokens need no care: the next step writes over them. A recurrent state does: transformers
gives the state behind the last token of a chunk only, and that one has absorbed the rejected tokens. What to do is
decided here, for all models with states:

    The state that a verification leaves is kept if every draft of the row was accepted, and else dropped: the running
    state stays as it was, the accepted tokens stay pending, and the next step computes them again in front of its
    draft.

A forward reads the states into a copy and writes that back (`headway.runtime.forward.views.PagedCache`), so dropping is
not writing back: it costs neither memory nor a copy. Computing again costs no forward of its own, only a longer row: a
forward of 8 tokens of the built-in model takes 1.2 times as long as one of 1 token on a CPU, and on a GPU, where
decoding waits for the weights, less. Pending tokens are bounded by the scheduler (`headway.engine.scheduling.drafts`).

Rejected: one state per drafted token (3.0 GB per request for Kimi-K3 with 7 drafts) and a log of corrections (needs
kernels that give them out; transformers' do not). Also rejected: a copy of the state before verification, restored
after a rejection and replayed at once: a state per request in scratch memory, and a second forward in nearly every
step.

So no state with a rejected token in it is ever in a block, and the cache, which publishes what is committed, cannot
publish one.

On several ranks all compute and store alike, but rank 0 alone proposes and judges: what it found goes to the others as
whole numbers, twice a step. Were each to find out by itself, a difference in the last bit of a logit could make one
keep a state that another drops. Where the entries of a drafter are split over the ranks, all of them run its layers
first, because each can attend to its own entries alone; tokens are chosen on rank 0 all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import Step
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.agreement import Agreement
from headway.runtime.drafting.drafter import Drafter, DraftRequest, Observed, Proposal
from headway.runtime.drafting.features import FeatureTap
from headway.runtime.drafting.verification import verify
from headway.runtime.forward.batch import RunBatch, batch_of
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.plan import ForwardPlan
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.forward.sampling import score_rows
from headway.runtime.interface import RowAnswer, SampleRow
from headway.runtime.parallel.communicator import Communicator

__all__ = ["Speculator"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NO_DRAFT = Proposal(np.empty(0, dtype=np.int32))


class Speculator:
    """Runs steps of a model with the drafts of one drafter.

    Args:
        runner: Runs the target.
        drafter: Proposes.
        rule: How drafts of sampled answers are judged.
        ranks: The ranks that run the same steps, if there are several.
        grammars: Knows the forms of answers that must have one; used on rank 0 alone.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        rule: AcceptanceRule = AcceptanceRule.MATCH,
        ranks: Communicator | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.rule = rule
        self.grammars = grammars
        self.agreement = Agreement(ranks, drafter.most, runner.device)
        drafter.attach(runner.arena, runner.merge)
        layers, mixed = drafter.feature_layers, drafter.mixed_features
        self._tap = FeatureTap(runner.model, layers, mixed) if layers else None

    @torch.no_grad()
    def run(
        self,
        step: Step,
        tables: Sequence[Int32s],
        tokens: Sequence[Int32s],
        asks: Sequence[SampleRow | None],
        following: Int64s,
        leases: Int64s | None = None,
        long: Bools | None = None,
        scored: Sequence[int | None] | None = None,
    ) -> list[RowAnswer]:
        """Propose, copy, compute, judge, export.

        Args:
            step: What the cache granted.
            tables: The cache's block tables.
            tokens: One int32 array per row of the step, its known tokens from `starts` on. Where they are fewer than
                the row was granted, the rest is room for a draft.
            asks: One per row: how to choose its next tokens, or None where none is wanted yet.
            following: int64, one per row: the token behind those of the step where it is known already, else -1.
            leases: int64, one per row: a number of its own that its lease keeps from step to step; the step's rows if
                not given.
            long: bool, one per row: whether it uses the long set of rotary frequencies; None for no row.
            scored: One per row: see `headway.engine.executor.StepWork`; None for no row.

        Returns:
            One record per row of the step.
        """
        leases = np.asarray(step.rows) if leases is None else leases
        proposals = self._propose(step, tables, tokens, asks, leases)
        whole = [np.concatenate([t, p.tokens]) for t, p in zip(tokens, proposals, strict=True)]
        cut = replace(step, counts=np.array([len(row) for row in whole], dtype=np.int64))
        drafted = np.array([len(proposal.tokens) > 0 for proposal in proposals])
        asked = [top is not None for top in scored or ()]
        batch, places = batch_of(cut, tables, whole, drafted | asked if scored else drafted, long)
        judging = _Judging(self, leases, batch, places, asks, proposals, following)
        result = self.runner.run(batch, judging.judge)
        if scored is not None:
            score_rows(judging.answers, result.all_logits, places.tolist(), tokens, following, scored)
        for row, fault in self.runner.faults(batch, result).items():
            judging.answers[int(places[row])] = RowAnswer(fault=fault)
        for place, fault in ({} if self.grammars is None else self.grammars.faults(asks, judging.answers)).items():
            judging.answers[place] = RowAnswer(fault=fault)
        return judging.answers

    def _propose(
        self,
        step: Step,
        tables: Sequence[Int32s],
        tokens: Sequence[Int32s],
        asks: Sequence[SampleRow | None],
        leases: Int64s,
    ) -> list[Proposal]:
        """One proposal per row, an empty one where there is no room for a draft."""
        found = [_NO_DRAFT] * len(step.rows)
        wanted: list[tuple[int, DraftRequest]] = []
        for i, (row, granted, ask) in enumerate(zip(step.rows.tolist(), step.counts.tolist(), asks, strict=True)):
            if ask is not None and (room := granted - len(tokens[i])) > 0:
                drawn = self.rule is not AcceptanceRule.MATCH and not ask.params.greedy
                held = [table[row] for table in tables]
                most = min(room, self.drafter.most)
                wanted.append((i, DraftRequest(int(leases[i]), most, ask, drawn, held, self.grammars)))
        if wanted:
            requests = [request for _, request in wanted]
            self.drafter.prepare(requests)
            made = self.agreement.on_proposals(
                len(requests),
                lambda: [_usable(p, r) for p, r in zip(self.drafter.propose(requests), requests, strict=True)],
            )
            for (i, _), proposal in zip(wanted, made, strict=True):
                found[i] = proposal
        return found

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._tap is not None:
            self._tap.close()


def _usable(proposal: Proposal, request: DraftRequest) -> Proposal:
    """The proposal as far as the form of the answer allows it.

    None where the drafter's opinion of it is NaN, from which nothing could be learned.
    """
    opinion, drawn = proposal.confidence, proposal.distribution
    if opinion is not None and not np.isfinite(opinion).all():
        return _NO_DRAFT
    if request.grammars is None or request.sample.constraint is None:
        return proposal
    # What was drawn was drawn from what is allowed (`choose`), so that a cut bends no distribution.
    count = request.grammars.allowed(request.sample, proposal.tokens)
    return replace(proposal, tokens=proposal.tokens[:count], distribution=None if drawn is None else drawn[:count])


class _Judging:
    """Judges the forwards of one step as they come, and lets the drafter see them."""

    def __init__(
        self,
        speculator: Speculator,
        leases: Int64s,
        batch: RunBatch,
        places: Int64s,
        asks: Sequence[SampleRow | None],
        proposals: Sequence[Proposal],
        following: Int64s,
    ) -> None:
        self._speculator = speculator
        self._leases = leases
        self._batch = batch
        self._places = places
        self._asks = asks
        self._proposals = proposals
        self._following = following
        self.answers = [RowAnswer() for _ in leases]

    def judge(self, plan: ForwardPlan, logits: torch.Tensor) -> Bools:
        """Judge a forward (see `headway.runtime.forward.runner.Judge`)."""
        which = self._places[plan.rows].tolist()
        valid = np.full(len(which), plan.count, dtype=np.int64)
        following = self._following[which]
        keep = np.ones(len(which), dtype=np.bool_)
        for place in which:
            self.answers[place] = RowAnswer(kept=plan.count)
        asked = [(i, place) for i, place in enumerate(which) if self._asks[place] is not None]
        judgements = self._judgements(logits, asked)
        for (i, place), judgement in zip(asked, judgements, strict=True):
            ask, proposal = self._asks[place], self._proposals[place]
            drafts = len(proposal.tokens)
            valid[i] += len(judgement.tokens) - 1 - drafts
            following[i] = judgement.tokens[-1]
            keep[i] = drafts == 0 or (valid[i] == plan.count and not (ask is not None and ask.revocable))
            self.answers[place] = replace(
                judgement,
                kept=self._kept(plan, int(valid[i]), bool(keep[i])),
                proposed=drafts,
                confidence=proposal.confidence,
            )
        self._observe(plan, which, valid, following)
        return keep

    def _judgements(self, logits: torch.Tensor, asked: Sequence[tuple[int, int]]) -> Sequence[RowAnswer]:
        """What the target says of the drafts of some rows, given as (row of the forward, row of the step)."""
        if not asked:
            return []
        return self._speculator.agreement.on_judgements(
            len(asked),
            lambda: verify(
                self._speculator.rule,
                [logits[i] for i, _ in asked],
                [ask for _, place in asked if (ask := self._asks[place]) is not None],
                [self._proposals[place] for _, place in asked],
                self._speculator.grammars,
            ),
        )

    def _kept(self, plan: ForwardPlan, valid: int, keep: bool) -> int:
        """Tokens of a row to commit: all with their state or none; without states those that are valid."""
        return valid if plan.states is None or keep else 0

    def _observe(self, plan: ForwardPlan, which: list[int], valid: Int64s, following: Int64s) -> None:
        tap = self._speculator._tap
        if tap is None:
            return
        observed = Observed(
            rows=self._leases[which],
            starts=plan.starts,
            valid=valid,
            following=following,
            tokens=plan.tokens,
            features=self._speculator.runner.of_all(plan, tap.take()),
            tables=[table[plan.rows] for table in self._batch.tables],
        )
        self._speculator.drafter.observe(observed)
