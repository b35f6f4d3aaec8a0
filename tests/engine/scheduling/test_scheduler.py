from dataclasses import replace

import numpy as np
import pytest
from tests.engine.bench import WORLDS, Bench
from tests.engine.fakes import EOS, VOCAB

from headway.cache import Hit, PrefixCache, Prompt, Reason
from headway.engine import EngineConfig, RequestFailedError, RowAnswer, longest_servable
from headway.errors import UnservableError
from headway.runtime.interface import RowFault


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def config(**options: int) -> EngineConfig:
    return EngineConfig(**({"max_batched_tokens": 16, "max_running": 4} | options))


@pytest.mark.parametrize("world", WORLDS)
def test_one_request_is_answered_and_leaves_nothing_held(world: str):
    bench = Bench(WORLDS[world])
    request = bench.add(prompt(30), 10)
    bench.run()
    bench.check_right(request)
    assert request.finish_reason == ("stop" if request.answer[-1] == EOS else "length")
    assert bench.news[-1].delta.result.tokens == tuple(bench.expected(request))
    bench.check_nothing_leaks()


@pytest.mark.parametrize("world", WORLDS)
def test_the_second_request_starts_from_the_first_ones_state(world: str):
    bench = Bench(WORLDS[world])
    first = bench.add(prompt(30), 6)
    bench.run()
    second = bench.add(prompt(30), 6)
    bench.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 29)
    assert first.explanation.reasons == {Reason.NOTHING_MATCHED}
    bench.check_right(first, second)


def test_the_next_turn_of_a_conversation_starts_behind_the_answer():
    bench = Bench(WORLDS["hybrid"])
    first = bench.add(prompt(20), 6, ignore_eos=True)
    bench.run()
    talk = [*prompt(20), *first.answer.tolist(), *prompt(9, seed=1)]
    second = bench.add(talk, 3)
    bench.run()
    assert second.cached_tokens == 20 + 6 - 1, "all but the last token of the answer has been computed"
    bench.check_right(first, second)


def test_a_long_prompt_is_computed_in_chunks_that_fit_the_budget():
    bench = Bench(WORLDS["full"], config=config(max_batched_tokens=8))
    bench.add(prompt(30), 1)
    bench.run()
    assert [sum(step) for step in bench.device.steps] == [8, 8, 8, 6]


def test_prefill_stops_where_a_state_is_to_be_kept():
    bench = Bench(WORLDS["hybrid"], config=config(max_batched_tokens=64))
    bench.add(prompt(30), 1, breakpoints=(11,))
    bench.run()
    assert [sum(step) for step in bench.device.steps] == [11, 18, 1]
    later = bench.add([*prompt(11), *prompt(9, seed=5)], 1)
    bench.run()
    assert later.cached_tokens == 11


def test_decoding_requests_go_on_while_a_long_prompt_is_computed():
    bench = Bench(WORLDS["full"], config=config(max_batched_tokens=8), blocks=100)
    decoding = bench.add(prompt(4), 30, ignore_eos=True)
    bench.step()
    bench.add(prompt(100, seed=1), 1)
    for _ in range(10):
        before = decoding.known
        bench.step()
        assert decoding.known == before + 1
    bench.run()
    bench.check_right(decoding)


def test_a_short_prompt_passes_a_long_one():
    bench = Bench(WORLDS["full"], config=config(max_batched_tokens=16), blocks=100)
    long, short = bench.add(prompt(300), 1), bench.add(prompt(4, seed=1), 1)
    bench.step()
    assert short.finish_reason is not None
    assert long.finish_reason is None
    bench.run()


def test_unused_budget_goes_to_the_first_prefill():
    bench = Bench(WORLDS["full"], config=config(max_batched_tokens=16), blocks=100)
    bench.add(prompt(300), 1)
    bench.add(prompt(2, seed=1), 1)
    bench.step()
    assert sorted(bench.device.steps[0]) == [2, 14]


def test_a_prompt_that_is_done_is_answered_before_the_next_ones_are_computed():
    """Prompts of 17 tokens, whose states are kept at 16, and 16 tokens per step."""
    bench = Bench(WORLDS["hybrid"], config=config(max_batched_tokens=16), blocks=100)
    requests = [bench.add(prompt(17, seed=seed), 1) for seed in range(4)]
    bench.run()
    bench.check_right(*requests)
    assert bench.device.steps == [[12, 4], [4, 12], [1, 1], [12, 4], [4, 12], [1, 1]], (
        "the first takes three quarters of a step while others wait; last tokens are computed without chunks of prompts"
    )


@pytest.mark.parametrize("world", WORLDS)
def test_the_youngest_gives_way_and_comes_back_to_the_right_answer(world: str):
    blocks = {"full": 24, "hybrid": 30, "window": 30, "chunk": 34, "all": 33, "state": 4}[world]
    bench = Bench(WORLDS[world], blocks=blocks, config=config(max_batched_tokens=32))
    requests = [bench.add(prompt(16, seed=i), 24, ignore_eos=True) for i in range(4)]
    bench.run()
    bench.check_right(*requests)
    if world != "state":
        assert bench.scheduler.counters.preemptions > 0
        assert requests[0].preemptions == 0
    bench.check_nothing_leaks()


def test_a_request_is_counted_once_however_often_it_comes_back():
    """MET-01."""
    bench = Bench(WORLDS["full"], blocks=24)
    requests = [bench.add(prompt(16, seed=i), 24, ignore_eos=True) for i in range(4)]
    bench.run()
    counters = bench.scheduler.counters
    assert counters.preemptions > 0
    assert counters.requests == 4
    assert counters.prompt_tokens == 64
    assert counters.hit_tokens + sum(counters.lost_tokens.values()) == 64
    assert counters.generated_tokens == sum(len(r.answer) for r in requests) == 96
    assert counters.resumed_tokens > counters.resumed_hit_tokens >= 0


def test_every_prompt_token_is_on_one_line_of_the_waterfall():
    bench = Bench(WORLDS["hybrid"])
    for seed in (0, 0, 1, 1):
        bench.add([*prompt(12), *prompt(8, seed)], 3)
        bench.run()
    counters = bench.scheduler.counters
    assert counters.prompt_tokens == 80
    assert counters.hit_tokens + sum(counters.lost_tokens.values()) == 80
    assert counters.hit_tokens > 19 + 12


def test_a_request_that_could_never_run_is_refused_without_harm():
    bench = Bench(WORLDS["full"], blocks=8)
    small = bench.add(prompt(8), 4)
    large = bench.add(prompt(40, seed=1), 4)
    bench.run()
    errors = [update.error for update in bench.news if update.error]
    assert [type(error) for error in errors] == [UnservableError]
    assert large.finish_reason == "error"
    bench.check_right(small)
    bench.check_nothing_leaks()


def test_a_request_that_grows_beyond_the_pool_fails_and_says_what_to_do():
    bench = Bench(WORLDS["full"], blocks=8)
    request = bench.add(prompt(8), 60, ignore_eos=True)
    other = bench.add(prompt(8, seed=1), 4)
    bench.run()
    (error,) = [update.error for update in bench.news if update.error]
    assert isinstance(error, RequestFailedError)
    assert "--memory" in str(error)
    assert request.finish_reason == "error"
    bench.check_right(other)
    bench.check_nothing_leaks()


def test_a_request_that_stalls_alone_fails_and_leaves_others_their_prefixes():
    bench = Bench(WORLDS["full"], blocks=12)
    bench.add(prompt(16), 1, pin=16)
    bench.run()
    stalled = bench.add([*prompt(16), *prompt(4, seed=1)], 60, ignore_eos=True)
    bench.run()
    (error,) = [update.error for update in bench.news if update.error]
    assert isinstance(error, RequestFailedError)
    assert "12 blocks of the cache, 4 of them pinned; give the server more --memory" in str(error)
    assert (stalled.finish_reason, stalled.cached_tokens) == ("error", 16)
    again = bench.add(prompt(16), 1)
    bench.run()
    assert again.cached_tokens == 15, "what was kept for others is still there"
    bench.check_right(again)


@pytest.mark.parametrize("blocks", [9, 12])
@pytest.mark.parametrize("world", WORLDS)
def test_the_longest_servable_request_is_served_whatever_is_kept(world: str, blocks: int):
    """Alone, cold or behind a hit: what the length limit accepts never stalls."""
    bench = Bench(WORLDS[world], blocks=blocks, config=config(max_running=1))
    longest = longest_servable(bench.cache.geometry, blocks, 40)
    assert longest >= 4
    first = prompt(longest * 2 // 3)
    other = [*first[: len(first) // 2], *prompt(len(first) - len(first) // 2, seed=1)]
    for tokens in (first, first, other, first, other[:-1]):
        request = bench.add(tokens, longest - len(tokens), ignore_eos=True)
        bench.run()
        bench.check_right(request)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt that the cache looks up, at its own wish or ours, in order."""
    asked: list[int] = []
    lookup = PrefixCache._lookup

    def counted(cache: PrefixCache, prompt: Prompt) -> Hit:
        asked.append(len(prompt.tokens))
        return lookup(cache, prompt)

    monkeypatch.setattr(PrefixCache, "_lookup", counted)
    return asked


def test_a_prompt_is_looked_up_once_to_be_admitted(lookups: list[int]):
    bench = Bench(WORLDS["hybrid"], blocks=100, config=config(max_batched_tokens=64))
    requests = [bench.add(prompt(12, seed=i), 4, ignore_eos=True) for i in range(4)]
    bench.step()
    assert len(bench.scheduler.running) == 4
    assert len(lookups) == 4
    bench.run()
    bench.check_right(*requests)


def test_a_request_that_waits_is_looked_up_when_something_has_changed_for_it(lookups: list[int]):
    bench = Bench(WORLDS["full"], blocks=16, config=config(max_batched_tokens=32))
    first, second = bench.add(prompt(20), 8, ignore_eos=True), bench.add(prompt(50, seed=1), 2, ignore_eos=True)
    seen = []
    while first.finish_reason is None:
        bench.step()
        seen.append(lookups.count(50))
    assert seen == [1, *[2] * (len(seen) - 1)], "at first, behind the other's prompt, not while it decodes"
    assert len(seen) > 4
    made = second.cache_prompt(0)
    bench.run()
    assert lookups.count(50) == 3
    assert second.cache_prompt(0) is not made, "it knows more tokens now"
    bench.check_right(first, second)


def test_a_pool_for_one_is_shared_by_turns():
    bench = Bench(WORLDS["hybrid"], blocks=16)
    requests = [bench.add(prompt(20, seed=i), 12, ignore_eos=True) for i in range(5)]
    bench.run()
    bench.check_right(*requests)
    bench.check_nothing_leaks()


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_abort_frees_at_once(when: str):
    bench = Bench(WORLDS["hybrid"], config=config(max_batched_tokens=8, max_running=1), blocks=100)
    other = bench.add(prompt(40), 20, ignore_eos=True)
    request = bench.add(prompt(30, seed=1), 20, ignore_eos=True) if when == "queued" else other
    for _ in range({"queued": 2, "prefill": 2, "decode": 12}[when]):
        bench.step()
    held = bench.cache.stats().leased
    bench.scheduler.abort(request)
    assert request.finish_reason == "abort"
    if when == "queued":
        bench.run()
        bench.check_right(other)
    else:
        assert held > 0
        assert bench.cache.stats().leased == 0
    (update,) = [update for update in bench.scheduler.take_news() or bench.news if update.request is request][-1:]
    assert update.delta.result.finish_reason == "abort"
    bench.check_nothing_leaks()


def test_what_an_aborted_request_had_published_stays():
    bench = Bench(WORLDS["full"], config=config(max_batched_tokens=8))
    request = bench.add(prompt(40), 4)
    for _ in range(3):
        bench.step()
    bench.scheduler.abort(request)
    again = bench.add(prompt(40), 4)
    bench.run()
    assert again.cached_tokens == 24
    bench.check_right(again)


@pytest.mark.parametrize("world", WORLDS)
def test_a_failed_step_is_repeated_and_publishes_nothing(world: str):
    bench = Bench(WORLDS[world])
    requests = [bench.add(prompt(30, seed=i), 6) for i in range(3)]
    steps = iter(range(1000))
    bench.device.fail_when = lambda work: next(steps) in (1, 4, 5)
    bench.run()
    assert bench.scheduler.counters.failed_steps == 3
    bench.check_right(*requests)
    bench.check_nothing_leaks()


def test_only_the_request_that_fails_each_time_is_failed():
    bench = Bench(WORLDS["hybrid"], blocks=100)
    poison = 7
    good = [bench.add([t for t in prompt(20, seed=i) if t != poison], 12, ignore_eos=True) for i in range(3)]
    bad = bench.add([*[t for t in prompt(20, seed=9) if t != poison], poison, 3, 4], 12)
    bench.device.fail_when = lambda work: any(poison in tokens[:40] and len(tokens) > 1 for tokens in work.tokens)
    bench.run()
    (failure,) = [update for update in bench.news if update.error]
    assert failure.request is bad
    assert "RuntimeError: the device says no" in str(failure.error)
    bench.check_right(*[request for request in good if poison not in request.answer])
    bench.check_nothing_leaks()


def test_a_dead_device_fails_everybody_and_the_scheduler_ends():
    bench = Bench(WORLDS["hybrid"])
    for i in range(5):
        bench.add(prompt(20, seed=i), 4)
    bench.device.fail_when = lambda work: True
    bench.run(most=100)
    assert len([update for update in bench.news if update.error]) == 5
    bench.check_nothing_leaks()


def test_followers_wait_for_their_leader_and_reuse_its_prompt():
    bench = Bench(WORLDS["hybrid"], config=config(max_batched_tokens=64))
    leader, *followers = requests = [bench.request(prompt(30), 4) for _ in range(3)]
    bench.scheduler.add(leader, followers)
    assert bench.scheduler.waiting == 3
    bench.run()
    assert [request.cached_tokens for request in requests] == [0, 29, 29]
    bench.check_right(*requests)


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_followers_are_not_left_behind(end: str):
    bench = Bench(WORLDS["hybrid"])
    leader, *followers = [bench.request(prompt(30), 4) for _ in range(3)]
    bench.scheduler.add(leader, followers)
    bench.step()
    if end == "abort":
        bench.scheduler.abort(followers[0])
        bench.scheduler.abort(leader)
        bench.run()
        bench.check_right(followers[1])
    else:
        bench.device.fail_when = lambda work: True
        bench.run()
        assert len([update for update in bench.news if update.error]) == 3
    bench.check_nothing_leaks()


def test_equal_prompts_at_once_are_computed_once():
    """RPT-15, on every kind of memory: 2,528 tokens, and for each of the other three the last one."""
    tokens = np.random.default_rng(0).integers(1, VOCAB, 2528).tolist()
    for world in WORLDS.values():
        bench = Bench(world, blocks=8000, config=EngineConfig(max_batched_tokens=2048))
        bench.device.run = lambda work: [
            RowAnswer(() if s is None else (1,), n)
            for s, n in zip(work.samples, work.step.counts.tolist(), strict=True)
        ]
        requests = [bench.add(tokens, 1, boundaries=(794, 2520)) for _ in range(4)]
        bench.run()
        counters = bench.scheduler.counters
        assert counters.computed_tokens == 2528 + 3
        assert [request.cached_tokens for request in requests] == [0, 2527, 2527, 2527]
        assert (counters.waits, counters.waited_tokens) == (3, 3 * 2527)
        assert bench.news[-1].delta.result.waited_tokens == 2527


@pytest.mark.parametrize("world", WORLDS)
def test_siblings_share_what_one_of_them_computes_now(world: str):
    """The first takes the junction at 20 for the others, though nothing parted there when it began."""
    bench = Bench(WORLDS[world], blocks=100, config=config(wait_tokens=8))
    siblings = [bench.add([*prompt(20), *prompt(9, seed=i + 1)], 3) for i in range(3)]
    stranger = bench.add(prompt(8, seed=9), 3)
    bench.step()
    assert siblings[1].lease is None
    assert stranger.lease is not None, "who has another prompt passes"
    bench.run()
    assert [request.cached_tokens for request in siblings] == [0, 20, 20]
    assert [request.waited_tokens for request in siblings] == [0, 20, 20]
    bench.check_right(*siblings, stranger)
    bench.check_nothing_leaks()


def test_nobody_waits_for_less_than_the_bound_or_where_nothing_will_be_kept():
    options = config(max_batched_tokens=64)
    for bound, waits, extra in ((20, 1, {}), (21, 0, {}), (0, 0, {}), (20, 0, {"no_store": True})):
        bench = Bench(WORLDS["hybrid"], config=replace(options, wait_tokens=bound))
        bench.add([*prompt(20), *prompt(9, seed=1)], 1, **extra)
        bench.add([*prompt(20), *prompt(9, seed=2)], 1)
        bench.run()
        assert bench.scheduler.counters.waits == waits
    bench = Bench(WORLDS["hybrid"], config=replace(options, wait_tokens=8), placement=("prompt_end", "answer_end"))
    bench.add([*prompt(20), *prompt(9, seed=1)], 1)
    bench.add([*prompt(20), *prompt(9, seed=2)], 1)
    bench.run()
    assert bench.scheduler.counters.waits == 0


@pytest.mark.parametrize("end", ["abort", "fail", "preempt"])
def test_who_waits_goes_on_when_the_other_does_not(end: str):
    bench = Bench(WORLDS["hybrid"], blocks=100, config=config(wait_tokens=8))
    older = bench.add(prompt(4, seed=9), 30, ignore_eos=True)
    bench.step()
    bench.step()
    leader, *others = [bench.add([*prompt(40), *prompt(9, seed=i)], 3) for i in range(3)]
    bench.step()
    assert bench.scheduler.running == [older, leader]
    assert bench.scheduler.waiting == 2
    if end == "abort":
        bench.scheduler.abort(leader)
    elif end == "fail":
        bench.device.fail_when = lambda work: True
        bench.step()
        bench.device.fail_when = lambda work: False
        assert bench.scheduler.running == []
    else:
        bench.scheduler._starved = [older]
        bench.step()
        assert leader.preemptions == 1
    bench.run()
    assert max(request.waited_tokens for request in others) == 40
    bench.check_right(older, *others)
    bench.check_nothing_leaks()


def test_nobody_waits_for_who_has_more_to_compute():
    bench = Bench(WORLDS["full"], blocks=100, config=config(max_batched_tokens=16))
    slow = bench.add([*prompt(30), *prompt(30, seed=1)], 1)
    bench.scheduler._config = replace(config(), wait_tokens=0)
    bench.step()
    assert slow.computed == 16
    quick = bench.cache.lease(Prompt(np.array(prompt(30))))
    bench.cache.commit(bench.cache.extend([quick.row], [14]))
    bench.cache.finish([quick.row])
    bench.scheduler._config = replace(config(), wait_tokens=8)
    bench.add([*prompt(30), *prompt(30, seed=1)], 1)
    assert bench.cache.lookup(Prompt(np.array(prompt(60)))).tokens == 30
    bench.step()
    assert bench.scheduler.waiting == 0


def test_stop_token_ids_and_eos():
    bench = Bench(WORLDS["full"])
    free = bench.add(prompt(10), 40, ignore_eos=True)
    bench.run()
    answer = free.answer.tolist()
    stop = answer[2]
    stopped = bench.add(prompt(10), 40, stop_token_ids=(stop,), ignore_eos=True)
    bench.run()
    assert stopped.answer.tolist() == answer[: answer.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_no_store_reads_and_leaves_nothing():
    bench = Bench(WORLDS["hybrid"])
    bench.add(prompt(20), 2)
    bench.run()
    free = bench.cache.free_blocks
    reader = bench.add([*prompt(20), *prompt(10, seed=3)], 5, no_store=True)
    bench.run()
    assert reader.cached_tokens >= 19
    assert bench.cache.free_blocks == free
    bench.check_right(reader)


def test_salts_do_not_meet():
    bench = Bench(WORLDS["hybrid"])
    bench.add(prompt(20), 2, salt="a")
    bench.run()
    other, same = bench.add(prompt(20), 2, salt="b"), bench.add(prompt(20), 2, salt="a")
    bench.run()
    assert (other.cached_tokens, same.cached_tokens) == (0, 19)
    assert Reason.OTHER_NAMESPACE in other.explanation.reasons


def test_whole_prompts_where_the_model_cannot_continue_one():
    options = EngineConfig(max_batched_tokens=40, max_running=4, step_price=5.0, placement=("prompt_end", "answer_end"))
    bench = Bench(WORLDS["hybrid"], blocks=60, config=options)
    requests = [bench.add(prompt(30, seed=i), 10, ignore_eos=True) for i in range(4)]
    bench.run()
    assert {count for step in bench.device.steps for count in step} == {29, 1}
    bench.check_right(*requests)


@pytest.mark.parametrize(("rest", "resumed"), [(1, True), (6, True), (8, True), (9, False), (30, False)])
def test_single_steps_go_on_where_they_are_cheaper(rest: int, resumed: bool):
    """All but the last of 35 + rest tokens in one piece, or as many steps as are behind 34, of 5 tokens' time each."""
    options = EngineConfig(
        max_batched_tokens=200, max_running=4, step_price=5.0, placement=("prompt_end", "answer_end")
    )
    bench = Bench(WORLDS["hybrid"], blocks=60, config=options)
    first = bench.add(prompt(30), 5, ignore_eos=True)
    bench.run()
    told = [*first.tokens[: first.known].tolist(), *prompt(rest, seed=9)]
    bench.device.steps.clear()
    again, beside = bench.add(told, 3, ignore_eos=True), bench.add(prompt(20, seed=5), 9, ignore_eos=True)
    bench.run()
    bench.check_right(first, again, beside)
    assert again.cached_tokens == (34 if resumed else 0)
    assert (Reason.COMPUTED_ANEW in again.explanation.reasons) != resumed
    counts = {count for step in bench.device.steps for count in step}
    assert counts == ({1, 19} if resumed else {1, 19, 34 + rest})


def test_reset_while_requests_run():
    """PRE-01."""
    bench = Bench(WORLDS["all"], blocks=100)
    requests = [bench.add(prompt(30, seed=i), 12, ignore_eos=True) for i in range(3)]
    for _ in range(5):
        bench.step()
    bench.cache.reset()
    bench.run()
    bench.check_right(*requests)
    bench.check_nothing_leaks()


def test_two_users_share_the_machine():
    bench = Bench(WORLDS["full"], config=config(max_running=2), blocks=100)
    for i in range(20):
        bench.add(prompt(8, seed=i), 4, user="batch", ignore_eos=True)
    single = bench.add(prompt(8, seed=99), 4, user="chat", ignore_eos=True)
    while single.finish_reason is None:
        bench.step()
    assert bench.scheduler.counters.finished["length"] <= 4
    bench.run()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_answers_are_right_and_nothing_leaks(seed: int):
    rng = np.random.default_rng(seed)
    world = list(WORLDS)[seed % len(WORLDS)]
    running = int(rng.integers(1, 7))
    tokens, wait = running + int(rng.integers(1, 40)), int(rng.integers(0, 12))
    options = EngineConfig(max_batched_tokens=tokens, max_running=running, wait_tokens=wait)
    blocks = int(rng.integers(4, 12)) if world == "state" else int(rng.integers(34, 80))
    placement = ["prompt_end", "answer_end", "junction", "breakpoint", "boundary"]
    if rng.random() < 0.3:
        placement.append("interval:8")
    bench = Bench(WORLDS[world], blocks=blocks, config=options, placement=placement)
    stems = [prompt(int(rng.integers(3, 30)), seed=1000 * seed + i) for i in range(3)]
    dice = iter(rng.random(100_000))
    bench.device.fail_when = lambda work: next(dice) < 0.02
    requests = []
    for _ in range(400):
        if len(requests) < 30 and rng.random() < 0.15:
            stem = stems[rng.integers(3)]
            tokens = [*stem[: rng.integers(1, len(stem) + 1)], *prompt(int(rng.integers(1, 15)), int(rng.integers(9)))]
            if rng.random() < 0.3 and requests and len(requests[-1].answer) and requests[-1].known < 40:
                tokens = [*requests[-1].tokens[: requests[-1].known].tolist(), *tokens[:3]]
            requests.append(
                bench.add(
                    tokens,
                    int(rng.integers(1, 16)),
                    ignore_eos=bool(rng.random() < 0.7),
                    no_store=bool(rng.random() < 0.1),
                    user=f"u{rng.integers(3)}",
                    salt="other" if rng.random() < 0.1 else "",
                    breakpoints=(int(rng.integers(1, len(tokens) + 1)),) if rng.random() < 0.3 else (),
                    boundaries=(int(rng.integers(1, len(tokens) + 1)),) if rng.random() < 0.3 else (),
                    pin=int(rng.integers(1, len(tokens) + 1)) if rng.random() < 0.1 else 0,
                )
            )
        if requests and rng.random() < 0.02:
            bench.scheduler.abort(requests[rng.integers(len(requests))])
        if rng.random() < 0.005:
            bench.cache.reset()
        bench.step()
    bench.run()
    failed = {update.request.request_id for update in bench.news if update.error}
    whole = [r for r in requests if r.finish_reason in ("stop", "length")]
    assert len(whole) > len(requests) / 2
    bench.check_right(*whole)
    assert {r.request_id for r in requests if r.finish_reason == "error"} == failed
    bench.check_nothing_leaks()


def test_a_form_that_cannot_be_followed_ends_its_request_alone():
    bench = Bench(WORLDS["hybrid"])
    bad, good = bench.add(prompt(9), 4, ignore_eos=True), bench.add(prompt(5, seed=1), 4, ignore_eos=True)
    run = bench.device.run
    bench.device.run = lambda work: [RowAnswer(fault=RowFault(form="no token")), *run(work)[1:]]
    bench.step()
    bench.device.run = run
    bench.run()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    (error,) = [update.error for update in bench.news if update.error]
    assert type(error) is RequestFailedError
    assert "cannot be followed any further: no token" in str(error)
    assert bench.scheduler.counters.not_finite == 0
    bench.check_right(good)
    bench.check_nothing_leaks()


@pytest.mark.parametrize("ends_at_once", [{"no_store": True}, {"tokens": 1}, {"placement": ("prompt_end",)}])
def test_a_row_that_is_not_finite_ends_alone_even_if_nothing_of_it_is_to_be_kept(ends_at_once: dict):
    """Such requests have nothing left to compute when they have failed, as those that have been answered."""
    placement = ends_at_once.get("placement", ("prompt_end", "answer_end"))
    bench = Bench(WORLDS["hybrid"], config=EngineConfig(max_batched_tokens=16, max_running=4, placement=placement))
    bad = bench.add(prompt(ends_at_once.get("tokens", 9)), 4, no_store=ends_at_once.get("no_store", False))
    good = bench.add(prompt(5, seed=1), 4, ignore_eos=True)
    bench.device.not_finite = lambda work: [0]
    bench.step()
    bench.device.not_finite = lambda work: ()
    bench.run()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    bench.check_right(good)
    bench.check_nothing_leaks()
