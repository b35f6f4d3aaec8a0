"""Tokens of texts and back, HEAD, other origins, keys, and what programs ask a server before they use it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.fakes import ALPHABET, CharTokenizer, Running, running

import headway
from headway.errors import ConfigError, RequestError
from headway.server.command import _ServerFlags
from headway.server.dialects.messages import MessagesRequest
from headway.server.dialects.responses import ResponsesRequest
from headway.server.protocol import parse_body

PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_key="secret", cors_origins=(PAGE,)) as server:
        yield server


def test_tokens_of_a_text_and_of_a_conversation_and_back(server: Running):
    text = server.post("/tokenize", prompt="Hello", return_token_strs=True)
    assert text == {
        "count": 5,
        "max_model_len": 600,
        "tokens": CharTokenizer().encode("Hello"),
        "token_strs": list("Hello"),
    }
    talk = [{"role": "user", "content": "Hi"}]
    for options, wanted in (
        ({}, "<user>Hi</><assistant>"),
        ({"add_generation_prompt": False}, "<user>Hi</>"),
        ({"continue_final_message": True}, "<user>Hi"),
        ({"chat_template_kwargs": {"before": "now"}}, "<user>Hi</>now<assistant>"),
    ):
        found = server.post("/tokenize", messages=talk, **options)
        assert found["token_strs"] is None
        assert server.post("/detokenize", tokens=found["tokens"]) == {"prompt": wanted}


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/tokenize", {}, 400, "prompt is missing"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "a prompt, or messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "not served here"),
        ("/tokenize", {"prompt": "a" * 3000}, 400, "3000 characters"),
        ("/tokenize", {"messages": []}, 400, "at least one message"),
        ("/detokenize", {}, 400, "tokens is missing"),
        ("/detokenize", {"tokens": [len(ALPHABET) + 1]}, 400, "is none of the"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1 is none of the"),
        ("/detokenize", {"tokens": [1] * 601}, 400, "601 tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "not served here"),
    ],
)
def test_what_has_no_tokens_says_why(server: Running, path: str, body: dict[str, Any], status: int, told: str):
    assert told in server.post(path, status, **body)["error"]["message"]


def test_every_get_is_there_for_head_without_a_body(server: Running):
    for path in ("/", "/health", "/ping", "/version", "/metrics", "/openapi.json", "/v1/models", "/v1/models/fake"):
        got, head = server.http.get(path), server.http.head(path)
        assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405
    stream = server.http.head("/v1/headway/live", headers={"Accept": "text/event-stream"}, timeout=10)
    assert stream.headers["content-type"].startswith("text/event-stream"), "and it does not take as long as a stream"
    counted = server.http.get("/metrics").text
    assert 'http_requests_total{handler="/v1/headway/live",method="HEAD",status="200"} 1.0' in counted
    assert server.http.get("/version").json() == {"version": headway.__version__}
    assert server.http.get("/ping").json() == server.http.get("/health").json()


def test_a_key_comes_in_either_header(server: Running):
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "Basic secret"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ):
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_pages_of_the_origins_that_are_named_may_call(server: Running):
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = httpx.options(f"{server.url}/v1/chat/completions", headers=asks)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    answer = server.http.get("/v1/models", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert httpx.get(f"{server.url}/v1/models", headers={"origin": PAGE}).headers["access-control-allow-origin"] == PAGE
    stranger = server.http.get("/v1/models", headers={"origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in stranger.headers


def test_without_the_option_no_page_may():
    with running() as server:
        answer = server.http.get("/v1/models", headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
    for origin in ("localhost:3000", "http://localhost/page", ""):
        with pytest.raises(ConfigError, match="is no origin"):
            _ServerFlags(cors_origin=[origin])


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ResponsesRequest, {"input": "Hi"}),
        (MessagesRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", ["."]), ("bad_words", ["no"]), ("guided_regex", "a+"), ("logprobs", True), ("suffix", "s")],
)
def test_what_would_change_a_chat_is_not_ignored_elsewhere(kind: Any, body: dict[str, Any], name: str, value: Any):
    with pytest.raises(RequestError, match=f"{name} is not supported here"):
        parse_body(kind, body | {name: value}, strict=False)
    parse_body(kind, body | {name: None}, strict=False)
