import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.fakes import ALPHABET, CharTokenizer, Running, running

from headway.engine import EngineConfig, RanksLostError, StepWork
from headway.server.pins import PinIds


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Running:
    """A server whose cache is empty."""
    shared.post("/reset_prefix_cache")
    return shared


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def events(response: httpx.Response) -> list[Any]:
    """The data of all events of a stream; the last one is `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_the_second_call_reports_cached_tokens_and_gives_the_same_answer(server: Running):
    first, second = (server.complete("Once upon a time", max_tokens=9) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["text"] == server.expected("Once upon a time", 9)
    assert (cached(first), cached(second)) == (0, 15)
    assert first["object"] == "text_completion"
    assert first["model"] == "fake"


def test_usage_adds_up(server: Running):
    usage = server.complete("Hello", max_tokens=7, ignore_eos=True)["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_goes_on_from_where_it_was(server: Running):
    first = server.chat("Hello there", max_tokens=20)
    said = first["choices"][0]["message"]
    assert said["role"] == "assistant"
    assert said["content"] == server.expected("<user>Hello there</><assistant>", 20)
    second = server.chat("Hello there", said["content"], "And now", max_tokens=5)
    length = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert cached(second) in (length - 1, length - 2), "all of the first turn but what was never computed"


def test_the_explanation_covers_every_token(server: Running):
    asked: dict[str, Any] = {"max_tokens": 2, "cache_salt": "mine", "headway": {"explain": True}}
    server.complete("The quick brown fox", **asked)
    answer = server.complete("The quick red fox", **asked)
    report = answer["headway"]
    assert report["matched_tokens"] == len("The quick ")
    assert report["cached_tokens"] == cached(answer) == 0
    spans = [(loss["start"], loss["stop"]) for loss in report["losses"]]
    assert [start for start, _ in spans] == [0, *[stop for _, stop in spans[:-1]]]
    assert spans[-1][1] == report["prompt_tokens"] == 17
    assert {loss["reason"] for loss in report["losses"]} == {"state_never_taken", "parted"}
    assert report["seconds"]["first_token"] >= report["seconds"]["queue"] >= 0
    third = server.complete("The quick blue fox", **asked)
    assert third["headway"]["resumed_from"] == "junction"
    assert cached(third) == 10


def test_no_explanation_unless_asked_for(server: Running):
    assert "headway" not in server.complete("Hello", max_tokens=2)


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_says_the_same_as_a_whole_answer(server: Running, include_usage: bool):
    body = {"messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 30, "temperature": 0}
    whole = server.post("/v1/chat/completions", **body, headway={"explain": True})
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    body |= {"stream": True, "headway": {"explain": True}, **options}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(response)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == whole["choices"][0]["finish_reason"]
    assert not any(reasons[:-1])
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usages) == 1
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == whole["usage"]["prompt_tokens"] - 1
    assert usages[0]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["headway"]["resumed_from"] == "prompt_end"
    assert (chunks[-1]["choices"] == []) == include_usage
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_zero_cached_tokens_are_shown_in_a_stream(server: Running):
    body = {"prompt": "New", "max_tokens": 2, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        *chunks, _ = events(response)
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_several_answers_share_one_prefill(server: Running):
    answer = server.complete("Once upon a time", max_tokens=6, n=3, temperature=0.9, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 16
    metrics = server.http.get("/metrics").text
    assert "headway_prompt_hit_tokens_total" in metrics
    snapshot = server.engine.snapshot()
    assert snapshot.cache.counters.resumed["prompt_end"] >= 2


def test_lists_of_prompts_in_text_and_tokens(server: Running):
    tokens = CharTokenizer().encode("Hello")
    texts = server.complete(["Hello", "World"], max_tokens=4, n=2)["choices"]
    assert [choice["index"] for choice in texts] == [0, 1, 2, 3]
    assert texts[0]["text"] == texts[1]["text"] == server.expected("Hello", 4)
    assert texts[2]["text"] == server.expected("World", 4)
    assert server.complete(tokens, max_tokens=4)["choices"][0]["text"] == server.expected("Hello", 4)
    assert server.complete([tokens, tokens], max_tokens=4)["choices"][1]["text"] == server.expected("Hello", 4)


def test_a_plain_completion_has_sixteen_tokens_and_a_chat_what_fits(server: Running):
    assert server.complete("Hello", ignore_eos=True)["usage"]["completion_tokens"] == 16
    usage = server.chat("Hello", ignore_eos=True)["usage"]
    assert usage["total_tokens"] == server.engine.max_model_len


def test_echo_puts_the_prompt_before_the_answer(server: Running):
    answer = server.complete(CharTokenizer().encode("Hello"), max_tokens=4, echo=True)
    assert answer["choices"][0]["text"] == "Hello" + server.expected("Hello", 4)


def test_stop_strings_end_the_answer_and_are_not_part_of_it(server: Running):
    whole = server.expected("Hello", 40)
    stop = whole[5:7]
    answer = server.complete("Hello", max_tokens=40, stop=[stop, "never"])["choices"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_a_salt_keeps_prefixes_apart(server: Running):
    server.complete("Once upon a time", max_tokens=2, cache_salt="alice")
    other = server.complete("Once upon a time", max_tokens=2, cache_salt="bob", headway={"explain": True})
    same = server.complete("Once upon a time", max_tokens=2, cache_salt="alice")
    assert (cached(other), cached(same)) == (0, 15)
    # That somebody else has sent these tokens is nobody's business: the report says what it says of unknown ones.
    assert [(loss["reason"], loss["start"], loss["stop"]) for loss in other["headway"]["losses"]] == [
        ("nothing_matched", 0, 16)
    ]


def test_cache_control_marks_where_others_will_part(server: Running):
    def talk(question: str, mark: bool) -> dict[str, Any]:
        system: dict[str, Any] = {"role": "system", "content": "You are a helpful machine"}
        if mark:
            system["cache_control"] = {"type": "ephemeral"}
        messages = [system, {"role": "user", "content": question}]
        return server.post(
            "/v1/chat/completions", messages=messages, max_tokens=2, temperature=0, headway={"explain": True}
        )

    first, second = talk("What is it", mark=True), talk("Who are you", mark=False)
    end = len("<system>You are a helpful machine")
    assert first["headway"]["breakpoints"] == [end]
    assert cached(second) == end + len("</>"), "the message ends there for both"
    assert second["headway"]["resumed_from"] in ("breakpoint", "boundary")


def test_cache_control_on_a_part_of_a_message(server: Running):
    def talk(question: str) -> dict[str, Any]:
        document = {"type": "text", "text": "A long document", "cache_control": {"type": "ephemeral"}}
        content = [document, {"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "headway": {"explain": True}}
        return server.post("/v1/chat/completions", **body)

    first, second = talk("what is it"), talk("who wrote it")
    assert first["headway"]["breakpoints"] == [len("<user>A long document")]
    assert cached(second) == len("<user>A long document")


def test_boundaries_are_the_ends_of_messages(server: Running):
    report = server.chat("Hello", "Hi", "Bye", max_tokens=2, headway={"explain": True})["headway"]
    ends = ["<user>Hello</>", "<assistant>Hi</>", "<user>Bye</>"]
    assert report["boundaries"] == [len("".join(ends[: i + 1])) for i in range(3)]


def test_no_store_reads_and_leaves_nothing(server: Running):
    server.complete("Once upon a time", max_tokens=2)
    reader = server.complete("Once upon a time there", max_tokens=2, headway={"no_store": True})
    again = server.complete("Once upon a time there", max_tokens=2)
    assert cached(reader) == cached(again) == 15


def test_pinned_prefixes_are_reported(server: Running):
    server.complete("Once upon a time", max_tokens=2, headway={"pin": True})
    assert server.engine.snapshot().cache.pinned > 0
    assert 'headway_blocks{state="pinned"} 0.0' not in server.http.get("/metrics").text


def test_a_pin_is_told_and_taken_back(server: Running):
    pinned = server.complete("Once upon a time", max_tokens=2, headway={"pin": 9, "pin_seconds": 60})["headway"]
    again = server.complete("Once upon a time", max_tokens=2, headway={"pin": 9})["headway"]["pin"]
    deeper = server.complete("Once upon a time", max_tokens=2, headway={"pin": True}, n=2)["headway"]["pin"]
    pin = pinned["pin"]
    assert set(pinned) == {"pin"}, "no explanation was asked for"
    assert pin == {"id": pin["id"], "outcome": "kept", "tokens": 9, "seconds": 60, "detail": ""}
    assert again == pin | {"seconds": 3600}
    assert deeper["tokens"] == 15
    assert deeper["id"] != pin["id"]
    before = server.engine.snapshot().cache.pinned
    gone = server.http.delete(f"/v1/pins/{pin['id']}")
    assert (gone.status_code, gone.json()) == (200, {"id": pin["id"], "object": "pin", "deleted": True})
    assert server.engine.snapshot().cache.pinned == before - 2, "the state; the rest is under the deeper pin"
    assert server.http.delete(f"/v1/pins/{pin['id']}").json()["error"]["code"] == "pin_not_found"
    assert server.http.delete(f"/v1/pins/{deeper['id']}").status_code == 200
    assert server.engine.snapshot().cache.pinned == 0


def test_a_salt_that_looks_like_tokens_does_not_get_the_id_of_another_pin(server: Running):
    pins = PinIds(server.engine)
    named = [([65, 7], ""), ([7], "\0A\0\0")]
    assert len({pins._enter(np.array(tokens, dtype=np.int32), salt, 60.0) for tokens, salt in named}) == 2


def test_a_pin_that_is_refused_says_why():
    config = EngineConfig(max_batched_tokens=64, max_running=8, max_model_len=600, pin_share=0.01, pin_seconds=60)
    with running(config=config) as server:
        options = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "headway": {"pin": True}}
        with server.http.stream("POST", "/v1/completions", json=options) as response:
            pin = events(response)[-2]["headway"]["pin"]
        assert (pin["id"], pin["outcome"], pin["tokens"]) == (None, "pin_share", 0)
        assert "--pin-share" in pin["detail"]
        error = server.complete("Hello", 400, headway={"pin": True, "pin_seconds": 61})["error"]
        assert (error["param"], error["message"]) == (
            "headway.pin_seconds",
            "pins last 60 seconds at most here (--pin-seconds)",
        )
        assert server.complete("Hello", 400, headway={"pin_seconds": 6})["error"]["message"].endswith(
            "needs headway.pin"
        )


def test_reset_says_what_was_freed(server: Running):
    server.complete("Once upon a time", max_tokens=2)
    kept = server.engine.snapshot().cache
    report = server.post("/reset_prefix_cache")
    assert report == {
        "blocks_freed": kept.blocks - kept.free,
        "checkpoints_removed": kept.checkpoints,
        "running_requests_detached": 0,
        "complete": True,
    }
    assert cached(server.complete("Once upon a time", max_tokens=2)) == 0


def test_metrics_agree_with_the_answers(server: Running):
    def totals() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = totals()
    answers = [server.complete("Once upon a time", max_tokens=3) for _ in range(3)]
    after = totals()

    def grown(name: str) -> float:
        return after[f"headway_{name}"] - before.get(f"headway_{name}", 0.0)

    assert grown("prompt_tokens_total") == 48
    assert grown("prompt_hit_tokens_total") == sum(map(cached, answers)) == 30
    lost = [name for name in after if name.startswith("headway_prompt_lost_tokens_total")]
    assert sum(grown(name.removeprefix("headway_")) for name in lost) == 18
    assert grown("time_to_first_token_seconds_count") == 3
    assert grown('checkpoints_taken_total{kind="prompt_end"}') == 1
    assert after["headway_requests_running"] == after["headway_requests_waiting"] == 0


def test_models_and_health(server: Running):
    models = server.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["fake"]
    assert server.http.get("/v1/models/fake").json() == models["data"][0]
    assert server.http.get("/health").json() == {"status": "ok", "not_finite": 0}


def test_a_key_is_asked_for_where_one_is_set():
    with running(api_key="secret") as server:
        assert cached(server.complete("Hello", max_tokens=2)) == 0
        stranger = httpx.Client(base_url=server.url)
        with stranger:
            for call in (stranger.get("/v1/models"), stranger.post("/reset_prefix_cache")):
                assert call.status_code == 401
                assert call.json()["error"]["code"] == "invalid_api_key"
            assert stranger.get("/health").status_code == 200
            assert stranger.get("/metrics").status_code == 200


def test_a_full_queue_refuses_and_health_answers_during_a_long_step():
    """OOM-04 asks that health checks do not wait for the engine."""
    entered, go = threading.Event(), threading.Event()

    def hold(work: StepWork) -> None:
        entered.set()
        assert go.wait(60)

    config = EngineConfig(max_batched_tokens=64, max_running=1, max_waiting=2, max_model_len=600)
    with running(config=config) as server:
        server.device.before_step = hold
        answers: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda i=i: answers.append(server.complete(f"Hello {ALPHABET[i]}", max_tokens=2)))
            for i in range(3)
        ]
        threads[0].start()
        assert entered.wait(60)
        for thread in threads[1:]:
            thread.start()
        server.wait_for_open(lambda count: count == 3)
        refused = server.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200
        assert "headway_requests_running" in server.http.get("/metrics").text
        go.set()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 3


def test_health_says_why_nothing_can_be_computed_and_metrics_count_the_loss():
    """Ranks are lost while nobody asks for anything; a request that comes meanwhile is answered by the new ones."""
    lost, restarting, go = threading.Event(), threading.Event(), threading.Event()

    def check() -> None:
        if not lost.is_set():
            lost.set()
            raise RanksLostError("rank 1 was ended by SIGKILL")

    def restart() -> None:
        restarting.set()
        assert go.wait(60)

    with running() as server:
        server.device.check, server.device.restart = check, restart
        assert lost.wait(60)
        assert restarting.wait(60)
        health = server.http.get("/health")
        assert health.status_code == 503
        reason = "ranks are lost, new ones start: rank 1 was ended by SIGKILL"
        assert health.json() == {"status": "unavailable", "reason": reason, "not_finite": 0}
        assert "headway_rank_losses_total 1.0" in server.http.get("/metrics").text
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.complete, "Hello", max_tokens=2)
            server.wait_for_open(lambda count: count == 1)
            go.set()
            assert answer.result(60)["choices"][0]["text"] == server.expected("Hello", 2)
        assert server.http.get("/health").json() == {"status": "ok", "not_finite": 0}
