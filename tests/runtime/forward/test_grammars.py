"""Answers of a form: whatever is drawn, it fits; whatever was asked before, the same may follow."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tests.server import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headway.errors import RequestError
from headway.runtime.forward import grammars as module
from headway.runtime.forward.grammars import MAX_CONSTRAINT_BYTES, Grammars
from headway.runtime.forward.sampling import sample
from headway.runtime.interface import Constraint, RowAnswer, SampleRow, SamplingParams

WORDS = tiny.tokenizer()
VOCAB = len(WORDS)
EOS, END = (WORDS.convert_tokens_to_ids(text) for text in ("<|eos|>", "<|end|>"))
ENDS = {EOS, END}
NOBODY = np.empty(0, dtype=np.int32)
LIKELY = [*WORDS('"}],:0', add_special_tokens=False)["input_ids"], EOS, END]


def new(**options: Any) -> Grammars:
    return Grammars(WORDS, VOCAB + 3, [EOS, END], **({"most": 8} | options))  # models pad their vocabularies


GRAMMARS = new()


def row(constraint: Constraint | None, output: Any = NOBODY, request: int = 0, **params: Any) -> SampleRow:
    asked = SamplingParams(**params)
    return SampleRow(asked, 7, NOBODY, np.array(output, dtype=np.int32), constraint=constraint, request=request)


def ids(text: str) -> list[int]:
    return list(WORDS(text, add_special_tokens=False)["input_ids"])


def logits(rng: np.random.Generator, rows: int = 1) -> torch.Tensor:
    """Random ones, with a taste for what ends texts, lists and objects."""
    made = torch.from_numpy(rng.normal(0, 2, (rows, VOCAB + 3)).astype(np.float32))
    made[:, LIKELY] += 4
    return made


def allowed(constraint: Constraint, output: Any, request: int = 0, using: Grammars = GRAMMARS) -> set[int]:
    restricted = using.restrict(torch.zeros(1, VOCAB + 3), [row(constraint, output, request)])
    return set(torch.isfinite(restricted[0]).nonzero()[:, 0].tolist())


def written(constraint: Constraint, seed: int, most: int = 600, using: Grammars = GRAMMARS) -> tuple[str, bool]:
    """What a random model answers, and whether it came to an end."""
    rng, output = np.random.default_rng(seed), list[int]()
    request = int(rng.integers(1 << 40))
    for _ in range(most):
        asked = row(constraint, output, request, temperature=float(rng.choice([0.0, 1.0])))
        output.append(int(sample(logits(rng), [asked], using).tokens[0]))
        if output[-1] in ENDS:
            return WORDS.decode(output[:-1]), True
    return WORDS.decode(output), False


def schema_of(rng: np.random.Generator, depth: int = 3) -> Any:
    """A random schema of what clients use."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = rng.choice([*kinds, *(["object"] * 4 + ["array"] * 3 + ["anyOf", "tuple", "map", "node"]) * (depth > 0)])

    def below() -> Any:
        return schema_of(rng, depth - 1)

    low, more = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    made: dict[str, Callable[[], Any]] = {
        "string": lambda: {"type": "string", "minLength": low, "maxLength": low + more},
        "integer": lambda: {"type": "integer", "minimum": -low, "maximum": 10 * more},
        "number": lambda: {"type": "number", "exclusiveMinimum": -low - 1, "maximum": more + 0.5},
        "boolean": lambda: {"type": "boolean", "title": "A title", "default": True},
        "null": lambda: {"type": ["null", "boolean"]},
        "enum": lambda: {"enum": ["red", 3, None, "grün", '"quoted" \\ and so on'][: low + 1]},
        "const": lambda: {"const": {"a": [1, low]}},
        "pattern": lambda: {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$", "maxLength": 9},
        "format": lambda: {"type": "string", "format": rng.choice(["uuid", "ipv4", "ipv6", "email"])},
        "object": lambda: {
            "type": "object",
            "properties": {name: below() for name in "abcd"[: low + 1]},
            "required": list("abcd"[:low]),
            "additionalProperties": False,
        },
        "array": lambda: {"type": "array", "items": below(), "minItems": low // 2, "maxItems": low // 2 + more},
        "anyOf": lambda: {"anyOf": [below(), below()]},
        "tuple": lambda: {"type": "array", "prefixItems": [below(), below()], "items": False, "minItems": low // 2},
        "map": lambda: {"type": "object", "additionalProperties": below()},
        "node": lambda: {"$ref": "#/$defs/node"},
    }
    return made[str(kind)]()


NODE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, "n": {"type": "integer"}},
    "required": ["left"],
    "additionalProperties": False,
}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_every_answer_under_a_random_schema_is_json_that_fits_it(seed: int) -> None:
    schema = schema_of(np.random.default_rng(seed)) | {"$defs": {"node": NODE}}
    Draft202012Validator.check_schema(schema)
    ended = 0
    for answer in range(3):
        text, done = written(Constraint("json", json.dumps(schema)), seed + answer)
        if done:
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
        ended += done
    assert ended or "string" in json.dumps(schema) or "node" in json.dumps(schema), "only text may go on for so long"


@pytest.mark.parametrize(
    ("kind", "text", "fits"),
    [
        ("regex", "[a-c]{3}|x+", "[a-c]{3}|x+"),
        ("regex", r"^\d{2}:\d{2}\$?$", r"\d{2}:\d{2}\$?"),
        ("regex", r"a+\\$", r"a+\\"),
        ("choice", '["yes", "no", "no way", "vielleicht \\u00fc", "\\"\\\\\\n"]', 'yes|no|no way|vielleicht ü|"\\\\\n'),
        ("grammar", 'start: "(" item ("," item)* ")"\nitem: /[0-9]{1,2}/', r"\((\d{1,2},)*\d{1,2}\)"),
        ("grammar", 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9] [0-9]?', r"\((\d{1,2},)*\d{1,2}\)"),
        ("grammar", 'start: "call " args\nargs: %json {"type": "object", "maxProperties": 0}', r"call \{\s*\}"),
        ("json", '{"type": "array", "items": {"type": "null"}}', r"\[[null, \n\t]*\]"),
    ],
)
def test_forms_of_every_kind(kind: Any, text: str, fits: str) -> None:
    constraint = Constraint(kind, text)
    answers = [written(constraint, seed) for seed in range(12)]
    assert all(re.fullmatch(fits, answer) for answer, done in answers if done), answers
    assert sum(done for _, done in answers) >= 6
    assert len({answer for answer, _ in answers}) > 1


def test_json_is_indented_by_so_much_at_most_and_not_at_all_where_asked() -> None:
    anything = Constraint("json", '{"type": "object"}')
    space = ids(" \n")
    assert set(space) <= allowed(anything, ids("{"))
    assert not {*space} & allowed(anything, ids("{ "))
    assert space[0] in allowed(anything, ids("{\n" + " " * 19))
    assert not {*space} & allowed(anything, ids("{\n" + " " * 20))
    compact = Constraint("json", '{"type": "object", "x-guidance": {"whitespace_flexible": false}}')
    assert not {*space} & allowed(compact, ids("{"))


def test_an_answer_ends_where_its_form_is_complete_and_only_there() -> None:
    constraint = Constraint("regex", "ab*")
    a, b = ids("ab")
    assert allowed(constraint, []) == {a}
    assert allowed(constraint, [a]) == {b} | ENDS
    assert allowed(Constraint("choice", '["ab"]'), [a, b]) == ENDS
    for output in ([a, END], [a, b, EOS], [a, EOS, END, END]):  # of a client that has answers go on (`ignore_eos`)
        assert allowed(constraint, output) == ENDS
    assert allowed(constraint, [a, b]) == {b} | ENDS, "what is behind an end can be gone back over"


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_what_may_follow_depends_on_the_answer_alone(seed: int) -> None:
    """Answers grow, are drafted and go back, are forgotten, and run beside each other: a new memory says the same."""
    rng = np.random.default_rng(seed)
    kept = new(most=3)
    forms = [Constraint("json", json.dumps(schema_of(rng) | {"$defs": {"node": NODE}})) for _ in range(2)]
    answers = [list[int]() for _ in range(4)]

    def masked(using: Grammars, outputs: list[list[int]], which: list[int], again: bool = False) -> torch.Tensor:
        rows = [row(forms[i % 2], output, i) for i, output in zip(which, outputs, strict=True)]
        return torch.isfinite(using.restrict(torch.zeros(len(rows), VOCAB + 3), rows, again=again))

    def check(outputs: list[list[int]], which: list[int], again: bool = False) -> list[int]:
        """Masks are right; returns what a model would say next."""
        found = masked(kept, outputs, which, again)
        for i, output, bits in zip(which, outputs, found, strict=True):
            GRAMMARS._places.clear()
            assert torch.equal(bits, masked(GRAMMARS, [output], [i])[0]), f"seed {seed}, {output}"
        chosen = torch.where(found, logits(rng, len(which)), -torch.inf).argmax(dim=-1)
        return list(chosen.tolist())

    for _ in range(40):
        which = rng.permutation(4)[: int(rng.integers(1, 5))].tolist()
        if rng.random() < 0.3:  # another answer, or one that has lost what a failed step gave it
            i = which[0]
            answers[i] = answers[i][: int(rng.integers(len(answers[i]) + 1))]
        drafts = [list[int]() for _ in which]
        for _ in range(int(rng.integers(0, 4))):
            tokens = check([answers[i] + draft for i, draft in zip(which, drafts, strict=True)], which, again=True)
            drafts = [[*draft, token] for draft, token in zip(drafts, tokens, strict=True)]
        for i, draft in zip(which, drafts, strict=True):
            count = kept.allowed(row(forms[i % 2], answers[i], i), np.array(draft, dtype=np.int32))
            first_end = next((k + 1 for k, token in enumerate(draft) if token in ENDS), len(draft))
            assert count == first_end, "what was drafted among what is allowed is allowed"
        places = [
            (i, answers[i] + draft[:k]) for i, draft in zip(which, drafts, strict=True) for k in range(len(draft) + 1)
        ]
        tokens = check([output for _, output in places], [i for i, _ in places])
        for (i, output), token in zip(places, tokens, strict=True):
            if len(output) - len(answers[i]) <= 0 or rng.random() < 0.5:
                answers[i] = [*output, token]
            if len(answers[i]) > 60 or token in ENDS:
                answers[i] = []


def test_a_draft_counts_up_to_the_first_token_that_is_not_allowed() -> None:
    constraint = Constraint("regex", "ab+c")
    draft = np.array(ids("bbcb"), dtype=np.int32)
    for request, output in enumerate([ids("a"), ids("a")]):
        assert GRAMMARS.allowed(row(constraint, output, request), draft) == 3
    assert GRAMMARS.allowed(row(constraint, ids("ab"), 0), draft[2:]) == 1
    assert GRAMMARS.allowed(row(constraint, [], 0), draft) == 0
    ended = np.array([*ids("bc"), END, *ids("b")], dtype=np.int32)
    assert GRAMMARS.allowed(row(constraint, ids("a"), 0), ended) == 3, "an end token is the last that can count"
    assert GRAMMARS.allowed(row(constraint, ids("a"), 0), ended[[0, 2]]) == 1
    assert GRAMMARS.allowed(row(None, ids("a"), 0), draft) == 4


def test_log_probabilities_are_those_of_what_is_allowed() -> None:
    rng = np.random.default_rng(0)
    constraint, own = Constraint("choice", '["a", "b"]'), logits(rng, 2)
    rows = [row(constraint, logprobs=5, temperature=0.0), row(None, request=1, logprobs=5, temperature=0.0)]
    before = own.clone()
    free, bound = (record for record in reversed(sample(own, rows, GRAMMARS).logprobs) if record is not None)
    assert torch.equal(own, before), "the logits given are not changed"
    two = own[0, ids("ab")].log_softmax(-1).tolist()
    assert sorted(bound.top) == [pytest.approx(pair) for pair in sorted(zip(ids("ab"), two, strict=True))]
    assert bound.logprob == pytest.approx(max(two))
    assert len(free.top) == 5
    assert free.logprob == pytest.approx(float(own[1].log_softmax(-1).max()))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"logit_bias": {}}])
def test_penalties_and_biases_never_bring_in_what_is_not_allowed(params: dict[str, Any]) -> None:
    a, b = ids("ab")
    params = {"repetition_penalty": 5.0, "presence_penalty": 2.0, "logit_bias": {a: -100.0, b: 100.0}} | params
    rows = [row(Constraint("regex", "a+"), [a], seed, **params) for seed in range(20)]
    found = sample(logits(np.random.default_rng(1), 20), rows, GRAMMARS).tokens.tolist()
    assert set(found) <= {a, *ENDS}


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json", '{"type": "strin"}', "JSON schema cannot be used: Invalid type: strin"),
        ("json", '{"type": "object"', "JSON schema cannot be used: Expecting ',' delimiter: line 1"),
        ("json", "[1]", "must be an object"),
        ("json", '{"$ref": "#/$defs/missing"}', "'/$defs/missing' does not exist"),
        ("json", '{"$ref": "http://example.com/a"}', "http://example.com/a"),
        ("json", '{"not": {"type": "string"}}', r'Unimplemented keys: \["not"\]'),
        ("json", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json", '{"allOf": [{"type": "string"}, {"type": "null"}]}', "Unsatisfiable"),
        ("json", '{"$ref": "#"}', "no text of this model's tokens fits it"),
        ("json", '{"items":' * 200 + "{}" + "}" * 200, "recursion"),
        ("json", '{"const": "' + "x" * MAX_CONSTRAINT_BYTES + '"}', f"{MAX_CONSTRAINT_BYTES} may be"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(", "unclosed group"),
        ("choice", "[]", "at least one text"),
        ("grammar", "start: other", 'unknown name: "other"'),
        ("grammar", "root ::= other", "other"),
        ("grammar", 'start: "a', "grammar cannot be used"),
        ("grammar", "start: <|nothing|>", "unknown special token"),
    ],
)
def test_a_bad_form_is_refused_and_says_why(kind: Any, text: str, said: str) -> None:
    for _ in range(2):  # the second time as well
        with pytest.raises(RequestError, match=said.replace("$", r"\$")) as refused:
            GRAMMARS.compile(Constraint(kind, text))
        assert len(str(refused.value)) < 420
        assert "\n" not in str(refused.value)


def test_a_least_length_gives_way_where_the_form_is_complete() -> None:
    asked = Constraint("regex", "a|ab")
    for answer, chosen in ((ids("a"), set(ids("b"))), (ids("ab"), ENDS)):
        least = dataclasses.replace(row(asked, answer, temperature=0.0, min_tokens=5), ends=frozenset(ENDS))
        assert int(sample(torch.zeros(1, VOCAB), [least], GRAMMARS).tokens[0]) in chosen


def test_thousands_of_choices_are_followed_and_what_is_too_large_to_follow_is_refused() -> None:
    choices = Constraint("choice", json.dumps([f"c{i:04d}" for i in range(3000)] + ["c1"]))
    GRAMMARS.compile(choices)
    assert GRAMMARS.allowed(row(choices), np.array([*ids("c2999"), END], dtype=np.int32)) == len(ids("c2999")) + 1
    assert GRAMMARS.allowed(row(choices), np.array([*ids("c1"), END], dtype=np.int32)) == len(ids("c1")) + 1
    assert GRAMMARS.allowed(row(choices), np.array(ids("c3000"), dtype=np.int32)) < len(ids("c3000"))
    with pytest.raises(RequestError, match="Too many items"):
        new().compile(Constraint("grammar", 'start: "a" start'))
    many = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1200)}}
    with pytest.raises(RequestError, match="max is 2000"):
        new().compile(Constraint("json", json.dumps(many)))


def test_a_form_is_compiled_once_beside_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, threads = list[str](), set[str]()
    real = module._written

    def counting(constraint: Constraint) -> str:
        made.append(constraint.text)
        threads.add(threading.current_thread().name)
        return real(constraint)

    monkeypatch.setattr(module, "_written", counting)
    using = new()
    for _ in range(3):
        using.compile(Constraint("regex", "ab"))
        allowed(Constraint("regex", "ab"), ids("a"), using=using)
    assert made == ["ab"]
    assert threads == {"headway-grammar"}


def test_a_form_that_takes_too_long_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    real = module._written

    def slow(constraint: Constraint) -> str:
        if constraint.text == "slow":
            assert stuck.wait(60)
        return real(constraint)

    monkeypatch.setattr(module, "_written", slow)
    using = new(patience=0.05)
    with pytest.raises(RequestError, match=r"takes more than 0.05 seconds to compile: make it smaller"):
        using.compile(Constraint("regex", "slow"))
    using._patience = 60
    using.compile(Constraint("regex", "ab"))
    stuck.set()
    using.compile(Constraint("regex", "slow"))


def test_a_tokenizer_that_cannot_be_read_is_told() -> None:
    class Slow:
        backend_tokenizer = None

    with pytest.raises(RequestError, match="cannot be constrained with this model's tokenizer"):
        Grammars(Slow(), 10, [1], 8).compile(Constraint("regex", "a"))  # type: ignore[arg-type]


def test_a_form_that_the_tokens_cannot_spell_fails_its_answer_alone() -> None:
    signs = ["a", "b", "<|end|>"]
    backend = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    using = Grammars(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"), 3, [2], 8)
    with pytest.raises(RequestError, match="no text of this model's tokens fits it"):
        using.compile(Constraint("regex", "x"))
    rows = [row(Constraint("regex", "ax"), [0], 0), row(Constraint("regex", "ab"), [0], 1), row(None, [0], 2)]
    said = [RowAnswer((int(token),)) for token in sample(torch.zeros(3, 3), rows, using).tokens]
    found = using.faults([*rows, None], [*said, RowAnswer()])
    assert list(found) == [0]
    assert "no token of this model can go on" in found[0].told(5)
    assert said[1].tokens == (1,)
    drafted = row(Constraint("regex", "a(b|ax)"), [], 3)
    using.restrict(torch.zeros(3, 3), [row(drafted.constraint, output, 3) for output in ([], [0], [0, 0])], again=True)
    assert using.faults([drafted], [RowAnswer((0, 1))]) == {}, "a draft that is not taken harms nobody"
    assert using.faults([drafted], [RowAnswer((0, 0, 2))]) != {}
    masks = using.restrict(torch.zeros(1, 3), [row(drafted.constraint, [0, 1], 3)])
    assert masks[0].tolist() == [-math.inf, -math.inf, 0.0]
