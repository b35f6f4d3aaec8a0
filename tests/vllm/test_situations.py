"""Situations that vLLM tests its prefix cache in, told as what a request can reuse here.

vLLM's `test_prefix_caching.py` asserts block ids, hashes and the order of its free list. What a user sees of it is how
many tokens hit; so each situation stands here as that number, in our words. Where vLLM rounds to its block, ours is
exact: then vLLM's number stands beside it. Left out, because nothing of ours corresponds: HiSparse and KV connectors
(refused at the start), retention intervals and masks (placement decides), and tables of hashes (there are none).
"""

from types import SimpleNamespace

import pytest
from tests.vllm.one_by_one import BLOCK, OneByOne
from tests.vllm.standin import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

COMMON = [10 + i // BLOCK for i in range(3 * BLOCK)]
MIXES = [
    ["full", "window"],
    ["full", "state"],
    ["window", "state"],
    ["window", "wide window"],
    ["full", "chunk"],
    ["full", "window", "window"],
    ["full", "state", "state"],
    ["full", "window", "state"],
    ["full", "window", "wide window"],
    ["full", "full", "window"],
    ["full", "full", "state"],
    ["full", "window", "full", "wide window"],
    ["full", "state", "full", "state"],
    ["window", "state", "wide window", "state"],
    ["full", "full", "window", "state"],
]


def test_a_prompt_again_hits_all_but_its_last_token() -> None:
    vllm = OneByOne("full")
    assert vllm.run([*COMMON, *[3] * 7]) == 0
    assert vllm.run([*COMMON, *[3] * 7]) == 54  # vLLM: 48, its last whole block
    assert vllm.run([*COMMON, *[3] * 5]) == 52
    assert vllm.run([*COMMON, 4]) == 48


def test_running_requests_share_what_is_computed() -> None:
    vllm = OneByOne("full")
    first, second = vllm.request([*COMMON, 3]), vllm.request([*COMMON, 4])
    assert vllm.admit(first) == 0
    assert vllm.admit(second) == 48
    mine = vllm.blocks(second)
    assert vllm.blocks(first)[:3] == mine[:3]
    vllm.end(first)
    assert vllm.blocks(second) == mine


@pytest.mark.parametrize("mix", MIXES, ids=" ".join)
def test_a_sibling_hits_the_common_prefix_in_every_mix_of_groups(mix: list[str]) -> None:
    """A state exists where it was taken: the first sibling shows that traffic parts there, the next one hits."""
    vllm = OneByOne(*mix)
    first, second, third = ([*COMMON[:41], *[last] * 14] for last in (3, 4, 5))
    assert vllm.run(first) == 0
    assert vllm.run(second) == (0 if "state" in mix else 41)
    assert vllm.run(third) == 41
    assert vllm.run(first) == 54


@pytest.mark.parametrize("mix", MIXES, ids=" ".join)
def test_a_sibling_hits_the_last_whole_page_of_a_prompt_at_once(mix: list[str]) -> None:
    """There vLLM keeps a state, and so does Headway, before anyone has shown where traffic parts."""
    vllm = OneByOne(*mix)
    assert vllm.run([*COMMON, *[3] * 7]) == 0
    assert vllm.run([*COMMON, *[4] * 5]) == 48


@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_entries_of_drafts_need_the_next_token_too(lookahead: int, more: int) -> None:
    """A state at the prompt's end is hit with `lookahead` more tokens alike; without a state only the last is lost."""
    vllm = OneByOne("full", lookahead=lookahead)
    assert vllm.run([*range(100, 149)]) == 0
    other = [*range(100, 140 + more), *range(900, 920)]
    assert vllm.run(other) == 40 + more - lookahead  # vLLM: 32, or one block less


@pytest.mark.parametrize("sharded", [True, False])
def test_each_group_has_its_own_split_over_ranks(sharded: bool) -> None:
    """A target split over 8 ranks, a draft that may not be, and states that never are: hits are exact with all."""
    draft = MLAAttentionSpec(block_size=BLOCK, dcp_sharded=sharded)
    vllm = OneByOne("full", draft, "state", dcp=8)
    spans = [manager.block_size for manager in vllm.manager.coordinator.single_type_managers]
    assert spans[:2] == [8 * BLOCK, 8 * BLOCK if sharded else BLOCK]
    common = [i // 128 for i in range(256)]
    assert vllm.run([*common, *[99] * 7]) == 0
    assert vllm.run([*common, *[99] * 7, 5, 6]) == 263  # vLLM: 256, two blocks of the target


def test_groups_with_blocks_of_unlike_sizes() -> None:
    vllm = OneByOne(FullAttentionSpec(block_size=32), SlidingWindowSpec(block_size=16, sliding_window=16))
    assert vllm.run([*range(100, 180)]) == 0
    assert vllm.run([*range(100, 141), 7, 7]) == 41  # vLLM: 32, the larger block


def test_prompt_logprobs_read_nothing_and_are_read() -> None:
    vllm = OneByOne("full", "state")
    assert vllm.run([*COMMON, 3, 4], skip_reading_prefix_cache=True) == 0
    assert vllm.run([*COMMON, 3, 4], skip_reading_prefix_cache=True) == 0
    assert vllm.run([*COMMON, 3, 4, 5]) == 50


def test_the_next_turn_hits_prompt_and_answer() -> None:
    vllm = OneByOne("full", "window", "state")
    vllm.run(COMMON, 8, 8, 8, 8)
    assert vllm.run([*COMMON, 8, 8, 8, 8, 20, 21]) == 51  # the last sampled token was never computed


def test_eviction_takes_what_is_worth_least_and_spares_what_is_in_use() -> None:
    vllm = OneByOne("full", blocks=11, eviction="lru")
    vllm.run([*range(100, 187)])
    running = vllm.request([*range(300, 348)])
    assert vllm.admit(running) == 0
    held = vllm.blocks(running)
    assert vllm.run([*range(100, 135)]) == 34
    assert vllm.run([*range(500, 600)]) == 0  # needs 7 of the 7 that are not in use
    assert vllm.blocks(running) == held
    assert vllm.run([*range(100, 135)]) < 34


def test_a_hit_is_not_evicted_for_the_request_that_has_it() -> None:
    vllm = OneByOne("full", blocks=3)
    vllm.run([*range(100, 116)])
    vllm.run([*range(200, 216)])
    assert vllm.run([*range(100, 132)]) == 16


def test_no_room_changes_nothing() -> None:
    vllm = OneByOne("full", blocks=11)
    running = vllm.request(COMMON)
    vllm.admit(running)
    vllm.run([*COMMON, *COMMON])
    other = vllm.request([7] * 2 * BLOCK)
    vllm.admit(other)
    free = vllm.manager.block_pool.get_num_free_blocks()
    waiting = vllm.request([*COMMON, *COMMON, *range(500, 548)])
    assert vllm.admit(waiting) is None
    vllm.manager.new_step_starts()
    assert vllm.manager.block_pool.get_num_free_blocks() == free
    vllm.end(other)
    assert vllm.admit(waiting) == 96


def test_different_images_behind_the_same_placeholders_share_nothing_from_there_on() -> None:
    def image(content: str, start: int) -> SimpleNamespace:
        return SimpleNamespace(identifier=content, mm_position=SimpleNamespace(offset=start, length=10))

    vllm, tokens = OneByOne("full"), [*range(100, 111), *[-1] * 10, *range(200, 220)]
    tokens = [0 if token == -1 else token for token in tokens]
    assert vllm.run(tokens, mm_features=[image("cat", 11)]) == 0
    assert vllm.run(tokens, mm_features=[image("cat", 11)]) == 40
    assert vllm.run(tokens, mm_features=[image("dog", 11)]) == 11
    assert vllm.run(tokens) == 11


def test_a_video_and_its_sound_on_the_same_placeholders_are_one_content() -> None:
    """As Qwen2.5-Omni has them; in other models a medium may have no placeholder at all."""

    def media(video: str, sound: str) -> list[SimpleNamespace]:
        at = [(video, 11, 10), (sound, 11, 10), ("text", 30, 0)]
        return [SimpleNamespace(identifier=i, mm_position=SimpleNamespace(offset=s, length=n)) for i, s, n in at]

    vllm, tokens = OneByOne("full"), [*range(100, 111), *[0] * 10, *range(200, 220)]
    assert vllm.run(tokens, mm_features=media("cat", "meow")) == 0
    assert vllm.run(tokens, mm_features=media("cat", "meow")) == 40
    assert vllm.run(tokens, mm_features=media("cat", "bark")) == 11
    assert vllm.run(tokens, mm_features=media("dog", "bark")) == 11


def test_embeddings_read_nothing_whatever_the_salts_are() -> None:
    vllm = OneByOne("full")
    vllm.run([0] * 50, cache_salt="r2")
    assert vllm.run([0] * 50, prompt_embeds=object()) == 0  # its request id is that salt


def test_a_request_that_is_aborted_before_it_was_admitted_is_told_nothing() -> None:
    vllm = OneByOne("full")
    request = vllm.request(COMMON, sampling_params=SimpleNamespace(extra_args={"headway_explain": 1}))
    vllm.manager.get_computed_blocks(request)
    assert vllm.manager.explain(request) is None
    vllm.end(request, "FINISHED_ABORTED")
    assert vllm.manager.cache.leases == 0


def test_what_cannot_be_served_is_said_at_once_and_keeps_nobody_waiting() -> None:
    """Also while others run: else it would wait for all of them, and those behind it too."""
    vllm = OneByOne("full", blocks=33)
    vllm.admit(vllm.request(COMMON))
    assert vllm.admit(vllm.request([*range(1000, 1600)])) is None
    assert vllm.admit(vllm.request([5, -1])) is None
    assert "needs 38 blocks" in vllm.manager.unservable["r2"]
    assert "negative" in vllm.manager.unservable["r3"]
    assert vllm.manager.cache.leases == 1


def test_a_session_is_told_of_its_latest_input() -> None:
    vllm = OneByOne("full", explain="all")
    session = vllm.request(COMMON, sampling_params=SimpleNamespace(extra_args={"headway_explain": 1}))
    vllm.admit(session, 8)
    vllm.end(session, "WAITING")
    session._all_token_ids[-1:] = range(200, 220)
    session.num_computed_tokens = 0
    assert vllm.admit(session, 8) == 48
    told = vllm.manager.explain(session)
    assert told
    assert (told["prompt_tokens"], told["cached_tokens"]) == (68, 48)


def test_salts_and_adapters_share_nothing() -> None:
    def adapter(name: str, number: int) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=f"/{name}")

    vllm = OneByOne("full")
    fields = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": adapter("a", 1)},
        {"lora_request": adapter("b", 2)},
    ]
    assert [vllm.run([*COMMON, 3], **each) for each in fields] == [0] * 5
    assert [vllm.run([*COMMON, 4], **each) for each in fields] == [48] * 5


def test_a_reset_forgets_while_others_run() -> None:
    """vLLM refuses a reset while requests run; here they go on with their own memory, and nobody hits it."""
    vllm = OneByOne("full", "state")
    running = vllm.request([*COMMON, 3])
    vllm.admit(running)
    held = vllm.blocks(running)
    assert vllm.manager.reset_prefix_cache()
    assert vllm.compute(running, 1, 5)
    assert vllm.blocks(running)[: len(held)] == held
    vllm.end(running)
    assert vllm.run([*COMMON, 4]) == 0


def test_without_stats_nothing_is_recorded() -> None:
    vllm = OneByOne("full")
    request = vllm.request(COMMON)
    vllm.admit(request)
    vllm.manager.record_prefix_cache_stats(request, 0)
    assert vllm.manager.make_prefix_cache_stats() is None


def test_siblings_hit_in_one_step() -> None:
    vllm, shared = OneByOne("full", "state"), [7] * 2 * BLOCK
    vllm.run(shared)
    siblings = [vllm.request([*shared, *[tail] * 8]) for tail in (60, 70, 80)]
    assert [vllm.manager.get_computed_blocks(each)[1] for each in siblings] == [32] * 3
    for each in siblings:
        assert vllm.manager.allocate_slots(each, vllm.manager.cut(each, 8)) is not None
    pages = [set(vllm.blocks(each)[2:]) for each in siblings]
    assert not pages[0] & pages[1] | pages[1] & pages[2] | pages[0] & pages[2]
    vllm.finish_step(siblings)


def test_a_window_admits_a_prompt_that_its_pages_alone_could_not_hold() -> None:
    """A window lets go behind itself: of 1,024 tokens its group holds 4 blocks and what one chunk adds."""
    vllm = OneByOne("full", "wide window", blocks=64 + 13 + 1)
    request = vllm.request([*range(1000, 2024)])
    assert vllm.manager.get_computed_blocks(request)[1] == 0
    assert all(vllm.compute(request, 128) for _ in range(8))


def test_full_attention_still_gates_what_does_not_fit() -> None:
    vllm = OneByOne("full", blocks=33)
    running = vllm.request([*range(1000, 1320)])
    vllm.admit(running)
    assert vllm.admit(vllm.request([*range(2000, 2320)])) is None


def test_drafts_that_shrink_from_step_to_step_need_no_new_pages() -> None:
    vllm = OneByOne("full", MambaSpec(num_speculative_blocks=16))
    request = vllm.request([*COMMON, *[3] * 7])
    vllm.admit(request, 1)
    for drafts in (16, 1):
        assert vllm.manager.allocate_slots(request, 1 + drafts) is not None
        vllm.finish_step([request], [4], drafts)
        request._all_token_ids.append(4)
    assert len(vllm.blocks(request)) == -(-(55 + 2 + 16) // BLOCK) + 17


@pytest.mark.parametrize("mix", [["full", "window"], ["full", "window", "window"], ["full", "state"]], ids=" ".join)
def test_a_preempted_request_comes_back_to_a_hit_and_no_page_is_given_twice(mix: list[str]) -> None:
    vllm = OneByOne(*mix, blocks=31)
    request, other = vllm.request([*COMMON, *range(500, 516)]), vllm.request([*range(900, 930)])
    vllm.admit(request, 1)
    vllm.admit(other)
    request.status = SimpleNamespace(name="PREEMPTED")
    vllm.manager.free(request)
    request.num_preemptions = 1
    assert vllm.admit(request) == 64
    pages = vllm.blocks(request) + vllm.blocks(other)
    assert len(set(pages)) == len(pages)


def test_what_was_taken_survives_other_traffic_while_there_is_room() -> None:
    vllm = OneByOne("full", "window", "wide window", "state", blocks=800)
    vllm.run([*range(10_000, 10_900)])
    assert vllm.run([*range(10_000, 10_900), 1]) == 900
    vllm.run([*range(20_000, 21_000)])
    assert vllm.run([*range(10_000, 10_900), 2]) == 900


def test_a_hit_needs_no_block_boundary_that_chunks_ended_on() -> None:
    """vLLM's Mamba groups hit where a chunk ended on a block; here the end of the prompt counts, whatever the block."""
    vllm = OneByOne("full", MambaSpec(block_size=544), lookahead=1)
    vllm.run([*range(5000, 6249)], 7)
    assert vllm.run([*range(5000, 6249)]) == 1248
