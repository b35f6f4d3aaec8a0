"""OpenAI's own package: chat, append, parse, stream, tools, responses."""

import json
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel, Field
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
client = OpenAI(base_url=BASE_URL, api_key=KEY)
# end


class Book(BaseModel):
    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a shelf",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "shelf": {"type": "integer", "minimum": 1, "maximum": 99},
                "kind": {"enum": ["book", "map"]},
            },
            "required": ["shelf", "kind"],
            "additionalProperties": False,
        },
    },
}


def chat() -> None:
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": "Who are you?"}]
    for name in ("chat", "chat again"):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=48)
        say(name, answer.choices[0].message.content)
    dumped = answer.choices[0].message.model_dump()
    messages += [dumped, {"role": "user", "content": "And what can you do?"}]
    said = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=48)
    messages += [said.choices[0].message, {"role": "user", "content": "Thank you."}]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
    say("append, as model_dump() and as it is", said.choices[0].message.content)
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Book)
    say("parse", parsed.choices[0].message.parsed.model_dump())
    with client.chat.completions.stream(model=MODEL, messages=messages, max_tokens=16) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().usage.prompt_tokens
    say("stream", sorted(set(kinds)))


def tools() -> None:
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": "Which shelf?"}]
    made = []
    for step in range(10):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls:
            made.append(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"step {step}: nothing there"})
    say("tools, ten steps", made[:3])


def responses() -> None:
    first = client.responses.create(model=MODEL, instructions=RULES, input="Who are you?", max_output_tokens=48)
    say("responses", first.output_text)
    turns: list[Any] = [{"role": "user", "content": "Who are you?"}, *first.output, {"role": "user", "content": "Oh?"}]
    with client.responses.stream(model=MODEL, instructions=RULES, input=turns, max_output_tokens=16) as stream:
        say("responses, appended and streamed", sorted({event.type for event in stream}))
    parsed = client.responses.parse(model=MODEL, input="Recommend a book.", text_format=Book)
    say("responses, parse", parsed.output_parsed.model_dump())
    tool: Any = {"type": "function", **TOOL["function"]}
    turns = [{"role": "user", "content": "Which shelf?"}]
    for step in range(10):
        answer = client.responses.create(
            model=MODEL,
            instructions=RULES,
            input=turns,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        turns += answer.output
        for call in answer.output:
            if call.type == "function_call":
                turns.append({"type": "function_call_output", "call_id": call.call_id, "output": f"step {step}: no"})
    say("responses, tools, ten steps", [item.name for item in answer.output if item.type == "function_call"])


chat()
tools()
responses()
say("models", [model.id for model in client.models.list()])
