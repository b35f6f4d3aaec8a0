"""Drafters alone: lookup, loading, refusals, and short chunks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.drafting.tiny_drafters import TOKENS, save_tiny, tiny_config
from tests.runtime.tiny_models import tiny_model

from headway.engine import EngineConfig
from headway.errors import ConfigError, ModelError
from headway.runtime.drafting.drafter import DraftRequest
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.drafting.lookup import PromptLookup
from headway.runtime.interface import SampleRow, SamplingParams
from headway.runtime.model.short_chunks import MOST_TOKENS, short_chunks


def looked_up(prompt: list[int], output: list[int], count: int = 3) -> list[int]:
    sample = SampleRow(SamplingParams(), 0, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
    return PromptLookup(8).propose([DraftRequest(0, count, sample, False, [])])[0].tokens.tolist()


@pytest.mark.parametrize(
    ("prompt", "output", "found"),
    [
        ([1, 2, 3, 4, 5, 6], [9, 2, 3], [4, 5, 6]),  # what followed
        ([1, 2, 3, 4, 1, 2, 3, 7], [1, 2, 3], [7, 1, 2]),  # the latest of equals
        ([5, 1, 2, 8, 6, 1, 2, 9], [5, 1, 2], [8, 6, 1]),  # a longer run before a later one
        ([1, 2, 3, 4], [5, 3], []),  # a single token is chance
        ([1, 2], [1, 2], [1, 2]),  # fewer than asked for: the text ends
        ([1], [], []),
        ([7, 7, 7, 7], [], [7]),
    ],
)
def test_lookup(prompt: list[int], output: list[int], found: list[int]) -> None:
    assert looked_up(prompt, output) == found


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_a_drafter_beside_the_model_is_found_by_name(kind: str, tmp_path: Path) -> None:
    model = tiny_model("KimiLinear")
    save_tiny(kind, model, tmp_path / "drafts" / kind)
    drafter = load_drafter(kind, model, tmp_path)
    assert (drafter.name, drafter.most) == (kind, TOKENS)
    (group,) = drafter.groups
    assert group.lookahead == (1 if kind == "mtp" else 0)
    assert not group.sharded
    layers = 1 if kind == "mtp" else 2
    assert getattr(group, "bytes_per_token", 0) == layers * 2 * 2 * 8 * 4  # keys and values, two heads of 8, fp32


def test_the_built_in_model_brings_both(tmp_path: Path) -> None:
    from headway.runtime.loading import load_model

    loaded = load_model()
    for kind in ("mtp", "dspark"):
        drafter = load_drafter(kind, loaded.model, loaded.folder)
        assert drafter.name == kind
        assert loaded.folder is not None
        folder = loaded.folder / "drafts" / kind
        assert sum(file.stat().st_size for file in folder.iterdir()) < 5_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "trained for another model"),
        ({"vocab_size": 99}, "trained for another model"),
        ({"drafter": "eagle"}, "known are mtp, dspark"),
        ({"heads": 2}, "cannot load the weights"),
        ({"layers": "two"}, "layers is 'two'"),
        ({"draft_tokens": 0}, "draft_tokens is 0"),
        ({"feature_layers": []}, "feature_layers"),
        ({"feature_layers": [1, 2]}, "reads one layer"),
        ({"kv_heads": 3}, "must divide"),
        (None, "not the config"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object] | None, message: str, tmp_path: Path) -> None:
    model = tiny_model("KimiLinear")
    path = save_tiny("mtp", model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text("[" if change is None else json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        load_drafter(str(path), model, None)


def test_unknown_names_and_too_long_drafts_are_refused(tmp_path: Path) -> None:
    model = tiny_model("KimiLinear")
    for source, folder in (("mtp", None), ("dspark", tmp_path), ("nothing", None)):
        with pytest.raises(ModelError, match="--draft"):
            load_drafter(source, model, folder)
    path = str(save_tiny("dspark", model, tmp_path))
    assert load_drafter(path, model, None, 2).most == 2
    with pytest.raises(ConfigError, match="trained for 4"):
        load_drafter(path, model, None, 5)
    assert tiny_config("mtp", model).draft_tokens == TOKENS


@pytest.mark.parametrize(
    "options",
    [{"draft_rule": "best"}, {"draft_tokens": 0}, {"draft_tokens": 17}, {"draft": "mtp", "step_price": 2.0}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="draft"):
        EngineConfig(**({"prefix_reuse": False} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["KimiLinear", "Qwen3Next"])
def test_short_chunks_give_the_same_in_recurrent_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DynamicCache

    model = tiny_model(name)
    tokens = torch.randint(3, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    found = []
    for tokens_said in (MOST_TOKENS + 1, MOST_TOKENS):  # too long for the recurrent form, and just short enough
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=tokens[:, :24], cache=cache, use_cache=True)
            with short_chunks(model, tokens_said):
                found.append(model(input_ids=tokens[:, 24:], cache=cache, use_cache=True)["logits"])
    assert not torch.equal(found[0], found[1]), "the form did not change"
    assert torch.allclose(found[0], found[1], atol=2e-4)


def test_the_form_is_that_of_one_thread_alone() -> None:
    """Ranks that are threads of one process must not change each other's computation."""
    model = tiny_model("KimiLinear")
    tokens = torch.randint(3, 256, (1, 12), generator=torch.Generator().manual_seed(1))

    def compute() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens, use_cache=False)["logits"]
        return logits

    plain = compute()
    with ThreadPoolExecutor(1) as other, short_chunks(model, 12):
        beside, own = other.submit(compute).result(), compute()
    assert torch.equal(beside, plain)
    assert not torch.equal(own, plain)
    assert torch.equal(compute(), plain)
