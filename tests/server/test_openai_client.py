"""The official client, against the fake device."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from tests.server.fakes import Running, running

from headway.engine import EngineConfig


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    config = EngineConfig(max_batched_tokens=64, max_running=8, max_model_len=600)
    with running(config=config, api_key="secret") as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    server.post("/reset_prefix_cache")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_chat(server: Running, client: openai.OpenAI):
    def ask() -> openai.types.chat.ChatCompletion:
        messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
        return client.chat.completions.create(model="fake", messages=messages, max_tokens=12, temperature=0)

    first, second = ask(), ask()
    expected = server.expected("<system>Be brief</><user>Hello</><assistant>", 12)
    assert first.choices[0].message.content == second.choices[0].message.content == expected
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_streamed_chat(server: Running, client: openai.OpenAI):
    def ask() -> list[openai.types.chat.ChatCompletionChunk]:
        stream = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Hello"}],
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"headway": {"explain": True}},
        )
        return list(stream)

    first, second = ask(), ask()
    for chunks in (first, second):
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == server.expected("<user>Hello</><assistant>", 12)
        assert not chunks[-1].choices
    assert first[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert second[-1].usage.prompt_tokens_details.cached_tokens == second[-1].usage.prompt_tokens - 1
    assert second[-1].headway["resumed_from"] == "prompt_end"


def test_completions_and_their_stream(server: Running, client: openai.OpenAI):
    whole = client.completions.create(model="fake", prompt="Hello", max_tokens=10, temperature=0)
    stream = client.completions.create(model="fake", prompt="Hello", max_tokens=10, temperature=0, stream=True)
    chunks = list(stream)
    assert whole.choices[0].text == server.expected("Hello", 10)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "headway"


def test_errors_are_the_clients_own(server: Running, client: openai.OpenAI):
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError, match="functions is not supported here") as refused:
        client.chat.completions.create(model="fake", messages=messages, functions=[{"name": "f"}])
    assert refused.value.param == "functions"
    assert refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="gpt", messages=messages)
    with pytest.raises(openai.BadRequestError, match="tokens") as long:
        client.completions.create(model="fake", prompt="a" * 1000)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


async def _many(url: str) -> list[str]:

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:

        async def one(i: int) -> str:
            answer = await client.completions.create(model="fake", prompt=f"Hello {i % 5}", max_tokens=6, temperature=0)
            return answer.choices[0].text

        return await asyncio.gather(*(one(i) for i in range(40)))


def test_forty_at_once(server: Running):

    answers = asyncio.run(_many(server.url))
    assert answers == [server.expected(f"Hello {i % 5}", 6) for i in range(40)]
