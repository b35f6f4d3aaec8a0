"""A server on a loopback port, over the fake device and a tokenizer of single characters."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from tests.engine.bench import WORLDS
from tests.engine.fakes import EOS, VOCAB, FakeDevice, expected_answer

from headway.cache import CacheConfig, LayerSpec, PrefixCache
from headway.engine import Engine, EngineConfig, ModelFacts, TextTokenizer
from headway.server import ServerOptions, create_app, schemas
from headway.server.connections import make_server
from headway.server.dialects import schemas as dialects
from headway.server.kv_publisher import KvEventPublisher, KvEventSockets

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY .!?<>/:-"


class CharTokenizer:
    """Token i is the character i - 1 of the alphabet, and 0 ends an answer."""

    has_chat_template = True
    template, response_template = "{{ messages }} {{ tools }}", None
    special_tokens: dict[str, int] = {}  # noqa: RUF012
    longest_token = 4  # of one character, but no tokenizer has to know its own well

    def template_knows(self, name: str) -> bool:
        return name == "before"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [max(1, ALPHABET.find(sign) + 1) for sign in text]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(ALPHABET[t - 1] for t in tokens if t != EOS)

    def piece(self, token: int) -> bytes:
        return b"" if token == EOS else ALPHABET[token - 1].encode()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool, options: Mapping[str, Any] | None = None
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("a conversation cannot begin with an answer")
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        if (options or {}).get("continue_final_message"):
            return text.removesuffix("</>")
        return text + (options or {}).get("before", "") + ("<assistant>" if answer else "")


ANSWERS = {
    "/v1/chat/completions": schemas.ChatCompletion,
    "/v1/completions": schemas.Completion,
    "/v1/responses": dialects.ResponseObject,
    "/v1/messages": dialects.MessageOfBlocks,
    "/v1/messages/count_tokens": dialects.TokenCount,
    "/tokenize": dialects.Tokenized,
    "/detokenize": dialects.Detokenized,
    "/reset_prefix_cache": schemas.ResetDone,
    "error": schemas.ErrorBody,
    "error in messages": dialects.MessagesErrorBody,
}
"""What `/openapi.json` says of answers: every test holds them to it."""

assert len(ALPHABET) == VOCAB - 1


class ByteTokenizer(CharTokenizer):
    """Token i is the byte i."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return bytes(t for t in tokens if t != EOS).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token])


@dataclass
class Running:
    """A server that answers."""

    url: str
    engine: Engine
    device: FakeDevice
    http: httpx.Client
    server: uvicorn.Server

    @property
    def open_requests(self) -> int:
        """Requests that the engine has not ended; unlike a snapshot it can be asked while a step is held up."""
        return len(self.engine._handles)

    def wait_for_open(self, right: Callable[[int], bool]) -> None:
        """Wait until `right` says so of the number of open requests."""
        with self.engine._wakeup:
            assert self.engine._wakeup.wait_for(lambda: right(self.open_requests), 60)

    def stop(self) -> None:
        """What a signal does: take no more, and end when what runs has ended."""
        self.server.should_exit = True

    def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """POST JSON and expect a status."""
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        failed = "error in messages" if path.startswith("/v1/messages") else "error"
        ANSWERS[path if status == 200 else failed].model_validate(answer)
        return answer

    def complete(self, prompt: Any, status: int = 200, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", status, **({"prompt": prompt, "temperature": 0} | body))

    def chat(self, *texts: str, status: int = 200, **body: Any) -> dict[str, Any]:
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return self.post("/v1/chat/completions", status, **({"messages": messages, "temperature": 0} | body))

    def expected(self, text: str, max_tokens: int) -> str:
        """The answer of an uncached run to a prompt."""
        tokens = CharTokenizer().encode(text)
        return CharTokenizer().decode(expected_answer(self.engine.cache.geometry, tokens, max_tokens))


@contextmanager
def running(
    groups: Sequence[LayerSpec] = WORLDS["hybrid"],
    blocks: int = 400,
    config: EngineConfig | None = None,
    api_key: str | None = None,
    max_body_bytes: int = 1 << 20,
    words: TextTokenizer | None = None,
    grace: float = 5.0,
    kv_events: KvEventSockets | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Start a server; at the end stop it and check that nothing is held."""
    config = config or EngineConfig(max_batched_tokens=64, max_running=8, max_model_len=600)
    cache = PrefixCache(CacheConfig(groups, blocks, block_tokens=4, check=True, pin_share=config.pin_share))
    device = FakeDevice(cache.geometry, blocks)
    publisher = None if kv_events is None else KvEventPublisher(cache, kv_events, 4)
    size, words = (VOCAB, CharTokenizer()) if words is None else (256, words)
    engine = Engine(cache, device, config, ModelFacts(size, words.decode, (EOS,))).start()
    keys = () if api_key is None else (api_key, *options.pop("more_keys", ()))  # the first is the client's own
    with listening(
        engine, words, ServerOptions("fake", keys, max_body_bytes, kv_events=publisher, **options), grace
    ) as (url, server):
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}".encode()}
        with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
            yield Running(url, engine, device, http, server)
    assert device.closed.is_set(), "the application closes its engine"
    stats = cache.stats()
    assert (stats.leases, stats.leased) == (0, 0)
    assert stats.free + stats.evictable + stats.pinned == stats.blocks


@contextmanager
def listening(
    engine: Engine, words: TextTokenizer, options: ServerOptions, grace: float = 5.0
) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve an engine on a loopback port: its address and its server."""
    app = create_app(engine, words, options)
    server = make_server(app, engine, patience=options.client_timeout, grace=grace)
    with served(server) as url:
        yield url, server


@contextmanager
def served(server: uvicorn.Server) -> Iterator[str]:
    """Run a server on a loopback port: its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, listener, started))
        thread.start()
        assert started.wait(30)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def _serve(server: uvicorn.Server, listener: socket.socket, started: threading.Event) -> None:
    startup = server.startup

    async def tell(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets=sockets)
        started.set()

    server.startup = tell  # type: ignore[method-assign]
    server.run(sockets=[listener])
