"""smolagents: both agents, ten steps each."""

from typing import Any

from said import BASE_URL, KEY, MODEL, say
from smolagents import CodeAgent, LogLevel, ToolCallingAgent, tool

# settings
from smolagents import OpenAIModel

model = OpenAIModel(MODEL, api_base=BASE_URL, api_key=KEY)
# end


@tool
def look_up(shelf: int) -> str:
    """Look up a shelf.

    Args:
        shelf: The number of the shelf.
    """
    return f"nothing on shelf {shelf}"


def steps(agent: Any) -> list[str]:
    agent.run("Which shelf has the oldest book?")
    found = [step for step in agent.memory.steps if hasattr(step, "tool_calls")]
    return [f"{len(found)} steps", *(type(step.error).__name__ if step.error else "done" for step in found[:3])]


model.kwargs["max_tokens"] = 100
say("ToolCallingAgent", steps(ToolCallingAgent([look_up], model, max_steps=10, verbosity_level=LogLevel.OFF)))
for structured in (False, True):
    agent = CodeAgent(
        [look_up], model, max_steps=10, verbosity_level=LogLevel.OFF, use_structured_outputs_internally=structured
    )
    say(f"CodeAgent, structured outputs {structured}", steps(agent))
