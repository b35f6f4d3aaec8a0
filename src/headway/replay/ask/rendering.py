"""Chat logs in tokens, as the server renders them: the same boundaries, parts, roles, template options and salts.

So a log replays to what the server gave. It is the server's own code that renders (`headway.server.prompts`), which is
imported when a log is read with a model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.engine import HubTokenizer
from headway.errors import ConfigError
from headway.formats import Trace
from headway.formats import read_trace as read_with
from headway.formats.chat import ByteRenderer, ChatRenderer, Rendered

__all__ = ["ServerRenderer", "read_trace", "renderer_of"]

_FIELDS = frozenset(
    {
        *("messages", "prompt", "tools", "continue_final_message", "add_generation_prompt", "reasoning_effort"),
        *("chat_template_kwargs", "cache_salt", "add_special_tokens", "truncate_prompt_tokens"),
    }
)
"""Fields of a request that its prompt depends on. Others, and what other servers call them, are not looked at."""


class ServerRenderer:
    """Renders requests as the server does."""

    def __init__(self, tokenizer: HubTokenizer) -> None:
        """Render for a model with that tokenizer."""
        self._tokenizer = tokenizer

    def prompt(self, body: Mapping[str, Any]) -> Rendered:
        """The prompt of a request.

        Raises:
            RequestError: The server would refuse it.
        """
        from headway.server.prompts import prepare_chat, prepare_completions  # they need the extra `serve`
        from headway.server.protocol import ChatRequest, CompletionRequest, parse_body

        asked = {name: value for name, value in body.items() if name in _FIELDS and value is not None}
        salt = str(asked.get("cache_salt") or "")
        if "messages" not in asked:
            asked["prompt"] = str(asked["prompt"])
            found = prepare_completions(parse_body(CompletionRequest, asked), self._tokenizer)[0]
        else:
            asked.pop("prompt", None)
            found = prepare_chat(parse_body(ChatRequest, asked), self._tokenizer)
        return Rendered(found.tokens.tolist(), sorted({*found.boundaries, *found.breakpoints}), salt)

    def text(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        """The text of a prompt."""
        from headway.server.chat.conversation import conversation_of
        from headway.server.protocol import ChatRequest, parse_body

        body = {"messages": list(messages)} | ({"tools": tools} if tools else {})
        return conversation_of(parse_body(ChatRequest, body), self._tokenizer).render(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text alone."""
        return self._tokenizer.encode(text)

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        return self._tokenizer.piece(token)


def renderer_of(name: str) -> ChatRenderer:
    """The renderer of a tokenizer: "bytes" (every byte is one token; nothing to download), or one of transformers.

    Raises:
        ConfigError: One that cannot be loaded.
    """
    if name == "bytes":
        return ByteRenderer()
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise ConfigError(
            f"tokenizer {name!r} needs transformers: pip install 'headway[serve]', or use --tokenizer bytes"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    return ServerRenderer(HubTokenizer(loaded))


def read_trace(path: str | Path, *, tokenizer: str | None = None, **more: Any) -> Trace:
    """Read a trace as `headway.formats.read_trace` does; a chat log with any tokenizer, by its folder or hub id.

    Raises:
        TraceError: A file that cannot be read as a trace; names file, line and field.
        ConfigError: As that function, and a tokenizer that cannot be loaded.
    """
    return read_with(path, renderer=None if tokenizer is None else renderer_of(tokenizer), **more)
