"""instructor: every mode that it has for servers of this kind."""

from collections.abc import Iterable
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
import instructor

client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY), mode=instructor.Mode.TOOLS)
# end


class Book(BaseModel):
    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


MESSAGES = [{"role": "system", "content": RULES}, {"role": "user", "content": "Recommend a book."}]
FORCED = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "RESPONSES_TOOLS")
FREE = ("PARALLEL_TOOLS", "JSON", "JSON_O1", "MD_JSON")
"""These ask for calls or JSON in words, or for any object: what is left to the model is too much for a small one."""
for mode in (*FORCED, *FREE):
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY), mode=getattr(instructor.Mode, mode))
    try:
        most = {"max_tokens": 200} if mode in FREE else {}
        kind = Iterable[Book] if mode == "PARALLEL_TOOLS" else Book
        book = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=kind, max_retries=1, **most
        )
        say(mode, [one.model_dump() for one in book] if mode == "PARALLEL_TOOLS" else book.model_dump())
    except Exception as error:
        if mode in FORCED or "Error code" in str(error):
            raise
        say(mode, f"answered, and the model's text did not fit: {str(error)[:80]}")
