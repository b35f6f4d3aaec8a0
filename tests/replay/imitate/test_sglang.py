"""The SGLang preset, against what its rules give by hand. Blocks of the trace have 64 tokens, chunks 128."""

from dataclasses import replace

import pytest

from headway.cache import FullAttention, LayerSpec, ParallelLayout, Recurrent
from headway.errors import ConfigError
from headway.replay import ReplayConfig, ReplayResult, SglangPreset, Trace, TraceBuilder, replay_trace
from headway.replay.imitate.sglang import Pools, sglang_pools

HYBRID: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 200_000)]


def trace(*prompts: list[int], answer: int = 4) -> Trace:
    builder = TraceBuilder("made", "test", 64)
    for time, blocks in enumerate(prompts):
        builder.add_blocks(blocks, len(blocks) * 64 + 8, answer, time)
    return builder.build()


def run(found: Trace, slots: int = 0, memory: int | None = None, outputs: str | None = None) -> ReplayResult:
    preset = SglangPreset(state_slots=slots, chunk_tokens=128)
    return replay_trace(found, ReplayConfig(HYBRID, memory, preset=preset, outputs=outputs))


def hits(found: Trace, slots: int = 0, memory: int | None = None) -> list[int]:
    totals = [run(found.head(n), slots, memory).whole.hit_tokens for n in range(1, len(found) + 1)]
    return [after - before for before, after in zip([0, *totals], totals, strict=False)]


def test_each_chunk_leaves_one_state() -> None:
    found = run(trace([1, 2, 3, 4, 5]))
    assert {kind: counts.taken for kind, counts in found.kinds.items()} == {"chunk_end": 2, "prompt_end": 1}
    assert hits(trace([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 9])) == [0, 320, 128]


def test_a_branching_point_takes_the_place_of_the_chunks_end() -> None:
    """The second prompt resumes at 128 and parts at 192, inside its chunk [128, 256)."""
    parting = trace([1, 2, 3, 4, 5], [1, 2, 3, 8, 8], [1, 2, 3, 8, 9], [1, 2, 3, 9])
    assert hits(parting) == [0, 128, 192, 192]
    assert run(parting.head(2)).kinds["junction"].taken == 1
    assert run(parting.head(2)).kinds["chunk_end"].taken == 2, "both are the first prompt's"


def test_the_least_recently_used_state_goes() -> None:
    order = trace([1], [2], [1], [3], [1], [2])
    assert hits(order, slots=2) == [0, 0, 64, 0, 64, 0]
    assert hits(order, slots=3) == [0, 0, 64, 0, 64, 64]
    assert run(order, slots=2).whole.lost["evicted"] == 64


def test_with_its_last_state_a_path_leaves_the_tree() -> None:
    """With one slot nobody knows any more that the third prompt begins like the first."""
    order = trace([1, 2, 3, 4], [5], [1, 9])
    assert run(order, slots=10).kinds["junction"].taken == 1
    assert "junction" not in run(order, slots=1).kinds


def test_an_answer_leaves_a_state_where_it_crosses_the_track() -> None:
    assert "answer_end" not in run(trace([1], answer=180)).kinds, "72 + 180 tokens end before 256"
    assert run(trace([1], answer=185)).kinds["answer_end"].taken == 1
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks([1], 72, 200, 0.0)
    builder.add_blocks([1, 2, 3, 4, 5], 328, 4, 1.0)
    found = run(builder.build(), outputs="continuation")
    assert found.whole.hit_tokens == 256


def test_attention_memory_is_a_pool_of_its_own() -> None:
    pools = sglang_pools(ReplayConfig(HYBRID, 3_800_000, ParallelLayout(tp=2, dcp=2)), SglangPreset())
    assert pools == Pools(slots=9, tokens=4000, state_bytes=200_000, token_bytes=500.0, ratio=0.9)
    pools = sglang_pools(ReplayConfig(HYBRID, 3_000_000), SglangPreset(state_slots=5))
    assert (pools.slots, pools.tokens) == (5, 2000)
    order = trace([1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3])
    assert hits(order, slots=100, memory=20_000_000 + 9 * 64_000) == [0, 0, 0, 192]
    assert hits(order, slots=100, memory=20_000_000 + 8 * 64_000) == [0, 0, 0, 128], "one block less: its end goes"
    assert hits(order, slots=100, memory=20_000_000 + 6 * 64_000) == [0, 0, 0, 0], "then the state before it as well"


def test_prompts_larger_than_attention_memory_are_refused() -> None:
    requests = trace(list(range(20)), [30])
    found = run(requests, slots=2, memory=400_000 + 1_000_000)
    assert (found.refused, found.refused_tokens) == (1, 20 * 64 + 8)
    assert run(requests, slots=2, memory=found.needed).refused == 0
    for ratio, memory in ((0.9, 1_500_000), (4.0, 3_000_000)):
        few = ReplayConfig(HYBRID, memory, preset=f"sglang,memory_ratio={ratio}")
        split = replay_trace(requests, few)
        assert split.refused == 1
        assert replay_trace(requests, replace(few, memory=split.needed)).refused == 0


def test_a_model_without_states_is_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent states"):
        sglang_pools(ReplayConfig(HYBRID[:1], None), SglangPreset())
