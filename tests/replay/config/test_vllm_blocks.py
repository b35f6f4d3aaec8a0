"""`headway-in-vllm`: this cache with vLLM's pages as its blocks."""

import json
from pathlib import Path

import pytest

from headway.cache import FullAttention, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.formats import read_trace
from headway.replay import ReplayConfig, generate, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.replay.config.scale import Scale, scale


def sized(name: str, layout: ParallelLayout, memory: int, width: int, dtype: str = "bf16") -> Scale:
    model = model_of(name, layout, kv_dtype=dtype)
    config = ReplayConfig(
        model.groups, memory, layout, preset="headway-in-vllm", layers=model.layers, kinds=model.kinds
    )
    return scale(config, width)


@pytest.mark.parametrize("width", [512, 1])
def test_a_page_is_a_block_and_a_state_takes_one_for_each_group(width: int) -> None:
    found = sized("kimi-k3", ParallelLayout(tp=8, dcp=8), 58_000_000_000, width, "fp8")
    geometry = found.cache.geometry()
    assert found.block_bytes == 21_233_664
    assert found.cache.blocks == 58_000_000_000 // 21_233_664 - 1, "one page is vLLM's null block"
    assert (found.symbol, geometry.prefix_tables[0].span * found.symbol) == (width, 8 * 1536)
    assert geometry.state_blocks == 3


def test_symbols_are_as_wide_as_pages_and_trace_blocks_allow() -> None:
    found = sized("qwen3-next", ParallelLayout(tp=2), 40_000_000_000, 512)
    assert found.symbol == 32, "pages of 1,056 tokens, blocks of 512"
    assert found.cache.geometry().prefix_tables[0].span * 32 == 1056


def test_groups_with_equal_needs_share_a_run_of_pages() -> None:
    """Gemma 4 31B, TP 1: a page covers 32 tokens of attention, and 16 of one of five groups of windows."""
    found = sized("gemma-4-31b", ParallelLayout(), 60_000_000_000, 512)
    geometry, page = found.cache.geometry(), 2_621_440
    attention, window = geometry.prefix_tables[0], geometry.tail_tables[0]
    assert found.block_bytes == 5 * page
    assert found.cache.blocks == (60_000_000_000 - page) // (5 * page)
    assert (attention.span * found.symbol, window.span * found.symbol) == (5 * 32, 16)
    assert (window.window - 1) * found.symbol >= 1023


def test_the_end_of_the_last_whole_page_is_a_message_boundary() -> None:
    """1,056 tokens per page of Qwen3-Next: 33 symbols of 32 tokens."""
    found = sized("qwen3-next", ParallelLayout(tp=2), 40_000_000_000, 512)
    assert found.boundaries([], 3 * 1056, 99) == (66,), "a prompt computes its last token, so this page is not whole"
    assert found.boundaries([], 3 * 1056 + 1, 100) == (99,)
    assert found.boundaries([600], 1056, 33) == (16,), "a mark lies at the end of a trace block; no page is whole"
    windows = sized("gemma-4-31b", ParallelLayout(), 60_000_000_000, 512)
    assert windows.boundaries([], 5000, 313) == (), "where there is no state there is none to keep"


def test_siblings_resume_at_the_end_of_a_page(tmp_path: Path) -> None:
    """Prompts of four pages share seven of their eight blocks: the second one resumes where its third page ends."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": 4096, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 100 + i]}
        for i in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = [FullAttention("a", 1000), Recurrent("s", 1_000_000)]
    preset = "headway-in-vllm,block_tokens=1024,state_groups=1"
    result = replay_trace(read_trace(path), ReplayConfig(groups, 10**9, outputs="never", preset=preset))
    assert result.whole.hit_tokens == 3 * 1024


def test_policies_are_this_caches_own() -> None:
    groups = [FullAttention("a", 1000), Recurrent("s", 3 * 100_000)]
    trace = generate("chat", 60, seed=1)

    def rate(**more: object) -> float:
        config = ReplayConfig(groups, 20_000_000, preset="headway-in-vllm,state_groups=3", **more)  # type: ignore[arg-type]
        result = replay_trace(trace, config)
        assert result.preset == "headway-in-vllm-0.33,block_tokens=112,state_groups=3"
        assert result.block_bytes == 112_000
        return result.whole.token_hit_rate

    assert rate(eviction="lru") != rate() != rate(placement=("prompt_end",))
    assert replay_trace(trace, ReplayConfig(groups, 20_000_000)).whole.token_hit_rate >= rate(), (
        "whose blocks are small"
    )


def test_what_cannot_work_is_refused() -> None:
    groups = [FullAttention("a", 1000), SlidingWindow("w", 1000, 100)]
    with pytest.raises(ConfigError, match="how many layers group 'a' has is not known"):
        scale(ReplayConfig(groups, 10**9, preset="headway-in-vllm"), 64)
    with pytest.raises(ConfigError, match="less than one block"):
        scale(ReplayConfig(groups, 10_000, preset="headway-in-vllm", layers={"a": 1, "w": 1}), 64)
