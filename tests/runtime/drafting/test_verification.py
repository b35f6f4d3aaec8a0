"""From logits behind a draft to the tokens of an answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.server import tiny

from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import DraftRequest, Proposal, choose, proposals
from headway.runtime.drafting.verification import verify
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.sampling import distributions, sample
from headway.runtime.interface import Constraint, RowAnswer, SampleRow, SamplingParams

VOCAB = 12


def ask(output: list[int] = [], seed: int = 3, ends: tuple[int, ...] = (), **params: Any) -> SampleRow:  # noqa: B006
    row = SampleRow(SamplingParams(**params), seed, np.array([1, 2], dtype=np.int32), np.array(output, dtype=np.int32))
    return replace(row, ends=frozenset(ends))


def logits(places: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(places, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def undrafted(asked: SampleRow, rows: torch.Tensor) -> list[int]:
    """The tokens that sampling one by one gives, if the logits are these whatever was said."""
    output = asked.output.tolist()
    for row in rows:
        at = replace(asked, output=np.array(output, dtype=np.int32))
        output.append(int(sample(row[None], [at]).tokens[0]))
    return output[len(asked.output) :]


def one(rule: AcceptanceRule, rows: torch.Tensor, asked: SampleRow, draft: list[int], found: Any = None) -> RowAnswer:
    return verify(rule, [rows], [asked], [Proposal(np.array(draft, dtype=np.int32), found)])[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.2, "top_k": 5, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
    ],
)
@pytest.mark.parametrize("right", range(5))
def test_a_match_goes_as_far_as_the_target_would_have_said_the_same(params: dict[str, Any], right: int) -> None:
    asked, rows = ask([4, 5], **params), logits(5)
    said = undrafted(asked, rows)
    draft = [*said[:right], *((token + 1) % VOCAB for token in said[right:4])]
    judgement = one(AcceptanceRule.MATCH, rows, asked, draft)
    assert list(judgement.tokens) == said[: right + 1]
    assert judgement.accepted == right


def test_pending_tokens_before_the_draft_are_not_judged() -> None:
    asked, rows = ask(temperature=0.0), logits(6)
    said = undrafted(asked, rows[3:])
    assert list(one(AcceptanceRule.MATCH, rows, asked, said[:2]).tokens) == said


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_nothing_counts_behind_an_end_token(rule: AcceptanceRule) -> None:
    asked, rows = ask(temperature=0.0), logits(4)
    said = undrafted(asked, rows)
    judgement = one(rule, rows, replace(asked, ends=frozenset(said[1:2])), said[:3])
    assert list(judgement.tokens) == said[:2]
    assert judgement.accepted == 2
    last = one(rule, rows, replace(asked, ends=frozenset(said[3:4]) - set(said[:3])), said[:3])
    assert (list(last.tokens), last.accepted) == (said, 3)


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_every_token_has_its_log_probability(rule: AcceptanceRule) -> None:
    asked, rows = ask(temperature=1.0, logprobs=2), logits(4)
    judgement = one(rule, rows, asked, undrafted(asked, rows)[:3])
    assert len(judgement.logprobs) == len(judgement.tokens)
    own = rows.log_softmax(-1)
    for place, (token, record) in enumerate(zip(judgement.tokens, judgement.logprobs, strict=True)):
        assert record.token == token
        assert record.logprob == pytest.approx(float(own[place, token]), abs=1e-5)
        assert len(record.top) == 2


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_the_numbers_of_a_step_are_not_those_of_the_next(rule: AcceptanceRule) -> None:
    """A rejected place is judged anew with other numbers: the block rule has looked at them already."""
    rows, draft = logits(3), [1, 2]
    first = [one(rule, rows, ask([], seed, temperature=1.0), draft).tokens for seed in range(60)]
    second = [one(rule, rows, ask([7], seed, temperature=1.0), draft).tokens for seed in range(60)]
    assert first != second
    assert first == [one(rule, rows, ask([], seed, temperature=1.0), draft).tokens for seed in range(60)]


def test_rows_of_every_kind_run_together_as_alone() -> None:
    asks = [ask([1], 5, temperature=0.0), ask([2, 3], 6, temperature=1.0), ask([], 7, temperature=1.0), ask([9], 8)]
    rows = [logits(3, 1), logits(4, 2), logits(1, 3), logits(3, 4)]
    drafts = [Proposal(np.array(d, dtype=np.int32)) for d in ([3, 4], [5, 6, 7], [], [1, 2])]
    together = verify(AcceptanceRule.BLOCK, rows, asks, drafts)
    alone = [verify(AcceptanceRule.BLOCK, [r], [a], [d])[0] for r, a, d in zip(rows, asks, drafts, strict=True)]
    assert [v.tokens for v in together] == [v.tokens for v in alone]


WORDS = tiny.tokenizer()
FORM = Constraint("regex", "(a[bc]|b[ac]|c)[a-c]?")


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_under_a_form_the_law_is_the_target_s_own_whatever_is_drafted(rule: AcceptanceRule) -> None:
    """Drafts are drawn from what the form allows. Drawn from all and cut where it forbids, they would bend the law."""
    count, vocab = 4000, len(WORDS)
    grammars = Grammars(WORDS, vocab, [vocab - 1], 2 * count)
    target, draft = (torch.zeros(3, vocab) for _ in range(2))  # of each place, whatever was said
    words = WORDS("abc", add_special_tokens=False)["input_ids"]
    draft[:, words], target[:, words] = torch.tensor([3.0, 1.5, 0.5]), torch.tensor([3.0, 4.0, 3.5])
    asks = [replace(ask(seed=seed, temperature=1.0), constraint=FORM, request=seed) for seed in range(count)]
    requests = [DraftRequest(row.seed, 2, row, True, (), grammars) for row in asks]
    drafts, found = torch.empty((count, 0), dtype=torch.int64), []
    for place in range(2):
        tokens, distribution = choose(draft[place].expand(count, -1), requests, drafts)
        drafts = torch.cat([drafts, tokens[:, None]], dim=1)
        found.append(distribution)
    made = proposals(requests, drafts, found)
    told = verify(rule, [target] * count, asks, made, grammars)
    first = Counter(answer.tokens[0] for answer in told)
    accepted = sum(answer.accepted for answer in told)
    assert 0.2 < accepted / (2 * count) < 0.9
    law = distributions(grammars.restrict(target[:1], asks[:1]), asks[:1])[0]
    assert set(first) <= set(law.nonzero()[:, 0].tolist())
    for token in law.nonzero()[:, 0].tolist():
        deviation = (law[token] * (1 - law[token]) * count).sqrt()
        assert abs(first[token] - law[token] * count) < 4 * deviation
    for lead in first:  # and of the second token, where it was told in the same step
        behind = [answer for answer in told if answer.tokens[0] == lead]
        output = np.array([lead], dtype=np.int32)
        place = [replace(asks[0], output=output, request=-1 - lead)]
        law = distributions(grammars.restrict(target[1:2], place), place)[0]
        allowed = set(law.nonzero()[:, 0].tolist())
        assert {answer.tokens[1] for answer in behind if len(answer.tokens) > 1} <= allowed
