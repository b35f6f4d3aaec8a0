"""Answers that come back as text, found and put back in their own tokens."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tests.server.fakes import CharTokenizer
from tests.server.test_prompts import Merging, chat, said

from headway.engine import GenerationRequest, RequestResult, Timings
from headway.server.answers import GivenAnswers
from headway.server.prompts import PreparedPrompt, prepare_chat, prepare_completions
from headway.server.protocol import ChatRequest, CompletionRequest, parse_body


def answered(
    prompt: str, text: str, tokens: Sequence[int], settled: tuple[int, int] | None = None, **asked: Any
) -> Any:
    """How a request ended."""
    request = GenerationRequest(np.array([1], dtype=np.int32), 99, text=prompt, **asked)
    told = settled or (len(tokens), len(text))
    return RequestResult("stop", None, 1, tuple(tokens), text, 0, "", None, Timings(1.0), 0, request, settled=told)


def given(*results: Any, **options: Any) -> GivenAnswers:
    answers = GivenAnswers(**options)
    for result in results:
        answers.request_finished(result)
    return answers


def spans(answers: GivenAnswers, text: str, salt: str = "") -> list[tuple[int, int]]:
    return [(found.start, found.stop) for found in answers.within(salt, text)]


def test_an_answer_is_found_behind_its_own_prompt_only():
    answers = given(answered("ask: ", "yes", [1, 2]), answered("ask: yes. and? ", "no", [3]))
    assert spans(answers, "ask: yes. and? no, or") == [(5, 8), (15, 17)]
    assert spans(answers, "ask: yes") == [(5, 8)]
    assert spans(answers, "Ask: yes") == spans(answers, "ask: ye") == spans(answers, "x ask: yes") == []
    assert spans(answers, "ask: yes", salt="other") == []


def test_of_two_answers_to_one_prompt_the_longer_counts():
    answers = given(answered("ask: ", "yes", [1]), answered("ask: ", "yes and no", [2, 3]))
    assert spans(answers, "ask: yes and no") == [(5, 15)]
    assert spans(answers, "ask: yes and") == [(5, 8)]


def test_only_what_is_settled_is_kept_and_nothing_of_others():
    answers = given(
        answered("a: ", "yes!", [1, 2], settled=(1, 3)),
        answered("b: ", "yes", [1], no_store=True),
        answered("", "yes", [1]),
        answered("c: ", "", [1]),
    )
    assert spans(answers, "a: yes!") == [(3, 6)]
    assert answers.within("", "a: yes!")[0].tokens.tolist() == [1]
    assert spans(answers, "b: yes") == spans(answers, "yes") == spans(answers, "c: ") == []


def test_what_was_used_longest_ago_is_forgotten():
    answers = given(*(answered(f"{i}: ", "yes", [1, 2]) for i in range(3)), most=3)
    assert spans(answers, "0: yes")
    answers.request_finished(answered("3: ", "yes", [1, 2]))
    assert [bool(spans(answers, f"{i}: yes")) for i in range(4)] == [True, False, True, True]
    few = given(*(answered(f"{i}: ", "yes", [1, 2]) for i in range(4)), most_tokens=5)
    assert [bool(spans(few, f"{i}: yes")) for i in range(4)] == [False, False, True, True]


def test_what_is_forgotten_takes_its_answers_along_and_those_under_way():
    answers = given(answered("a: ", "yes", [1]), answered("a: ", "yes", [1], salt="me"))
    answers.forgotten("me")
    assert (spans(answers, "a: yes", "me"), spans(answers, "a: yes")) == ([], [(3, 6)])
    answers.forgotten(None)
    assert spans(answers, "a: yes") == []
    answers.request_finished(replace(answered("a: ", "yes", [1]), timings=Timings(time.monotonic())))
    assert spans(answers, "a: yes") == [(3, 6)]
    under_way = replace(answered("a: ", "yes", [1]), timings=Timings(time.monotonic()))
    answers.forgotten(None)
    answers.request_finished(under_way)
    assert spans(answers, "a: yes") == []


# In prompts. `Merging` writes two equal characters as one token; the model wrote them one by one.


def answer_of_bbb(**options: Any) -> tuple[GivenAnswers, list[int]]:
    own = [ord("b")] * 3
    return given(answered("a>", "bbb", own), **options), own


def prepared(answers: GivenAnswers, *messages: Any) -> PreparedPrompt:
    body = {"messages": [{"role": "user", "content": "a>"}, said("assistant", "bbb"), *messages]}
    return prepare_chat(parse_body(ChatRequest, body), Merging(), answered=answers)


def test_an_answer_gets_its_own_tokens_and_marks_behind_it_stay_right():
    answers, own = answer_of_bbb()
    prompt = prepared(answers, said("user", "cc", mark=True))
    assert prompt.tokens.tolist() == [ord("a"), ord(">"), *own, 1000 + ord("c"), ord(">")]
    assert (prompt.boundaries, prompt.breakpoints) == ((2, 5, 6), (6,))
    [told] = prompt.answers
    assert (told.start, told.stop, told.differs, told.restored) == (2, 5, 2, True)


def test_without_restoring_the_prompt_is_the_tokenizers_and_says_where_it_differs():
    answers, _ = answer_of_bbb(restore=False)
    prompt = prepared(answers, said("user", "cc"))
    assert prompt.tokens.tolist() == chat(Merging(), "a>", said("assistant", "bbb"), "cc").tokens.tolist()
    [told] = prompt.answers
    assert (told.start, told.stop, told.differs, told.restored) == (2, 4, 2, False)


def test_what_follows_must_be_written_as_it_stands_alone():
    """The `x` that follows would be one token with the one before, had that been written so."""
    answers = given(answered("a>", "bbx", [ord("b"), ord("b"), ord("x")]))
    [prompt] = prepare_completions(parse_body(CompletionRequest, {"prompt": "a>bbxx"}), Merging(), answered=answers)
    assert prompt.tokens.tolist() == Merging().encode("a>bbxx")


def test_an_answer_that_the_tokenizer_writes_alike_is_no_news():
    answers = given(answered("Hello", " yes", CharTokenizer().encode(" yes")))
    [prompt] = prepare_completions(
        parse_body(CompletionRequest, {"prompt": "Hello yes ok"}), CharTokenizer(), answered=answers
    )
    assert prompt.tokens.tolist() == CharTokenizer().encode("Hello yes ok")
    assert prompt.answers == ()
