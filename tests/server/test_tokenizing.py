"""What a long text costs the others: nothing but a thread, and nothing at all if it can be refused by its length."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from tests.server import tiny
from tests.server.fakes import CharTokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers

from headway.engine.tokenizer import HubTokenizer
from headway.errors import RequestError
from headway.server.prompts import prepare_chat, prepare_completions
from headway.server.protocol import ChatRequest, CompletionRequest, parse_body
from headway.server.tokenizing import TokenizingThreads

LONG = 100_000


def test_a_short_text_does_not_wait_for_long_ones_and_clients_take_turns():
    done: list[str] = []
    threads, go = TokenizingThreads(2), threading.Event()

    def work(name: str) -> Callable[[], str]:
        return lambda: (go.wait(60) if name != "short" else None, done.append(name))[1] or name

    async def ask() -> None:
        waiting = [asyncio.create_task(threads.run(work(f"a{i}"), LONG, "a")) for i in range(4)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(threads.run(work("b0"), LONG, "b")))
        left = asyncio.create_task(threads.run(work("left"), LONG, "b"))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.run(work("short"), 10, "a"), 60) == "short"
        left.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*waiting)

    try:
        asyncio.run(ask())
    finally:
        threads.close()
    assert done == ["short", "a0", "b0", "a1", "a2", "a3"], (
        "who was there first, then whoever had less; nobody who left"
    )


def test_an_error_reaches_the_one_who_asked():
    threads = TokenizingThreads(2)

    def fail() -> None:
        raise RequestError("no")

    try:
        with pytest.raises(RequestError, match="no"):
            asyncio.run(threads.run(fail, 1, ""))
    finally:
        threads.close()


def test_a_text_of_too_many_characters_is_not_tokenised():
    class Counted(CharTokenizer):
        longest_token = 5

        def encode(self, text: str, *, special: bool = False) -> list[int]:
            assert len(text) <= 100, "it is refused before"
            return super().encode(text, special=special)

    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a" * 200}]})
    plain = CompletionRequest.model_validate({"prompt": ["a", "a" * 200]})
    with pytest.raises(RequestError, match=r"220 characters, which are at least 44 tokens, and this server allows 20"):
        prepare_chat(chat, Counted(), 20)
    with pytest.raises(RequestError, match=r"200 characters, which are at least 40 tokens") as refused:
        prepare_completions(plain, Counted(), 20)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    assert len(prepare_completions(CompletionRequest.model_validate({"prompt": "a" * 100}), Counted(), 20)) == 1


def test_how_many_characters_a_token_stands_for():
    """The longest entry of the vocabulary; four times that where some are composed; unknown where some are lost."""
    words = tiny.tokenizer()
    longest = len("<|assistant|>")
    assert HubTokenizer(words).longest_token == longest
    backend = words.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    assert HubTokenizer(words).longest_token == 4 * longest
    backend.normalizer = normalizers.Strip()
    assert HubTokenizer(words).longest_token is None
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert HubTokenizer(words).longest_token is None
    words = tiny.tokenizer()
    words.backend_tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert HubTokenizer(words).longest_token is None


MANY = 20_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": ["a", 1] * MANY}),
        (CompletionRequest, {"prompt": [1, "a"] * MANY}),
        (CompletionRequest, {"prompt": [["a"]] * 200}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (ChatRequest, {"messages": [{"role": "x", "content": 3}] * 9000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * 9000}]}),
    ],
)
def test_a_body_with_many_faults_is_refused_for_one_of_them(kind: Any, body: dict[str, Any]):
    """Each fault costs time and memory: a megabyte of them would hold up the server for ten seconds."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 8
    with pytest.raises(RequestError):
        parse_body(kind, body)


def test_token_ids_are_refused_by_their_number():
    for prompt in ([1] * 30, [[1], [1] * 30]):
        with pytest.raises(RequestError, match="the prompt has 30 tokens, and this server allows 20"):
            parse_body(CompletionRequest, {"prompt": prompt}, 20)
    with pytest.raises(RequestError, match="more than 16384 messages"):
        parse_body(ChatRequest, {"messages": [{"role": "user", "content": "a"}] * 20_000})
