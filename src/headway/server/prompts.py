"""From a client's messages to tokens, and to the positions that are worth a checkpoint.

Where a message ends is where later requests part from this one. The template is rendered on every prefix of the
conversation; a boundary is kept only where that text is a prefix of the whole text and its tokens are a prefix of the
whole tokens, because a checkpoint anywhere else could never be hit. To check that in time linear in the prompt, each
stretch between two boundaries is tokenised by itself and compared with its place in the whole.

A client's breakpoint (`cache_control`) is a wish and not a guess: where its text does not end with a token, it is put
at the last token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.engine.tokenizer import TextTokenizer
from headway.errors import RequestError
from headway.server.protocol import ChatRequest, CompletionRequest, Message
from headway.tell.prompt_text import common_start

__all__ = ["PreparedPrompt", "plain_message", "prepare_chat", "prepare_completions"]

_MAX_ANSWERS = 256
"""Answers that one request may ask for."""
_FIRST_BOUNDARIES, _LAST_BOUNDARIES = 8, 24
"""Messages whose ends are looked for: each costs a rendering, and what lies between was kept by earlier turns."""
_MAX_MARKS = 64
"""Breakpoints that one request may mark: each costs a rendering of the conversation up to it."""
_MAX_MISMATCHES = 4
"""Ends inside a token after which no more are looked for: each makes the next stretch to tokenise longer."""
# Options of transformers' function itself. The template above all: it is a program, and clients do not choose programs.
_TAKEN_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready for the engine.

    Attributes:
        tokens: int32 [n].
        text: The prompt as text, for `echo`; empty where tokens came and nobody asks.
        boundaries: Ends of messages, in tokens, ascending.
        breakpoints: Positions that the client marked, in tokens, ascending.
    """

    tokens: NDArray[np.int32]
    text: str = ""
    boundaries: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()


def prepare_completions(
    request: CompletionRequest, tokenizer: TextTokenizer, longest: int | None = None
) -> list[PreparedPrompt]:
    """Tokens of the prompt or prompts of a plain completion, none of more than `longest` tokens.

    Raises:
        RequestError: No prompt, or too many, or one whose characters alone make it too long.
    """
    given = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        prompts: Sequence[Any] = [given]
    else:
        prompts = given
    if not prompts:
        raise RequestError("the prompt is empty; send at least one token", "prompt", "empty_prompt")
    if len(prompts) * (request.n or 1) > _MAX_ANSWERS:
        raise RequestError(f"more than {_MAX_ANSWERS} answers in one request; send several", "prompt")
    for text in prompts:
        if isinstance(text, str):
            _refuse_by_length(text, tokenizer, longest, "prompt")
    return [_prepare_text(prompt, request.echo, tokenizer) for prompt in prompts]


def prepare_chat(request: ChatRequest, tokenizer: TextTokenizer, longest: int | None = None) -> PreparedPrompt:
    """Tokens, boundaries and breakpoints of a conversation.

    One of more than `longest` tokens is going to be refused, so its boundaries and breakpoints are not looked for.

    Raises:
        RequestError: The model has no chat template, its template refuses the messages, too many are marked, or their
            characters alone make them too long.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template; use /v1/completions", "messages", "chat_template_missing")
    options = _template_options(request)
    _refuse_many_marks(request.messages)
    messages = [plain_message(message, message.parts()) for message in request.messages]
    try:
        text = tokenizer.render(messages, answer=True, options=options)
    except Exception as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
    _refuse_by_length(text, tokenizer, longest, "messages")
    tokens = tokenizer.encode(text)
    if longest is not None and len(tokens) > longest:
        return PreparedPrompt(np.array(tokens, dtype=np.int32), text)
    ends = _message_ends(messages, text, tokenizer, options)
    marks = _marked_ends(request.messages, messages, text, tokenizer, options)
    boundaries, breakpoints = _positions(text, tokens, ends, marks, tokenizer)
    return PreparedPrompt(np.array(tokens, dtype=np.int32), text, boundaries, breakpoints)


def _refuse_by_length(text: str, tokenizer: TextTokenizer, longest: int | None, field: str) -> None:
    """Refuse a text that must have more than `longest` tokens, before it is tokenised, which may take seconds."""
    most = tokenizer.longest_token
    if longest is not None and most is not None and len(text) > longest * most:
        raise RequestError(
            f"the prompt has {len(text)} characters, which are at least {-(-len(text) // most)} tokens, and this "
            f"server allows {longest} of prompt and answer together",
            field,
            "context_length_exceeded",
        )


def _refuse_many_marks(messages: Sequence[Message]) -> None:
    marks = sum(message.cache_control is not None for message in messages)
    for message in messages:
        if not isinstance(message.content, str):
            marks += sum(part.cache_control is not None for part in message.content)
    if marks > _MAX_MARKS:
        raise RequestError(
            f"{marks} messages and parts have cache_control, {_MAX_MARKS} may: mark the ends of what others share only",
            "messages",
            "too_many_breakpoints",
        )


def _template_options(request: ChatRequest) -> Mapping[str, Any]:
    options = request.chat_template_kwargs or {}
    taken = sorted(_TAKEN_OPTIONS & options.keys())
    if taken:
        raise RequestError(f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs")
    return options


def _prepare_text(prompt: str | list[int], echo: bool, tokenizer: TextTokenizer) -> PreparedPrompt:
    if isinstance(prompt, str):
        return PreparedPrompt(np.array(tokenizer.encode(prompt, special=True), dtype=np.int32), prompt)
    if any(not 0 <= token < 2**31 for token in prompt):
        raise RequestError("a token id is negative or too large", "prompt", "invalid_token")
    return PreparedPrompt(np.array(prompt, dtype=np.int32), tokenizer.decode(prompt) if echo else "")


def plain_message(message: Message, parts: Sequence[str]) -> dict[str, Any]:
    """A message as templates expect it."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": "\n".join(parts)}
    return plain if message.name is None else plain | {"name": message.name}


def _try_render(
    messages: Sequence[Mapping[str, Any]], tokenizer: TextTokenizer, options: Mapping[str, Any]
) -> str | None:
    """The text of a part of the conversation, or None: some templates refuse one that ends in the middle."""
    try:
        return tokenizer.render(messages, answer=False, options=options)
    except Exception:
        return None


def _message_ends(
    messages: Sequence[Mapping[str, Any]], text: str, tokenizer: TextTokenizer, options: Mapping[str, Any]
) -> set[int]:
    """Where messages end, as offsets into `text`."""
    count = len(messages)
    wanted = {*range(1, min(count, _FIRST_BOUNDARIES) + 1), *range(max(1, count - _LAST_BOUNDARIES + 1), count + 1)}
    rendered = (_try_render(messages[:end], tokenizer, options) for end in sorted(wanted))
    return {len(part) for part in rendered if part and text.startswith(part)}


def _marked_ends(
    given: Sequence[Message],
    messages: Sequence[Mapping[str, Any]],
    text: str,
    tokenizer: TextTokenizer,
    options: Mapping[str, Any],
) -> set[int]:
    """Where the client put `cache_control`, as offsets into `text`."""
    ends = set()
    for i, message in enumerate(given):
        cuts = [] if message.cache_control is None else [len(message.parts())]
        if not isinstance(message.content, str):
            cuts += [j for j, part in enumerate(message.content, start=1) if part.cache_control is not None]
        for cut in cuts:
            shortened = [*messages[:i], plain_message(message, message.parts()[:cut])]
            rendered = _try_render(shortened, tokenizer, options)
            ends.add(common_start(rendered or "", text))
    return ends - {0}


def _positions(
    text: str, tokens: Sequence[int], ends: set[int], marks: set[int], tokenizer: TextTokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token positions of offsets into `text`: of those in `ends` that fall between tokens, of all in `marks`."""
    boundaries: list[int] = []
    breakpoints: list[int] = []
    start = position = mismatches = 0
    for end in sorted(ends | marks):
        if mismatches >= _MAX_MISMATCHES and end not in marks:
            continue
        stretch = tokenizer.encode(text[start:end])
        common = _common_prefix(stretch, tokens[position : position + len(stretch)])
        exact = common == len(stretch)
        if end in marks and position + common > 0:
            breakpoints.append(position + common)
        if not exact:
            mismatches += 1
            continue
        position, start = position + common, end
        if end in ends:
            boundaries.append(position)
    return tuple(boundaries), tuple(dict.fromkeys(breakpoints))


def _common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
