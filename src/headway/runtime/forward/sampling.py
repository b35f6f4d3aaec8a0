"""From logits to tokens: greedy and sampled decoding, penalties and log-probabilities, a batch at a time.

The random number of a token depends on its request's seed and on how many tokens it has answered, on nothing else. So
the same request gives the same tokens whatever runs beside it, and a preempted one goes on as if it had never stopped.
Rejected: one generator per request, whose state would have to survive preemption and a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from headway.runtime.forward.grammars import Grammars
from headway.runtime.interface import RowAnswer, SampleRow, SamplingParams, TokenLogprob

__all__ = [
    "Sampled",
    "Stream",
    "distributions",
    "draw",
    "sample",
    "score_rows",
    "token_logprobs",
    "uniform",
]

Int32s = NDArray[np.int32]

_COLDEST = 1e-5
"""Lower temperatures are raised to it: it is as good as greedy, and logits divided by it are still finite."""


@dataclass(frozen=True)
class Sampled:
    """The chosen tokens.

    Attributes:
        tokens: int32 [n].
        logprobs: One record per row that asked for it, else None.
    """

    tokens: Int32s
    logprobs: tuple[TokenLogprob | None, ...]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], grammars: Grammars | None = None) -> Sampled:
    """Choose the next token of every row.

    Args:
        logits: float32 [n, vocab]. Not changed.
        rows: One record per row.
        grammars: Knows the forms of answers that must have one; None where none does.
    """
    if grammars is not None:
        logits = grammars.restrict(logits, rows)
    shaped = _shape(logits, rows)
    tokens = shaped.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(shaped[index], [rows[i] for i in drawn])
    chosen = tokens.to("cpu", torch.int32).numpy()
    return Sampled(chosen, _logprobs(logits, chosen, rows))


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of given tokens, such as a prompt's.

    Args:
        logits: float32 [n, vocab]; row i is what the model expects in the place of token i.
        tokens: n token ids.
        top: How many of the most likely tokens to report with each, as far as there are any.
    """
    if not len(tokens):
        return []
    all_logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor([int(token) for token in tokens], device=logits.device)[:, None]
    own = all_logprobs.gather(1, chosen)[:, 0].tolist()
    values, ids = all_logprobs.topk(top, dim=-1)
    pairs = [
        tuple((i, v) for i, v in zip(*row, strict=True) if v > -math.inf)  # the rest is not allowed
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [TokenLogprob(int(t), p, best) for t, p, best in zip(tokens, own, pairs, strict=True)]


def score_rows(
    answers: list[RowAnswer],
    logits: Sequence[torch.Tensor | None],
    places: Sequence[int],
    tokens: Sequence[Int32s],
    following: NDArray[np.int64],
    scored: Sequence[int | None],
) -> None:
    """Add the log-probabilities of known tokens to the answers of rows that ask for them (`RowAnswer.scored`).

    Args:
        answers: One per row of the step; changed.
        logits: One float32 [n, vocab] per row of the batch, behind each of its tokens, or None.
        places: For each row of the batch its place in the step.
        tokens: One array per row of the step.
        following: The token behind them where it is known, else -1.
        scored: How many of the most likely tokens to report with each, or None; one per row of the step.
    """
    for row, place in zip(logits, places, strict=True):
        if row is not None and (top := scored[place]) is not None:
            known = [*tokens[place][1:].tolist(), *(token for token in following[[place]].tolist() if token >= 0)]
            records = token_logprobs(row[: len(known)], known, min(top, row.shape[-1]))
            answers[place] = replace(answers[place], scored=tuple(records))


def _shape(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Apply penalties, biases and least lengths, on a copy if there are any."""
    changed = [i for i, row in enumerate(rows) if row.params.shapes_logits]
    if not changed:
        return logits
    shaped = logits.clone()
    for i in changed:
        _penalise(shaped[i], rows[i])
    return shaped


def _penalise(logits: torch.Tensor, row: SampleRow) -> None:
    """Change one row's logits, float32 [vocab], in place."""
    params, device = row.params, logits.device
    if len(row.output) < params.min_tokens and row.ends:
        ends = torch.tensor(sorted(row.ends), device=device)
        longer = logits.index_fill(0, ends, -torch.inf)
        if row.constraint is None or (longer > -torch.inf).any():  # a form that is complete ends the answer
            logits.copy_(longer)
    if params.repetition_penalty != 1:
        present = np.unique(np.concatenate([row.prompt, row.output])).astype(np.int64)
        seen = torch.from_numpy(present[(present >= 0) & (present < len(logits))]).to(device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(row.output) and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(row.output, return_counts=True)
        taken = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
        logits[torch.from_numpy(ids.astype(np.int64)).to(device)] -= torch.from_numpy(taken).to(device, logits.dtype)
    biases = {token: bias for token, bias in params.logit_bias.items() if token < len(logits)}
    if biases:
        logits[torch.tensor(list(biases), device=device)] += torch.tensor(
            list(biases.values()), dtype=logits.dtype, device=device
        )


def distributions(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The distribution that each row's token is drawn from: after penalties, temperature and cuts.

    Args:
        logits: float32 [n, vocab]. Not changed.
        rows: One record per row. A greedy row has all its probability on one token.

    Returns:
        float32 [n, vocab]; each row adds up to 1.
    """
    shaped = _shape(logits, rows)
    kept, ids = _cut(shaped, [row.params for row in rows])
    placed = torch.zeros_like(kept).scatter_(1, ids, kept)
    return placed / placed.sum(dim=-1, keepdim=True)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one index a row by the inverse of its running sum.

    Args:
        weights: float [n, m], not negative; a row need not add up to 1.
        uniforms: float [n] in [0, 1).

    Returns:
        int64 [n], indices of positive weight.
    """
    running = weights.cumsum(dim=-1)
    place = (running <= uniforms[:, None] * running[:, -1:]).sum(dim=-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).long().argmax(dim=-1)
    return torch.minimum(place, last)


class Stream(IntEnum):
    """What a random number is for. Numbers of different streams are independent."""

    TOKEN = 0
    DRAFT = 1
    ACCEPTANCE = 2
    REST = 3


def uniform(seed: int, step: int, stream: Stream = Stream.TOKEN, offset: int = 0) -> float:
    """A number in [0, 1) that is a function of all its arguments.

    Args:
        seed: Seed of the request.
        step: Tokens that it has answered when the engine's step begins. No two steps of a request begin alike, so
            numbers that a step has looked at, even of places that it did not get to, are never used again.
        stream: What the number is for.
        offset: Place within the step's draft.
    """
    counter = np.array([step, offset, int(stream), 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=counter)).random())


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Sample one token per row, int64 [n]: a uniform number each, looked up in the cut distribution's running sum."""
    kept, ids = _cut(logits, [row.params for row in rows])
    numbers = torch.tensor([uniform(row.seed, len(row.output)) for row in rows], device=logits.device)
    return ids.gather(1, draw(kept, numbers)[:, None])[:, 0]


def _cut(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities after temperature, likeliest first, 0 where a token is cut; and the tokens. Both [n, vocab]."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    ordered, ids = (logits / column([max(p.temperature, _COLDEST) for p in params])).sort(
        dim=-1, descending=True, stable=True
    )
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(logits.shape[-1], device=device)
    limit = column([1.0 if p.greedy else float(min(p.top_k or len(rank), len(rank))) for p in params])
    cut = (before >= column([p.top_p for p in params])) | (rank >= limit)
    cut |= probabilities < column([p.min_p for p in params]) * probabilities[:, :1]
    cut[:, 0] = False
    return probabilities.masked_fill(cut, 0), ids


def _logprobs(logits: torch.Tensor, tokens: Int32s, rows: Sequence[SampleRow]) -> tuple[TokenLogprob | None, ...]:
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    found: list[TokenLogprob | None] = [None] * len(rows)
    if asked:
        most = max(rows[i].params.logprobs or 0 for i in asked)
        records = token_logprobs(logits[asked], [int(tokens[i]) for i in asked], min(most, logits.shape[-1]))
        for i, record in zip(asked, records, strict=True):
            found[i] = TokenLogprob(record.token, record.logprob, record.top[: rows[i].params.logprobs])
    return tuple(found)
