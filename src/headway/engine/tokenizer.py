"""What the engine and the server need of a tokenizer, and the one that transformers loads."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["HubTokenizer", "TextTokenizer"]


class TextTokenizer(Protocol):
    """Text to tokens and back. Every method may be called by several threads at once.

    Attributes:
        longest_token: Most characters of a text that one token stands for; None if that is not known.
    """

    @property
    def longest_token(self) -> int | None:
        """See above."""

    @property
    def template(self) -> str:
        """The chat template, or templates; empty for none."""

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How the model writes its answers, in transformers' language, if that came with the tokenizer."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The special tokens by their text."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` works."""

    def template_knows(self, name: str) -> bool:
        """Whether the chat template reads a variable."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; with `special` what the model expects around a whole text is added."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`; with `special` that of special tokens too, which are left out else."""

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool, options: Mapping[str, Any] | None = None
    ) -> str:
        """The chat template's text of `messages`; with `answer` it ends where the model's answer starts.

        Raises:
            Exception: The template refuses these messages.
        """


class HubTokenizer:
    """A tokenizer of transformers. Those in Rust encode in several threads at once, others in one after another."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._turn = contextlib.nullcontext() if getattr(tokenizer, "is_fast", False) else threading.Lock()
        self.longest_token = _longest_token(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self.special_tokens = {str(token): number for number, token in added if token.special}
        self._special = frozenset(tokenizer.all_special_ids)
        self._byte_level = "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))

    @property
    def template(self) -> str:
        """The chat template; of several, all of them."""
        given = getattr(self._tokenizer, "chat_template", None) or ""
        return given if isinstance(given, str) else "\n".join(given.values())

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """What came with the tokenizer."""
        found: Mapping[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer came with a chat template."""
        return bool(self.template)

    def template_knows(self, name: str) -> bool:
        """Whether the chat template names a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`."""
        with self._turn:
            said = self._tokenizer(
                text,
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        ids: list[int] = said["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`."""
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:
            return b""
        if token in self._special:
            return str(written).encode()
        if self._byte_level and all(sign in _BYTE_OF for sign in written):
            return bytes(_BYTE_OF[sign] for sign in written)
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", written):
            return bytes([int(match[1], 16)])
        return str(written).replace("▁", " ").encode()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool, options: Mapping[str, Any] | None = None
    ) -> str:
        """The chat template's text of `messages`."""
        return str(
            self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=answer, **(options or {})
            )
        )


_KEEPS_TEXT = {
    "normalizers": {"NFC", "Prepend", "Replace"},
    "pretokenizers": {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"},
}
"""Parts of a tokenizer that leave no character out."""
_MOST_COMPOSED = 4
"""Characters that NFC makes into one."""


def _longest_token(tokenizer: Any) -> int | None:
    """Most characters that one token stands for, where no part of the tokenizer leaves out any, or takes many for one.

    Unknown characters fuse into one token unless all are spelled in bytes, and some added tokens take spaces with them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    normalizers = _parts("normalizers", backend.normalizer)
    splitters = _parts("pretokenizers", backend.pre_tokenizer)
    bytewise = getattr(backend.model, "byte_fallback", False) or any(part["type"] == "ByteLevel" for part in splitters)
    added = backend.get_added_tokens_decoder().values()
    keeps = all(part["type"] in _KEEPS_TEXT["normalizers"] and part.get("content", "_") for part in normalizers)
    keeps &= all(part["type"] in _KEEPS_TEXT["pretokenizers"] for part in splitters)
    keeps &= not any(part.get("behavior") == "Removed" for part in splitters)
    if not (keeps and bytewise) or any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return longest * (_MOST_COMPOSED if any(part["type"] == "NFC" for part in normalizers) else 1)


def _parts(kind: str, whole: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer or pretokenizer, as the JSON that it is kept as."""
    if whole is None:
        return []
    said = json.loads(whole.__getstate__())
    return list(said[kind]) if said["type"] == "Sequence" else [said]


def _signs_of_bytes() -> dict[str, int]:
    """The signs in which byte-level vocabularies write bytes: themselves where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _signs_of_bytes()
