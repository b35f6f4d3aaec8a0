"""langchain-openai: structured output in its three modes, bind_tools, a stream."""

from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL)
# end


class Book(BaseModel):
    """A book of the library."""

    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


@tool
def look_up(shelf: Literal["north", "south"]) -> str:
    """Look up a shelf."""
    return f"nothing on the {shelf} shelf"


asked: list[Any] = [SystemMessage(RULES), HumanMessage("Recommend a book, as JSON.")]
brief = model.bind(max_tokens=48)
for name in ("invoke", "invoke again"):
    answer = brief.invoke(asked)
    say(name, answer.text)
say("append and stream", "".join(part.text for part in brief.stream([*asked, answer, HumanMessage("Another?")])))
for method in ("json_schema", "function_calling"):
    say(
        f"with_structured_output({method})",
        model.with_structured_output(Book, method=method).invoke(asked).model_dump(),
    )
# this mode asks for any JSON object: that it fits the class, and ends soon, is left to the model
try:
    text = (
        model.with_structured_output(None, method="json_mode", include_raw=True, max_tokens=100)
        .invoke(asked)["raw"]
        .text
    )
except LengthFinishReasonError as error:
    text = error.completion.choices[0].message.content
assert text.startswith("{")
say("with_structured_output(json_mode)", text)
turns = [SystemMessage(RULES), HumanMessage("Which shelf?")]
bound = model.bind_tools([look_up], tool_choice="required", parallel_tool_calls=False)
for _ in range(10):
    answer = bound.invoke(turns)
    turns.append(answer)
    turns += [ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert answer.tool_calls
say("bind_tools, ten steps", answer.tool_calls)
