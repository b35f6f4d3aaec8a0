"""From the target's logits behind a draft to the tokens that a row answers, rows of one forward at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from headway.runtime.drafting.acceptance import AcceptanceRule, accept, one_hot
from headway.runtime.drafting.drafter import Proposal
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.sampling import Stream, distributions, draw, sample, token_logprobs, uniform
from headway.runtime.interface import RowAnswer, SampleRow, TokenLogprob

__all__ = ["verify"]


def verify(
    rule: AcceptanceRule,
    logits: Sequence[torch.Tensor],
    asks: Sequence[SampleRow],
    proposals: Sequence[Proposal],
    grammars: Grammars | None = None,
) -> list[RowAnswer]:
    """Judge the drafts of some rows.

    Args:
        rule: How drafts of sampled answers are judged.
        logits: One float32 [tokens, vocab] a row; the last k + 1 belong to a draft of k tokens.
        asks: One per row: its prompt and answer so far, and how to choose.
        proposals: One per row; an empty one where there is no draft.
        grammars: Knows the forms of answers that must have one.

    Returns:
        One per row: accepted drafts and one token more, or fewer where one of them ends the answer. What is kept of the
        row, and its draft, are for the caller to fill in.
    """
    found: list[RowAnswer | None] = [None] * len(asks)
    drawn: dict[int, list[int]] = {}
    matched: list[int] = []
    for i, (ask, proposal) in enumerate(zip(asks, proposals, strict=True)):
        by_match = rule is AcceptanceRule.MATCH or ask.params.greedy or len(proposal.tokens) == 0
        (matched if by_match else drawn.setdefault(len(proposal.tokens), [])).append(i)
    for length, rows in [(0, matched), *drawn.items()]:
        if rows:
            picked = [logits[i] for i in rows], [asks[i] for i in rows], [proposals[i] for i in rows]
            made = _draw(rule, *picked, grammars) if length else _match(*picked, grammars)
            for i, judgement in zip(rows, made, strict=True):
                found[i] = judgement
    return [judgement for judgement in found if judgement is not None]


def _match(
    logits: Sequence[torch.Tensor],
    asks: Sequence[SampleRow],
    proposals: Sequence[Proposal],
    grammars: Grammars | None,
) -> list[RowAnswer]:
    """The target chooses at every place as it would without drafts; they count as far as they say the same."""
    places = [_places(ask, proposal) for ask, proposal in zip(asks, proposals, strict=True)]
    parts = [row[-len(p) :] for row, p in zip(logits, places, strict=True)]
    chosen = sample(torch.cat(parts), [row for p in places for row in p], grammars)
    judgements, begin = [], 0
    for ask, proposal, at in zip(asks, proposals, places, strict=True):
        tokens = chosen.tokens[begin : begin + len(at)]
        differing = np.flatnonzero(tokens[:-1] != proposal.tokens)
        count = int(differing[0]) if len(differing) else len(proposal.tokens)
        records = chosen.logprobs[begin : begin + count + 1]
        judgements.append(_judgement(ask, tokens[: count + 1].tolist(), [r for r in records if r is not None]))
        begin += len(at)
    return judgements


def _draw(
    rule: AcceptanceRule,
    logits: Sequence[torch.Tensor],
    asks: Sequence[SampleRow],
    proposals: Sequence[Proposal],
    grammars: Grammars | None,
) -> list[RowAnswer]:
    """Judge drafts of equal length by their distributions."""
    device, vocab = logits[0].device, logits[0].shape[-1]
    length = len(proposals[0].tokens)
    places = [row for ask, proposal in zip(asks, proposals, strict=True) for row in _places(ask, proposal)]
    own = torch.cat([row[-length - 1 :] for row in logits])
    if grammars is not None:
        own = grammars.restrict(own, places)
    target = distributions(own, places).view(-1, length + 1, vocab)
    tokens = torch.from_numpy(np.stack([p.tokens for p in proposals]).astype(np.int64)).to(device)
    draft = torch.stack(
        [
            one_hot(t, vocab) if p.distribution is None else p.distribution
            for t, p in zip(tokens, proposals, strict=True)
        ]
    )
    numbers = [[_number(ask, Stream.ACCEPTANCE, k) for k in range(length)] for ask in asks]
    outcome = accept(rule, target, draft, tokens, torch.tensor(numbers, device=device))
    counts = outcome.counts.tolist()
    rest = [_number(ask, Stream.REST, count) for ask, count in zip(asks, counts, strict=True)]
    last = draw(outcome.rest, torch.tensor(rest, device=device)).tolist()
    judgements = []
    for row, ask, proposal, count, token in zip(
        torch.split(own, length + 1), asks, proposals, counts, last, strict=True
    ):
        chosen = [*proposal.tokens[:count].tolist(), token]
        top, records = ask.params.logprobs, list[TokenLogprob]()
        if top is not None:
            records = token_logprobs(row[: count + 1], chosen, min(top, vocab))
        judgements.append(_judgement(ask, chosen, records))
    return judgements


def _places(ask: SampleRow, proposal: Proposal) -> list[SampleRow]:
    """How the target chooses at each place of a draft and behind it, given that it holds so far."""
    output = np.concatenate([ask.output, proposal.tokens])
    given = len(ask.output)
    return [replace(ask, output=output[: given + k]) for k in range(len(proposal.tokens) + 1)]


def _number(ask: SampleRow, stream: Stream, offset: int) -> float:
    return uniform(ask.seed, len(ask.output), stream, offset)


def _judgement(ask: SampleRow, tokens: list[int], records: list[TokenLogprob]) -> RowAnswer:
    """Cut accepted drafts and the token behind them behind the first end token."""
    stop = next((k + 1 for k, token in enumerate(tokens) if token in ask.ends), len(tokens))
    return RowAnswer(tuple(tokens[:stop]), logprobs=tuple(records[:stop]), accepted=min(stop, len(tokens) - 1))
