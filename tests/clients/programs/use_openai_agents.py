"""openai-agents: both of its models, a stream, output of a type, loops of ten steps."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded
from pydantic import BaseModel, Field
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to OpenAI
client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY)
models = [OpenAIChatCompletionsModel(model=MODEL, openai_client=client), OpenAIResponsesModel(MODEL, client)]
# end


class Book(BaseModel):
    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


looked: list[str] = []


@function_tool
def look_up(shelf: Literal["north", "south"]) -> str:
    """Look up a shelf."""
    looked.append(shelf)
    return f"nothing on the {shelf} shelf"


async def ask(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
    name = type(model).__name__
    brief = Agent("librarian", instructions=RULES, model=model, model_settings=ModelSettings(max_tokens=48))
    for step in ("run", "run again"):
        first = await Runner.run(brief, "Who are you?")
        say(f"{name}: {step}", first.final_output)
    streamed = Runner.run_streamed(brief, [*first.to_input_list(), {"role": "user", "content": "What can you do?"}])
    kinds = [event.type async for event in streamed.stream_events()]
    say(f"{name}: append and stream", sorted(set(kinds)))
    typed = await Runner.run(Agent("chooser", instructions=RULES, model=model, output_type=Book), "A book?")
    say(f"{name}: output of a type", typed.final_output.model_dump())
    looked.clear()
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    looking = Agent(
        "looker", instructions=RULES, model=model, tools=[look_up], model_settings=settings, reset_tool_choice=False
    )
    try:
        await Runner.run(looking, "Which shelf?", max_turns=10)
    except MaxTurnsExceeded:
        say(f"{name}: tools, ten steps", looked)
    assert len(looked) == 10, looked


async def ask_all() -> None:
    for model in models:
        await ask(model)


asyncio.run(ask_all())
