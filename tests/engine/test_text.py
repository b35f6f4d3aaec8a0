from collections.abc import Sequence

import numpy as np
import pytest

from headway.engine import TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    """Token i is byte i; what is no UTF-8 shows as the replacement character, as tokenizers do it."""
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


def stream(text: bytes, stop: Sequence[str] = ()) -> list[str]:
    out = TextStream(decode_bytes, stop=stop)
    shown = []
    for byte in text:
        shown.append(out.push(byte))
        if out.stopped_by is not None:
            break
    shown.append(out.finish())
    assert "".join(shown) == out.text
    return shown


def test_a_character_appears_once_and_whole():
    text = "aé漢🙂e\u0301z"
    shown = stream(text.encode())
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown)


def test_bytes_that_are_no_text_do_not_hold_up_the_answer():
    shown = stream(b"ab" + b"\xff" * 40 + b"cd")
    assert "".join(shown) == "ab" + "\ufffd" * 40 + "cd"
    longest_silence = max(map(len, "".join("x" if s else "." for s in shown).split("x")))
    assert longest_silence <= 8


def test_an_unfinished_character_is_shown_at_the_end():
    assert "".join(stream("a漢".encode()[:-1])) == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected", "by"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("aaab", ["aab"], "a", "aab"),
        ("xyxyxz", ["xyxz"], "xy", "xyxz"),
        ("stop", ["stop"], "", "stop"),
        ("a\n\nb", ["\n\n"], "a", "\n\n"),
        ("abc", ["bcd", "bc"], "a", "bc"),
        ("漢字終", ["終"], "漢字", "終"),
        ("almost sto", ["stop"], "almost sto", None),
    ],
)
def test_stop_strings(text: str, stop: list[str], expected: str, by: str | None):
    out = TextStream(decode_bytes, stop=stop)
    shown = ""
    for byte in text.encode():
        shown += out.push(byte)
        assert expected.startswith(shown), "part of a stop string was shown"
        if out.stopped_by is not None:
            break
    shown += out.finish()
    assert (shown, out.text, out.stopped_by) == (expected, expected, by)


def test_the_leading_space_depends_on_the_prompt():
    words = {1: "Hello", 2: " world", 3: " again"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[t] for t in tokens).lstrip()  # as sentencepiece tokenizers do

    out = TextStream(decode, prompt=[1])
    assert out.push(2) + out.push(3) + out.finish() == " world again"


def test_special_tokens_are_silent_and_the_window_stays_short():
    sizes = []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return decode_bytes(tokens)

    out = TextStream(decode)
    shown = "".join(out.push(999) for _ in range(1000)) + out.push(65)
    assert shown == "A"
    assert max(sizes) <= 130


@pytest.mark.parametrize("seed", range(30))
def test_random_texts_and_stops_agree_with_find(seed: int):
    rng = np.random.default_rng(seed)
    alphabet = list("abé漢🙂")
    text = "".join(rng.choice(alphabet, 80))
    stops = ["".join(rng.choice(alphabet, rng.integers(1, 5))) for _ in range(3)]
    cuts = [at for s in stops if (at := text.find(s)) >= 0]
    ends = [text.find(s) + len(s) for s in stops if s in text]
    shown = "".join(stream(text.encode(), stops))
    if not cuts:
        assert shown == text
    else:
        first_end = min(ends)  # the answer ends at the token that completes the first stop string
        expected = min(text.find(s) for s in stops if s in text and text.find(s) + len(s) == first_end)
        assert shown == text[:expected]


@pytest.mark.parametrize(
    ("text", "stop", "settled"),
    [
        ("one", [], (3, "one")),
        ("a漢", [], (4, "a漢")),
        ("one two", ["two"], (4, "one ")),
        ("one tw", ["two"], (6, "one tw")),
        ("aaab", ["aab"], (1, "a")),
        ("stop", ["stop"], (0, "")),
    ],
)
def test_the_settled_part_ends_where_the_text_of_the_client_can(text: str, stop: list[str], settled: tuple[int, str]):
    out = TextStream(decode_bytes, stop=stop)
    for byte in text.encode():
        out.push(byte)
    out.finish()
    tokens, characters = out.settled
    assert (tokens, out.text[:characters]) == settled


def test_what_has_only_begun_is_not_settled():
    out = TextStream(decode_bytes, stop=["two"])
    tokens = []
    for byte in "one tw漢".encode()[:-1]:
        out.push(byte)
        tokens.append(out.settled[0])
    assert tokens == [1, 2, 3, 4, 4, 4, 4, 4], "neither a stop string that began nor a part of a character counts"
    out.finish()
    assert out.settled == (6, 6), "what the stop string did not go on with is text, the part of a character is none"


def test_a_token_that_is_half_a_stop_string_is_not_settled():
    words = {1: "one ", 2: "t", 3: "wo", 4: "one s", 5: "top"}
    out = TextStream(lambda tokens: "".join(words[t] for t in tokens), stop=["stop"])
    for token in (1, 4, 5):
        out.push(token)
    assert (out.text, out.settled) == ("one one ", (1, 4))


def test_a_stop_string_that_is_shown_is_part_of_the_answer_and_settled():
    out = TextStream(decode_bytes, stop=["two"], shown=True)
    shown = "".join(out.push(byte) for byte in b"one two")
    assert (shown, out.text, out.stopped_by) == ("one two", "one two", "two")
    assert out.settled == (7, 7), "whoever sends it back reaches its end"


def test_stop_strings_count_from_the_least_length_on():
    out = TextStream(decode_bytes, stop=["ab"], least=3)
    shown, pushed = "", 0
    for byte in b"abcab":
        assert out.stopped_by is None
        shown, pushed = shown + out.push(byte), pushed + 1
    assert (shown, out.text, out.stopped_by, pushed) == ("abc", "abc", "ab", 5)
