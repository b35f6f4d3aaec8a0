"""A prompt in its client's words, whatever a template makes of the messages."""

from collections.abc import Sequence
from typing import Any

import pytest

from headway.cache import Displaced
from headway.tell.prompt_text import Change, Place, PromptText

Messages = Sequence[dict[str, Any]]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "<think>Hm.</think>So."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "how?"}]},
]


def plain(messages: Messages) -> str:
    def content(message: dict[str, Any]) -> str:
        given = message["content"]
        return given if isinstance(given, str) else "".join(part["text"] for part in given)

    return "".join(f"[{m['role']}]{content(m)}\n" for m in messages) + "[assistant]"


def without_thinking(messages: Messages) -> str:
    """A template that strips earlier reasoning, and spaces around what is said."""
    said = [m | {"content": plain([m]).split("]", 1)[1][: -len("\n[assistant]")]} for m in messages]
    return plain([m | {"content": m["content"].split("</think>")[-1].strip()} for m in said])


def text_of(render: Any, messages: Messages = TALK, piece: Any = None, front: str = "") -> PromptText:
    text = render(messages)
    return PromptText(list((front + text).encode()), piece or (lambda t: bytes([t])), text, messages, render)


@pytest.mark.parametrize("render", [plain, without_thinking])
def test_every_token_lies_in_its_message(render: Any) -> None:
    prompt = text_of(render)
    text = render(TALK)
    ends = [text.index(word) + len(word) for word in ("brief.", "Why?", "So.", "how?")]
    for position in range(len(text)):
        right = sum(position > end for end in ends)
        assert prompt.place(position).index == (right if right < 4 else None), text[position:]
    assert prompt.place(ends[1]).role == "user"


def test_a_template_that_moves_the_system_prompt_into_the_last_message() -> None:
    def moved(messages: Messages) -> str:
        system, *others, last = messages
        return plain([*others[:2], {"role": "user", "content": f"{system['content']} {last['content']}"}])

    talk = [*TALK[:3], {"role": "user", "content": "And how?"}]
    prompt = text_of(moved, talk)
    for word, index in (("Why", 1), ("So", 2), ("brief", 0), ("how", 3)):
        assert prompt.place(moved(talk).index(word)).index == index


def test_what_a_template_hides_or_refuses_is_not_guessed() -> None:
    def hides(messages: Messages) -> str:
        return plain([m for m in messages if m["role"] != "system"])

    def refuses(messages: Messages) -> str:
        if any("\ue000" in str(m["content"]) for m in messages):
            raise ValueError("no")
        return plain(messages)

    assert text_of(hides, TALK[:1]).place(3).index is None
    assert text_of(refuses).place(3) == Place(None, "", "[sy", "stem]Be brief.\n[user]Why")


def test_tokens_that_do_not_spell_the_text_tell_no_message() -> None:
    other = PromptText(list(b"something else"), lambda t: bytes([t]), plain(TALK), TALK, plain)
    assert other.place(4) == Place(None, "", "some", "thing else")


def test_a_space_that_a_tokenizer_writes_in_front() -> None:
    prompt = text_of(plain, front=" ")
    assert prompt.place(plain(TALK).index("brief") + 1).index == 0
    assert prompt.place(plain(TALK).index("Why") + 2).index == 1


def test_characters_are_whole() -> None:
    prompt = PromptText(list("漢字 is text".encode()), lambda t: bytes([t]))
    assert prompt.place(4) == Place(None, "", "漢", " is text")


@pytest.mark.parametrize(
    ("text", "start", "stop", "told"),
    [
        ("It is 08:31 now.", 10, 11, "08:31"),
        ("It is 08:31. And", 9, 11, "08:31"),
        ('{"id": "a-7f"}', 9, 11, "a-7f"),
        ("<user>one two</>", 6, 13, "one two"),
        ("x" * 50 + "y" * 100, 50, 150, "x" * 24 + "y" * 53 + "..."),
    ],
)
def test_changes_are_shown_in_whole_words(text: str, start: int, stop: int, told: str) -> None:
    prompt = PromptText(list(text.encode()), lambda t: bytes([t]))
    assert prompt.change(Displaced(start, stop, 1, 40)).text == told


def test_sentences() -> None:
    place = Place(0, "system", "cch=", "0aaa9")
    assert str(place) == "message 0 (system): `cch=|0aaa9`"
    assert str(Place()) == ""
    change = str(Change(28, 33, 2030, place, "08:31"))
    assert change.startswith("changed at token 28, message 0 (system), `08:31`; 2,030 tokens behind it are the same")
    assert str(Change(28, 28, 40, Place(), "")).startswith(
        "changed at token 28: text that stood there before is missing"
    )
