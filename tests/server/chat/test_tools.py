"""Loops of tool calls with the built-in model behind the official client: calls are forced, so that they are real."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tests.server.fakes import listening

from headway.engine import EngineConfig
from headway.engine.build import build_engine
from headway.engine.tokenizer import HubTokenizer
from headway.runtime.forward.grammars import JSON_SPACE
from headway.runtime.interface import Constraint
from headway.server import ServerOptions
from headway.server.chat.required import calls_constraint

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place on a day",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 8},
                "day": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["place", "day"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search in a library",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["book", "map"]}, "new": {"type": "boolean"}},
            "required": ["kind", "new"],
            "additionalProperties": False,
        },
    },
}
TOOLS: list[Any] = [WEATHER, SEARCH]
ASK: list[Any] = [
    {"role": "system", "content": "You are a librarian who looks things up."},
    {"role": "user", "content": "Which book goes with the weather in Paris?"},
]
ENDLESS = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}},
    "required": ["n"],
    "additionalProperties": False,
}
EXPLAIN = {"cache_salt": "me", "headway": {"explain": True}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    built = build_engine(None, EngineConfig(memory=64 << 20, max_running=4))
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("builtin")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield client


def ask(client: openai.OpenAI, messages: list[Any] = ASK, **body: Any) -> Any:
    given: dict[str, Any] = {"tools": TOOLS, "temperature": 0, "max_tokens": 120, "extra_body": EXPLAIN} | body
    return client.chat.completions.create(model="builtin", messages=messages, **given)


def check(call: Any) -> None:
    """A call is one of the tools, with arguments that fit."""
    arguments = json.loads(call.function.arguments)
    assert call.type == "function"
    if call.function.name == "get_weather":
        assert set(arguments) == {"place", "day"}
        assert len(arguments["place"]) <= 8
        assert arguments["day"] in range(1, 8)
    else:
        assert call.function.name == "search"
        assert set(arguments) == {"kind", "new"}


def test_a_loop_of_ten_calls_reuses_all_that_it_has_computed(client: openai.OpenAI):
    """Case RPT-17: tools, calls and results are sent as they are, and every step goes on where the last one ended."""
    talk, known = list(ASK), 0
    for step in range(10):
        answer = ask(client, talk, tool_choice="required", parallel_tool_calls=False)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert len(choice.message.tool_calls) == 1
        check(choice.message.tool_calls[0])
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == known, (step, answer.headway["losses"])
        known = answer.usage.total_tokens - 1  # the end of the answer is told and not computed
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": f"result {step}"}
        talk += [choice.message.model_dump(), result]


def test_a_streamed_call_is_the_same(client: openai.OpenAI):
    whole = ask(client, tool_choice="required").choices[0]
    chunks = list(ask(client, tool_choice="required", stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    calls = whole.message.tool_calls
    assert [call.function.name for call in deltas if call.id] == [call.function.name for call in calls]
    assert len(deltas) > 2 * len(calls), "arguments come as they are written"
    for i, call in enumerate(calls):
        assert "".join(one.function.arguments for one in deltas if one.index == i) == call.function.arguments
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (whole.message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_the_choice_of_a_tool(client: openai.OpenAI):
    named = ask(client, tool_choice={"type": "function", "function": {"name": "search"}}).choices[0]
    assert [call.function.name for call in named.message.tool_calls] == ["search"]
    for choice in ("auto", "none"):
        said = ask(client, tool_choice=choice, max_tokens=8).choices[0]
        assert said.message.tool_calls is None
        assert said.message.content
    with pytest.raises(openai.BadRequestError, match="the tools are get_weather, search"):
        ask(client, tool_choice={"type": "function", "function": {"name": "fly"}})
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        ask(client, tool_choice="required", tools=[])
    with pytest.raises(openai.BadRequestError, match="each its own"):
        ask(client, tools=[WEATHER, WEATHER])


def test_an_answer_without_a_call_may_have_a_form(client: openai.OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    message = ask(client, response_format=form).choices[0].message
    if message.tool_calls:
        check(message.tool_calls[0])
    else:
        assert json.loads(message.content) in ("yes", "no")


def test_where_a_call_is_required_a_form_of_other_answers_is_no_matter(client: openai.OpenAI):
    # instructor's mode RESPONSES_TOOLS sends both
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    answer = ask(client, response_format=form, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    check(call)
    assert answer.model_extra["headway"]["ignored"] == ["response_format"]


def test_a_form_beside_tools_has_no_more_space_than_without(client: openai.OpenAI):
    tools, otherwise = [{"type": "function", "function": {"name": "a", "parameters": {}}}], Constraint("json", "{}")
    tokenizer = HubTokenizer(SimpleNamespace(chat_template="<tool_call>", all_special_ids=[]))
    form = calls_constraint(tokenizer, tools, "", parallel=True, otherwise=otherwise)
    assert form is not None
    assert json.dumps(JSON_SPACE) in form.text
    for schema in ('{}\nother: "a"', "[" * 100_000, "false"):
        with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be used") as refused:
            ask(client, extra_body={"guided_json": schema})
        assert refused.value.param == "guided_json"


@pytest.mark.parametrize("otherwise", [{}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
        ({"properties": {"a": {"type": "text"}}}, "Invalid type: text"),
        ({"type": "string"}, "arguments are an object"),
        ({"properties": 5, "required": 5}, "properties"),
        ({"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": ENDLESS}}, "cannot be used"),
    ],
)
def test_a_schema_of_arguments_that_cannot_be_followed_is_blamed_by_its_place(
    client: openai.OpenAI, parameters: Any, told: str, otherwise: dict[str, Any]
):
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    choice = {} if otherwise else {"tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match=told) as refused:
        ask(client, tools=tools, **choice, **otherwise)
    assert refused.value.param == "tools[2].function.parameters"
    assert refused.value.code == "invalid_constraint"


def test_arguments_may_be_required_that_have_no_schema(client: openai.OpenAI):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"properties": {}, "required": ["b"]}}}
    answer = ask(client, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    if answer.choices[0].finish_reason == "tool_calls":
        assert "b" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


def test_arguments_are_an_object_though_their_schema_does_not_say_so(client: openai.OpenAI):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"description": "anything"}}}
    for seed in range(3):
        answer = ask(client, tools=[tool], tool_choice="required", temperature=1, seed=seed, parallel_tool_calls=False)
        for call in answer.choices[0].message.tool_calls or ():
            assert isinstance(json.loads(call.function.arguments), dict)


def test_arguments_that_no_template_can_write_stay_text(client: openai.OpenAI):
    for arguments in ("[" * 2_000, '{"a": "\\ud800"}'):
        call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": arguments}}
        said = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": ""}]
        assert ask(client, said, max_tokens=1).usage.completion_tokens == 1


def test_the_end_of_the_tools_serves_other_conversations(client: openai.OpenAI):
    body = {"cache_salt": "shared", "headway": {"explain": True}}
    first = ask(client, max_tokens=1, extra_body=body)
    other = [{"role": "user", "content": "Good morning!"}]
    second = ask(client, other, max_tokens=1, extra_body=body)
    third = ask(client, [{"role": "user", "content": "Good evening!"}], max_tokens=1, extra_body=body)
    end = first.headway["boundaries"][0]
    assert second.headway["boundaries"][0] == third.headway["boundaries"][0] == end
    assert third.usage.prompt_tokens_details.cached_tokens >= end


def turned_keys(value: Any, *, names: bool = False) -> Any:
    """The same JSON with its keys in another order, but for the names of parameters."""
    if not isinstance(value, dict):
        return value
    keys = value if names else list(value)[::-1]
    return {key: turned_keys(value[key], names=key == "properties") for key in keys}


def test_tools_in_another_order_are_told_by_name_and_other_keys_are_the_same_text(client: openai.OpenAI):
    body = {"cache_salt": "order", "headway": {"explain": True}}
    first = ask(client, max_tokens=1, extra_body=body)
    assert first.headway["tools"] == ""
    shuffled = [turned_keys(tool) for tool in TOOLS]
    same = ask(client, max_tokens=1, tools=shuffled, extra_body=body)
    assert same.headway["tools"] == ""
    assert same.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    turned = ask(client, max_tokens=1, tools=TOOLS[::-1], extra_body=body)
    assert "search was number 2 and is number 1" in turned.headway["tools"]
    changed = ask(
        client,
        max_tokens=1,
        tools=[WEATHER | {"function": WEATHER["function"] | {"description": "x"}}, SEARCH],
        extra_body=body,
    )
    assert "the definition of get_weather" in changed.headway["tools"]
