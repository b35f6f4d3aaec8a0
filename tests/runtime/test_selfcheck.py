"""The self-check trusts what is right, and finds what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from tests.runtime.tiny_models import ALSO_SOUND, SOUND, tiny_model

from headway.cache import ComputeCost
from headway.errors import ModelError
from headway.runtime import selfcheck
from headway.runtime.forward.views import PagedCache, StateLayer
from headway.runtime.model.inspection import inspect_model
from headway.runtime.selfcheck import Verdict, self_check


@pytest.mark.parametrize("name", SOUND + ALSO_SOUND)
def test_sound_models_pass(name: str) -> None:
    found = self_check(tiny_model(name), inspect_model(tiny_model(name)))
    assert found.verdict is Verdict.SOUND
    assert found.reuse
    assert not found.single_steps
    assert found.warning is None
    assert found.max_difference < 1e-4
    assert max(found.whole, found.chunks, found.steps) < 1e-4


@pytest.mark.parametrize("name", ["KimiLinear", "GptOss", "Gemma4", "Llama4"])
def test_sound_models_pass_in_bf16(name: str) -> None:
    model = copy.deepcopy(tiny_model(name)).to(torch.bfloat16)
    assert self_check(model, inspect_model(model)).reuse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Jamba", "FalconMamba"])
def test_models_that_cannot_continue_by_several_tokens(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_model(name)).to(dtype)
    found = self_check(model, inspect_model(model))
    assert found.verdict is Verdict.STEPS_ONLY
    assert not found.reuse
    assert found.single_steps
    assert found.chunks > 0.3
    assert found.warning is not None
    assert "prefix reuse is off" in found.warning


def test_a_model_with_a_state_outside_its_cache_is_refused() -> None:
    model = tiny_model("RecurrentGemma")
    with pytest.raises(ModelError, match="outside its cache"):
        self_check(model, inspect_model(model))


def test_a_continuation_that_raises_is_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Qwen3")
    forward = model.forward

    @functools.wraps(forward)
    def refuse(*args: object, **kwargs: object) -> object:
        tokens, positions = kwargs["input_ids"], kwargs["position_ids"]
        assert isinstance(tokens, torch.Tensor)
        assert isinstance(positions, torch.Tensor)
        if tokens.shape[1] > 1 and int(positions[0, 0]) > 0:
            raise RuntimeError("shapes do not match")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", refuse)
    found = self_check(model, inspect_model(model))
    assert found.verdict is Verdict.STEPS_ONLY
    assert "raises RuntimeError: shapes do not match" in found.detail


def test_states_that_are_not_stored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateLayer, "save", lambda self: None)
    with pytest.raises(ModelError, match="continuation by single tokens"):
        self_check(tiny_model("KimiLinear"), inspect_model(tiny_model("KimiLinear")))


def test_a_window_one_token_too_wide_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Gemma3")
    layout = inspect_model(model)
    real = PagedCache._token_plan

    def wider(self: PagedCache, layer: object) -> object:
        plan = real(self, layer)  # type: ignore[arg-type]
        table = plan._table
        if table.window == 32:
            plan._table = dataclasses.replace(table, window=33)
        return plan

    monkeypatch.setattr(PagedCache, "_token_plan", wider)
    with pytest.raises(ModelError, match="a prefill over Headway's memory differs"):
        self_check(model, layout)


def test_large_models_are_probed_with_short_texts() -> None:
    layout = inspect_model(tiny_model("Gemma3"))
    assert selfcheck._probe_length(layout) == 96
    huge = dataclasses.replace(layout, cost=ComputeCost(linear=2 * 70e9))
    assert selfcheck._probe_length(huge) == 32
