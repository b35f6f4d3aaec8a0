"""What was computed serves whoever asks for it next: chats with the official client.

On the built-in model, on a random one with windows and on one of states alone, all with the built-in model's tokenizer;
and on the fake device, where steps can be held up. The right numbers are those of the tokens that two prompts share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from tests.engine.bench import WORLDS
from tests.runtime.tiny_configs import COMMON, MODELS
from tests.server import tiny
from tests.server.fakes import CharTokenizer, Gate, Running, listening, running

from headway.engine import EngineConfig
from headway.engine.build import build_engine
from headway.runtime.sources import resolve_source
from headway.server import ServerOptions

Message = dict[str, Any]
LIBRARIAN: list[Message] = [
    {"role": "system", "content": "You are a patient librarian. Answer in one or two sentences."},
    {"role": "user", "content": "Who are you?"},
]
WINDOWED, RECURRENT = "Gemma3", "Mamba2"


@dataclass
class Chat:
    """Conversations with a server."""

    client: openai.OpenAI
    name: str = ""

    def ask(self, messages: list[Message], **options: Any) -> Any:
        """An answer, with its explanation."""
        return self.client.chat.completions.create(
            model="kept", messages=messages, temperature=0, extra_body={"headway": {"explain": True}}, **options
        )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def go_on(messages: list[Message], said: str) -> list[Message]:
    """The next turn: what was said, as the client got it, and another question."""
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def save_model(path: Path, name: str) -> str:
    """Write a tiny model that has the tokenizer of the built-in one. Returns where."""
    words = transformers.AutoTokenizer.from_pretrained(resolve_source(None)[1])
    kind, arguments = MODELS[name]
    tiny.save_model(path, getattr(transformers, kind)(**(COMMON | arguments | {"vocab_size": len(words)})))
    words.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["built-in", WINDOWED, RECURRENT])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    name = request.param
    source = None if name == "built-in" else save_model(tmp_path_factory.mktemp("kept") / name, name)
    built = build_engine(source, EngineConfig(memory=64 << 20, check=True))
    assert built.engine.config.prefix_reuse
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("kept")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Chat(client, name)


def test_an_answer_that_is_sent_back_is_the_one_that_was_given(chat: Chat):
    first = chat.ask(LIBRARIAN, max_tokens=24, logit_bias={"89": 100})
    assert (text(first), first.usage.prompt_tokens) == ("t" * 24, 30)
    second = chat.ask(go_on(LIBRARIAN, text(first)), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (53, "answer_end")
    assert second.headway["own_answers"] == [{"start": 30, "stop": 54, "restored": True}]


def test_an_answer_that_a_stop_string_ends_is_reused_up_to_its_visible_text(chat: Chat):
    whole = chat.ask(LIBRARIAN, max_tokens=16, logprobs=True)
    pieces = [entry.token for entry in whole.choices[0].logprobs.content]
    at = next(i for i in range(8, 15) if "".join(pieces).find("".join(pieces[i : i + 2])) == len("".join(pieces[:i])))
    other = [{"role": "system", "content": "Nobody has asked this yet."}, *LIBRARIAN[1:]] if chat.name else LIBRARIAN
    del other
    stopped = chat.ask(LIBRARIAN, max_tokens=16, stop=["".join(pieces[at : at + 2])])
    assert text(stopped) == "".join(pieces[:at])
