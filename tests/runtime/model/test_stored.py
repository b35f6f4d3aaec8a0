"""Entries and states stored as narrower types: what they become, what they take, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.tiny_models import SOUND, tiny_model

from headway.cache import CacheGeometry
from headway.errors import ConfigError, ModelError
from headway.runtime.forward.batch import RunBatch
from headway.runtime.forward.canonical import shares_of
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.interface import StoredTypes
from headway.runtime.model.inspection import inspect_model, require_read_back
from headway.runtime.model.layout import ModelLayout
from headway.runtime.model.stored import as_stored, stored_layout
from headway.runtime.quality import Quality, measured_quality

FP8, BF16_STATES = StoredTypes("fp8_e4m3"), StoredTypes("auto", "bf16")


def test_numbers_are_clamped_and_nan_stays() -> None:
    given = torch.tensor([1e9, -torch.inf, 449.0, 0.3, 5e-4, torch.nan], dtype=torch.bfloat16)
    stored = as_stored(given, torch.float8_e4m3fn)
    assert stored.float()[:5].tolist() == [448.0, -448.0, 448.0, 0.3125, 0.0]
    assert bool(stored.float()[5].isnan())
    assert torch.equal(as_stored(stored.float(), torch.float8_e4m3fn).float()[:5], stored.float()[:5])


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (("int8", "auto"), "--kv-dtype is 'int8', it must be auto, fp32, bf16 or fp8_e4m3"),
        (("auto", "fp8_e4m3"), "--state-dtype is 'fp8_e4m3'.*a state gathers up what rounding loses"),
    ],
)
def test_other_types_are_refused(read: tuple[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        StoredTypes.read(*read)
    assert StoredTypes.read("fp8", "auto") == FP8


def sizes(layout: ModelLayout) -> dict[str, int]:
    return {spec.name: getattr(spec, "bytes_per_token", 0) or spec.state_bytes for spec in layout.groups}  # type: ignore[union-attr]


def test_groups_take_as_many_bytes_as_their_types() -> None:
    layout = inspect_model(tiny_model("KimiLinear"))
    full, state = sizes(layout)["full"], sizes(layout)["state"]
    recurrent = sum(f.bytes for x in layout.layers if x.state for f in x.state.fields if f.name.startswith("recurrent"))
    smaller = stored_layout(layout, StoredTypes("fp8_e4m3", "bf16"))
    assert sizes(smaller) == {"full": full // 4, "state": state - recurrent // 2}
    assert sizes(stored_layout(smaller, FP8)) == sizes(smaller)
    assert stored_layout(layout, StoredTypes("fp32", "fp32")) == layout, "what it computes with anyway"
    windowed = inspect_model(tiny_model("GptOss"))
    assert sizes(stored_layout(windowed, FP8)) == {name: size // 4 for name, size in sizes(windowed).items()}


@pytest.mark.parametrize(
    ("model", "types", "told"),
    [
        ("Mamba2", FP8, "--kv-dtype: Mamba2ForCausalLM keeps no entries of attention"),
        ("Lfm2", BF16_STATES, "--state-dtype: Lfm2ForCausalLM keeps no recurrent states"),
    ],
)
def test_a_type_of_what_a_model_does_not_keep_is_refused(model: str, types: StoredTypes, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        stored_layout(inspect_model(tiny_model(model)), types)


def test_a_wider_type_than_is_computed_with_is_refused() -> None:
    model = copy.deepcopy(tiny_model("Qwen3")).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="computes its entries of attention in bfloat16"):
        stored_layout(inspect_model(model), StoredTypes("fp32"))


@pytest.mark.parametrize("name", [name for name in SOUND if name != "Mamba2"])
def test_layers_attend_to_what_the_cache_returns(name: str) -> None:
    require_read_back(tiny_model(name), "--kv-dtype fp8_e4m3")


def test_a_model_that_goes_on_with_unrounded_values_is_refused_with_its_layer() -> None:
    model: Any = copy.deepcopy(tiny_model("Qwen3"))
    attention, kept = model.model.layers[1].self_attn, []
    attention.v_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0] + 0.1 * kept[-1].mean(),))
    with pytest.raises(ModelError, match="--kv-dtype fp8_e4m3: layer 1 of Qwen3ForCausalLM goes on with its keys"):
        require_read_back(model, "--kv-dtype fp8_e4m3")


def test_objects_of_other_types_have_other_keys_also_where_their_bytes_are_alike() -> None:
    families = set()
    for dtype in (torch.float32, torch.bfloat16):
        computed = inspect_model(copy.deepcopy(tiny_model("Qwen3")).to(dtype))
        for layout in (computed, stored_layout(computed, FP8)):
            (share,) = shares_of(layout, CacheGeometry(layout.groups, block_tokens=16))
            assert share.group.bytes == sizes(layout)["full"]
            families.add(share.group.family)
    assert len(families) == 4


def test_computing_goes_on_from_states_as_they_are_stored() -> None:
    """As if the states of full precision had been rounded where they lie, between two forwards; and only there."""
    model = tiny_model("Qwen3Next")
    computed = inspect_model(model)
    text = np.random.default_rng(0).integers(3, 256, 50).astype(np.int32)
    ends: list[torch.Tensor] = []
    for layout, rounds in ((stored_layout(computed, BF16_STATES), False), (computed, True), (computed, False)):
        geometry = CacheGeometry(layout.groups, block_tokens=16)
        counts = [table.blocks_for(len(text)) for table in geometry.tables]
        runner = ModelRunner(model, layout, geometry, sum(counts))
        runner.arena.data.fill_(0xFF)
        stops = np.cumsum(counts)
        tables = [np.arange(s - n, s, dtype=np.int32)[None] for s, n in zip(stops, counts, strict=True)]

        def run(start: int, stop: int, runner: ModelRunner = runner, tables: list[Any] = tables) -> torch.Tensor:
            one = np.array([start]), np.array([stop - start])
            return runner.run(RunBatch(text[start:stop], *one, tables, np.array([start == 0]))).logits

        first = run(0, 40)
        if rounds:
            ids = torch.from_numpy(tables[-1].astype(np.int64))
            states = runner.arena.gather_states(ids)
            for layer in layout.layers:
                for name, field in runner.arena.state_fields(states, layer.index).items() if layer.state else ():
                    if name.startswith("recurrent"):
                        field.copy_(field.to(torch.bfloat16))
            runner.arena.scatter_states(ids, states)
        ends += [first, run(40, 45)]
    firsts, seconds = ends[::2], ends[1::2]
    assert torch.equal(firsts[0], firsts[2]), "inside a forward nothing is rounded"
    assert torch.equal(seconds[0], seconds[1])
    assert not torch.equal(seconds[0], seconds[2])


def test_quality_tells_what_a_type_costs_and_warns_of_harm() -> None:
    model = tiny_model("GptOss")
    tokens = np.random.default_rng(0).integers(3, 256, 60).tolist()
    found = measured_quality(model, inspect_model(model), FP8, tokens)
    assert found.tokens == 59
    assert found.stored != found.whole
    assert 0.5 < found.agreed < 1
    assert "attention entries fp8_e4m3: perplexity" in found.told
    assert measured_quality(model, inspect_model(model), StoredTypes("fp32"), tokens).stored == found.whole
    assert Quality(FP8, 9, 20.0, 20.9, 0.9).warning is None
    assert "leave out --kv-dtype" in str(Quality(FP8, 9, 20.0, 21.1, 0.9).warning)
    assert Quality(FP8, 9, 20.0, float("inf"), 0.0).warning is not None
