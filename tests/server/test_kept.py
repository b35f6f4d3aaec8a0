"""What was computed serves whoever asks for it next: chats with the official client, on the built-in model and others.

The numbers are those of the tokens that two prompts have in common, not those that the server says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from tests.server.fakes import listening

from headway.engine import EngineConfig
from headway.engine.build import BuiltEngine, build_engine
from headway.server import ServerOptions

Message = dict[str, Any]
LIBRARIAN: list[Message] = [
    {"role": "system", "content": "You are a patient librarian. Answer in one or two sentences."},
    {"role": "user", "content": "Who are you?"},
]


@dataclass
class Chat:
    """A server, and conversations with it."""

    built: BuiltEngine
    client: openai.OpenAI

    def ask(self, messages: list[Message], **options: Any) -> Any:
        """An answer, with its explanation."""
        return self.client.chat.completions.create(
            model="kept", messages=messages, temperature=0, extra_body={"headway": {"explain": True}}, **options
        )

    def go_on(self, messages: list[Message], answer: Any) -> list[Message]:
        """The next turn: the answer as the client got it, and another question."""
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        return [*messages, said, {"role": "user", "content": "Go on."}]


@pytest.fixture(scope="module")
def chat() -> Iterator[Chat]:
    built = build_engine(None, EngineConfig(memory=64 << 20, check=True))
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("kept")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Chat(built, client)


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_an_answer_that_is_sent_back_is_the_one_that_was_given(chat: Chat):
    first = chat.ask(LIBRARIAN, max_tokens=24, logit_bias={"89": 100})
    assert first.usage.prompt_tokens == 30
    second = chat.ask(chat.go_on(LIBRARIAN, first), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (53, "answer_end")
    assert second.headway["own_answers"] == [{"start": 30, "stop": 54, "restored": True}]


def test_others_share_a_marked_part_whatever_follows_it(chat: Chat):
    words = " ".join(f"word{i}" for i in range(200))
    mark = {"type": "ephemeral"}
    marked, more = {"type": "text", "text": words, "cache_control": mark}, {"type": "text", "text": "And so on."}
    question = {"role": "user", "content": "Why?"}
    first = chat.ask([{"role": "system", "content": [marked]}, question], max_tokens=2)
    second = chat.ask([{"role": "system", "content": [marked, more]}, question], max_tokens=2)
    [place] = first.headway["breakpoints"]
    assert second.headway["breakpoints"] == [place]
    assert (cached(second), second.headway["resumed_from"]) == (place, "breakpoint")
    assert second.headway["matched_tokens"] == place
    for content in ([marked], [marked, more]):
        last = chat.ask([LIBRARIAN[0], {"role": "user", "content": content}], max_tokens=2)
    assert cached(last) == last.headway["matched_tokens"] == last.headway["breakpoints"][0]


def test_an_answer_that_a_stop_string_ends_is_reused_up_to_its_visible_text(chat: Chat):
    stopped = chat.ask(LIBRARIAN, max_tokens=48, stop=[" I was"])
    assert stopped.choices[0].message.content == "I am the small built-in model of Headway."
    second = chat.ask(chat.go_on(LIBRARIAN, stopped), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (41, "answer_end")
