"""From a client's messages to tokens, and to the positions that are worth a checkpoint.

Where a message ends is where later requests part from this one. The template is rendered on every prefix of the
conversation; a boundary is kept only where that text is a prefix of the whole text and its tokens are a prefix of the
whole tokens, because a checkpoint anywhere else could never be hit. To check that in time linear in the prompt, each
stretch between two boundaries is tokenised by itself and compared with its place in the whole.

A client's breakpoint (`cache_control`) is a wish and not a guess. It lies where the marked text ends, before what the
template closes the message with: others may have another part behind the same text. Two renderings tell the two apart,
one that ends there and one in which the text goes on. Where the text does not end with a token in both, the breakpoint
is put at the last token before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.engine.tokenizer import TextTokenizer
from headway.errors import RequestError
from headway.server.answers import GivenAnswer, GivenAnswers
from headway.server.chat.conversation import Conversation, conversation_of
from headway.server.protocol import ChatRequest, CompletionRequest, GenerationFields
from headway.tell.prompt_text import common_start

__all__ = ["OwnAnswer", "PreparedPrompt", "prepare_chat", "prepare_completions"]

_MAX_ANSWERS = 256
"""Answers that one request may ask for."""
_FIRST_BOUNDARIES, _LAST_BOUNDARIES = 8, 24
"""Messages whose ends are looked for: each costs a rendering, and what lies between was kept by earlier turns."""
_MAX_MARKS = 64
"""Breakpoints that one request may mark: each costs a rendering of the conversation up to it."""
_HEAD = 32
"""Characters by which it is seen how a tokenizer writes the beginning of a text."""
_MORE = "more"
"""Stands for a part behind the marked one."""
_THINK = "<think>"
_MAX_MISMATCHES = 4
"""Ends inside a token after which no more are looked for: each makes the next stretch to tokenise longer."""


@dataclass(frozen=True)
class OwnAnswer:
    """An answer of this server that a prompt sends back as text, and that the tokenizer would write in other tokens.

    Attributes:
        start: Position of its first token.
        stop: Position after its last.
        differs: Position from which on the tokenizer's ids are others than those of the answer.
        restored: The prompt has the ids of the answer; if not, those of the tokenizer.
    """

    start: int
    stop: int
    differs: int
    restored: bool


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready for the engine.

    Attributes:
        tokens: int32 [n].
        text: The prompt as text, for `echo`; empty where tokens came and nobody asks.
        boundaries: Ends of messages, in tokens, ascending.
        breakpoints: Positions that the client marked, in tokens, ascending.
        answers: Answers in it of which the ids are a question, ascending.
        cut: Tokens in front of it that `truncate_prompt_tokens` took away.
        opening: What the chat template writes behind the last message, in front of the answer.
        tools: How the tools differ from those of an earlier request, as a sentence; empty if they do not.
    """

    tokens: NDArray[np.int32]
    text: str = ""
    boundaries: tuple[int, ...] = ()
    breakpoints: tuple[int, ...] = ()
    answers: tuple[OwnAnswer, ...] = ()
    cut: int = 0
    opening: str = ""
    tools: str = ""


def prepare_completions(
    request: CompletionRequest,
    tokenizer: TextTokenizer,
    longest: int | None = None,
    answered: GivenAnswers | None = None,
) -> list[PreparedPrompt]:
    """Tokens of the prompt or prompts of a plain completion, none of more than `longest` tokens.

    What was `answered` is looked for in them.

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
    keep = _tokens_to_keep(request, longest)
    for text in prompts:
        if isinstance(text, str) and keep is None:
            _refuse_by_length(text, tokenizer, longest, "prompt")
    prepared = (_prepare_text(prompt, request, tokenizer, answered) for prompt in prompts)
    return [_cut(prompt, keep, tokenizer if request.echo else None) for prompt in prepared]


def prepare_chat(
    request: ChatRequest,
    tokenizer: TextTokenizer,
    longest: int | None = None,
    answered: GivenAnswers | None = None,
) -> PreparedPrompt:
    """Tokens, boundaries and breakpoints of a conversation; what was `answered` is looked for in it.

    One of more than `longest` tokens is going to be refused, so its boundaries and breakpoints are not looked for.

    Raises:
        RequestError: The model has no chat template, its template refuses the messages, too many are marked, or their
            characters alone make them too long.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template; use /v1/completions", "messages", "chat_template_missing")
    asked, keep = conversation_of(request, tokenizer), _tokens_to_keep(request, longest)
    _refuse_many_marks(request)
    try:
        text = asked.render(tokenizer)
    except Exception as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
    if keep is None:
        _refuse_by_length(text, tokenizer, longest, "messages")
    special = bool(request.add_special_tokens)
    written = _write(text, tokenizer, request.cache_salt or "", answered, special=special)
    tokens = np.array(written.tokens, dtype=np.int32)
    if longest is not None and len(tokens) > longest:
        return _cut(PreparedPrompt(tokens, text), keep, None)
    ends, marks = _message_ends(asked, text, tokenizer), _marked_ends(request, asked, text, tokenizer)
    opening = (
        text[ends[len(asked.messages)] :] if len(asked.messages) in ends else _THINK * text.rstrip().endswith(_THINK)
    )
    listed = _tools_end(asked, text, tokenizer)
    exact, floors = _positions(text, written, set(ends.values()), {**listed, **marks}, tokenizer)
    boundaries = sorted({*exact, *(floors[end] for end in listed if floors[end])})
    breakpoints = dict.fromkeys(floors[end] for end in sorted(marks) if floors[end])
    prepared = PreparedPrompt(tokens, text, tuple(boundaries), tuple(breakpoints), written.answers, opening=opening)
    return _cut(prepared, keep, None)


def _tokens_to_keep(request: GenerationFields, longest: int | None) -> int | None:
    """How many last tokens of a prompt are kept (`truncate_prompt_tokens`); None for all."""
    wanted = request.truncate_prompt_tokens
    answer = request.max_tokens or getattr(request, "max_completion_tokens", None) or 1
    room = None if longest is None else max(1, longest - answer)
    return room if wanted == -1 else wanted


def _cut(prompt: PreparedPrompt, keep: int | None, tokenizer: TextTokenizer | None) -> PreparedPrompt:
    """The last `keep` tokens of a prompt; `tokenizer` writes them as text where that is wanted."""
    cut = 0 if keep is None else len(prompt.tokens) - keep
    if cut <= 0:
        return prompt
    tokens = prompt.tokens[cut:]
    boundaries, breakpoints = (
        tuple(place - cut for place in places if place > cut) for places in (prompt.boundaries, prompt.breakpoints)
    )
    text = "" if tokenizer is None else tokenizer.decode(tokens.tolist())
    return replace(
        prompt, tokens=tokens, text=text, boundaries=boundaries, breakpoints=breakpoints, answers=(), cut=cut
    )


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


def _refuse_many_marks(request: ChatRequest) -> None:
    marks = sum(one.cache_control is not None for one in (*request.messages, *(request.tools or ())))
    for message in request.messages:
        parts = message.content if isinstance(message.content, list) else ()
        marks += sum(one.cache_control is not None for one in (*parts, *(message.tool_calls or ())))
    if marks > _MAX_MARKS:
        raise RequestError(
            f"{marks} messages and parts have cache_control, {_MAX_MARKS} may: mark the ends of what others share only",
            "messages",
            "too_many_breakpoints",
        )


def _prepare_text(
    prompt: str | list[int], request: CompletionRequest, tokenizer: TextTokenizer, answered: GivenAnswers | None
) -> PreparedPrompt:
    if isinstance(prompt, str):
        special = request.add_special_tokens is not False
        written = _write(prompt, tokenizer, request.cache_salt or "", answered, special=special)
        return PreparedPrompt(np.array(written.tokens, dtype=np.int32), prompt, answers=written.answers)
    if any(not 0 <= token < 2**31 for token in prompt):
        raise RequestError("a token id is negative or too large", "prompt", "invalid_token")
    return PreparedPrompt(np.array(prompt, dtype=np.int32), tokenizer.decode(prompt) if request.echo else "")


@dataclass
class _Written:
    """A text in tokens.

    Attributes:
        tokens: Its tokens.
        level: Offsets into the text, and how many tokens there are before them; where answers begin and end.
        answers: See `PreparedPrompt`.
    """

    tokens: list[int]
    level: list[tuple[int, int]] = field(default_factory=list)
    answers: tuple[OwnAnswer, ...] = ()


def _write(
    text: str, tokenizer: TextTokenizer, salt: str, answered: GivenAnswers | None, *, special: bool = False
) -> _Written:
    """The tokens of a text, with the ids of what was `answered` to what stands before it."""
    found = [] if answered is None else answered.within(salt, text)
    if found and special and tokenizer.encode("x", special=True)[-1:] != tokenizer.encode("x")[-1:]:
        found = []  # a token that closes the text stands behind every answer
    if found and answered is not None and answered.restore:
        return _restored(text, found, tokenizer, special=special)
    told = [_told_apart(text, answer, tokenizer, special=special) for answer in found]
    answers = tuple(answer for answer in told if answer is not None)
    return _Written(tokenizer.encode(text, special=special), answers=answers)


def _restored(text: str, found: Sequence[GivenAnswer], tokenizer: TextTokenizer, *, special: bool) -> _Written:
    """The tokens of a text, with the ids of the answers in it."""
    written, start, answers = _Written([]), 0, []
    for i, answer in enumerate(found):
        following = text[answer.stop : found[i + 1].start if i + 1 < len(found) else None]
        if not _stands_alone(following, tokenizer):
            continue
        before = tokenizer.encode(text[start : answer.start], special=special and start == 0)
        own, start = answer.tokens.tolist(), answer.stop
        first = len(written.tokens) + len(before)
        written.level += [(answer.start, first), (answer.stop, first + len(own))]
        written.tokens += [*before, *own]
        usual = tokenizer.encode(text[answer.start : answer.stop])
        if usual != own:
            answers.append(OwnAnswer(first, first + len(own), first + common_start(usual, own), restored=True))
    written.tokens += tokenizer.encode(text[start:], special=special and start == 0)
    written.answers = tuple(answers)
    return written


def _told_apart(text: str, answer: GivenAnswer, tokenizer: TextTokenizer, *, special: bool) -> OwnAnswer | None:
    """Where an answer stands in the tokenizer's own tokens, if these are others."""
    usual, own = tokenizer.encode(text[answer.start : answer.stop]), answer.tokens.tolist()
    if usual == own:
        return None
    first = len(tokenizer.encode(text[: answer.start], special=special))
    return OwnAnswer(first, first + len(usual), first + common_start(usual, own), restored=False)


def _stands_alone(text: str, tokenizer: TextTokenizer) -> bool:
    """Whether the beginning of `text` is written behind another text as it is written by itself."""
    head = text[:_HEAD]
    return tokenizer.encode("x" + head) == tokenizer.encode("x") + tokenizer.encode(head)


def _message_ends(asked: Conversation, text: str, tokenizer: TextTokenizer) -> dict[int, int]:
    """Where the first so many messages end, as offsets into `text`."""
    count = len(asked.messages)
    wanted = {*range(1, min(count, _FIRST_BOUNDARIES) + 1), *range(max(1, count - _LAST_BOUNDARIES + 1), count + 1)}
    rendered = ((end, asked.part(tokenizer, asked.messages[:end])) for end in sorted(wanted))
    return {end: len(part) for end, part in rendered if part and text.startswith(part)}


def _tools_end(asked: Conversation, text: str, tokenizer: TextTokenizer) -> dict[int, str]:
    """Where the definitions of the tools end, and other conversations with the same tools part from this one.

    As an offset into `text`, with what would follow it in another. Nowhere if the template writes the tools behind the
    text of the first message, or not at all.
    """
    if not asked.tools:
        return {}
    more = replace(asked, tools=[*asked.tools, asked.tools[-1]]).part(tokenizer, asked.messages)
    listed = common_start(more or text, text)
    said = {"content": _MORE if asked.messages[0]["content"] != _MORE else ""}
    others = (asked.part(tokenizer, [{"role": role} | said]) or "" for role in ("system", "user"))
    ends = [(end, other[end : end + _HEAD]) for other in others if listed <= (end := common_start(other, text))]
    return dict([min(ends)]) if listed and ends and min(ends)[0] < len(text) else {}


def _marked_ends(request: ChatRequest, asked: Conversation, text: str, tokenizer: TextTokenizer) -> dict[int, str]:
    """Where the texts end that the client marked, as offsets into `text`, and what would follow if they went on."""
    ends: dict[int, str] = {}

    def mark(closed: str | None, going_on: str | None) -> None:
        end = min(common_start(closed or "", text), common_start(closed or "", going_on or ""))
        if end:
            ends[end] = (going_on or "")[end : end + len(_MORE) + 1]

    for i, tool in enumerate(request.tools or (), start=1):
        if tool.cache_control is not None:
            listed = (replace(asked, tools=[*asked.tools[:i], *more]) for more in ((), asked.tools[:1]))
            mark(*(one.part(tokenizer, asked.messages) for one in listed))
    for i, message in enumerate(request.messages):
        parts = message.parts()
        cuts = [] if message.cache_control is None else [len(parts)]
        if isinstance(message.content, list):
            cuts += [j for j, part in enumerate(message.content, start=1) if part.cache_control is not None]
        for cut in cuts:
            said = ("\n".join([*parts[:cut], *more]) for more in ((), (_MORE,)))
            mark(*(asked.part(tokenizer, [*asked.messages[:i], {**asked.messages[i], "content": one}]) for one in said))
        calls = asked.messages[i].get("tool_calls", [])
        for j, call in enumerate(message.tool_calls or (), start=1):
            if call.cache_control is not None:
                made = ([*calls[:j], *more] for more in ((), calls[:1]))
                begun = ({**asked.messages[i], "tool_calls": one} for one in made)
                mark(*(asked.part(tokenizer, [*asked.messages[:i], one]) for one in begun))
    return ends


def _positions(
    text: str, written: _Written, ends: set[int], floors: Mapping[int, str], tokenizer: TextTokenizer
) -> tuple[list[int], dict[int, int]]:
    """Token positions of offsets into `text`.

    Args:
        text: The prompt.
        written: Its tokens.
        ends: Offsets of which those count that fall between tokens.
        floors: Offsets that count in any case, at the last token before, with what would follow them in another text.
        tokenizer: The tokenizer.

    Returns:
        Those of `ends`, ascending, and each of `floors`.
    """
    exact: list[int] = []
    found: dict[int, int] = {}
    tokens, level = written.tokens, deque(written.level)
    start = position = mismatches = 0
    for end in sorted(ends | floors.keys()):
        while level and level[0][0] <= end:
            start, position = max((start, position), level.popleft())
        if mismatches >= _MAX_MISMATCHES and end not in floors:
            continue
        stretch = tokenizer.encode(text[start:end])
        common = common_start(stretch, tokens[position : position + len(stretch)])
        if end in floors:
            going_on = tokenizer.encode(text[start:end] + floors[end])
            found[end] = position + min(common, common_start(going_on, stretch))
        if common < len(stretch):
            mismatches += end in ends
            continue
        position, start = position + common, end
        if end in ends:
            exact.append(position)
    return exact, found
