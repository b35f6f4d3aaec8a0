"""Kimi-K3 and its drafter against second implementations of both, in float64 and from the equations alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import dspark_oracle, kimi_k3_oracle
from torch import Tensor

from headway.models.kimi_k3.tiny import tiny_config, tiny_draft_config, write_tiny, write_tiny_draft
from headway.runtime.drafting.features import FeatureTap
from headway.runtime.drafting.layers import LayerEntries, attend
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.loading import load_model
from headway.runtime.model.attention import Scores
from headway.runtime.sources import resolve_source

TOLERANCE = 1e-4
LAYERS = 17
TOKENS = np.random.default_rng(5).integers(3, 4096, 90).tolist()
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "rope_theta": 50000.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "of mixtures, with yarn": {"aux_hidden_stream": "attn_res", "rope_parameters": YARN},
    "causal": {"full_attention_causal": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judged") / "k3"
    write_tiny(path, Path(resolve_source(None)[1]), seed=1, config=tiny_config(LAYERS))
    return path


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return load_model(str(target)).model


def streams(model: Any, *, mixed: bool) -> tuple[Tensor, Tensor]:
    """What is behind each layer, [tokens, layers, hidden], and the logits."""
    tap = FeatureTap(model, range(LAYERS), mixed)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    found = tap.take()[0].unflatten(-1, (LAYERS, -1))
    tap.close()
    return found, logits


def test_the_model(model: Any, target: Path) -> None:
    judged = kimi_k3_oracle.run(target, TOKENS)
    for mixed, right in ((False, judged.sums), (True, judged.mixed)):
        found, logits = streams(model, mixed=mixed)
        layers = np.abs(found.numpy() - right[:, 1:]).max(axis=(0, 2))
        assert layers.max() < TOLERANCE, layers
    assert np.abs(logits.numpy() - judged.logits).max() < TOLERANCE
    assert judged.logits.std() > 1


class Whole(LayerEntries):
    """Attention to a context that is not cached, and to the draft."""

    def __init__(self, context: tuple[Tensor, Tensor], *, causal: bool) -> None:
        self._context, self._causal = context, causal

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self._context[0], keys], 1), torch.cat([self._context[1], values], 1)

    def mix(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores | None = None) -> Tensor:
        count, columns = query.shape[1], keys.shape[1]
        seen = torch.ones(count, columns, dtype=torch.bool).tril(columns - count if self._causal else columns)
        return attend(query, keys, values, seen[None, None], scores)


@pytest.mark.parametrize("form", DRAFTS)
def test_the_drafter(model: Any, target: Path, tmp_path: Path, form: str) -> None:
    config = tiny_draft_config(LAYERS) | DRAFTS[form]
    write_tiny_draft(tmp_path, 2, config)
    causal = "full_attention_causal" in config
    reading = dspark_oracle.Reading(causal=causal)
    judged = dspark_oracle.propose(tmp_path, target, TOKENS[:-1], TOKENS[-1], reading=reading)
    drafter: Any = load_drafter(str(tmp_path), model, None)
    network, length = drafter._network, len(TOKENS) - 1
    tap = FeatureTap(model, drafter.feature_layers, drafter.mixed_features)
    with torch.no_grad():
        model(torch.tensor([TOKENS[:-1]]))
        context, places = network.context(tap.take()), torch.arange(length)[None]
        tap.close()
        held = [Whole(network.entries(i, context, places), causal=causal) for i in range(config["num_hidden_layers"])]
        inputs = network.inputs(model.get_input_embeddings()(torch.tensor(TOKENS[-1:])), 7)
        hidden = network(inputs, torch.arange(length, length + 7)[None], held)[0]
        before = torch.tensor([TOKENS[-1], *judged.tokens[:-1]])
        logits = model.get_output_embeddings()(hidden) + network.correction(before)
        chances = network.chance(hidden, before).sigmoid()
    assert np.abs(logits.numpy() - judged.logits).max() < TOLERANCE
    assert np.abs(chances.numpy() - judged.confidence).max() < TOLERANCE
    assert logits.argmax(-1).tolist() == judged.tokens
