"""`/v1/responses`: what is asked becomes a chat, what is answered can be sent back, and streams are as published."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.server.dialects.answers import CALLS, TEXT, WORDS, events, form, whole
from tests.server.fakes import ByteTokenizer, Running, listening, running

from headway.engine import EngineConfig
from headway.engine.build import build_engine
from headway.errors import HeadwayError
from headway.server import ServerOptions
from headway.server.chat.conversation import conversation_of
from headway.server.dialects.response_items import ItemsFormat
from headway.server.dialects.responses import ResponsesRequest, chat_of_response
from headway.server.dialects.schemas import ResponseObject
from headway.server.protocol import ChatRequest, parse_body
from headway.server.records import ignored_fields

USER = {"role": "user", "content": "Weather?"}


def parsed(**body: Any) -> ResponsesRequest:
    return parse_body(ResponsesRequest, {"input": "Hello"} | body, strict=True)


def written(**body: Any) -> ItemsFormat:
    return ItemsFormat(parsed(**body), "m", WORDS, form())


def seen(chat: ChatRequest) -> list[dict[str, Any]]:
    """The messages that a template gets."""
    return list(conversation_of(chat, ByteTokenizer()).messages)


def said(message: dict[str, Any], *others: Any) -> list[dict[str, Any]]:
    """What a template gets where the same is asked as a chat."""
    body = {"messages": [USER, message, *others]}
    return seen(parse_body(ChatRequest, body))


def test_texts_instructions_and_items_become_messages():
    chat = chat_of_response(parsed(instructions="Be brief.", max_output_tokens=9, temperature=0, cache_salt="me"))
    assert [(m["role"], m["content"]) for m in seen(chat)] == [("system", "Be brief."), ("user", "Hello")]
    assert (chat.max_tokens, chat.temperature, chat.cache_salt) == (9, 0, "me")
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"type": "message", "role": "developer", "content": parts}, {"role": "user", "content": "c"}]
    assert [(m["role"], m["content"]) for m in seen(chat_of_response(parsed(input=items)))] == [
        ("system", "a\nb"),
        ("user", "c"),
    ]


def test_marks_of_both_kinds_are_breakpoints():
    marks = ({"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}, {})
    parts = [{"type": "input_text", "text": "a"} | mark for mark in marks]
    content = chat_of_response(parsed(input=[{"role": "user", "content": parts}])).messages[0].content
    assert [part.cache_control is not None for part in content] == [True, True, False]


def test_what_was_answered_can_be_sent_back_and_is_the_message_of_a_chat():
    """As the client's objects, as their dumps, and as plain JSON: the template gets what it gets of a chat."""
    answer = whole(written())
    ResponseObject.model_validate(answer)
    record = Response.model_validate(answer)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item, output in zip(record.output[2:], ("3", [{"type": "input_text", "text": "noon"}]), strict=True)
    ]
    calls = [
        {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        for item in record.output[2:]
    ]
    chat = {"role": "assistant", "reasoning_content": "Where?", "content": "I look.", "tool_calls": calls}
    tools = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(calls, ("3", "noon"), strict=True)
    ]
    for items in (
        answer["output"],
        [item.model_dump() for item in record.output],
        [item.model_dump(exclude_none=True) for item in record.output],
        [item.model_dump(exclude_unset=True) for item in record.output],
    ):
        body = parsed(input=[USER, *items, *results])
        assert ignored_fields(body) == []
        assert seen(chat_of_response(body)) == said(chat, *tools)


def test_each_turn_is_a_message_of_its_own():
    first, second = whole(written())["output"], whole(written(), "Yes.")["output"]
    messages = seen(chat_of_response(parsed(input=[USER, *second, *first, *second, *second])))
    assert [(m["content"], len(m.get("tool_calls", []))) for m in messages[1:]] == [
        ("Yes.", 0),
        ("I look.", 2),
        ("Yes.", 0),
        ("Yes.", 0),
    ]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_has_the_published_events_in_their_order(size: int):
    told = list(events(written(), size=size))
    for event in told:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    kinds = [event["type"].removeprefix("response.") for event in told]
    shortened = [kind for i, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[i - 1] != kind]
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert shortened == [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in text),
        *(kind.format("output_text") for kind in text),
        *call * 2,
        "completed",
    ]


def test_a_stream_adds_up_to_the_whole_answer():
    told = list(events(written(), size=3))
    last, answer = told[-1]["response"], whole(written())
    for one in (last, answer):
        for name in ("id", "created_at", "completed_at"):
            del one[name]
        for item in one["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert last == answer
    added = {event["output_index"]: "" for event in told if event["type"].endswith("item.added")}
    for event in told:
        if event["type"].endswith(".delta"):
            added[event["output_index"]] += event["delta"]
    assert added[0], added[1] == ("Where?", "I look.")
    assert [json.loads(added[i]) for i in (2, 3)] == [arguments for _, arguments in CALLS]


def test_counts_and_ends():
    answer = whole(written(), reason="length")
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 3}
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Where?")
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed"] * 3 + ["incomplete"]
    assert list(events(written(), reason="length"))[-1]["type"] == "response.incomplete"
    assert whole(written(), "")["output"][0]["content"][0]["text"] == ""
    failed = list(written().failed(HeadwayError("no")))
    assert [event["type"] for event in failed] == ["error", "response.failed"]
    assert failed[1]["response"]["error"] == {"code": "server_error", "message": "no"}


def test_what_the_answer_says_of_its_request():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    asked = {"tools": [tool], "tool_choice": {"type": "function", "name": "look"}, "instructions": "Be brief."}
    answer = whole(written(**asked, text={"format": schema}, reasoning={"effort": "low"}))
    told = Response.model_validate(answer)
    assert (told.instructions, told.tool_choice.name, told.tools[0].name) == ("Be brief.", "look", "look")
    assert (told.text.format.name, told.reasoning.effort, told.store) == ("a", "low", False)


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(words=ByteTokenizer()) as server:
        yield server


def respond(server: Running, status: int = 200, **body: Any) -> dict[str, Any]:
    return server.post("/v1/responses", status, **({"input": "Hello", "max_output_tokens": 4} | body))


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier input"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "stream: true"),
        ({"input": []}, "input", "the input is empty"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "web_search_call are not supported"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": ""}]}, "input[0].call_id", "is missing"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", ""),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "images are not supported",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "describe it as a function"),
        ({"tools": [{"type": "function", "name": "no name"}]}, "tools[0].name", ""),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "max_output_tokens is 9999"),
        ({"input": "a" * 700}, "input", "the prompt has 720 tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "cannot be constrained"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"max_tokens": 4}, "max_tokens", "send max_output_tokens"),
    ],
)
def test_what_is_refused_is_named_as_it_was_sent(server: Running, body: dict[str, Any], param: str, told: str):
    error = respond(server, 400, **body)["error"]
    assert error["param"] == param
    assert told in error["message"]


def test_what_changes_nothing_is_taken_and_told(server: Running):
    hints: dict[str, Any] = {"store": True, "metadata": {"a": "b"}, "truncation": "auto", "prompt_cache_key": "k"}
    hints |= {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "mood": 1}
    answer = respond(server, **hints, reasoning={"summary": "auto"}, background=False, previous_response_id=None)
    assert set(answer["headway"]["ignored"]) == {*hints, "reasoning.summary"}


def test_reports_and_pins_come_as_in_a_chat(server: Running):
    asked = {"input": "Once upon a time", "cache_salt": "me", "headway": {"explain": True, "pin": True}}
    first, second = (respond(server, **asked) for _ in range(2))
    assert first["headway"]["losses"][0]["reason"] == "nothing_matched"
    assert second["headway"]["resumed_from"] in ("breakpoint", "prompt_end")
    assert second["headway"]["pin"]["outcome"] == "kept"
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
    assert usage["input_tokens_details"]["cache_write_tokens"] == 0
    assert first["usage"]["input_tokens_details"]["cache_write_tokens"] == usage["input_tokens"] - 1


# -- with the official client, on the built-in model -----------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    built = build_engine(None, EngineConfig(memory=64 << 20, max_running=4))
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("builtin")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield client


TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 8}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_loop_of_calls_reuses_all_that_it_has_computed(client: openai.OpenAI):
    talk: list[Any] = [USER]
    known = 0
    for step in range(4):
        with client.responses.stream(
            model="builtin",
            input=talk,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=90,
        ) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        call = answer.output[-1]
        assert call.type == "function_call"
        assert set(call.parsed_arguments) == {"place"}
        assert answer.usage.input_tokens_details.cached_tokens == known
        known = answer.usage.total_tokens - 1
        talk += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": f"{step}"}]


class Book(BaseModel):
    kind: bool


def test_an_answer_is_parsed_as_its_form(client: openai.OpenAI):
    answer = client.responses.parse(
        model="builtin", input="A book?", text_format=Book, temperature=0, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, Book)
    assert answer.text.format.type == "json_schema"


def test_the_text_of_a_stream_is_that_of_the_whole_answer(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": "builtin", "input": "Who are you?", "temperature": 0, "max_output_tokens": 20}
    whole_answer = client.responses.create(**asked)
    chunks = list(client.responses.create(**asked, stream=True))
    assert "".join(chunk.delta for chunk in chunks if chunk.type.endswith("text.delta")) == whole_answer.output_text
    assert chunks[-1].response.status == whole_answer.status == "incomplete"
    assert TEXT not in whole_answer.output_text
