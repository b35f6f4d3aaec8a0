"""Whatever is wrong with a request, the answer has the form that OpenAI clients expect, and says what to change."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.fakes import CharTokenizer, Running, running

from headway.engine import StepWork


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


ERRORS: list[tuple[str, dict[str, Any], int, str | None, str | None, str]] = [
    ("completions", {}, 400, "prompt", "missing_required_parameter", "prompt is missing"),
    ("completions", {"prompt": ""}, 400, "prompt", "empty_prompt", "empty"),
    ("completions", {"prompt": []}, 400, "prompt", "empty_prompt", "empty"),
    ("completions", {"prompt": ["a", ""]}, 400, "prompt", "empty_prompt", "empty"),
    ("completions", {"prompt": [1, 2, 999]}, 400, "prompt", "invalid_token", "999"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "invalid_token", "negative"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "invalid_value", "greater than or equal to 1"),
    ("completions", {"prompt": "a", "max_tokens": 9999}, 400, "max_tokens", "context_length_exceeded", "at most 599"),
    ("completions", {"prompt": "a" * 700}, 400, "prompt", "context_length_exceeded", "700"),
    ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "invalid_value", "less than or equal"),
    ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", "invalid_value", "number"),
    ("completions", {"prompt": "a", "n": 1000}, 400, "n", "invalid_value", "64"),
    ("completions", {"prompt": "a", "stop": ""}, 400, "stop", None, "empty"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_parameter", "only continue"),
    ("completions", {"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "invalid_value", "at most 16"),
    ("completions", {"prompt": "a", "logit_bias": {"99": 1}}, 400, "logit_bias", None, "99"),
    ("completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", None, "9999999999..."),
    ("completions", {"prompt": "a", "logit_bias": {"1.0": 1}}, 400, "logit_bias", None, "'1.0'"),
    ("completions", {"prompt": "a", "stop": ["b" * 513]}, 400, "stop[0]", "invalid_value", "512"),
    ("completions", {"prompt": "a", "headway": {"pin": -1}}, 400, "headway.pin", "invalid_value", "greater than or"),
    (
        "completions",
        {"prompt": "a", "headway": {"pin": True, "no_store": True}},
        400,
        "headway.pin",
        "invalid_value",
        "choose",
    ),
    (
        "completions",
        {"prompt": "a", "headway": {"explian": True}},
        400,
        "headway.explian",
        "unknown_parameter",
        "explain, no",
    ),
    ("completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "invalid_value", "stream: true"),
    ("completions", {"prompt": "a", "model": "other"}, 404, "model", "model_not_found", "other"),
    ("chat/completions", {"messages": []}, 400, "messages", "invalid_value", "at least one message"),
    (
        "chat/completions",
        {"messages": "hi"},
        400,
        "messages",
        "invalid_value",
        "a list of at least one",
    ),
    ("chat/completions", {"messages": ["hi"]}, 400, "messages[0]", "invalid_value", "must be an object"),
    ("completions", {"prompt": 5}, 400, "prompt", "invalid_value", "must be a text, a list of texts"),
    (
        "chat/completions",
        {"messages": [{"role": "king", "content": "a"}]},
        400,
        "messages[0].role",
        "invalid_value",
        "",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user"}]},
        400,
        "messages[0].content",
        "missing_required_parameter",
        "",
    ),
    ("chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, 400, "messages", None, "cannot begin"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0]",
        "unsupported_content",
        "text only",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "function", "name": "f", "content": "a"}]},
        400,
        "messages[0]",
        "unsupported_parameter",
        "role tool",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "forever"}}]},
        400,
        "messages[0].cache_control.type",
        "invalid_value",
        "ephemeral",
    ),
]
TALK = {"messages": [{"role": "user", "content": "a"}]}
ERRORS += [
    ("chat/completions", TALK | {name: value}, 400, name, code, text)
    for name, value, code, text in (
        ("functions", [{"name": "look"}], "unsupported_parameter", "send tools"),
        ("tools", {"type": "function"}, "invalid_value", "a list of tools"),
        ("tool_choice", "look", "invalid_value", '{"type": "function"'),
        ("response_format", {"type": "json_object"}, "unsupported_parameter", "cannot be constrained"),
        ("cache_control", {"type": "ephemeral"}, "unsupported_parameter", "put it on a message or on a part"),
        ("audio", {"voice": "x"}, "unsupported_parameter", "only text"),
        ("max_completion_tokens", 9999, "context_length_exceeded", "max_completion_tokens is 9999"),
        ("max_tokens", 9999, "context_length_exceeded", "max_tokens is 9999"),
        ("modalities", ["audio"], "unsupported_parameter", "only text"),
        ("top_logprobs", 3, None, "logprobs: true"),
        ("max_completion_tokens", -1, "invalid_value", ""),
        ("chat_template_kwargs", {"chat_template": "x"}, None, "may not set chat_template"),
    )
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code", "text"), ERRORS)
def test_errors_have_the_form_that_clients_expect(
    server: Running, path: str, body: dict[str, Any], status: int, param: str | None, code: str | None, text: str
):
    error = server.post(f"/v1/{path}", status, **body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert text in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_what_asks_for_nothing_is_accepted(server: Running):
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "user": "me"}
    nothing |= {"functions": None, "metadata": None, "seed": None, "stream_options": None}
    answer = server.chat("Hello", max_tokens=2, frequency_penalty=0, presence_penalty=0, logit_bias={}, **nothing)
    assert "headway" not in answer
    assert answer["choices"][0]["message"]["content"] == server.expected("<user>Hello</><assistant>", 2)


def test_the_schema_tells_every_path_and_every_field(server: Running):
    document = server.http.get("/openapi.json").json()
    told = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    told -= {line.replace("GET ", "HEAD ") for line in told if line.startswith("GET ")}
    named = {name.replace("NAME", "{name}").replace("ID", "{id}") for name in server.http.get("/").json()["paths"]}
    assert told == named | {"GET /"}
    schemas = document["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert fields["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    assert fields["functions"]["enum"] == [None, []], "what asks for nothing is taken"
    assert fields["metadata"]["description"].startswith("Ignored")
    assert schemas["ChatRequest"]["additionalProperties"]
    assert not schemas["HeadwayOptions"]["additionalProperties"]
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used <= set(schemas)


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "JSON object"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"prompt": "\xff"}', 400, "not JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "not JSON"),
        (b'{"prompt": "a\\ud800"}', 400, "surrogate"),
        (b'{"prompt": "a", "\\udc00": 1}', 400, "surrogate"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
        (b'{"prompt": "a", "logit_bias": {"1": -Infinity}}', 400, "-Infinity"),
        (b'{"prompt": "a", "metadata": [1e400]}', 400, "1e400"),
        (b'{"prompt": "a", "metadata": ' + b"[" * 128 + b"]" * 128 + b"}", 400, "in one another"),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 128 + b"{}" + b"}" * 128 + b"}", 400, "in one another"),
        (b'"' + b"x" * (2 << 20) + b'"', 413, "larger than"),
        (b"[" * 300_000, 413, "opening brackets"),
    ],
)
def test_bodies_that_are_no_requests(server: Running, content: bytes, status: int, text: str):
    response = server.http.post("/v1/completions", content=content)
    assert response.status_code == status
    assert text in response.json()["error"]["message"]


def test_a_tool_may_be_as_deep_as_a_body(server: Running):
    parameters = json.loads('{"anyOf": [' * 61 + "{}" + "]}" * 61)  # 122, in the list of tools, a tool and its function
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=asked).status_code == 200


def test_a_body_without_a_declared_length_is_limited_too(server: Running):
    response = server.http.post("/v1/completions", content=(b"x" * 65536 for _ in range(40)))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_unknown_paths_and_methods(server: Running):
    response = server.http.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    response = server.http.get("/v1/completions")
    assert response.status_code == 405
    assert "GET" in response.json()["error"]["message"]
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_the_root_lists_what_there_is(server: Running):
    paths = server.http.get("/").json()["paths"]
    for line in paths:
        method, path = line.split()
        wrong = "DELETE" if method == "GET" else "GET"
        assert server.http.request(wrong, path).status_code == 405, f"{path} is there, for {method} only"


def test_a_step_that_always_fails_is_a_server_error_and_the_server_goes_on():
    with running() as server:
        server.device.fail_when = lambda work: True
        error = server.complete("Hello", 500, max_tokens=2)["error"]
        assert error["type"] == "server_error"
        assert "the device says no" in error["message"]
        server.device.fail_when = lambda work: False
        assert server.complete("Hello", max_tokens=4)["choices"][0]["text"] == server.expected("Hello", 4)


def test_whole_surrogate_pairs_are_characters(server: Running):
    response = server.http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')
    assert response.status_code == 200, response.text


def test_a_reset_during_a_step_that_hangs_says_that_it_will_come():
    go, stuck = threading.Event(), threading.Event()

    def hang(work: StepWork) -> None:
        stuck.set()
        go.wait(60)

    with running() as server, ThreadPoolExecutor(1) as pool:
        ask = server.engine.reset
        server.engine.reset = lambda timeout=None: ask(0.01)  # type: ignore[method-assign]
        server.device.before_step = hang
        answer = pool.submit(server.complete, "Hello", max_tokens=2)
        assert stuck.wait(60)
        response = server.http.post("/reset_prefix_cache")
        go.set()
        assert response.status_code == 503
        assert "when it has ended" in response.json()["error"]["message"]
        assert answer.result()["choices"][0]["text"] == server.expected("Hello", 2)


def test_a_row_that_is_not_finite_is_an_error_and_its_neighbour_goes_on(server: Running):
    together = threading.Barrier(2, timeout=30)

    def ask(text: str, stream: bool) -> str:
        body = {"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": stream}
        together.wait()
        return server.http.post("/v1/completions", json=body).text

    def late(work: StepWork) -> list[int]:
        asks = enumerate(work.samples)
        return [
            i
            for i, ask in asks
            if ask is not None and ask.prompt[0] == CharTokenizer().encode("b")[0] and len(ask.output) > 3
        ]

    server.device.not_finite = late
    try:
        with ThreadPoolExecutor() as pool:
            streamed, whole = pool.submit(ask, "bad one", True), pool.submit(ask, "good one", False)
            assert json.loads(whole.result(60))["choices"][0]["finish_reason"] == "length"
        *chunks, last = [line for line in streamed.result(60).splitlines() if line]
        assert len(chunks) >= 1
        error = json.loads(last.removeprefix("data: "))["error"]
        answer = server.complete("bad two", 500, max_tokens=12, ignore_eos=True)
        assert answer["error"]["code"] == error["code"] == "not_finite"
        assert answer["error"]["type"] == "server_error"
        assert "NaN or infinite" in answer["error"]["message"]
    finally:
        server.device.not_finite = lambda work: ()
    assert server.http.get("/health").json() == {"status": "ok", "not_finite": 2}
    assert "headway_not_finite_total 2.0" in server.http.get("/metrics").text
