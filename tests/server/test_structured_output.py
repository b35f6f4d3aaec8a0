"""Answers of a form over HTTP: OpenAI's and vLLM's fields for it, and what is said to a bad one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.fakes import listening, running

from headway.engine import EngineConfig
from headway.engine.build import build_engine
from headway.server import ServerOptions
from headway.server.constraints import closed

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def http(tiny_model: Path) -> Iterator[httpx.Client]:
    built = build_engine(
        str(tiny_model), EngineConfig(memory=8 << 20, max_batched_tokens=64, max_running=8, check=True)
    )
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("tiny")) as (url, _),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client


def chat(http: httpx.Client, status: int = 200, **body: Any) -> Any:
    said = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Who?"}], "seed": 1} | body)
    assert said.status_code == status, said.text
    return said.json()


def complete(http: httpx.Client, status: int = 200, **body: Any) -> Any:
    said = http.post("/v1/completions", json={"prompt": "Who?", "max_tokens": 120, "seed": 1} | body)
    assert said.status_code == status, said.text
    return said.json()


def check(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "age"}
    assert len(found["name"]) <= 5
    assert 0 <= found["age"] <= 99


def test_every_one_of_n_answers_fits_its_schema_streamed_or_not(http: httpx.Client) -> None:
    body = {"response_format": FORMAT, "n": 3, "max_tokens": 400}
    whole = chat(http, **body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    for choice, text in zip(whole["choices"], texts, strict=True):
        assert choice["finish_reason"] == "stop"
        check(text)
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    asked = {"messages": [{"role": "user", "content": "Who?"}], "seed": 1, "stream": True} | body
    with http.stream("POST", "/v1/chat/completions", json=asked) as stream:
        for line in filter(None, stream.iter_lines()):
            if line != "data: [DONE]":
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts, "a seed gives the same answers"


def test_properties_that_a_schema_does_not_name_are_not_invented(http: httpx.Client) -> None:
    # instructor's mode JSON_SCHEMA sends what pydantic writes, which does not say whether there may be others
    inner = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
    schema = {"type": "object", "properties": {"who": {"$ref": "#/$defs/who"}}, "required": ["who"]}
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": schema | {"$defs": {"who": inner}}}}
    for choice in chat(http, response_format=form, n=4, max_tokens=400)["choices"]:
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"who"}
        check(json.dumps(found["who"]))


@pytest.mark.parametrize(
    "left",
    [
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "required": [{}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"const": {"properties": {"a": {}}}},
        True,
        "no schema",
    ],
)
def test_schemas_that_say_of_other_properties_stay_as_they_are(left: Any) -> None:
    assert closed(left) == left


def test_every_object_of_a_schema_is_closed() -> None:
    person = {"type": "object", "properties": {"name": {}}}
    only = person | {"additionalProperties": False}
    assert closed({"anyOf": [person, {"items": person}]}) == {"anyOf": [only, {"items": only}]}
    assert closed({"properties": {"properties": person}}) == {
        "properties": {"properties": only},
        "additionalProperties": False,
    }
    assert closed({"$ref": "#/$defs/p", "$defs": {"p": person}}) == {"$ref": "#/$defs/p", "$defs": {"p": only}}


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[a-f]{4}"}, "[a-f]{4}"),
        ({"guided_grammar": 'root ::= "(" [0-9]+ ")"'}, r"\([0-9]+\)"),
        ({"guided_json": json.dumps({"enum": [1, "two"]})}, '1|"two"'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"const": {"a": 1}}, "disable_any_whitespace": True}}, r'\{"a":1\}'),
        ({"structured_outputs": {"regex": "^x{3}$"}}, "xxx"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a|b"),
    ],
)
def test_prompts_of_a_batch_are_all_answered_in_the_form(http: httpx.Client, asked: Any, fits: str) -> None:
    found = complete(http, prompt=["One", "Two", "Three"], **asked)["choices"]
    assert all(re.fullmatch(fits, choice["text"]) and choice["finish_reason"] == "stop" for choice in found), found


def test_json_object_begins_as_one_and_what_ends_answers_ends_them_before(http: httpx.Client) -> None:
    cut = chat(http, response_format={"type": "json_object"}, max_tokens=5)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"].startswith("{")
    stopped = complete(http, guided_regex="(abc){5}", stop=["cab"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("ab", "stop")
    padded = complete(http, guided_choice=["ab"], ignore_eos=True, max_tokens=20)
    assert padded["choices"][0]["text"] == "ab"
    assert (padded["choices"][0]["finish_reason"], padded["usage"]["completion_tokens"]) == ("length", 20)


def test_log_probabilities_name_nothing_that_is_not_allowed(http: httpx.Client) -> None:
    found = chat(http, guided_choice=["a", "b"], logprobs=True, top_logprobs=5, temperature=0)
    first = found["choices"][0]["logprobs"]["content"][0]
    assert {one["token"] for one in first["top_logprobs"]} == {"a", "b"}
    assert all(one["logprob"] <= 0 for one in first["top_logprobs"])


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}}},
            "response_format.json_schema.schema",
            "Invalid type: text",
        ),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_json": "{"}, "guided_json", "Expecting property name"),
        ({"guided_regex": ".*" * 8000}, "guided_regex", "8000 repetitions"),
        ({"guided_json": {"type": "string", "pattern": "a?" * 20_000}}, "guided_json", "20000 repetitions"),
        ({"guided_json": "[" * 100_000}, "guided_json", "recursion"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"structured_outputs": {}}, "structured_outputs", "says no form"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "both say"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown field"),
        ({"guided_grammar": "start: a"}, "guided_grammar", 'unknown name: "a"'),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "both say"),
    ],
)
def test_a_bad_form_is_refused_by_its_field_and_says_why(http: httpx.Client, asked: Any, param: str, said: str) -> None:
    error = complete(http, 400, **asked)["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_text_is_no_form_and_an_engine_without_forms_says_so() -> None:
    with running() as server:
        server.complete("abc", max_tokens=2, response_format={"type": "text"}, guided_json=None)
        refused = server.complete("abc", 400, guided_regex="a")["error"]
        assert (refused["param"], refused["code"]) == ("guided_regex", "unsupported_parameter")
