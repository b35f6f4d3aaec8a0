"""Drafters of random weights for the tiny models, and what they should propose, computed without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.runtime.drafting.drafter import Drafter, DraftRequest, Observed, Proposal
from headway.runtime.drafting.features import FeatureTap
from headway.runtime.drafting.layers import Attend, attend
from headway.runtime.drafting.loading import DrafterConfig, load_drafter, save_drafter
from headway.runtime.drafting.target import Target

TOKENS = 4


def tiny_config(kind: str, model: PreTrainedModel) -> DrafterConfig:
    target = Target.of(model)
    return DrafterConfig(
        drafter=kind,
        hidden_size=target.hidden,
        vocab_size=target.vocab,
        feature_layers=(target.layers - 1,) if kind == "mtp" else (-1, 0, target.layers - 1),
        draft_tokens=TOKENS,
        layers=1 if kind == "mtp" else 2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        markov_rank=0 if kind == "mtp" else 8,
    )


def save_tiny(kind: str, model: PreTrainedModel, path: Path, seed: int = 0) -> Path:
    """Write a drafter for a model to a folder."""
    config = tiny_config(kind, model)
    network = config.network()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    save_drafter(path, network, config)
    return path


class Improved:
    """A drafter whose proposals are partly replaced by what the target will say, so that some are accepted.

    Attributes:
        seen: Sequences that it was asked for, and what the drafter itself proposed.
    """

    def __init__(
        self, drafter: Drafter, answers: dict[tuple[int, ...], list[int]], seed: int, skill: float = 0.75
    ) -> None:
        self._drafter = drafter
        self._answers = answers
        self._dice = np.random.default_rng(seed)
        self._skill = skill
        self.seen: list[tuple[list[int], list[int]]] = []
        self.name, self.groups, self.entries = drafter.name, drafter.groups, drafter.entries
        self.feature_layers, self.mixed_features = drafter.feature_layers, drafter.mixed_features
        self.most = drafter.most

    def attach(self, arena: Any, merge: Any = None) -> None:
        self._drafter.attach(arena, merge)

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        self._drafter.prepare(requests)

    def observe(self, observed: Observed) -> None:
        self._drafter.observe(observed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = self._drafter.propose(requests)
        better = []
        for request, proposal in zip(requests, proposals, strict=True):
            prompt, output = request.sample.prompt.tolist(), request.sample.output.tolist()
            self.seen.append(([*prompt, *output], proposal.tokens.tolist()))
            truth = self._answers[tuple(prompt)][len(output) :][: request.count]
            own = [*proposal.tokens.tolist(), *([1] * request.count)]
            tokens = [t if self._dice.random() < self._skill else own[k] for k, t in enumerate(truth)]
            better.append(Proposal(np.array(tokens, dtype=np.int32), confidence=proposal.confidence))
        return better


@torch.no_grad()
def reference(kind: str, path: Path, model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """The greedy draft behind `tokens`, from whole sequences alone."""
    drafter: Any = load_drafter(str(path), model, None)
    tap = FeatureTap(model, drafter.feature_layers)
    given = torch.tensor([tokens])
    model(input_ids=given[:, :-1], position_ids=torch.arange(len(tokens) - 1)[None], use_cache=False)
    features = tap.take()
    tap.close()
    work = _mtp if kind == "mtp" else _dspark
    return work(drafter._network, Target.of(model), features, given, count)


def _growing(layers: int, mask: torch.Tensor) -> list[Attend]:
    """Attention over all that a layer has been called with; the first call is causal."""

    def one() -> Attend:
        held: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attending(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            held.append((keys, values))
            k, v = (torch.cat(parts, dim=1) for parts in zip(*held, strict=True))
            return attend(query, k, v, mask if len(held) == 1 else None)

        return attending

    return [one() for _ in range(layers)]


def _mtp(network: Any, target: Target, features: torch.Tensor, tokens: torch.Tensor, count: int) -> list[int]:
    n = features.shape[1]
    attending = _growing(len(network.layers), torch.ones(n, n, dtype=torch.bool).tril()[None, None])
    hidden = network(features, target.embed(tokens[:, 1:]), torch.arange(n)[None], attending)[:, -1:]
    draft: list[int] = []
    for k in range(count):
        if k:
            hidden = network(hidden, target.embed(torch.tensor([[draft[-1]]])), torch.tensor([[n + k - 1]]), attending)
        draft.append(int(target.logits(network.out_norm(hidden))[0, 0].argmax()))
    return draft


def _dspark(network: Any, target: Target, features: torch.Tensor, tokens: torch.Tensor, count: int) -> list[int]:
    n = features.shape[1]
    context = network.context(features)
    past = [layer.keys_values(context, torch.arange(n)[None]) for layer in network.layers]

    def attending(entries: tuple[torch.Tensor, torch.Tensor]) -> Attend:
        return lambda q, k, v: attend(q, torch.cat([entries[0], k], 1), torch.cat([entries[1], v], 1))

    inputs = network.inputs(target.embed(tokens[:, -1]), TOKENS)
    hidden = network(inputs, torch.arange(n, n + TOKENS)[None], [attending(entries) for entries in past])
    logits, before = target.logits(hidden)[0], tokens[0, -1:]
    draft: list[int] = []
    for k in range(count):
        before = (logits[k] + network.correction(before)[0]).argmax()[None]
        draft.append(int(before))
    return draft
