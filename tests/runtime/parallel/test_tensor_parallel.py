"""Shares of a model, each on a rank of its own, against the whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.parallel.rank_threads import RankedRunner, Ranks, layout_of, shares_of
from tests.runtime.tiny_models import tiny_model
from transformers import DynamicCache, PreTrainedModel

from headway.cache import CacheGeometry
from headway.errors import ConfigError, HeadwayError, ModelError
from headway.runtime.forward.batch import RunBatch
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.layout import ModelLayout, Part, Share
from headway.runtime.parallel.communicator import Rehearsal
from headway.runtime.parallel.cuts import Cut
from headway.runtime.parallel.mixers import MIXERS
from headway.runtime.parallel.tensor_parallel import layout_of_share, rules_of_reading, split_model

TOLERANCE = 2e-5
"""For sums in another order, in fp32, of numbers of about 1; logits, of more layers, get ten times that."""
MIXED = [
    ("KimiLinear", 2),
    ("KimiLinear", 4),
    ("BailingHybrid", 4),
    ("Qwen3Next", 2),
    ("Qwen3NextWide", 4),
    ("Qwen3_5", 2),
    ("Qwen3_5Moe", 2),
    ("OlmoHybrid", 4),
    ("GraniteMoeHybrid", 2),
    ("GraniteMoeHybrid", 8),
    ("NemotronH", 2),
    ("NemotronH", 4),
    ("NemotronHWide", 2),
]
"""Groups of Mamba-2 are one on all ranks (Granite), one a rank, one on two ranks, and two a rank (Nemotron)."""


def mixers(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in MIXERS]


def rehearsed(model: PreTrainedModel, tp: int, dcp: int = 1) -> ModelLayout:
    """What a rank stores, found out without ranks and without numbers."""
    shapes = copy.deepcopy(model).to("meta")
    shapes.tie_weights()  # moving parts them
    shapes.config._experts_implementation = "batched_mm"
    split_model(shapes, Rehearsal(tp))
    return layout_of_share(inspect_model(model), shapes, tp).over(dcp)


def tables_of(geometry: CacheGeometry, length: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Block tables of the only sequence, table after table."""
    ends = np.cumsum([table.blocks_for(length) for table in geometry.tables])
    return [part[None].astype(np.int32) for part in np.split(np.arange(ends[-1]), ends[:-1])]


def logits_of(
    ranked: RankedRunner, geometry: CacheGeometry, text: np.ndarray[Any, np.dtype[np.int32]], start: int, stop: int
) -> torch.Tensor:
    """Compute tokens [start, stop) of the only sequence: the logits behind the last of them."""
    batch = RunBatch(
        tokens=text[start:stop],
        starts=np.array([start]),
        counts=np.array([stop - start]),
        tables=tables_of(geometry, len(text)),
        fresh=np.array([start == 0]),
        copies=np.empty((0, 2), dtype=np.int32),
    )
    return ranked.run(batch).logits[0]


@pytest.mark.parametrize(("name", "size"), MIXED)
def test_what_shares_of_a_mixer_put_out_adds_up(name: str, size: int) -> None:
    """In one go, then for a few tokens and for one token behind a state: each has its own path in transformers."""
    model, ranks = tiny_model(name), Ranks(size)
    shares = shares_of(model, ranks)
    whole = mixers(model)[0]
    tokens = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(5))

    def run(mixer: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            outputs = [mixer(tokens[:, cut], cache=cache) for cut in (slice(20), slice(20, 29), slice(29, 30))]
        return outputs, cache.layers[mixer.layer_idx].recurrent_states[0]

    expected, state = run(whole)
    found = ranks(lambda rank: run(mixers(shares[rank])[0]))
    for outputs, _ in found:
        for got, want in zip(outputs, expected, strict=True):
            assert (got - want).abs().max() < TOLERANCE * max(1.0, want.abs().max().item())
    heads = torch.cat([states for _, states in found], dim=1)
    assert heads.shape == state.shape, "a head's state is on one rank"
    assert (heads - state).abs().max() < TOLERANCE * max(1.0, state.abs().max().item())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *MIXED,
        ("Gemma3Wide", 4),
        ("Gemma4", 2),
        ("Llama4", 2),
        ("MiMoV2Flash", 2),
        ("Llama", 2),
        ("Gemma3n", 2),
        ("Mistral", 2),
        ("Mixtral", 2),
        ("Qwen3", 2),
        ("MiniMaxM2", 4),
        ("Olmo3", 4),
        ("Phi3", 4),
        ("DeepseekV2", 4),
        ("DeepseekV3", 4),
    ],
)
def test_shares_compute_the_logits_of_the_whole(name: str, size: int) -> None:
    model, ranks = tiny_model(name), Ranks(size)
    shares = shares_of(model, ranks)
    tokens = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(6))

    def logits(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens, use_cache=False)["logits"]

    expected = logits(model)
    found = ranks(lambda rank: logits(shares[rank]))
    for got in found:
        assert torch.equal(got, found[0]), "ranks go on with the same bits"
        assert (got - expected).abs().max() < 10 * TOLERANCE
    ends = sum(p.numel() for n, p in model.named_parameters() if "embed" in n or "lm_head" in n)
    inner = [sum(p.numel() for p in m.parameters()) - ends for m in (shares[0], model)]
    assert inner[0] < inner[1] * (0.85 if size == 2 else 0.7)


@pytest.mark.parametrize(
    ("name", "tp", "dcp"),
    [("KimiLinear", 2, 2), ("Qwen3Next", 2, 1), ("NemotronH", 4, 2), ("Gemma3Wide", 4, 2), ("DeepseekV2", 4, 1)],
)
def test_a_rehearsal_says_what_ranks_store(name: str, tp: int, dcp: int) -> None:
    model, ranks = tiny_model(name), Ranks(tp)
    shares, whole = shares_of(model, ranks), inspect_model(model)
    found = ranks(lambda rank: layout_of_share(whole, shares[rank], tp).over(dcp))
    assert all(layout == rehearsed(model, tp, dcp) for layout in found)


def test_bytes_of_a_rank() -> None:
    """States are divided, a latent is not; heads are, and of split tokens a rank holds the heads of its group."""
    kimi, qwen = tiny_model("KimiLinear"), tiny_model("Qwen3NextWide")
    one, four = inspect_model(kimi), rehearsed(kimi, 4, 4)
    assert four.group("state").state_bytes * 4 == one.group("state").state_bytes
    assert four.group("full") == one.group("full")
    assert (four.parameters, four.cost) == (one.parameters, one.cost), "what is said of the model is said of all of it"
    assert four.rank_parameters == sum(p.numel() for p in shares_of(kimi, Ranks(4))[3].parameters()) < one.parameters
    whole = inspect_model(qwen).group("full").bytes_per_token
    assert [rehearsed(qwen, 4, dcp).group("full").bytes_per_token * 4 // whole for dcp in (1, 2, 4)] == [1, 2, 4]
    assert rehearsed(qwen, 4, 4).over(1) == rehearsed(qwen, 4)
    windows = rehearsed(tiny_model("Gemma3Wide"), 4, 4).group("window-32")
    assert windows.bytes_per_token * 4 == inspect_model(tiny_model("Gemma3Wide")).group("window-32").bytes_per_token


def test_a_group_of_ranks_stores_all_of_its_heads_once() -> None:
    """The entries of a text on four ranks, put together by token and head, are those of one rank."""
    model = tiny_model("Gemma3Wide")
    layout = rehearsed(model, 4, 2)
    text = np.random.default_rng(3).integers(3, 250, 37, dtype=np.int32)

    def entries(ranked: RankedRunner, geometry: CacheGeometry) -> list[torch.Tensor]:
        for start, stop in ((0, 20), (20, 36), (36, 37)):
            logits_of(ranked, geometry, text, start, stop)
        full = next(layer.index for layer in ranked.runners[0].layout.layers if layer.in_full)
        blocks = tables_of(geometry, len(text))[geometry.group("full").table.index][0].tolist()
        return [runner.arena.entries(full)[0][blocks].flatten(0, 1) for runner in ranked.runners]

    alone = CacheGeometry(inspect_model(model).groups, block_tokens=16)
    (want,) = entries(RankedRunner(model, alone, 80), alone)
    split = CacheGeometry(layout.groups, layout_of(4, 2, 2), block_tokens=16)
    got = entries(RankedRunner(model, split, 80, split=True), split)
    table = split.group("full").table
    for position in range(len(text)):
        owner, place = int(table.owner(position)), int(table.local_index(position))
        heads = torch.cat([got[group + owner][place] for group in (0, 2)])
        assert torch.allclose(heads, want[position], atol=1e-5), position


@pytest.mark.parametrize(
    ("name", "tp", "dcp", "error", "text"),
    [
        ("GPT2", 2, 1, ModelError, "no tensor-parallel plan for the layers of this model"),
        ("GptOss", 2, 1, ModelError, "GptOssForCausalLM: transformers has no tensor-parallel plan"),
        ("Mamba2", 2, 1, ModelError, "no tensor-parallel plan"),
        ("Lfm2Moe", 2, 1, ModelError, r"layer 0 \(Lfm2MoeShortConv\) keeps a recurrent state"),
        ("Qwen3", 4, 1, ConfigError, "tp=4 does not divide the 2 heads of model.layers.0.self_attn.k_proj"),
        ("KimiLinear", 8, 1, ConfigError, "tp=8 does not divide the 4 heads of KimiLinearDeltaAttention.q_proj"),
        ("Qwen3Next", 4, 1, ConfigError, "tp=4 does not divide the 2 key heads of Qwen3NextGatedDeltaNet"),
        ("NemotronH", 3, 1, ConfigError, "tp=3 does not divide the 8 heads or groups of NemotronHMamba2Mixer"),
        ("DeepseekV3", 5, 1, ConfigError, "tp=5 does not divide the 128 elements of model.layers.0.mlp.gate_proj"),
        ("DeepseekV2", 2, 2, ModelError, "the latent cannot be split by tokens over 2 ranks"),
    ],
)
def test_what_cannot_be_shared_is_refused(name: str, tp: int, dcp: int, error: type[HeadwayError], text: str) -> None:
    with pytest.raises(error, match=text):
        rehearsed(tiny_model(name), tp, dcp)


def test_a_class_that_has_changed_is_refused() -> None:
    """A parameter, or a style, that is not known would be computed with as if it were whole."""
    model = copy.deepcopy(tiny_model("KimiLinear"))
    mixers(model)[0].extra = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match="KimiLinearDeltaAttention has a parameter 'extra'"):
        split_model(model, Rehearsal(2))
    model = copy.deepcopy(tiny_model("KimiLinear"))
    model.tp_plan["model.layers.*.mlp.gate_proj"] = "sequence_parallel"
    with pytest.raises(ModelError, match="a style that Headway cannot follow: sequence_parallel"):
        split_model(model, Rehearsal(2))


def test_what_transformers_must_not_cut_while_it_reads() -> None:
    """Embeddings and head stay whole; mixers are cut afterwards, in parts that its rules do not know."""
    kimi = copy.deepcopy(tiny_model("KimiLinear"))
    kimi.tp_plan["model.layers.*.self_attn.q_proj"] = "colwise"  # of attention, and of mixers of the same name
    assert "model.layers.*.self_attn.q_proj" in rules_of_reading(kimi)
    rules = rules_of_reading(tiny_model("Qwen3_5"))
    mixer = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    assert set(rules) == {"lm_head", "model.embed_tokens", *(f"model.layers.*.linear_attn.{part}" for part in mixer)}
    assert set(rules.values()) == {"replicate"}


def test_a_cut_takes_its_share_of_every_part() -> None:
    whole = torch.arange(12)
    cut = Cut(0, (Part(8, 4), Part(4, 2, shared=True)))
    assert [cut.of(whole, rank, 4, "x").tolist() for rank in range(4)] == [
        [0, 1, 8, 9],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
        [6, 7, 10, 11],
    ]
    assert cut.of(whole, 1, 2, "x").tolist() == [4, 5, 6, 7, 10, 11]
    with pytest.raises(ConfigError, match="tp=8 does not divide the 4 elements of x"):
        cut.of(whole, 0, 8, "x")


def _biased(mixer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in ("in_proj", "out_proj"):
        linear = getattr(mixer, name)
        linear.bias = torch.nn.Parameter(torch.randn(len(linear.weight), generator=generator))


def test_a_bias_behind_a_sum_counts_once() -> None:
    model = copy.deepcopy(tiny_model("NemotronH"))
    _biased(mixers(model)[0], 4)
    ranks = Ranks(2)
    shares: Sequence[PreTrainedModel] = shares_of(model, ranks)
    tokens = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = mixers(model)[0](tokens)
        got = ranks(lambda rank: mixers(shares[rank])[0](tokens).detach())
    assert all((each - want).abs().max() < TOLERANCE * want.abs().max() for each in got)


def test_which_layers_are_split() -> None:
    assert {layer.share for layer in rehearsed(tiny_model("Gemma4"), 2).layers if layer.heads} == {Share.SPLIT}
    assert {layer.share for layer in rehearsed(tiny_model("DeepseekV2"), 2).layers} == {Share.QUERIES}
    assert {layer.share for layer in rehearsed(tiny_model("KimiLinear"), 2).layers} == {Share.WHOLE}


def planned(name: str) -> PreTrainedModel:
    """A tiny model; the one with sinks in full attention, and biases, gets the plan that it lacks."""
    model = tiny_model(name)
    if name == "GptOss":
        model = copy.deepcopy(model)
        attention = {
            "q_proj": "colwise",
            "k_proj": "colwise",
            "v_proj": "colwise",
            "sinks": "colwise",
            "o_proj": "rowwise",
        }
        model.tp_plan.update({f"model.layers.*.self_attn.{part}": style for part, style in attention.items()})
    return model


@pytest.mark.parametrize("form", ["ag_rs", "a2a"])
@pytest.mark.parametrize("name", ["Gemma2", "Gemma4", "GptOss", "Llama4", "NemotronH", "Olmo3"])
def test_heads_and_tokens_split_over_the_same_ranks(name: str, form: str) -> None:
    """A prompt in three pieces and one token: caps, sinks, and layers that share entries survive both splits."""
    model, text = planned(name), np.random.default_rng(8).integers(3, 250, 61, dtype=np.int32)
    geometry = CacheGeometry(rehearsed(model, 2, 2).groups, layout_of(2, 4, 2), block_tokens=16)
    ranked = RankedRunner(model, geometry, 200, form, split=True)
    for data in ranked.arenas:
        data.fill_(0xFF)
    found = [logits_of(ranked, geometry, text, *cut) for cut in ((0, 30), (30, 33), (33, 60), (60, 61))]
    with torch.no_grad():
        want = model(input_ids=torch.from_numpy(text.astype(np.int64))[None], use_cache=False)["logits"][0]
    for got, stop in zip(found, (30, 33, 60, 61), strict=True):
        assert (got - want[stop - 1]).abs().max() < 10 * TOLERANCE, stop
