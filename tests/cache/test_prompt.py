"""Prompts and symbols: what a caller may give, what is kept of it, and what is refused."""

from __future__ import annotations

import copy
import pickle
from array import array
from collections import deque
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, Engine

from headway.cache import Media, Prompt
from headway.cache.shape.symbols import SymbolTable
from headway.errors import LeaseError

ROOT = Path(__file__).resolve().parents[2]
IMAGE = [Media(1, 2, "a picture")]


@pytest.mark.parametrize(
    "given",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        [np.int64(5), 6, 7],
        deque([5, 6, 7]),
        b"\x05\x06\x07",
        bytearray(b"\x05\x06\x07"),
        array("i", [5, 6, 7]),
        array("Q", [5, 6, 7]),
        memoryview(array("h", [5, 6, 7])),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        np.array([5, 6, 7], dtype=">i4"),
        np.array([5, 0, 6, 0, 7, 0], dtype=np.int32)[::2],
    ],
    ids=lambda given: type(given).__name__,
)
def test_any_sequence_or_buffer_of_integers_is_a_prompt(given: Any) -> None:
    prompt = Prompt(given)
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == [5, 6, 7]
    assert prompt.data == np.array([5, 6, 7], dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one"),
        (np.empty(0, dtype=np.int32), "at least one"),
        (np.empty(0), "at least one"),
        ([1, -1], "must not be negative"),
        (np.array([1, -1]), "must not be negative"),
        ([1, 2**31], "must fit into 32 bits"),
        (np.array([1, 2**31]), "must fit into 32 bits"),
        (np.array([1, 2**63], dtype=np.uint64), "must fit into 32 bits"),
        ([1, 2.0], "must be whole numbers"),
        (np.array([1.0]), "must be whole numbers"),
        ([[1], [2, 3]], "must be whole numbers, in one dimension"),
        (np.zeros((2, 2), dtype=np.int32), "must have one dimension, not 2"),
        (np.int32(3), "must have one dimension, not 0"),
        (7, "must have one dimension, not 0"),
        (["a"], "must be whole numbers"),
        ("text", "must be a sequence or an array of whole numbers, not a str"),
        (None, "must be a sequence or an array of whole numbers, not a NoneType"),
        ({1, 2}, "must be a sequence or an array of whole numbers, not a set"),
        (np.array([True]), "must be whole numbers"),
        ((token for token in (1, 2)), "must be a sequence or an array of whole numbers, not a generator"),
    ],
)
def test_what_is_no_prompt_is_refused_with_the_reason(given: Any, message: str) -> None:
    with pytest.raises(LeaseError, match=message):
        Prompt(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pin": -1}, "pin is -1"),
        ({"pin": 1.5}, "pin is 1.5"),
        ({"namespace": -1}, "namespace is -1"),
        ({"boundaries": (4,)}, "boundaries must lie in"),
        ({"breakpoints": [0]}, "breakpoints must lie in"),
        ({"breakpoints": ["a"]}, "breakpoints must be a sequence of whole numbers"),
        ({"pin_seconds": 0}, "pin_seconds is 0"),
        ({"pin_seconds": float("nan")}, "pin_seconds is nan"),
        ({"pin_seconds": float("inf")}, "pin_seconds is inf"),
        ({"pin_seconds": "1h"}, "pin_seconds is '1h'"),
        ({"pin_seconds": True}, "pin_seconds is True"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LeaseError, match=message):
        Prompt([1, 2, 3], **options)


def test_marks_are_kept_as_tuples_of_ints() -> None:
    prompt = Prompt([1, 2, 3], boundaries=np.array([1, 3]), breakpoints=[2], pin=3, pin_seconds=5)
    assert (prompt.boundaries, prompt.breakpoints) == ((1, 3), (2,))
    assert (prompt.pin, prompt.pin_seconds, Prompt([1]).pin_seconds) == (3, 5, None)


def test_a_prompt_owns_its_tokens() -> None:
    """What a caller does with its array later reaches neither the prompt nor the tree."""
    engine = Engine.of(ATTENTION)
    mine = np.arange(20, dtype=np.int32)
    prompt = Prompt(mine)
    engine.run(mine)
    mine[:] = 99
    assert prompt.tokens.tolist() == list(range(20))
    assert engine.hit(np.arange(20)) == 19
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 1
    with pytest.raises(FrozenInstanceError):
        prompt.pin = 3


def test_a_prompt_can_be_copied_and_pickled() -> None:
    prompt = Prompt([1, 2, 3], boundaries=(2,), pin=1)
    for same in (copy.copy(prompt), copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):
        assert (same.data, same.boundaries, same.pin) == (prompt.data, (2,), 1)
        assert same.tokens.tolist() == [1, 2, 3]


def test_equal_contents_share_and_different_ones_part() -> None:
    engine = Engine.of(ATTENTION)
    text = [3, 9, 9, 4, 5]

    def prompt(content: str) -> Prompt:
        return Prompt(engine.cache.symbols(text, [Media(1, 2, content)]))

    engine.run(prompt("one").tokens[:1])  # something is known already
    lease = engine.cache.lease(prompt("one"))
    engine.compute(lease)
    engine.cache.finish([lease.row])
    assert engine.cache.lookup(prompt("one")).tokens == 4
    assert engine.cache.lookup(prompt("another")).tokens == 1
    assert engine.cache.lookup(Prompt(text)).tokens == 1


def test_symbols_can_be_cut_and_continued() -> None:
    symbols = Engine.of(ATTENTION).cache.symbols([3, 9, 9, 4], IMAGE)
    assert symbols.tokens.tolist() == [3, -1, -1, 4]
    assert len(symbols) == 4
    assert symbols[1:3].tokens.tolist() == [-1, -1]
    answered = symbols.followed_by([7, 8])
    assert Prompt(answered).tokens.tolist() == [3, -1, -1, 4, 7, 8]
    assert Prompt(symbols[:2].followed_by(symbols[2:])).data == symbols.data
    assert "[ 3 -1 -1  4]" in repr(symbols)


def test_symbols_of_another_cache_are_refused() -> None:
    """The same number is another content there."""
    one, other = Engine.of(ATTENTION).cache, Engine.of(ATTENTION).cache
    symbols, plain = one.symbols([3, 9, 9, 4], IMAGE), one.symbols([3, 4])
    for call in (other.lookup, other.explain, other.lease):
        with pytest.raises(LeaseError, match="symbols of another cache"):
            call(Prompt(symbols.followed_by([1])))
        call(Prompt(plain))
    with pytest.raises(LeaseError, match="two caches"):
        symbols.followed_by(other.symbols([9, 9, 9], IMAGE))
    assert one.lookup(Prompt(plain.followed_by(symbols))).tokens == 0
    twin = copy.deepcopy(one)
    with pytest.raises(LeaseError, match="symbols of another cache"):
        twin.lookup(Prompt(symbols))
    twin.lookup(Prompt(twin.symbols([3, 9, 9, 4], IMAGE)))


@pytest.mark.parametrize(
    ("tokens", "media", "message"),
    [
        ([1, -2, 3], IMAGE, "must not be negative"),
        ([1, 2, 3], [Media(1, 3, "a")], "outside 3 tokens"),
        ([1, 2, 3], [Media(-1, 2, "a")], "outside 3 tokens"),
        ([1, 2, 3], [Media(1, 0, "a")], "outside 3 tokens"),
        ([1, 2, 3, 4], [Media(2, 2, "a"), Media(1, 2, "b")], r"\[2, 4\) overlaps another that ends at 3"),
        ([1, 2, 3], [Media(0, 2, "a"), Media(0, 2, "a")], "overlaps"),
        ([1, 2, 3], [Media(0, 2, [])], "must be hashable"),
    ],
)
def test_media_that_make_no_sense_are_refused(tokens: list[int], media: list[Media], message: str) -> None:
    with pytest.raises(LeaseError, match=message):
        Engine.of(ATTENTION).cache.symbols(tokens, media)


def test_what_was_made_before_a_reset_stays_right() -> None:
    cache = Engine.of(ATTENTION).cache
    before = cache.symbols([3, 9, 9, 4], IMAGE)
    cache.reset()
    after = cache.symbols([3, 9, 9, 4], IMAGE)
    assert after.data != before.data
    assert cache.lookup(Prompt(before)).tokens == 0


def test_contents_are_forgotten_beyond_a_bound_and_never_mistaken() -> None:
    table = SymbolTable(most=3)

    def symbol(content: str, length: int = 1) -> int:
        return int(table.apply([0] * length, [Media(0, length, content)]).tokens[0])

    first, second, third = symbol("a"), symbol("b"), symbol("c")
    assert symbol("a") == first, "used again: b is the oldest now"
    full = table.nbytes
    given = {first, second, third, symbol("d")}
    assert len(given) == 4
    assert symbol("a") == first
    assert symbol("b") not in given, "forgotten: a miss, never a wrong hit"
    assert table.nbytes == full
    assert 3 * 400 < full < 3 * 600
    assert symbol("b", 2) != symbol("b"), "a content of another length is another one"
    table.forget()
    assert table.nbytes == 0


SNIPPET = """
from array import array
import numpy as np
from numpy.typing import NDArray
from headway.cache import Media, PrefixCache, Prompt, Symbols

Prompt([1, 2, 3])
Prompt((1, 2, 3), boundaries=[2])
Prompt(range(3))
Prompt(np.arange(3))
Prompt(np.arange(3, dtype=np.int32), pin=2, pin_seconds=60)
Prompt(array("i", [1]))
Prompt(memoryview(array("i", [1])))
tokens: NDArray[np.int32] = Prompt([1]).tokens
data: bytes = Prompt([1]).data


def answered(cache: PrefixCache) -> Prompt:
    symbols: Symbols = cache.symbols([1, 2], [Media(0, 1, "digest")])
    return Prompt(symbols[:1].followed_by([3]).followed_by(symbols))
"""
WRONG = """
Prompt(["a"])
Prompt([1.5])
Prompt(3)
Prompt(np.zeros(3))
Prompt([1]).tokens = tokens
"""


def test_a_strict_type_checker_takes_what_the_cache_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(SNIPPET + WRONG)
    mypy = pytest.importorskip("mypy.api", reason="where only the cache is tested, there is no mypy")
    out, _, _ = mypy.run(["--strict", "--no-error-summary", "snippet.py"])
    lines, first = out.splitlines(), SNIPPET.count("\n") + 2
    wrong = [int(line.split(":")[1]) for line in lines if ": error:" in line]
    assert sorted(set(wrong)) == list(range(first, first + 5)), out
