"""Which drafted tokens count, and from what the token behind them is drawn.

The target model gives a distribution p_t for each place of a draft and one behind it; the drafter says from which
distribution p_d it drew each token x. A rule accepts the first few tokens so that accepted tokens and the one after
them together have exactly the law of the target, whatever the drafter is worth. Both distributions are those after
temperature, penalties and cuts. Three rules:

    match   The target draws its own token at every place, with the random number it would have used there without
            drafts, and goes on as long as the draft says the same. So the answer is, token for token, the one without
            drafts; a preempted request goes on as if nothing had been. The drafter need not draw: its likeliest token
            is the best guess. It needs no function here.
    token   Leviathan et al., arXiv 2211.17192: accept x with probability min(1, p_t(x) / p_d(x)); at the
            first rejection draw from max(p_t - p_d, 0).
    block   Sun et al., arXiv 2403.10444: the whole draft is judged at once; never fewer accepted in expectation.

`token` and `block` accept more where the target is not sure (1 - TV(p_t, p_d) against p_t of the likeliest draft), and
give up repeatability: the same seed gives another answer if the steps are cut otherwise. So `match` is the default.

A draft that was not drawn at all is a distribution on one token (`one_hot`); no rule needs a case for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.runtime.interface import AcceptanceRule

__all__ = ["Acceptance", "AcceptanceRule", "accept", "chances", "one_hot"]


@dataclass(frozen=True)
class Acceptance:
    """What became of drafts.

    Attributes:
        counts: int64 [rows], how many tokens of each draft are accepted.
        rest: float [rows, vocab], weights (they need not add up to 1) of the token that follows them.
    """

    counts: torch.Tensor
    rest: torch.Tensor


def accept(
    rule: AcceptanceRule, target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> Acceptance:
    """Judge drafts of n tokens each by `token` or `block`.

    Args:
        rule: `TOKEN` or `BLOCK`.
        target: float [rows, n + 1, vocab], p_t at each place of the draft and behind it.
        draft: float [rows, n, vocab], p_d at each place; positive at the token that was drawn.
        tokens: int64 [rows, n], the draft.
        uniforms: float [rows, n], independent uniform numbers in [0, 1), not used for anything else.
    """
    passed = uniforms < chances(rule, target, draft, tokens)
    if rule is AcceptanceRule.TOKEN:
        counts = passed.long().cumprod(dim=1).sum(dim=1)
        weight = torch.ones_like(uniforms[:, :1]).expand(-1, tokens.shape[1] + 1)
    else:
        counts = _longest(passed)
        weight = _running(_ratios(target, draft, tokens))
    return Acceptance(counts, _rest(target, draft, weight, counts))


def chances(rule: AcceptanceRule, target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Below what its uniform number must be for each place to pass, float [rows, n].

    By `token` the draft counts up to the first place that does not pass, by `block` up to the last that does.
    Arguments as for `accept`.
    """
    assert rule is not AcceptanceRule.MATCH, "matching compares tokens, it has no distributions to judge"
    ratios = _ratios(target, draft, tokens)
    if rule is AcceptanceRule.TOKEN:
        return ratios.clamp(max=1.0)
    return _block_chances(target, draft, _running(ratios))


def one_hot(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """The distribution of a draft that was not drawn: float32 [*tokens.shape, vocab]."""
    return torch.nn.functional.one_hot(tokens, vocab).float()


def _ratios(target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """p_t(x) / p_d(x) at each place, [rows, n]."""
    index = tokens[..., None]
    return target[:, :-1].gather(2, index)[..., 0] / draft.gather(2, index)[..., 0]


def _running(ratios: torch.Tensor) -> torch.Tensor:
    """p_0 = 1, p_i = min(1, p_(i-1) * ratio_i), [rows, n + 1]."""
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(dim=1):
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    return torch.stack(weights, dim=1)


def _block_chances(target: torch.Tensor, draft: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """h_i of the block rule, [rows, n]: h_n = p_n, else R_i / (R_i + 1 - p_i), where 0/0 is 1."""
    inner = weight[:, 1:-1]
    left = (inner[..., None] * target[:, 1:-1] - draft[:, 1:]).clamp(min=0).sum(dim=-1)
    whole = left + 1 - inner
    passing = torch.where(whole > 0, left / whole, torch.ones_like(whole))
    return torch.cat([passing, weight[:, -1:]], dim=1)


def _longest(passed: torch.Tensor) -> torch.Tensor:
    """The last place that passed, counted from 1; 0 if none did. int64 [rows]."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    longest: torch.Tensor = (passed * places).amax(dim=1)
    return longest


def _rest(target: torch.Tensor, draft: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Weights of the token behind the accepted ones: the target's own where all are, else what the draft lacked."""
    rows = torch.arange(len(counts), device=counts.device)
    whole = target[rows, counts]
    drafted = draft[rows, counts.clamp(max=draft.shape[1] - 1)]
    left = (weight[rows, counts][:, None] * whole - drafted).clamp(min=0)
    # Nothing may be left where both distributions agree up to rounding; then a rejection was rounding too.
    usable = (counts < draft.shape[1]) & (left.sum(dim=-1) > 0)
    return torch.where(usable[:, None], left, whole)
