"""What clients send: what this server wrote, and fields of which the answer does not depend."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from tests.server.fakes import ByteTokenizer, CharTokenizer, Running, running

from headway.server.chat.conversation import conversation_of
from headway.server.prompts import prepare_chat, prepare_completions
from headway.server.protocol import ChatRequest, CompletionRequest, parse_body
from headway.server.records import ignored_fields
from headway.server.schemas import AnswerMessage

HINTS = {
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "priority": 3,
    "request_id": "r",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(words=ByteTokenizer()) as server:
        yield server


def parsed(*messages: Any, **fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, {"messages": list(messages)} | fields)


@pytest.mark.parametrize("form", ["object", "dump", "dump without null"])
def test_the_message_that_was_answered_can_be_appended(server: Running, form: str):
    """Case RPT-05."""
    talk: list[Any] = [{"role": "user", "content": f"Hello {form}"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(model="fake", messages=talk, max_tokens=8, temperature=0)
        message = first.choices[0].message
        given = message if form == "object" else message.model_dump(exclude_none="without" in form)
        second = client.chat.completions.create(
            model="fake", messages=[*talk, given, {"role": "user", "content": "Go on"}], max_tokens=1
        )
    computed = first.usage.total_tokens - 1  # the last token of an answer is told, and computed by who goes on
    assert second.usage.prompt_tokens_details.cached_tokens == computed
    assert second.model_extra == {}, "nothing of it is told as ignored"


CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "K\u00f6ln", "n": 3}'}},
    {"id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
]
ANSWERS = [
    {"role": "assistant", "refusal": None, "content": content} | reasoning | ({"tool_calls": calls} if calls else {})
    for content in (None, "", "Well.")
    for reasoning in ({}, {"reasoning_content": "Hm."})
    for calls in ([], CALLS[:1], CALLS)
]
"""Every shape of message that `headway.server.schemas.AnswerMessage` allows."""


def forms_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message as clients keep it: as it came, or from their own records of it."""
    record = ChatCompletionMessage.model_validate(message)
    yield message
    yield record.model_dump()
    yield record.model_dump(exclude_none=True)
    yield record.model_dump(exclude_unset=True)
    yield (
        message | {"function_call": None, "annotations": [], "audio": None, "id": "msg_1", "tool_calls": None} | message
    )
    yield message | {"content": [{"type": "text", "text": message["content"] or ""}]}
    parsed_calls = [
        c | {"index": i, "function": c["function"] | {"arguments": json.loads(c["function"]["arguments"])}}
        for i, c in enumerate(message.get("tool_calls", []))
    ]
    yield message | {"tool_calls": parsed_calls}


def test_every_message_of_an_answer_is_taken_in_every_form_and_place():
    user = {"role": "user", "content": "a"}
    for message in ANSWERS:
        AnswerMessage.model_validate(message)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": content}
            for call in message.get("tool_calls", [])
            for content in ("done", [{"type": "text", "text": "done"}])
        ]
        for given in forms_of(message):
            for talk in ([user, given], [user, given, *results, user], [user, given, *results, given, *results]):
                body = parse_body(ChatRequest, {"messages": talk}, strict=True)
                assert ignored_fields(body) == []
                seen = conversation_of(body, CharTokenizer()).messages
                assert [m["role"] for m in seen] == [m["role"] for m in talk]
                plain = seen[1]
                assert plain["content"] == (message["content"] or "")
                assert plain.get("reasoning_content") == message.get("reasoning_content")
                calls = [
                    (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in plain.get("tool_calls", [])
                ]
                wanted = [
                    (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
                    for c in message.get("tool_calls", [])
                ]
                assert calls == wanted
                told = [(m["tool_call_id"], m["name"], m["content"]) for m in seen if m["role"] == "tool"]
                assert all(one in [(i, name, "done") for i, name, _ in wanted] for one in told)


def test_fields_that_change_nothing_are_taken_and_told(server: Running, caplog: pytest.LogCaptureFixture):
    """Case RPT-08."""
    plain = server.chat("Hello", max_tokens=4)
    with caplog.at_level(logging.INFO, "headway.server.service"):
        told = [server.chat("Hello", max_tokens=4, **HINTS, temprature=1, seed=None) for _ in range(2)]
    for answer in told:
        assert answer["choices"] == plain["choices"]
        assert set(answer["headway"]["ignored"]) == {*HINTS, "temprature"}
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == 1, "once for each field"
    assert all(name in lines[0] for name in (*HINTS, "temprature"))


def test_strict_servers_take_what_changes_nothing_and_refuse_what_they_do_not_know():
    with running(strict=True) as server:
        assert server.chat("Hello", max_tokens=1, **HINTS)["headway"]["ignored"]
        error = server.chat("Hello", status=400, temprature=1)["error"]
        assert "did you mean temperature?" in error["message"]
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
        schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
        assert not schemas["ChatRequest"]["additionalProperties"]


def test_what_is_ignored_is_told_by_its_place_and_once():
    user = {"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}], "mood": "good"}
    marked = {"role": "user", "content": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    given = parsed(user, user, marked, stream=True, stream_options={"include_obfuscation": True}, store=False)
    told = {"messages[].mood", "messages[].content[].mood", "messages[].cache_control.ttl"}
    assert set(ignored_fields(given)) == told | {"stream_options.include_obfuscation"}
    many = parsed({"role": "user", "content": "a"}, **{f"field{i}": i + 1 for i in range(50)})
    assert ignored_fields(many)[-1] == "and 18 more"


def test_an_assistant_may_have_said_nothing_or_refused():
    part = {"type": "refusal", "refusal": "never"}
    said = [
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "function_call": None},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [part], "annotations": [], "audio": None, "id": "msg_1"},
    ]
    given = conversation_of(parsed({"role": "user", "content": "a"}, *said), CharTokenizer())
    assert [message["content"] for message in given.messages] == ["a", "", "no", "never"]


def test_a_truncated_prompt_keeps_its_last_tokens():
    user = {"role": "user", "content": "Hello there"}
    whole = prepare_chat(parsed(user), CharTokenizer())
    cut = prepare_chat(parsed(user, truncate_prompt_tokens=16), CharTokenizer())
    assert cut.tokens.tolist() == whole.tokens.tolist()[-16:]
    assert [b + cut.cut for b in cut.boundaries] == [b for b in whole.boundaries if b > cut.cut]
    body = {"prompt": "Hello there", "truncate_prompt_tokens": -1, "max_tokens": 4, "echo": True}
    room = prepare_completions(parse_body(CompletionRequest, body), CharTokenizer(), 10)[0]
    assert (room.text, room.cut) == (" there", 5), "-1 is what fits"


def test_a_truncated_prompt_says_that_it_begins_elsewhere(server: Running):
    body: dict[str, Any] = {"truncate_prompt_tokens": 8, "cache_salt": "cut", "headway": {"explain": True}}
    answers = [server.complete(text, max_tokens=1, **body) for text in ("Once upon a time", "Once upon a time there")]
    assert answers[1]["usage"]["prompt_tokens"] == 8
    assert "truncate_prompt_tokens" in answers[1]["headway"]["losses"][0]["detail"]


def test_the_last_message_can_be_gone_on_with(server: Running):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    body: dict[str, Any] = {"messages": talk, "max_tokens": 1, "headway": {"explain": True}, "cache_salt": "on"}
    going_on = server.post("/v1/chat/completions", **body, continue_final_message=True)
    assert going_on["usage"]["prompt_tokens"] == len("<user>Hi</><assistant>I am")
    again = server.post("/v1/chat/completions", **body, add_generation_prompt=False)
    assert again["usage"]["prompt_tokens"] == len("<user>Hi</><assistant>I am</>")
    error = server.post("/v1/chat/completions", 400, **body, continue_final_message=True, add_generation_prompt=True)[
        "error"
    ]
    assert "send one" in error["message"]


@pytest.mark.parametrize(
    ("known", "effort", "options"),
    [
        ({"reasoning_effort"}, "high", {"reasoning_effort": "high"}),
        ({"enable_thinking"}, "none", {"enable_thinking": False}),
        ({"enable_thinking"}, "high", {}),
        (set(), "low", {}),
    ],
)
def test_reasoning_effort_reaches_templates_that_know_it(known: set[str], effort: str, options: dict[str, Any]):
    class Knowing(CharTokenizer):
        def template_knows(self, name: str) -> bool:
            return name in known

    given = conversation_of(parsed({"role": "user", "content": "a"}, reasoning_effort=effort), Knowing())
    assert given.options == options


def test_a_stop_string_is_shown_where_that_is_asked_for(server: Running):
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = server.complete("Hello", **body)["choices"][0]["text"]
    stop = whole[4:6]
    shown = server.complete("Hello", **body, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (shown["text"], shown["finish_reason"]) == (whole[: whole.index(stop) + 2], "stop")
