"""What the live page is told, against counted requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.engine.bench import WORLDS
from tests.server.fakes import CharTokenizer, Running, running

from headway.engine import EngineConfig, StepWork
from headway.server import live as live_module

SYSTEM = "You are a patient librarian"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are made anew for each call."""
    monkeypatch.setattr(live_module, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(live_module, "_SURVEY_SHARE", 0)


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as made:
        yield made


def live(server: Running) -> dict[str, Any]:
    told: dict[str, Any] = server.http.get("/v1/headway/live").json()
    return told


def talk(server: Running, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return server.post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0, **more)


def test_the_record_counts_what_was_answered(server: Running):
    assert live(server)["verdict"]["title"] == "No requests yet"
    answers = [talk(server, question) for question in ("Who are you", "What is it", "Who are you", "How old are you")]
    told = live(server)
    asked = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert cached
    assert told["total"]["requests"] == 4
    assert (told["total"]["prompt_tokens"], told["total"]["reused_tokens"]) == (asked, cached)
    assert told["recent"]["lines"] == told["total"]["lines"]
    assert sum(line["tokens"] for line in told["total"]["lines"]) == asked
    assert told["total"]["share"] == cached / asked
    assert (told["running"], told["waiting"], told["requests"]) == (0, 0, [])
    counters = server.engine.snapshot().cache.counters
    for one in told["checkpoints"]:
        assert one["taken"] == counters.taken[one["kind"]]
        assert one["resumed"] == counters.resumed.get(one["kind"], 0)
    assert sum(one["kept"] for one in told["checkpoints"]) == server.engine.snapshot().cache.checkpoints
    assert told["seconds"] > 0
    assert told["model"] == "fake"


def test_a_server_without_reuse_does_not_blame_the_prompts():
    with running(config=EngineConfig(prefix_reuse=False)) as server:
        server.complete("Once upon a time", max_tokens=2)
        assert live(server)["verdict"]["title"] == "Prefix reuse is off"


@pytest.mark.parametrize("world", ["full", "hybrid", "window", "all"])
def test_every_block_is_of_one_kind(world: str):
    """While a request runs, and after it: the kinds add up to the pool, and agree with what the pool counts."""
    looked: list[Any] = []
    with running(WORLDS[world], blocks=200) as server:
        server.complete("Once upon a time there was a whale", max_tokens=5)

        def look(work: StepWork) -> None:
            looked.append((server.engine._take_survey().holdings, server.engine.cache.stats()))

        server.device.before_step = look
        server.complete("Once upon a time there was a fish", max_tokens=9)
        server.device.before_step = lambda work: None
        after = live(server)["memory"]
        stats = server.engine.snapshot().cache
    for holdings, then in looked:
        assert sum(holdings.blocks.values()) == then.blocks
        assert holdings.blocks["free"] == then.free
        assert sum(holdings.checkpoints.values()) == then.checkpoints
    assert any(holdings.blocks["running"] for holdings, _ in looked)
    assert sum(after["kinds"].values()) == sum(after["states"].values()) == 200
    assert after["kinds"]["running"] == 0
    assert after["kinds"]["free"] == after["states"]["free"] == stats.free
    states = stats.checkpoints * server.engine.cache.geometry.state_blocks
    assert after["kinds"]["states"] == states
    assert bool(states) == (world in ("hybrid", "all"))


def test_prefixes_are_told_by_name_and_their_tokens_add_up(server: Running):
    questions = ("Who are you", "What is it", "Who are you")
    answers = [talk(server, question) for question in questions]
    told = live(server)
    head = len(f"<system>{SYSTEM}</>")
    first = next(one for one in told["saving"] if one["start"] == 0)
    assert (first["stop"], first["requests"]) == (head, 3)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert first["reused_tokens"] == sum(min(head, tokens) for tokens in cached)
    assert sum(one["reused_tokens"] for one in told["saving"]) == sum(cached)
    lost = {line["name"]: line["tokens"] for line in told["total"]["lines"] if line["kind"] == "lost"}
    assert sum(one["lost_tokens"] for one in told["costing"]) == sum(lost.values()) > 0
    assert {one["reason"] for one in told["costing"]} <= set(lost)
    assert "librarian" not in json.dumps(told), "names, no text"
    talk(server, "Who are you", cache_salt="me")
    assert sum(one["start"] == 0 for one in live(server)["saving"]) == 1, "another salt is another prefix"
    server.post("/reset_prefix_cache")
    assert live(server)["saving"] == []


@pytest.mark.parametrize(("explain", "texts"), [("all", True), ("own", False), ("off", None)])
def test_text_is_told_where_all_may_know_it(explain: str, texts: bool | None):
    with running(explain=explain) as server:
        for _ in range(2):
            talk(server, "Who are you")
        told = live(server)["saving"]
        if texts is None:
            assert told is None
        else:
            assert any("<system>You are" in one["text"] for one in told) == texts


def test_plain_texts_are_divided_too(server: Running):
    prompt = "abcdefghij" * 15
    for end in ("x", "y", "z"):
        server.complete(prompt + end, max_tokens=2)
    told = live(server)
    parts = {(one["start"], one["stop"]): one["requests"] for one in told["saving"]}
    assert parts[0, 64] == parts[64, 128] == 3


def test_requests_that_run_are_shown():
    came, go = threading.Event(), threading.Event()

    def hold(work: StepWork) -> None:
        if work.samples[0] is not None and len(work.samples[0].output) == 3:
            server.engine._take_snapshot()
            came.set()
            assert go.wait(60)

    config = EngineConfig(max_batched_tokens=64, max_running=1, max_model_len=600)
    with running(config=config) as server, ThreadPoolExecutor(2) as pool:
        server.complete("Once upon a time", max_tokens=2)
        server.device.before_step = hold
        body = {"max_tokens": 20, "ignore_eos": True}
        first = pool.submit(server.complete, "Once upon a time there", **body)
        assert came.wait(60)
        survey = server.engine._take_survey()
        told = live(server)
        go.set()
        first.result(60)
        assert told["running"] == 1
        (one,) = survey.requests
        assert (one.prompt_tokens, one.cached_tokens, one.answer_tokens, one.max_tokens) == (22, 15, 3, 20)
        assert one.computed_tokens == 22 + 3 - 1
        assert one.seconds > 0


def test_a_browser_gets_the_page_and_others_the_list(server: Running):
    page = server.http.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert page.headers["vary"] == server.http.get("/").headers["vary"] == "Accept"
    assert "GET /v1/headway/live" in server.http.get("/").json()["paths"]


def test_a_stream_of_records_ends_with_the_server():
    events = {"Accept": "text/event-stream"}
    with running(grace=0.5) as server, server.http.stream("GET", "/v1/headway/live", headers=events) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        assert json.loads(next(lines).removeprefix("data: "))["verdict"]["level"] == "none"
        server.stop()
        last = json.loads(list(lines)[-1].removeprefix("data: "))
        assert "shutting down" in last["unavailable"]
        assert last["verdict"]["title"] == "No request can be computed"


def test_the_page_is_open_and_its_data_asks_for_the_key():
    with running(api_key="secret") as server, httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/", headers={"Accept": "text/html"}).status_code == 200
        assert stranger.get("/v1/headway/live").status_code == 401
        assert live(server)["model"] == "fake"


def test_the_table_of_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.server.prefixes._MOST", 8)
    with running() as server:
        for _ in range(2):
            talk(server, "Who are you")
        for i in range(20):
            server.complete(CharTokenizer().decode([i + 1]) * 70, max_tokens=1)
        told = live(server)
        assert any(one["stop"] == len(f"<system>{SYSTEM}</>") for one in told["saving"]), "what weighs most stays"
