"""Rules of acceptance by exact enumeration: on a small vocabulary every draft and every outcome is summed up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from headway.runtime.drafting.acceptance import AcceptanceRule, accept, chances, one_hot

VOCAB, DRAFT = 3, 3
RULES = (AcceptanceRule.TOKEN, AcceptanceRule.BLOCK)
Model = dict[tuple[int, ...], torch.Tensor]


def model(seed: int, sharpness: float = 1.0, cut: float = 0.0) -> Model:
    """A distribution for every context of up to DRAFT tokens; probabilities below `cut` are cut to nothing."""
    generator = torch.Generator().manual_seed(seed)
    found: Model = {}
    for length in range(DRAFT + 1):
        for context in itertools.product(range(VOCAB), repeat=length):
            logits = torch.randn(VOCAB, generator=generator, dtype=torch.float64) * sharpness
            weights = logits.softmax(0)
            weights = torch.where(weights < cut, 0.0, weights)
            found[context] = weights / weights.sum()
    return found


def likeliest(drafter: Model) -> Model:
    """A drafter that proposes its likeliest token instead of drawing."""
    return {context: one_hot(weights.argmax(), VOCAB).double() for context, weights in drafter.items()}


def law(found: Model) -> torch.Tensor:
    """Probability of each sequence of DRAFT + 1 tokens."""
    total = torch.zeros((VOCAB,) * (DRAFT + 1), dtype=torch.float64)
    for sequence in itertools.product(range(VOCAB), repeat=DRAFT + 1):
        total[sequence] = math.prod(float(found[sequence[:i]][token]) for i, token in enumerate(sequence))
    return total


def speculated(rule: AcceptanceRule, target: Model, drafter: Model, length: int) -> tuple[torch.Tensor, float]:
    """Law of DRAFT + 1 tokens that begin with one draft of `length`, and the expected number accepted."""
    total = torch.zeros((VOCAB,) * (DRAFT + 1), dtype=torch.float64)
    expected = 0.0
    for draft in itertools.product(range(VOCAB), repeat=length):
        drawn = math.prod(float(drafter[draft[:i]][token]) for i, token in enumerate(draft))
        if drawn == 0:
            continue
        places = torch.stack([target[draft[:i]] for i in range(length + 1)])[None]
        proposed = torch.stack([drafter[draft[:i]] for i in range(length)])[None]
        tokens = torch.tensor([draft])
        limits = chances(rule, places, proposed, tokens)[0]
        for passes in itertools.product((True, False), repeat=length):
            weight = drawn * math.prod(float(h if p else 1 - h) for h, p in zip(limits, passes, strict=True))
            if weight < 1e-15:
                continue
            uniforms = torch.stack([h / 2 if p else (1 + h) / 2 for h, p in zip(limits, passes, strict=True)])[None]
            outcome = accept(rule, places, proposed, tokens, uniforms)
            count = int(outcome.counts)
            expected += weight * count
            rest = outcome.rest[0] / outcome.rest[0].sum()
            for follower in range(VOCAB):
                add(total, target, (*draft[:count], follower), weight * float(rest[follower]))
    return total, expected


def add(total: torch.Tensor, target: Model, begin: tuple[int, ...], weight: float) -> None:
    """Spread `weight` over the sequences that begin so, as the target would go on."""
    if len(begin) == DRAFT + 1:
        total[begin] += weight
        return
    for token in range(VOCAB):
        if (more := weight * float(target[begin][token])) > 0:
            add(total, target, (*begin, token), more)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("cut", [0.0, 0.25])
def test_the_law_is_the_target_s(rule: AcceptanceRule, length: int, seed: int, drawn: bool, cut: float) -> None:
    target, drafter = model(seed, 1.5, cut), model(100 + seed, 1.5, cut)
    found, _ = speculated(rule, target, drafter if drawn else likeliest(drafter), length)
    assert (found - law(target)).abs().max() < 1e-12


def test_blocks_are_never_shorter_and_sometimes_longer() -> None:
    gains = []
    for seed in range(6):
        target, drafter = model(seed), model(100 + seed)
        tokens, blocks = (speculated(rule, target, drafter, DRAFT)[1] for rule in RULES)
        gains.append(blocks - tokens)
    assert min(gains) > -1e-12
    assert max(gains) > 1e-3


def test_of_one_token_both_rules_accept_what_the_distributions_share() -> None:
    target, drafter = model(3), model(103)
    shared = float(torch.minimum(target[()], drafter[()]).sum())
    for rule in RULES:
        assert speculated(rule, target, drafter, 1)[1] == pytest.approx(shared)


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_is_the_target_is_always_right(rule: AcceptanceRule) -> None:
    target = model(1)
    assert speculated(rule, target, target, DRAFT)[1] == pytest.approx(DRAFT)


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_target_takes_its_own_tokens_only(rule: AcceptanceRule) -> None:
    """Temperature 0 as a distribution: a draft counts as far as it is the target's argmax."""
    target = one_hot(torch.tensor([[2, 0, 1, 1]]), VOCAB)
    drafter = torch.full((1, 3, VOCAB), 1 / 3)
    for draft, count, follower in (([2, 0, 1], 3, 1), ([2, 0, 2], 2, 1), ([2, 1, 1], 1, 0), ([0, 0, 1], 0, 2)):
        outcome = accept(rule, target, drafter, torch.tensor([draft]), torch.full((1, 3), 0.999))
        assert (int(outcome.counts), int(outcome.rest[0].argmax())) == (count, follower)
        assert torch.count_nonzero(outcome.rest) == 1


def test_rows_are_judged_apart() -> None:
    targets, drafters = [model(s) for s in range(5)], [model(50 + s) for s in range(5)]
    draft = (0, 2, 1)
    places = torch.stack([torch.stack([t[draft[:i]] for i in range(4)]) for t in targets])
    proposed = torch.stack([torch.stack([d[draft[:i]] for i in range(3)]) for d in drafters])
    uniforms = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.tensor([draft] * 5)
    for rule in RULES:
        together = accept(rule, places, proposed, tokens, uniforms)
        for i in range(5):
            alone = accept(rule, places[i : i + 1], proposed[i : i + 1], tokens[:1], uniforms[i : i + 1])
            assert int(together.counts[i]) == int(alone.counts[0])
            assert torch.equal(together.rest[i], alone.rest[0])
