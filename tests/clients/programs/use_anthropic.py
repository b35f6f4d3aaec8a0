"""Anthropic's own package: messages, streams, tools with moving breakpoints, counts."""

from typing import Any

from anthropic import Anthropic
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
client = Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=KEY)
# end

SYSTEM: Any = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]
TOOL: Any = {
    "name": "look_up",
    "description": "Look up a shelf",
    "input_schema": {
        "type": "object",
        "properties": {"shelf": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["shelf"],
    },
}


def marked(messages: list[Any]) -> list[Any]:
    """The messages with a breakpoint at the end of the last one, and at no other."""
    *earlier, last = messages
    content = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else last["content"]
    return [*earlier, last | {"content": [*content[:-1], content[-1] | {"cache_control": {"type": "ephemeral"}}]}]


def talk() -> None:
    messages: list[Any] = []
    for question in ("Who are you?", "What can you do?", "Which book is old?"):
        messages.append({"role": "user", "content": question})
        answer = client.messages.create(model=MODEL, max_tokens=32, system=SYSTEM, messages=marked(messages))
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        say(question, [block.type for block in answer.content] + [answer.usage.model_dump(exclude_none=True)])
    count = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=messages[:-1])
    say("count_tokens", count.input_tokens)
    with client.messages.stream(model=MODEL, max_tokens=32, system=SYSTEM, messages=messages[:1]) as stream:
        say("stream", "".join(stream.text_stream))


def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": "Which shelf?"}]
    for step in range(10):
        answer = client.messages.create(
            model=MODEL,
            max_tokens=200,
            system=SYSTEM,
            tools=[TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=marked(messages),
        )
        assert answer.stop_reason == "tool_use", answer
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"step {step}: nothing there"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    say("tools, ten steps, the breakpoint moves", [block.model_dump() for block in answer.content])


talk()
tools()
