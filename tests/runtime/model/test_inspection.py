"""What the dry run reads off each model, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests.runtime.tiny_configs import COMMON, MODELS
from tests.runtime.tiny_models import SOUND, tiny_model
from transformers import AttentionInterface

from headway.cache import ChunkedLocal, FullAttention, LayerSpec, Recurrent, SlidingWindow
from headway.errors import ConfigError, ModelError
from headway.runtime.interface import LongRope
from headway.runtime.model.attention import NAME, AttentionSwitch, Scores, masked_attention
from headway.runtime.model.inspection import inspect_model

GROUPS: dict[str, list[LayerSpec]] = {
    # 1 MLA layer: latent 32 + 8, fp32. 3 KDA layers: 192 conv channels x 4 columns, 4 heads x 16 x 16, fp32.
    "KimiLinear": [FullAttention("full", 160), Recurrent("state", 3 * (192 * 4 + 1024) * 4)],
    "Qwen3Next": [FullAttention("full", 256), Recurrent("state", 3 * (128 * 4 + 1024) * 4)],
    "FalconH1": [FullAttention("full", 3 * 256), Recurrent("state", 3 * (160 * 4 + 8 * 16 * 16) * 4)],
    "Lfm2": [FullAttention("full", 256), Recurrent("state", 3 * 64 * 3 * 4)],
    "GptOss": [FullAttention("full", 512), SlidingWindow("window-32", 512, window=32)],
    "Gemma3": [FullAttention("full", 256), SlidingWindow("window-32", 5 * 256, window=32)],
    "Gemma4": [FullAttention("full", 2 * 512), SlidingWindow("window-32", 2 * 256, window=32)],
    "Llama4": [FullAttention("full", 256), ChunkedLocal("chunk-32", 3 * 256, chunk=32)],
    "DeepseekV3": [FullAttention("full", 3 * 160)],
    "Mamba2": [Recurrent("state", 2 * (160 * 4 + 8 * 16 * 16) * 4)],
}


@pytest.mark.parametrize("name", list(GROUPS))
def test_groups(name: str) -> None:
    assert list(inspect_model(tiny_model(name)).groups) == GROUPS[name]


def test_keys_and_values_of_different_widths() -> None:
    layout = inspect_model(tiny_model("MiMoV2Flash"))
    fields = next(layer.tokens for layer in layout.layers if layer.tokens is not None).fields
    assert [(field.name, field.shape[1]) for field in fields] == [("keys", 24), ("values", 16)]


def test_layers_that_use_anothers_entries_keep_none() -> None:
    layout = inspect_model(tiny_model("Gemma4"))
    assert [(x.index, x.entries_of) for x in layout.layers if x.entries_of is not None] == [(4, 2), (5, 3)]
    assert layout.source(5) is layout.layers[3]
    assert all(layout.layers[i].tokens is None for i in (4, 5))


def test_moe_layers_of_a_hybrid_keep_nothing() -> None:
    layers = inspect_model(tiny_model("NemotronH")).layers
    assert [bool(layer.tokens or layer.state) for layer in layers] == [True, False, True, True, False]


def test_a_model_that_asks_for_one_length_is_noticed() -> None:
    assert [name for name in SOUND if inspect_model(tiny_model(name)).uniform_starts] == ["Llama4"]


def test_active_parameters_leave_out_embeddings_and_unchosen_experts() -> None:
    model = tiny_model("KimiLinear")
    layout = inspect_model(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert layout.parameters == sum(p.numel() for p in model.parameters())
    assert layout.active_parameters == layout.parameters - 256 * 64 - experts * 6 // 8
    assert layout.cost.linear == 2 * layout.active_parameters


def test_quadratic_cost_counts_full_attention_only() -> None:
    # heads x (key width + value width) x 2 for each earlier token
    assert inspect_model(tiny_model("Qwen3")).cost.quadratic == 3 * 4 * 32 * 2
    assert inspect_model(tiny_model("Gemma3")).cost.quadratic == 4 * 32 * 2
    assert inspect_model(tiny_model("KimiLinear")).cost.quadratic == 4 * (24 + 16) * 2
    assert inspect_model(tiny_model("Mamba2")).cost.quadratic == 0


def test_tensor_parallel_sizes() -> None:
    model = tiny_model("KimiLinear")
    one, four = inspect_model(model), inspect_model(model, tp=4)
    assert four.group("full") == one.group("full"), "an MLA latent is on every rank"
    assert four.group("state").state_bytes * 4 == one.group("state").state_bytes
    gqa = tiny_model("Qwen3")
    sizes = [inspect_model(gqa, tp=tp).group("full").bytes_per_token for tp in (1, 2, 4)]
    assert sizes == [768, 384, 384], "two heads: one on each of two ranks, and one on each of four"
    with pytest.raises(ConfigError, match="tp=3"):
        inspect_model(gqa, tp=3)
    with pytest.raises(ConfigError, match="tp=3"):
        inspect_model(tiny_model("Mamba2"), tp=3)


@pytest.mark.parametrize("name", ["KimiLinear", "GptOss", "NemotronH", "Gemma4", "Llama4"])
def test_shapes_need_no_weights(name: str) -> None:
    config_name, arguments = MODELS[name]
    config = getattr(transformers, config_name)(**(COMMON | arguments))
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found, expected = inspect_model(model), inspect_model(tiny_model(name))
    assert (found.groups, found.layers, found.cost) == (expected.groups, expected.layers, expected.cost)
    assert (found.parameters, found.vocab_size) == (expected.parameters, expected.vocab_size)


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"MiniMaxForCausalLM cannot be served: .* a cache of its own \(MiniMaxCache\)"
    ):
        inspect_model(tiny_model("MiniMax"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekV32", "an attention mask for sparse attention over an index"),
        ("Inkling", "a bias on attention scores that depends on positions"),
        ("Falcon", "its FalconAttention works on an attention mask;"),
    ],
)
def test_what_attention_asks_for_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as raised:
        inspect_model(tiny_model(name))
    assert "NoneType" not in str(raised.value)


def test_attention_to_what_no_layer_keeps_is_refused() -> None:
    model = copy.deepcopy(tiny_model("Qwen3"))
    attend, alone = AttentionInterface()[NAME], [torch.nn.Identity(), *[torch.zeros(1, 1, 8, 4)] * 3, None]
    model.lm_head.register_forward_hook(lambda *_: attend(*alone))
    with pytest.raises(ModelError, match=r"^Qwen3ForCausalLM cannot be served: a part of it attends to more than"):
        inspect_model(model)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"indices": torch.zeros(1, 8, 4)}, "sparse attention over an index, which"),
        ({"is_causal": False}, "attention to later tokens"),
        ({"novelty": 3}, "what its attention calls 'novelty'"),
    ],
)
def test_an_unknown_keyword_of_attention_is_not_dropped(asked: dict[str, object], reason: str) -> None:
    attend = AttentionInterface()[NAME]
    with AttentionSwitch(tiny_model("Qwen3")).attending(Everything()), pytest.raises(ModelError, match=reason):
        attend(torch.nn.Identity(), torch.zeros(1, 2, 8, 4), *[torch.zeros(1, 1, 8, 4)] * 2, None, **asked)


class Everything:
    """A context in which every token sees every other."""

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        return masked_attention(query, key, value, scores)


def test_two_sets_of_rotary_frequencies() -> None:
    assert inspect_model(tiny_model("Phi3Long")).long_rope == LongRope(96, recomputed=True)
    assert inspect_model(tiny_model("LlamaLong")).long_rope == LongRope(96, recomputed=False)
    assert inspect_model(tiny_model("Llama")).long_rope is None


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("Qwen3")
    inspect_model(model)
    assert model.config._attn_implementation == "eager"
