"""Attention to tokens that are split over ranks: the parts, their merge, and whole models on simulated ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.forward.test_runner import TOLERANCE, reference, text, worst
from tests.runtime.hand_cache import HandCache
from tests.runtime.parallel.rank_threads import Ranks, layout_of
from tests.runtime.tiny_models import tiny_model

from headway.cache import CacheGeometry, FullAttention, SlidingWindow, TableGeometry, TableKind
from headway.errors import ConfigError
from headway.runtime.forward.plan import TokenPlan
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.interface import COMMUNICATIONS
from headway.runtime.model.attention import Scores, masked_attention
from headway.runtime.model.inspection import inspect_model
from headway.runtime.parallel.context_parallel import HeadMerge, Partial, merge, partial_attention

FAMILIES = ("KimiLinear", "Qwen3Next", "GraniteMoeHybrid", "GptOss", "Gemma4", "FalconH1", "Llama4", "DeepseekV3")
"""Full attention with KDA, Gated DeltaNet, Mamba-2, windows and sinks, shared entries, states beside entries in one
layer, chunks, and alone (MLA with RoPE)."""
SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([(4, 4), (4, 2), (6, 1), (3, 3)]), st.integers(1, 5))


def drawn(data: st.DataObject, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scores]:
    """Queries, keys and values of random shape, and how to score them."""
    rows, (heads, kv_heads), queries = data.draw(SHAPES)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    softcap = data.draw(st.sampled_from([None, 5.0]))
    sinks = torch.randn(heads) if data.draw(st.booleans()) else None
    query, key = torch.randn(rows, heads, queries, 8), torch.randn(rows, kv_heads, columns, 8)
    return query, key, torch.randn(rows, kv_heads, columns, 5), Scores(0.3, softcap, sinks)


@settings(max_examples=60)
@given(st.data())
def test_merged_parts_are_the_attention_to_all(data: st.DataObject) -> None:
    """Any split of the columns, empty parts included, in either form of communication, on any number of ranks."""
    columns = data.draw(st.integers(1, 9))
    query, key, value, scores = drawn(data, columns)
    mask = torch.rand(query.shape[0], 1, query.shape[2], columns) < 0.6
    mask[..., 0] = True  # every query sees something, as a causal one does
    expected = masked_attention(query, key, value, scores, mask)
    size = data.draw(st.integers(1, 4))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=columns, max_size=columns)))
    parts = [partial_attention(query, key, value, scores, mask & (owner == rank)) for rank in range(size)]
    stacked = Partial(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    assert worst(merge(stacked, scores.sinks), expected) < 1e-5
    for form in COMMUNICATIONS:
        ranks = Ranks(size, form)
        merged = ranks(lambda rank, ranks=ranks: ranks.merges[rank](parts[rank], scores.sinks))
        assert all(torch.equal(one, merged[0]) for one in merged)
        assert worst(merged[0], expected) < 1e-5


def test_who_sees_nothing_anywhere_gets_zeros() -> None:
    scores = Scores(0.3)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 4, 8)
    part = partial_attention(query, key, key, scores, torch.zeros(1, 1, 3, 4, dtype=torch.bool))
    assert torch.equal(part.out, torch.zeros(1, 2, 3, 8))
    assert bool((part.lse == float("-inf")).all())
    assert torch.equal(merge(Partial(part.out[None], part.lse[None])), torch.zeros(1, 2, 3, 8))


def test_parts_of_low_precision_are_merged_in_high() -> None:
    query, key = torch.randn(1, 2, 1, 8).bfloat16(), torch.randn(1, 2, 4, 8).bfloat16()
    part = partial_attention(query, key, key, Scores(0.3), None)
    assert (part.out.dtype, part.lse.dtype) == (torch.float32, torch.float32)


def test_collectives_of_each_form() -> None:
    called = {}
    for form in COMMUNICATIONS:
        ranks = Ranks(2, form)
        part = Partial(torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1))
        ranks(lambda rank, ranks=ranks, part=part: ranks.merges[rank](part))
        called[form] = ranks.exchange.calls[0]
    assert called == {"ag_rs": ["all_gather", "reduce_scatter", "all_gather"], "a2a": ["all_to_all", "all_gather"]}
    with pytest.raises(ConfigError, match="ag_rs or a2a"):
        HeadMerge(Ranks(2).merges[0].ranks, "smoke signals")


# -- plans ---------------------------------------------------------------------------------------------


def plan_of(table: TableGeometry, starts: list[int], count: int, rank: int) -> TokenPlan:
    held = np.arange(len(starts) * 64, dtype=np.int32).reshape(len(starts), 64)
    return TokenPlan(table, held, np.array(starts, dtype=np.int64), count, torch.device("cpu"), rank)


@settings(max_examples=80)
@given(st.data())
def test_every_query_sees_each_earlier_position_on_exactly_one_rank(data: st.DataObject) -> None:
    size, interleave = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.sampled_from([1, 2, 16]))
    geometry = CacheGeometry([FullAttention("a", 4)], layout_of(size, interleave), block_tokens=16)
    starts = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    count = data.draw(st.sampled_from([1, 2, 9, 40]))
    plans = [plan_of(geometry.tables[0], starts, count, rank) for rank in range(size)]
    if not plans[0].merged:
        assert count > 1
        assert not any(starts)
        return
    for row, start in enumerate(starts):
        for i in range(count):
            seen: list[int] = []
            for plan in plans:
                mask = plan.mask(0, count)
                keys = plan._keys[row]
                seen += (keys if mask is None else keys[mask[row, 0, i]]).tolist()
            assert sorted(seen) == list(range(start + i + 1))


def test_every_new_entry_is_written_once_and_read_where_it_was_written() -> None:
    geometry = CacheGeometry([FullAttention("a", 4)], layout_of(3, 4), block_tokens=8)
    table = geometry.tables[0]
    held = np.arange(64, dtype=np.int32)
    for rank in range(3):
        plan = plan_of(table, [30], 50, rank)
        slots = table.slots(np.arange(30, 80), rank, held)
        assert plan.kept is not None
        assert plan.kept.tolist() == np.flatnonzero(slots >= 0).tolist()
        assert (plan.write[0] * 8 + plan.write[1]).tolist() == slots[slots >= 0].tolist()
        read = (plan.past[0].repeat_interleave(8) * 8 + torch.arange(8).repeat(plan.past.shape[1]))[: plan.past_columns]
        expected = table.slots(plan._keys[0].numpy(), rank, held)
        assert read.tolist() == expected.tolist()


def test_a_first_chunk_and_a_window_need_no_other_rank() -> None:
    geometry = CacheGeometry([FullAttention("a", 4), SlidingWindow("b", 4, 7)], layout_of(2, 1), block_tokens=4)
    full, window = geometry.tables
    assert not plan_of(full, [0, 0], 5, 1).merged
    assert plan_of(full, [0, 0], 5, 1).is_plain_causal
    assert plan_of(full, [0, 3], 5, 1).merged
    assert plan_of(full, [0], 1, 1).merged
    assert not plan_of(window, [9], 1, 1).merged


def test_a_runner_alone_refuses_split_tokens() -> None:
    layout = inspect_model(tiny_model("KimiLinear"))
    with pytest.raises(ConfigError, match="over 2 ranks and 1 run"):
        ModelRunner(tiny_model("KimiLinear"), layout, CacheGeometry(layout.groups, layout_of(2, 1)), 40)


# -- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "interleave", "form"), [(3, 2, "ag_rs"), (4, 16, "a2a")])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_forks_and_steps_equal_one_forward(name: str, size: int, interleave: int, form: str) -> None:
    """Chunked prefill over split history, a fork inside a block, verification-like rows and single steps, ragged."""
    model = tiny_model(name)
    cache = HandCache(model, parallel=layout_of(size, interleave), form=form)
    stem, left, right, short = text(1, 75), text(2, 30), text(3, 30), text(4, 3)
    expected = {
        "left": reference(model, stem + left),
        "right": reference(model, stem + right),
        "short": reference(model, short),
    }
    for row in ("left", "short"):
        cache.start(row)
    for start, stop in ((0, 41), (41, 75)):
        found = cache.step({"left": stem[start:stop]}, whole=True).all_logits[0]
        assert worst(found, expected["left"][start:stop]) < TOLERANCE
    copies = cache.fork("left", "right")
    result = cache.step({"left": left[:7], "right": right[:7], "short": short[:1]}, copies=copies, whole=True)
    assert worst(result.all_logits[0], expected["left"][75:82]) < TOLERANCE
    assert worst(result.all_logits[1], expected["right"][75:82]) < TOLERANCE
    assert worst(result.all_logits[2], expected["short"][:1]) < TOLERANCE
    for i in range(2):
        result = cache.step({"left": [left[7 + i]], "right": [right[7 + i]], "short": [short[1 + i]]})
        for row, logits in zip(("left", "right", "short"), result.logits, strict=True):
            position = {"left": 82, "right": 82, "short": 1}[row] + i
            assert worst(logits, expected[row][position]) < TOLERANCE
    assert len(cache.ranked.ranks.exchange.calls[0]) > 0


def test_a_rank_stores_its_own_tokens_and_nothing_else() -> None:
    """The arena starts full of 0xFF; of the full-attention entries, a rank writes those it owns."""
    cache = HandCache(tiny_model("Qwen3"), parallel=layout_of(2, 4))
    cache.start("a")
    cache.step({"a": text(1, 50)})
    table = cache.geometry.tables[0]
    assert table.kind is TableKind.PREFIX
    for rank, runner in enumerate(cache.ranked.runners):
        keys = runner.arena.entries(0)[0]
        written = ~keys.isnan().flatten(2).all(dim=-1).flatten()
        slots = table.slots(np.arange(50), rank, cache.tables["a"][0])
        assert np.flatnonzero(written.numpy()).tolist() == sorted(slots[slots >= 0].tolist())


def test_rejected_tokens_are_overwritten_like_any_other() -> None:
    """A verification of four tokens of which one counts: the next step starts behind it, on other ranks perhaps."""
    model = tiny_model("Qwen3")
    cache = HandCache(model, parallel=layout_of(2, 1))
    tokens = text(1, 40)
    cache.start("a")
    cache.step({"a": tokens[:30]})
    cache.step({"a": [tokens[30], 9, 9, 9]})
    cache.length["a"] = 31
    found = cache.step({"a": tokens[31:36]}, whole=True).all_logits[0]
    assert worst(found, reference(model, tokens)[31:36]) < TOLERANCE
