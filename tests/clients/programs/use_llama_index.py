"""llama-index: chat, a stream, structured prediction, an agent with a tool."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field
from said import BASE_URL, KEY, MODEL, RULES, say

# settings
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=32768,
)
# end


class Book(BaseModel):
    """A book of the library."""

    title: Literal["Walden", "Emma", "Dracula"]
    year: int = Field(ge=1, le=2100)


asked = [ChatMessage(role="system", content=RULES), ChatMessage(role="user", content="Who are you?")]
for name in ("chat", "chat again"):
    answer = model.chat(asked, max_tokens=48)
    say(name, str(answer.message.content))
asked += [answer.message, ChatMessage(role="user", content="And what can you do?")]
say("append and stream", "".join(part.delta or "" for part in model.stream_chat(asked, max_tokens=24)))
say(
    "structured_predict",
    model.structured_predict(Book, PromptTemplate("Recommend a book."), max_tokens=200).model_dump(),
)
