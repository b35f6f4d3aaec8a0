"""Sampling: cuts, penalties, seeds, and log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import RequestError
from headway.runtime.forward.sampling import distributions, sample, token_logprobs
from headway.runtime.interface import SampleRow, SamplingParams

NONE = np.empty(0, dtype=np.int32)


def row(seed: int = 0, output: Any = NONE, prompt: Any = NONE, **params: Any) -> SampleRow:
    return SampleRow(
        SamplingParams(**params), seed, np.asarray(prompt, dtype=np.int32), np.asarray(output, dtype=np.int32)
    )


def draws(logits: torch.Tensor, count: int = 2000, **params: Any) -> np.ndarray:
    """Frequencies of the tokens drawn with `count` seeds."""
    found = sample(logits.expand(count, -1), [row(seed, **params) for seed in range(count)]).tokens
    return np.bincount(found, minlength=logits.shape[-1]) / count


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [row(temperature=0), row(temperature=0)]).tokens.tolist() == [1, 0]


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    assert np.allclose(draws(probabilities.log(), 8000), probabilities.numpy(), atol=0.02)


def test_temperature_sharpens() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    squared = (probabilities**2 / (probabilities**2).sum()).numpy()
    assert np.allclose(draws(probabilities.log(), 8000, temperature=0.5), squared, atol=0.02)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.01}, [0]),
        ({"min_p": 0.4}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.95}, [0, 1, 2]),
        ({"logit_bias": {0: -100.0}}, [1, 2, 3]),
    ],
)
def test_cuts(params: dict[str, Any], kept: list[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert np.flatnonzero(draws(logits, **params)).tolist() == kept


def test_a_token_depends_on_seed_and_step_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows = [row(11, [1, 2]), row(12, [1]), row(13)]
    together = sample(logits, rows).tokens
    alone = [int(sample(logits[i : i + 1], [rows[i]]).tokens[0]) for i in range(3)]
    assert together.tolist() == alone
    steps = {int(sample(logits[:1], [row(11, list(range(n)))]).tokens[0]) for n in range(20)}
    assert len(steps) > 5
    assert int(sample(logits[:1], [row(-1)]).tokens[0]) >= 0


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    rows = [row(1), row(temperature=0), row(3, top_k=1), row(4, temperature=0)]
    found = sample(logits, rows).tokens
    assert found[1:].tolist() == logits.argmax(-1)[1:].tolist()


def test_penalties() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    assert sample(logits, [row(temperature=0, repetition_penalty=1.2, prompt=[0])]).tokens[0] == 1
    assert sample(logits, [row(temperature=0, presence_penalty=0.5, output=[0])]).tokens[0] == 1
    assert sample(logits, [row(temperature=0, presence_penalty=0.5, prompt=[0])]).tokens[0] == 0
    assert sample(logits, [row(temperature=0, frequency_penalty=0.06, output=[0])]).tokens[0] == 0
    assert sample(logits, [row(temperature=0, frequency_penalty=0.06, output=[0, 0])]).tokens[0] == 1
    assert sample(logits, [row(temperature=0, repetition_penalty=1.2, prompt=[-5, 0])]).tokens[0] == 1
    assert logits.tolist() == [[2.0, pytest.approx(1.9), -1.0]], "the logits given are not changed"


def test_no_end_token_is_chosen_before_the_least_length() -> None:
    logits = torch.tensor([[5.0, 3.0, 1.0]])
    for length, token in ((0, 1), (1, 1), (2, 0)):
        asked = replace(row(temperature=0, min_tokens=2, output=[1] * length), ends=frozenset({0}))
        assert sample(logits, [asked]).tokens.tolist() == [token]
        assert distributions(logits, [asked]).argmax().item() == token, "as drafts are judged"


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    found = sample(logits, [row(5, temperature=2.0, logprobs=3), row(6)])
    expected = logits.log_softmax(-1)[0]
    record = found.logprobs[0]
    assert record is not None
    assert record.token == found.tokens[0]
    assert record.logprob == pytest.approx(expected[record.token].item())
    assert [token for token, _ in record.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in record.top] == pytest.approx(expected.topk(3).values.tolist())
    assert found.logprobs[1] is None


def test_logprobs_of_a_prompt() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(2))
    found = token_logprobs(logits, [4, 5, 6], 0)
    assert [record.token for record in found] == [4, 5, 6]
    assert [record.logprob for record in found] == pytest.approx(logits.log_softmax(-1)[[0, 1, 2], [4, 5, 6]].tolist())
    assert [record.top for record in found] == [(), (), ()]
    assert token_logprobs(logits[:0], [], 1) == []


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {3: 101.0}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_values_outside_their_range_are_refused(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == param


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 1e-300, 5e-324])
def test_a_temperature_next_to_nothing_takes_the_most_likely(temperature: float) -> None:
    logits = torch.tensor([[-40.0, 20.0, 30.0, 29.9]])
    assert sample(logits, [row(temperature=temperature)]).tokens.tolist() == [2]


def test_top_k_may_be_any_number() -> None:
    assert np.allclose(draws(torch.tensor([0.5, 0.5]).log(), 4000, top_k=10**400), [0.5, 0.5], atol=0.04)


def test_biases_of_many_tokens_are_added_to_each() -> None:
    logits = torch.zeros(1, 5)
    biases = {4: 1.0, 0: 3.0, 2: -100.0, 77: 100.0}
    assert sample(logits, [row(temperature=0, logit_bias=biases)]).tokens.tolist() == [0]
    shares = draws(torch.zeros(5), 4000, logit_bias={0: -100.0, 1: 1.0, 2: 1.0, 3: -100.0, 4: -100.0})
    assert np.allclose(shares, [0, 0.5, 0.5, 0, 0], atol=0.04)
    assert logits.tolist() == [[0.0] * 5]
