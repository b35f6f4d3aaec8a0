"""`/v1/messages`: what is asked becomes a chat, what is answered can be sent back, and streams are as published."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from tests.server.chat.test_tools import SEARCH, WEATHER
from tests.server.dialects.answers import CALLS, WORDS, events, form, whole
from tests.server.fakes import ByteTokenizer, Running, listening, running

from headway.engine import EngineConfig, RequestFailedError
from headway.engine.build import build_engine
from headway.server import ServerOptions
from headway.server.chat.conversation import conversation_of
from headway.server.dialects.message_blocks import BlocksFormat
from headway.server.dialects.messages import MessagesRequest, chat_of_messages, ignored_in_messages
from headway.server.dialects.schemas import MessageOfBlocks
from headway.server.protocol import ChatRequest, parse_body

USER = {"role": "user", "content": "Weather?"}
MARK = {"cache_control": {"type": "ephemeral"}}


def parsed(*messages: Any, **body: Any) -> MessagesRequest:
    given = {"messages": list(messages) or [USER], "max_tokens": 100_000}
    return parse_body(MessagesRequest, given | body, strict=True)


def written(**body: Any) -> BlocksFormat:
    return BlocksFormat(parsed(**body), "m", WORDS, form())


def seen(chat: ChatRequest) -> list[dict[str, Any]]:
    """The messages that a template gets."""
    return list(conversation_of(chat, ByteTokenizer()).messages)


def test_system_and_turns_become_messages():
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."} | MARK]
    chat = chat_of_messages(parsed(system=system, stop_sequences=["x"], metadata={"user_id": "me"}, top_k=3))
    assert [(m["role"], m["content"]) for m in seen(chat)] == [("system", "Be brief.\nBe kind."), ("user", "Weather?")]
    assert (chat.stops, chat.user, chat.top_k, chat.continue_final_message) == (("x",), "me", 3, False)
    begun = chat_of_messages(parsed(USER, {"role": "assistant", "content": "I"}))
    assert begun.continue_final_message


def test_a_line_that_is_not_for_the_model_is_left_out():
    """It differs with every request, and would part all of them at their first token."""
    line = "x-anthropic-billing-header: cc_version=1; cch=0a1b2;"
    for system in ([{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}], f"{line}\nBe brief."):
        body = parsed(system=system)
        assert seen(chat_of_messages(body))[0]["content"] == "Be brief."
        assert ignored_in_messages(body) == ["system (x-anthropic-billing-header)"]
    assert [m["role"] for m in seen(chat_of_messages(parsed(system=line)))] == ["user"]


def test_what_was_answered_can_be_sent_back_and_is_the_message_of_a_chat():
    """As the client's objects, as their dumps, and as plain JSON: the template gets what it gets of a chat."""
    answer = whole(written())
    MessageOfBlocks.model_validate(answer)
    record = Message.model_validate(answer)
    ids = [block["id"] for block in answer["content"][2:]]
    calls = [
        {"id": name, "type": "function", "function": {"name": call[0], "arguments": call[1]}}
        for name, call in zip(ids, CALLS, strict=True)
    ]
    chat = {"role": "assistant", "reasoning_content": "Where?", "content": "I look.", "tool_calls": calls}
    told = [{"role": "tool", "tool_call_id": name, "content": "3"} for name in ids]
    body = {"messages": [USER, chat, *told, {"role": "user", "content": "Well?"}]}
    wanted = seen(parse_body(ChatRequest, body))
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": "3"},
        {"type": "tool_result", "tool_use_id": ids[1], "content": [{"type": "text", "text": "3"} | MARK]},
        {"type": "text", "text": "Well?"},
    ]
    for blocks in (
        answer["content"],
        [block.model_dump() for block in record.content],
        [block.model_dump(exclude_none=True) for block in record.content],
    ):
        sent = parsed(USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results})
        assert ignored_in_messages(sent) == []
        assert seen(chat_of_messages(sent)) == wanted


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_has_the_published_events_in_their_order(size: int):
    told = list(events(written(), size=size))
    for event in told:
        if event["type"] != "ping":
            TypeAdapter(RawMessageStreamEvent).validate_python(event)
    kinds = [event["type"] for event in told]
    shortened = [kind for i, kind in enumerate(kinds) if kind != "content_block_delta" or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert shortened == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    start, end = told[0]["message"]["usage"], told[-2]["usage"]
    counts = {"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4}
    assert counts.items() <= start.items()
    assert counts.items() <= end.items()


def test_a_stream_adds_up_to_the_whole_answer():
    told, answer = list(events(written(), size=3)), whole(written())
    texts = ["", "", "", ""]
    for event in told:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta.get("thinking") or delta.get("text") or delta.get("partial_json") or ""
    blocks = answer["content"]
    assert texts[:2] == [blocks[0]["thinking"], blocks[1]["text"]] == ["Where?", "I look."]
    assert [json.loads(text) for text in texts[2:]] == [block["input"] for block in blocks[2:]]
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"] == answer["usage"]


@pytest.mark.parametrize(
    ("text", "reason", "stopped", "asked", "told"),
    [
        ("Yes.", "stop", None, 9, ("end_turn", None)),
        ("Yes.", "stop", "###", 9, ("stop_sequence", "###")),
        ("Yes.", "length", None, 4, ("max_tokens", None)),
        ("Yes.", "length", None, 9, ("model_context_window_exceeded", None)),
    ],
)
def test_why_an_answer_ends(text: str, reason: str, stopped: str | None, asked: int, told: tuple[str, str | None]):
    answer = whole(written(max_tokens=asked), text, reason, stopped)
    assert (answer["stop_reason"], answer["stop_sequence"]) == told


def test_choices_forms_and_thinking_are_those_of_a_chat():
    tool = {"name": "look", "input_schema": {"type": "object"}}
    for choice, wanted, parallel in (
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "look"}, "look", True),
    ):
        chat = chat_of_messages(parsed(tools=[tool], tool_choice=choice))
        found = chat.tool_choice if isinstance(chat.tool_choice, str) else chat.tool_choice.function.name
        assert (found, chat.parallel_tool_calls) == (wanted, parallel)
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    for asked in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        assert chat_of_messages(parsed(**asked)).response_format.json_schema.schema_ == {"type": "integer"}
    for kind, switch in (("enabled", True), ("disabled", False)):
        chat = chat_of_messages(parsed(thinking={"type": kind}))
        assert chat.chat_template_kwargs == {"enable_thinking": switch}


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(words=ByteTokenizer(), api_key="secret") as server:
        yield server


def ask(server: Running, status: int = 200, **body: Any) -> dict[str, Any]:
    return server.post("/v1/messages", status, **({"messages": [USER], "max_tokens": 4} | body))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens: input should be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: images are not"),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "blocks of the type search_result are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}]},
            "a message of the role user has no tool_use",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]: images are not",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "describe it with an input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"mcp_servers": [{"url": "x"}]}, "send its tools in tools"),
        ({"stop": "a"}, "send stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "cannot be constrained"),
        ({"messages": [{"role": "user", "content": "a" * 700}]}, "the prompt has 720 tokens"),
    ],
)
def test_what_is_refused_says_why_in_the_form_of_this_api(server: Running, body: dict[str, Any], told: str):
    answer = ask(server, 400, **body)
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert told in answer["error"]["message"]


def test_other_errors_have_this_form_too(server: Running):
    stranger = httpx.post(f"{server.url}/v1/messages", json={})
    assert (stranger.status_code, stranger.json()["error"]["type"]) == (401, "authentication_error")
    assert stranger.json()["request_id"] == stranger.headers["x-request-id"]
    assert server.http.get("/v1/messages").json()["error"]["message"] == "/v1/messages does not take GET"
    assert ask(server, 404, model="claude")["error"]["type"] == "not_found_error"
    assert server.http.post("/v1/messages", content=b"x" * (2 << 20)).json()["error"]["type"] == "request_too_large"
    [failed] = written().failed(RequestFailedError("no"))
    assert failed["error"] == {"type": "api_error", "message": "no"}


def test_what_changes_nothing_is_taken_and_told(server: Running):
    hints: dict[str, Any] = {"service_tier": "auto", "context_management": {"edits": []}, "mood": 1}
    answer = ask(
        server, **hints, thinking={"type": "enabled", "budget_tokens": 1024}, cache_control=MARK["cache_control"]
    )
    assert set(answer["headway"]["ignored"]) == {*hints, "thinking", "thinking.budget_tokens"}


def test_more_tokens_than_there_is_room_for_may_be_asked_for(server: Running):
    answer = ask(server, max_tokens=64_000, ignore_eos=True)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    prompt = sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    assert prompt + usage["output_tokens"] == server.engine.max_model_len
    counted = server.post("/v1/messages/count_tokens", messages=[USER])
    assert counted == {"input_tokens": prompt}


def test_reports_come_as_in_a_chat_and_what_is_kept_is_told(server: Running):
    text = {"messages": [{"role": "user", "content": "Once upon a time"}], "cache_salt": "me"}
    first, second = (ask(server, **text, headway={"explain": True}) for _ in range(2))
    third = ask(server, messages=[{"role": "user", "content": "A new one"}], headway={"no_store": True})
    tokens = first["headway"]["prompt_tokens"]
    names = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    counts = [[answer["usage"][name] for name in names] for answer in (first, second, third)]
    assert counts == [[0, tokens - 1, 1], [tokens - 1, 0, 1], [0, 0, third["usage"]["input_tokens"]]]
    assert third["usage"]["input_tokens"] > 1


# -- with the official client, on the built-in model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    built = build_engine(None, EngineConfig(memory=64 << 20, max_running=4))
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("builtin", ("secret",))) as (url, _),
        anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=300) as client,
    ):
        yield client


TOOLS: Any = [
    {"name": one["function"]["name"], "description": "a tool", "input_schema": one["function"]["parameters"]}
    for one in (WEATHER, SEARCH)
]


def test_a_series_with_moving_marks_reuses_all_that_it_has_computed(client: anthropic.Anthropic):
    """As Claude Code asks: tools, instructions and the last message are marked, and each turn moves the last mark."""
    system: Any = [{"type": "text", "text": "You are a librarian who looks things up."} | MARK]
    tools = [*TOOLS[:-1], TOOLS[-1] | MARK]
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Which book goes with the weather?"} | MARK]}
    ]
    known = 0
    for step in range(4):
        with client.messages.stream(
            model="builtin",
            max_tokens=120,
            system=system,
            tools=tools,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=talk,
            extra_body={"temperature": 0, "cache_salt": "me", "headway": {"explain": True}},
        ) as stream:
            told = list(stream)
            answer = stream.get_final_message()
        usage = answer.usage
        assert usage.cache_read_input_tokens == known
        assert usage.input_tokens == 1
        known += usage.cache_creation_input_tokens + usage.input_tokens + usage.output_tokens - 1
        assert answer.stop_reason == "tool_use"
        call = answer.content[-1]
        assert call.type == "tool_use"
        assert call.input
        report = next(event for event in told if event.type == "message_delta").headway
        assert len(report["breakpoints"]) == 3
        del talk[-1]["content"][-1]["cache_control"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"result {step}"} | MARK
        talk += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]


def test_the_text_of_a_stream_is_that_of_the_whole_answer(client: anthropic.Anthropic):
    asked: dict[str, Any] = {
        "model": "builtin",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "extra_body": {"temperature": 0},
    }
    answer = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    begun = [*asked["messages"], {"role": "assistant", "content": "I am the small"}]
    more = client.messages.create(**(asked | {"messages": begun, "stop_sequences": ["model"]}))
    assert (more.content[0].text.strip(), more.stop_reason, more.stop_sequence) == (
        "built-in",
        "stop_sequence",
        "model",
    )


def test_errors_are_the_clients_own(client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    wrong = anthropic.Anthropic(base_url=str(client.base_url), api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.count_tokens(model="builtin", messages=[{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"place": "\\ud83d"}', {"place": "?"}),
        ('{"place": "\\ud83d\\ude00"}', {"place": "\U0001f600"}),
        ('{"days": 1e400}', {}),
        ('{"days": NaN}', {}),
    ],
)
def test_arguments_that_no_json_can_have_are_not_told(arguments: str, told: dict[str, Any]):
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    found = whole(written(), text)
    assert found["content"][0]["input"] == told
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


def test_what_is_said_behind_a_call_stays_behind_it():
    text = '<tool_call>\n{"name": "get-time", "arguments": {"zone": "UTC"}}\n</tool_call> Well.'
    kinds = [block["type"] for block in whole(written(), text)["content"]]
    assert kinds == ["tool_use", "text"]
    for size in (1, 1000):
        told = [event for event in events(written(), text, size) if event["type"] == "content_block_start"]
        assert [event["content_block"]["type"] for event in told] == kinds
