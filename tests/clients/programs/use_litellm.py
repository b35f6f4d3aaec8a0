"""litellm: a completion, a stream, a schema, a loop of tools."""

import json
from typing import Any, Literal

from pydantic import BaseModel, Field
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
import litellm

server = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY}
# end


class Book(BaseModel):
    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a shelf",
        "parameters": {
            "type": "object",
            "properties": {"shelf": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["shelf"],
        },
    },
}

messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": "Who are you?"}]
for name in ("completion", "completion again"):
    answer = litellm.completion(**server, messages=messages, max_tokens=48)
    say(name, answer.choices[0].message.content)
messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And what can you do?"}]
parts = list(litellm.completion(**server, messages=messages, max_tokens=24, stream=True))
say("append and stream", "".join(part.choices[0].delta.content or "" for part in parts if part.choices))
shaped = litellm.completion(**server, messages=messages, response_format=Book)
say("response_format", Book.model_validate_json(shaped.choices[0].message.content).model_dump())

messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Which shelf?"}]
for step in range(10):
    answer = litellm.completion(
        **server, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        assert 1 <= json.loads(call.function.arguments)["shelf"] <= 99
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"step {step}: nothing there"})
say("tools, ten steps", [call.function.arguments for call in message.tool_calls])
