"""The self-check trusts what is right, and finds what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from tests.runtime.tiny_models import ALSO_SOUND, SOUND, tiny_model
from transformers import MoshiConfig, MoshiForCausalLM

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
    assert "does not continue from a cached state by several tokens" in found.warning
    assert found.step_price >= 1


def test_a_model_with_a_state_outside_its_cache_is_refused() -> None:
    model = tiny_model("RecurrentGemma")
    with pytest.raises(ModelError, match="outside its cache"):
        self_check(model, inspect_model(model))


def test_a_model_whose_cache_has_a_window_that_its_attention_has_not_is_refused_by_that_name() -> None:
    config = MoshiConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        ffn_dim=64,
        sliding_window=13,
    )
    torch.manual_seed(0)
    model = MoshiForCausalLM(config).eval()
    with pytest.raises(ModelError, match="first 13 tokens agree: its cache lets go of entries behind a window of 13"):
        self_check(model, inspect_model(model))


def test_a_continuation_that_raises_is_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Qwen3")
    forward = model.forward

    @functools.wraps(forward)
    def refuse(*args: object, **kwargs: object) -> object:
        tokens, held = kwargs["input_ids"], kwargs.get("cache")
        assert isinstance(tokens, torch.Tensor)
        if tokens.shape[1] > 1 and isinstance(held, PagedCache) and held.get_seq_length() > 0:
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
    assert selfcheck._probe_length(layout, ()) == 96
    assert selfcheck._probe_length(layout, (200,)) == 200 + 100 + 16
    huge = dataclasses.replace(layout, cost=ComputeCost(linear=2 * 70e9))
    assert selfcheck._probe_length(huge, (200,)) == 32


def test_frequencies_that_depend_on_the_whole_forward_are_found() -> None:
    """LongRoPE taken for ordinary positions: a row at the far end changes those beside it."""
    layout = dataclasses.replace(inspect_model(tiny_model("Phi3Long")), long_rope=None)
    with pytest.raises(ModelError, match="couple the rows"):
        self_check(tiny_model("Phi3Long"), layout)


def test_a_switch_of_frequencies_out_of_reach_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text reaches the original length: positions around it do, and those at the far end."""
    monkeypatch.setattr(selfcheck, "_FLOPS_LIMIT", 1.0)
    model = tiny_model("Phi3Long")
    layout = inspect_model(model)
    assert self_check(model, layout).tokens == 32
    with pytest.raises(ModelError, match="couple the rows"):
        self_check(model, dataclasses.replace(layout, long_rope=None))


def test_entries_that_depend_on_later_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Qwen3")
    hook = model.get_input_embeddings().register_forward_hook(lambda *given: given[2] + 0.1 * given[2].amax(1, True))
    try:
        with pytest.raises(ModelError, match="continuation by single tokens"):
            self_check(model, inspect_model(model))
    finally:
        hook.remove()


def test_texts_are_cut_on_each_side_of_every_length_that_the_configuration_names() -> None:
    named = sorted(set(selfcheck._named(selfcheck._LENGTHS, tiny_model("GptOss").config.to_dict())))
    assert 32 in named
    assert {1, 31, 32, 33} <= set(selfcheck._cuts(76, 96, named, states=False))
    assert {63, 64, 65} <= set(selfcheck._cuts(76, 96, named, states=True))
