"""The vLLM preset, against what its rules give by hand. Blocks have 64 tokens, and a state takes three pages."""

from dataclasses import replace

import numpy as np
import pytest

from headway.cache import ChunkedLocal, FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay import ReplayConfig, ReplayResult, Trace, TraceBuilder, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.replay.ask.options import ModelChoice, RankChoice
from headway.replay.ask.sizing import sized_model
from headway.replay.config.presets import VllmPreset
from headway.replay.imitate.paged import PagedCache, PagedRequest, PageSizes
from headway.replay.imitate.pool import PagePool
from headway.replay.imitate.vllm import _Vllm, vllm_pages
from headway.replay.run.ledger import Ledger

BLOCK, TOKEN = 64, 1000
PAGE = BLOCK * TOKEN
HYBRID: list[LayerSpec] = [FullAttention("attention", TOKEN), Recurrent("state", 3 * PAGE - 100)]


def trace(*prompts: list[int], tail: int = 8, answer: int = 4) -> Trace:
    """Prompts of whole blocks of 64 tokens and a tail that is each one's own."""
    builder = TraceBuilder("made", "test", BLOCK)
    for time, blocks in enumerate(prompts):
        builder.add_blocks(blocks, len(blocks) * BLOCK + tail, answer, time)
    return builder.build()


def run(found: Trace, pages: int | None = None, dcp: int = 1, **settings: object) -> ReplayResult:
    preset = VllmPreset(block_tokens=BLOCK, **({"running": 1, "state_groups": 3} | settings))  # type: ignore[arg-type]
    memory = None if pages is None else (pages + 1) * PAGE  # one page is the null block
    layout = ParallelLayout(tp=dcp, dcp=dcp)
    return replay_trace(found, ReplayConfig(HYBRID, memory, layout, preset=preset))


def hits(found: Trace, pages: int | None = None, **settings: object) -> list[int]:
    """Tokens that each request reused: from runs of longer and longer parts of the trace."""
    totals = [run(found.head(n), pages, **settings).whole.hit_tokens for n in range(1, len(found) + 1)]  # type: ignore[arg-type]
    return [after - before for before, after in zip([0, *totals], totals, strict=False)]


def test_a_hit_is_the_last_block_boundary_with_a_state() -> None:
    again = trace([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    assert hits(again) == [0, 256, 256]
    assert run(again).kinds["prompt_end"].taken == 2
    assert hits(trace([1, 2, 3, 4], [1, 2, 3, 4, 5], tail=0)) == [0, 0], "at 256 no state is kept: it is not before 255"


def test_where_prompts_part_a_state_is_kept_for_the_next() -> None:
    parting = trace([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8])
    assert hits(parting) == [0, 0, 128]
    found = run(parting)
    assert found.kinds["junction"].taken == 1
    assert found.whole.lost["state_never_taken"] == 128
    assert hits(parting, retention="dense", step_tokens=BLOCK) == [0, 128, 128], "each step ends on a boundary"
    assert hits(parting, retention="dense") == [0, 0, 128], "one step reaches the end: no state on the way"


def test_pages_of_attention_and_of_states() -> None:
    found = run(trace([1, 2, 3, 4]))
    assert found.block_bytes == PAGE
    assert found.memory[-1].used == (4 + 3) * PAGE, "four whole blocks and a state; what is not whole is given back"
    assert found.memory[-1].checkpoints == 3 * PAGE


def test_a_request_that_meets_another_in_flight_waits_for_its_state() -> None:
    assert hits(trace([1, 2, 3], [1, 2, 3], [1, 2, 3]), running=3) == [0, 192, 192]
    ledger = Ledger(trace([1]), np.zeros(1, dtype=np.int64), None)
    cache = PagedCache(PageSizes(BLOCK, 1, PAGE, 3, 100), dense=False, ledger=ledger)
    first, second = (PagedRequest(n, 200, 200, 204, [11, 12, 13]) for n in range(2))
    cache.look_up(first)
    assert cache.enter(first, 192)
    cache.look_up(second)
    assert second.hit == 192
    assert not cache.enter(second, 200)
    cache.new_step()
    assert cache.enter(second, 200)


def test_what_is_under_way_is_said() -> None:
    """Both begin in the same step. The second finds two blocks of the first, and no state where they part."""
    together = trace([1, 2, 3], [1, 2, 9])
    assert run(together, running=2).whole.lost["still_computing"] == 128
    assert "still_computing" not in run(together, running=1).whole.lost
    assert run(together, running=1).whole.lost["state_never_taken"] == 128


def test_what_was_freed_first_is_taken_first() -> None:
    """The first prompt leaves two blocks and a state: five pages. The second needs three blocks, the state at its last
    boundary and the running one behind it: nine. With 13 pages it takes one of the first's state."""
    first, second = [1, 2], [11, 12]
    assert hits(trace(first, second, first), pages=14) == [0, 0, 128]
    assert hits(trace(first, second, first), pages=13) == [0, 0, 0]
    found = run(trace(first, second, first), pages=13)
    assert found.whole.lost["evicted"] == 128
    assert found.kinds["prompt_end"].evicted >= 1


def test_pages_without_a_key_are_taken_first() -> None:
    gone: list[object] = []
    pool = PagePool(3, gone.append)
    named, blank, other = pool.take(), pool.take(), pool.take()
    pool.name(named, "a")
    for page in (named, blank, other):
        pool.release(page)
    assert pool.free == 3
    assert {id(pool.take()), id(pool.take())} == {id(blank), id(other)}
    assert pool.find("a") is named
    assert gone == []
    assert pool.take() is named
    assert (gone, pool.find("a"), pool.free) == (["a"], None, 0)


def test_in_plain_order_pages_without_a_key_wait_their_turn() -> None:
    pool = PagePool(2, lambda _: None, blank_first=False)
    named, blank = pool.take(), pool.take()
    pool.name(named, "a")
    pool.release(named)
    pool.release(blank)
    assert pool.take() is named


def test_a_key_is_gone_when_its_last_page_is() -> None:
    gone: list[object] = []
    pool = PagePool(2, gone.append)
    pages = [pool.take(), pool.take()]
    for page in pages:
        pool.name(page, "a")
        pool.release(page)
    pool.take()
    assert (gone, pool.find("a")) == ([], pages[1])
    pool.hold(pages[1])
    pool.release(pages[1])
    pool.take()
    assert gone == ["a"]


def test_context_parallelism_makes_attention_pages_wide() -> None:
    """Four ranks: a page covers four blocks. A hit may end inside one, at an earlier prompt's last boundary."""
    longer = trace([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert hits(longer, dcp=4) == [0, 320]
    assert run(longer.head(1), dcp=4).memory[-1].used == (2 + 3) * PAGE, "two pages of attention, and a state"
    inside = trace([1, 2, 3, 4, 5], [1, 2, 8, 9, 9], [1, 2, 7, 7, 7])
    assert hits(inside, dcp=4) == [0, 0, 0], "two blocks of a page are not found by themselves"
    whole = trace([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8], [1, 2, 3, 4, 9])
    assert hits(whole, dcp=4) == [0, 0, 256], "a whole page is, and where it ends is a junction"


def test_states_at_the_common_multiple_alone() -> None:
    again = trace([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 7])
    assert hits(again, dcp=4) == [0, 384, 0], "a page of attention covers 256 tokens; states lie at multiples of 64"
    assert hits(again, dcp=4, retention="common") == [0, 256, 0]
    assert run(again, dcp=4, retention="common").whole.lost["state_never_taken"] == 128 + 192
    assert hits(again, retention="common") == hits(again), "without context parallelism nothing is coarse"


def test_one_geometry_for_all_groups_finds_no_state() -> None:
    again = trace([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    found = run(again, dcp=4, geometry="process")
    assert found.kinds["prompt_end"].taken == 1
    assert found.whole.hit_tokens == 0
    assert found.whole.lost["state_never_taken"] == 384
    assert hits(again, geometry="process") == hits(again), "one rank has one geometry"
    attention = ReplayConfig(HYBRID[:1], None, ParallelLayout(tp=4, dcp=4), preset="vllm,geometry=process")
    assert replay_trace(again, attention).whole.hit_tokens > 0, "only states are lost"


def test_who_finds_no_page_preempts_the_youngest(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their ends both have 436 tokens: seven blocks and a state each, twenty pages."""
    victims, preempt = [], _Vllm._preempt

    def noted(self: _Vllm, victim: PagedRequest) -> None:
        victims.append(victim.request)
        preempt(self, victim)

    monkeypatch.setattr(_Vllm, "_preempt", noted)
    assert run(trace([1, 2], [11, 12], answer=300), pages=40, running=2).refused == 0
    assert victims == []
    assert run(trace([1, 2], [11, 12], answer=300), pages=19, running=2).refused == 0
    assert set(victims) == {1}


def test_prompts_that_never_fit_are_refused() -> None:
    requests = trace(list(range(20)), [1])
    found = run(requests, pages=16)
    assert (found.refused, found.refused_tokens) == (1, 20 * BLOCK + 8)
    assert found.needed % found.block_bytes == 0
    enough = found.needed // found.block_bytes - 1
    assert run(requests, pages=enough).refused == 0
    assert run(requests, pages=enough - 1).refused == 1


def test_a_block_is_as_large_as_a_state_needs() -> None:
    k3 = ReplayConfig([FullAttention("a", 13_824), Recurrent("s", 56_171_520)], None)
    pages = vllm_pages(k3, VllmPreset(state_groups=3))
    assert pages.block_tokens == 1360, "56,171,520 / 3 / 13,824 = 1354.4 tokens, rounded up to a multiple of 16"
    assert pages.page_bytes == 1360 * 13_824
    layers = replace(k3, layers={"a": 24, "s": 69})
    assert vllm_pages(layers, VllmPreset()).block_tokens == 1424, "of a layer: 814,080 / 576 = 1413.3 tokens"
    pages = vllm_pages(replace(layers, kinds={"a": "mla"}), VllmPreset())
    assert (pages.block_tokens, pages.state_groups) == (1536, 3), "with latent attention in steps of 128"
    assert vllm_pages(layers, VllmPreset(4096)).block_tokens == 4096
    with pytest.raises(ConfigError, match="must be at least 1355; vLLM takes 1360"):
        vllm_pages(k3, VllmPreset(512, state_groups=3))
    with pytest.raises(ConfigError, match="full attention"):
        vllm_pages(ReplayConfig([Recurrent("s", 100)], None), VllmPreset())
    with pytest.raises(ConfigError, match="context-parallel"):
        vllm_pages(
            ReplayConfig([FullAttention("a", 10), FullAttention("d", 10, 0, False)], None, ParallelLayout(tp=2, dcp=2)),
            VllmPreset(state_groups=1),
        )


def test_the_newest_kernels_of_gated_delta_nets_want_wider_blocks() -> None:
    config = ReplayConfig(
        [FullAttention("a", 1000), Recurrent("s", 3 * 100_000)], None, layers={"a": 1, "s": 3}, kinds={"s": "gdn"}
    )
    assert vllm_pages(config, VllmPreset(version="0.32")).block_tokens == 112
    assert vllm_pages(config, VllmPreset()).block_tokens == 128


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("kimi-k3", 3),  # 69 layers with states, in groups as large as the 24 of attention
        ("kimi-linear", 3),  # 20 and 7
        ("ling-3.0-flash", 5),  # 35 and 7
        ("qwen3-next", 3),  # 36 and 12
        ("jamba-v0.1", 7),  # 28 and 4
        ("bamba-9b", 10),  # 29 and 3
        ("nemotron-3-nano", 4),  # 23 and 6
        ("falcon-h1-34b", 1),  # 72 and 72
    ],
)
def test_layers_say_how_many_pages_a_state_takes(name: str, groups: int) -> None:
    model = model_of(name, ParallelLayout())
    config = ReplayConfig(model.groups, None, preset="vllm", layers=model.layers, kinds=model.kinds)
    assert vllm_pages(config, VllmPreset()).state_groups == groups
    found = replay_trace(trace([1]), config)
    assert f"state_groups={groups}" in found.preset, "the result says what was found"


def test_attention_in_several_groups_is_refused() -> None:
    config = ReplayConfig([FullAttention("a", 300), Recurrent("s", 10_000)], None, layers={"a": 30, "s": 10})
    with pytest.raises(ConfigError, match=r"attention in several groups.*give state_groups"):
        vllm_pages(config, VllmPreset())
    assert vllm_pages(config, VllmPreset(state_groups=1)).state_groups == 1
    with pytest.raises(ConfigError, match="how many layers group 's' has is not known"):
        vllm_pages(replace(config, layers={"a": 30}), VllmPreset())
    draft = sized_model(ModelChoice("kimi-k3", draft="kimi-k3-mla"), RankChoice())
    k3 = ReplayConfig(draft.groups, None, layers=draft.layers, kinds=draft.kinds)
    assert vllm_pages(k3, VllmPreset()).state_groups == 3, "five layers more of the same kind: 29"


NEAR: list[LayerSpec] = [FullAttention("attention", TOKEN), SlidingWindow("near", 2 * TOKEN, 100)]


def near(found: Trace, pages: int | None = None, **settings: object) -> ReplayResult:
    """A group of one layer of attention, and two of one layer with a window: 99 tokens before, two blocks of 64."""
    preset = VllmPreset(block_tokens=BLOCK, **({"running": 1} | settings))  # type: ignore[arg-type]
    memory = None if pages is None else (pages + 1) * PAGE
    return replay_trace(found, ReplayConfig(NEAR, memory, preset=preset, layers={"attention": 1, "near": 2}))


def test_a_window_is_found_where_its_tail_was_kept() -> None:
    again = trace([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9])
    assert near(again.head(3)).whole.hit_tokens == 256 + 256
    found = near(again)
    assert found.whole.hit_tokens == 256 + 256 + 0, "the fourth parts at 192: there no tail was kept"
    assert found.whole.lost["state_never_taken"] == 192
    assert found.kinds["prompt_end"].taken == 3
    dense = near(again, retention="dense")
    assert dense.whole.hit_tokens == 256 + 256 + 192
    parting = trace([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 8])
    assert near(parting).whole.hit_tokens == 192, "the second left the junction's tail for the third"


def test_pages_that_a_window_has_left_are_free() -> None:
    found = near(trace([1, 2, 3, 4, 5, 6]), step_tokens=BLOCK)
    assert found.memory[-1].used == (6 + 2 * 2) * PAGE, "six blocks of attention, a tail of two for each group"
    assert found.memory[-1].checkpoints == 2 * 2 * PAGE
    assert near(trace([1, 2, 3, 4, 5, 6]), pages=8 + 2 * 4, step_tokens=BLOCK).refused == 0
    assert near(trace([1, 2, 3, 4, 5, 6]), pages=8 + 2 * 4 - 1, step_tokens=BLOCK).refused == 1


def test_windows_of_other_sizes_align_hits_to_both() -> None:
    """A token of a window's layer has half the bytes: its pages cover two blocks."""
    groups = [FullAttention("attention", TOKEN), SlidingWindow("near", TOKEN, 100)]
    config = ReplayConfig(groups, None, preset=VllmPreset(BLOCK, running=1), layers={"attention": 1, "near": 2})
    assert vllm_pages(config, VllmPreset(BLOCK)).align == 2
    assert replay_trace(trace([1, 2, 3], [1, 2, 3]), config).whole.hit_tokens == 128
    assert replay_trace(trace([1, 2, 3, 4], [1, 2, 3, 4]), config).whole.hit_tokens == 256


def test_chunks_are_kept_as_full_attention() -> None:
    groups = [FullAttention("attention", TOKEN), ChunkedLocal("near", 2 * TOKEN, 128)]
    config = ReplayConfig(groups, None, preset=VllmPreset(BLOCK, running=1), layers={"attention": 1, "near": 2})
    found = replay_trace(trace([1, 2, 3], [1, 2, 9]), config)
    assert (found.whole.hit_tokens, found.block_bytes) == (128, 3 * PAGE)


def test_a_model_without_states_hits_every_block() -> None:
    config = ReplayConfig([FullAttention("a", TOKEN)], None, preset=VllmPreset(block_tokens=BLOCK, running=1))
    assert replay_trace(trace([1, 2, 3, 4], [1, 2, 5, 6]), config).whole.hit_tokens == 128
