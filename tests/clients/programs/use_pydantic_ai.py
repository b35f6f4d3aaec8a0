"""pydantic-ai: text, output by tools and by schema, streams, an agent's loop of ten steps."""

from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.settings import ModelSettings
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
# end


class Book(BaseModel):
    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


brief = ModelSettings(max_tokens=48)
agent = Agent(model, system_prompt=RULES, model_settings=brief)
first = agent.run_sync("Who are you?")
say("run", first.output)
say("run again", agent.run_sync("Who are you?").output)
say("append", agent.run_sync("And what can you do?", message_history=first.all_messages()).output)
stream = agent.run_stream_sync("Who are you?")
say("stream", list(stream.stream_text(delta=True))[-1:])
say("output by a tool", Agent(model, output_type=Book, system_prompt=RULES).run_sync("A book?").output.model_dump())
native = Agent(model, output_type=NativeOutput(Book), system_prompt=RULES)
say("output by a schema", native.run_sync("A book?").output.model_dump())

looking = Agent(
    model,
    system_prompt=RULES,
    model_settings=lambda _: ModelSettings(tool_choice="required", parallel_tool_calls=False),
)
looked: list[str] = []


@looking.tool_plain
def look_up(shelf: Literal["north", "south"]) -> str:
    """Look up a shelf."""
    looked.append(shelf)
    return f"nothing on the {shelf} shelf"


try:
    looking.run_sync("Which shelf?", usage_limits=UsageLimits(request_limit=10))
except UsageLimitExceeded as error:
    say("tools, ten steps", f"{len(looked)} calls, then: {error}")
