from collections.abc import Sequence
from typing import Any

import pytest
from tests.server import tiny
from tests.server.fakes import CharTokenizer

from headway.engine import HubTokenizer
from headway.errors import RequestError
from headway.server.prompts import PreparedPrompt, prepare_chat, prepare_completions
from headway.server.protocol import ChatRequest, CompletionRequest, parse_body


@pytest.fixture(scope="module")
def words() -> HubTokenizer:
    return HubTokenizer(tiny.tokenizer())


def chat(tokenizer: Any, *messages: Any, **fields: Any) -> PreparedPrompt:
    body = {"messages": [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]}
    return prepare_chat(parse_body(ChatRequest, body | fields), tokenizer)


def said(role: str, content: Any, mark: bool = False) -> dict[str, Any]:
    return {"role": role, "content": content} | ({"cache_control": {"type": "ephemeral"}} if mark else {})


def test_boundaries_are_prefixes_in_text_and_tokens(words: HubTokenizer):
    talk = [said("system", "Be ünkind"), said("user", "漢字?"), said("assistant", "no"), said("user", "why")]
    prompt = chat(words, *talk)
    assert len(prompt.boundaries) == 4
    for i, boundary in enumerate(prompt.boundaries, start=1):
        part = words.render(talk[:i], answer=False)
        assert words.encode(part) == prompt.tokens[:boundary].tolist()
    assert prompt.boundaries[-1] == len(prompt.tokens) - 1, "the answer's first token alone comes after the messages"


def test_a_system_message_comes_as_developer_too(words: HubTokenizer):
    roles = [chat(words, said(role, "x"), "y").tokens.tolist() for role in ("system", "developer")]
    assert roles[0] == roles[1]


class Merging(CharTokenizer):
    """Writes two equal characters in a row as one token, so that a boundary can fall inside a token."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        tokens: list[int] = []
        place = 0
        while place < len(text):
            twice = place + 1 < len(text) and text[place] == text[place + 1]
            tokens.append(ord(text[place]) + (1000 if twice else 0))
            place += 1 + twice
        return tokens

    def render(self, messages: Sequence[Any], *, answer: bool, options: Any = None) -> str:
        return "".join(m["content"] for m in messages) + (">" if answer else "")


def test_a_boundary_inside_a_token_is_left_out():
    prompt = chat(Merging(), "ab", said("assistant", "bc"), "d")
    assert prompt.tokens.tolist() == [ord("a"), 1000 + ord("b"), ord("c"), ord("d"), ord(">")]
    assert prompt.boundaries == (3, 4), "the first message ends in the middle of bb"


def test_a_breakpoint_inside_a_token_goes_before_it():
    prompt = chat(Merging(), said("user", "ab", mark=True), said("assistant", "bc"), "d")
    assert prompt.breakpoints == (1,)


class Forgetting(CharTokenizer):
    """A template that leaves the words of all answers but the last out, as those of reasoning models do."""

    def render(self, messages: Sequence[Any], *, answer: bool, options: Any = None) -> str:
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        shown = [m["content"] if m["role"] == "user" or i == last else "-" for i, m in enumerate(messages)]
        return "/".join(shown) + ("/" if answer else "")


def test_a_boundary_that_the_template_rewrites_later_is_left_out():
    prompt = chat(Forgetting(), "a", said("assistant", "think b"), "c", said("assistant", "think d"), "e")
    assert prompt.text == "a/-/c/think d/e/"
    assert prompt.boundaries == tuple(map(len, ("a", "a/-/c/think d", "a/-/c/think d/e")))


def test_long_conversations_are_not_rendered_once_a_message():
    calls = []

    class Counting(CharTokenizer):
        def render(self, messages: Sequence[Any], *, answer: bool, options: Any = None) -> str:
            calls.append(len(messages))
            return super().render(messages, answer=answer, options=options)

    talk = [said("user" if i % 2 == 0 else "assistant", f"message {i}") for i in range(301)]
    prompt = chat(Counting(), *talk)
    assert len(calls) <= 34
    assert len(prompt.boundaries) == 32


def test_marks_on_parts(words: HubTokenizer):
    parts = [
        {"type": "text", "text": "first", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "second"},
    ]
    prompt = chat(words, said("user", parts))
    assert words.decode(prompt.tokens[: prompt.breakpoints[0]]) == "first"
    assert prompt.breakpoints[0] == len("first") + 1


def test_template_options_reach_the_template():
    plain, thinking = (chat(CharTokenizer(), "a", chat_template_kwargs=o) for o in (None, {"before": "bb"}))
    assert thinking.text == plain.text.replace("<assistant>", "bb<assistant>")


def test_a_model_without_a_template_is_pointed_to_completions():
    class Bare(CharTokenizer):
        has_chat_template = False

    with pytest.raises(RequestError, match="/v1/completions"):
        chat(Bare(), "a")


@pytest.mark.parametrize("given", [[["a"]], [[1], "a"], [1, "a"], 3, [1.5]])
def test_prompts_of_mixed_kinds_are_refused(given: Any):
    with pytest.raises(RequestError, match="prompt"):
        prepare_completions(parse_body(CompletionRequest, {"prompt": given}), CharTokenizer())


def test_pieces_are_the_bytes_of_tokens(words: HubTokenizer):
    text = "a é 漢🙂\n"
    tokens = words.encode(text)
    assert b"".join(words.piece(token) for token in tokens) == text.encode()
    assert words.piece(words.encode("<|end|>")[0]) == b"<|end|>"
    assert words.piece(100_000) == b""


def test_too_many_answers_in_one_request_are_refused():
    with pytest.raises(RequestError, match="256"):
        prepare_completions(parse_body(CompletionRequest, {"prompt": ["a"] * 100, "n": 3}), CharTokenizer())


def test_many_marks_are_refused_before_anything_is_rendered_for_them():
    Counting.rendered = 0
    marked = [said("user", "a", mark=True) for _ in range(65)]
    with pytest.raises(RequestError, match="65 messages and parts have cache_control, 64 may") as caught:
        chat(Counting(), *marked)
    assert (caught.value.code, Counting.rendered) == ("too_many_breakpoints", 0)
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}} for _ in range(64)]
    assert len(chat(CharTokenizer(), said("user", parts)).breakpoints) == 64


class Counting(CharTokenizer):
    rendered = 0

    def render(self, messages: Sequence[Any], *, answer: bool, options: Any = None) -> str:
        Counting.rendered += 1
        return super().render(messages, answer=answer, options=options)


def test_a_prompt_that_will_be_refused_is_rendered_once():
    Counting.rendered = 0
    talk = [said("user", "word ", mark=True) for _ in range(20)]
    body = parse_body(ChatRequest, {"messages": talk})
    whole = prepare_chat(body, Counting())
    assert whole.breakpoints
    Counting.rendered = 0
    cut = prepare_chat(body, Counting(), len(whole.tokens) - 1)
    assert (cut.tokens.tolist(), cut.boundaries, cut.breakpoints) == (whole.tokens.tolist(), (), ())
    assert Counting.rendered == 1
    assert prepare_chat(body, Counting(), len(whole.tokens)).breakpoints == whole.breakpoints
