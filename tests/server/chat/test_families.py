"""How families of models write calls and reasoning: examples in the published forms, read back and written by force.

Each example is written after what the makers of the models publish (`SOURCES`), for the tools of these tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from jsonschema import validate
from tests.server import tiny
from tokenizers import AddedToken

from headway.engine import HubTokenizer
from headway.runtime.forward.grammars import Grammars
from headway.runtime.interface import Constraint, SampleRow, SamplingParams
from headway.server.chat.families import FAMILIES, family_of
from headway.server.chat.reading import AnswerForm, Call, Piece, ReadAnswer, answer_form
from headway.server.chat.required import calls_constraint

SOURCES = {
    "hermes": "https://github.com/NousResearch/Hermes-Function-Calling; the chat template of Qwen/Qwen3-8B",
    "qwen3-coder": "the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "llama": "https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1, JSON based tool calling",
    "mistral-v3": "https://docs.mistral.ai, the tokenizer v3: mistral-common's tests of tool calls",
    "mistral": "https://docs.mistral.ai, the tokenizer v11: mistral-common's tests of tool calls",
    "kimi": "https://huggingface.co/moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md",
    "glm": "the chat template of zai-org/GLM-4.5",
    "harmony": "https://cookbook.openai.com/articles/openai-harmony, function calling",
}

PARIS: dict[str, Any] = {"place": "Paris", "days": 3}
TIME: dict[str, Any] = {"zone": "Europe/Paris"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get-time",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string", "enum": ["UTC", "Europe/Paris"]}},
                "required": ["zone"],
            },
        },
    },
]


@pytest.fixture(scope="module")
def special() -> dict[str, list[str]]:
    """The special tokens of each family, as their tokenizers have them."""
    return {
        "harmony": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"],
        "kimi": [
            f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
        ],
        "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        "mistral-v3": ["[TOOL_CALLS]"],
        "llama": ["<|python_tag|>", "<|start_header_id|>"],
    }


def words(name: str, special: Mapping[str, list[str]], template: str | None = None) -> HubTokenizer:
    """A tokenizer of single bytes with the special tokens and the marks of a family."""
    built = tiny.tokenizer()
    built.add_special_tokens({"additional_special_tokens": [AddedToken(s) for s in special.get(name, [])]})
    family = next(one for one in FAMILIES if one.name == name)
    built.chat_template = template or " ".join(family.marks)
    return HubTokenizer(built)


EXAMPLES: list[tuple[str, str, Piece]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"place": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get-time", "arguments": {"zone": "Europe/Paris"}}\n</tool_call>',
        Piece("", "I look.", [Call("", "get_weather", json.dumps(PARIS)), Call("", "get-time", json.dumps(TIME))]),
    ),
    (
        "hermes",
        "<think>\nWhere?\n</think>\n\nIn Paris.\n",
        Piece("Where?", "In Paris.\n"),
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=place>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        Piece("", "", [Call("", "get_weather", json.dumps(PARIS))]),
    ),
    (
        "glm",
        "<think>Weather.</think>\n<tool_call>get_weather\n<arg_key>place</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        Piece("Weather.", "", [Call("", "get_weather", json.dumps(PARIS))]),
    ),
    (
        "llama",
        '{"name": "get_weather", "parameters": {"place": "Paris", "days": 3}}',
        Piece("", "", [Call("", "get_weather", json.dumps(PARIS))]),
    ),
    ("llama", 'Say {"name": 1}', Piece("", 'Say {"name": 1}')),
    (
        "mistral-v3",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"place": "Paris", "days": 3}, "id": "VvvODy9mT"}]',
        Piece("", "", [Call("VvvODy9mT", "get_weather", json.dumps(PARIS))]),
    ),
    (
        "mistral",
        '[THINK]Weather.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"place": "Paris", "days": 3}'
        '[TOOL_CALLS]get-time[ARGS]{"zone": "Europe/Paris"}',
        Piece(
            "Weather.",
            "I look.",
            [Call("", "get_weather", json.dumps(PARIS)), Call("", "get-time", json.dumps(TIME))],
        ),
    ),
    (
        "kimi",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"place": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get-time:1'
        '<|tool_call_argument_begin|>{"zone": "Europe/Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        Piece(
            "",
            "I look.",
            [
                Call("functions.get_weather:0", "get_weather", json.dumps(PARIS)),
                Call("functions.get-time:1", "get-time", json.dumps(TIME)),
            ],
        ),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"place": "Paris", "days": 3}',
        Piece("Need the weather.", "", [Call("", "get_weather", json.dumps(PARIS))]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        Piece("Simple.", "Four."),
    ),
]


def same(found: Piece, expected: Piece) -> bool:
    """Whether two pieces are alike, but for ids that were not given."""
    calls = [(c.name, json.loads(c.arguments)) for c in found.calls]
    wanted = [(c.name, json.loads(c.arguments)) for c in expected.calls]
    ids = all(not e.id or e.id == f.id for e, f in zip(expected.calls, found.calls, strict=True))
    return (found.reasoning, found.content, calls) == (expected.reasoning, expected.content, wanted) and ids


def read(form: AnswerForm | None, text: str, size: int) -> Piece:
    """An answer read in pieces of so many characters."""
    answer, piece = ReadAnswer(form), Piece()
    for i in range(0, len(text), size):
        piece += answer.read(text[i : i + size], ended=i + size >= len(text))
    return piece


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_published_forms_are_read_whole_and_in_pieces(
    special: dict[str, list[str]], name: str, text: str, expected: Piece
):
    tokenizer = words(name, special)
    assert family_of(tokenizer) is not None
    assert family_of(tokenizer).name == name
    form = answer_form(tokenizer, "", "", TOOLS)
    for size in (len(text), 7, 1):
        found = read(form, text, size)
        assert same(found, expected), (size, found)


@pytest.mark.parametrize("name", list(SOURCES))
def test_what_is_required_is_what_is_read(special: dict[str, list[str]], name: str):
    """Random tokens within the grammar are calls that fit their schemas, and that the family's reader finds."""
    tokenizer = words(name, special)
    for parallel in (False, True):
        constraint = calls_constraint(tokenizer, TOOLS, "", parallel=parallel)
        assert constraint is not None
        for seed in range(4):
            text = forced(tokenizer, constraint, seed)
            piece = read(answer_form(tokenizer, "", "", TOOLS), text, 5)
            assert piece.calls, text
            assert parallel or len(piece.calls) == 1
            assert (piece.content, piece.reasoning) == ("", "")
            for call in piece.calls:
                schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.name)
                validate(json.loads(call.arguments), schema | {"additionalProperties": False})


def forced(tokenizer: Any, constraint: Constraint, seed: int) -> str:
    """Random text within a form."""
    import torch

    inner = tokenizer._tokenizer
    size, end = len(inner), inner.convert_tokens_to_ids("<|eos|>")
    grammars = Grammars(inner, size, (end,), 1)
    grammars.compile(constraint)
    generator = np.random.default_rng(seed)
    output: list[int] = []
    while len(output) < 2000:
        row = SampleRow(
            SamplingParams(),
            0,
            np.empty(0, dtype=np.int32),
            np.array(output, dtype=np.int32),
            frozenset({end}),
            constraint=constraint,
            request=seed,
        )
        logits = grammars.restrict(torch.zeros(1, size), [row])[0]
        allowed = torch.isfinite(logits).nonzero()[:, 0].tolist()
        printable = [token for token in allowed if token >= 256 or 32 <= tokenizer.piece(token)[0] < 127] or allowed
        token = end if end in allowed else int(generator.choice(printable))
        if token == end:
            return str(tokenizer.decode(output, special=True))
        output.append(token)
    raise AssertionError(tokenizer.decode(output, special=True))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('So: <tool_call>\n{"name": "get_wea', 'So: <tool_call>\n{"name": "get_wea'),
        ("<tool_call>\nget_weather\n</tool_call> Done.", "<tool_call>\nget_weather\n</tool_call> Done."),
        ("<tool_call>\n[1]\n</tool_call>", "<tool_call>\n[1]\n</tool_call>"),
        ("a < b > c [1]\n", "a < b > c [1]\n"),
    ],
)
def test_what_is_no_call_is_given_out_as_it_was_written(special: dict[str, list[str]], text: str, content: str):
    form = answer_form(words("hermes", special), "", "", TOOLS)
    for size in (len(text), 5, 1):
        assert read(form, text, size) == Piece(content=content)


def test_a_call_that_was_cut_off_leaves_those_before_it(special: dict[str, list[str]]):
    call = '<tool_call>\n{"name": "get-time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    form = answer_form(words("hermes", special), "", "", TOOLS)
    for size in (len(call) + 20, 5, 1):
        found = read(form, f"{call}\n{call[:20]}", size)
        assert [one.name for one in found.calls] == ["get-time"]
        assert found.content.strip() == call[:20].strip()


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral-v3"])
def test_half_of_a_surrogate_pair_stays_an_escape(special: dict[str, list[str]], name: str):
    call = r'{"name": "get_weather", "arguments": {"place": "\ud83d \u00e9"}}'
    text = {"hermes": f"<tool_call>{call}</tool_call>", "mistral-v3": f"[TOOL_CALLS][{call}]", "llama": call}[name]
    found = read(answer_form(words(name, special), "", "", TOOLS), text, 5)
    assert found.calls[0].arguments.isascii()
    assert json.loads(found.calls[0].arguments) == {"place": "\ud83d \u00e9"}


@pytest.mark.parametrize("name", ["hermes", "kimi", "mistral", "harmony"])
def test_a_call_is_told_by_its_name_first_and_then_as_it_is_written(special: dict[str, list[str]], name: str):
    text, expected = next((text, piece) for family, text, piece in EXAMPLES if family == name and piece.calls)
    answer = ReadAnswer(answer_form(words(name, special), "", "", TOOLS))
    told = [call for sign in text for call in answer.read(sign, ended=False).calls]
    first = expected.calls[0]
    assert (told[0].name, told[0].arguments) == (first.name, "{")
    assert len(told) >= len(first.arguments), "each sign by itself"
    assert answer.calls == len(expected.calls)


def test_a_call_that_is_cut_off_in_its_arguments_is_one_and_so_is_one_with_words_behind_them(
    special: dict[str, list[str]],
):
    """As in OpenAI's API: where an answer ends by its length, the last call's arguments may be no JSON."""
    form = answer_form(words("hermes", special), "", "", TOOLS)
    begun = 'Look. <tool_call>\n{"name": "get-time", "arguments": '
    for written, arguments, behind in (
        ('{"zone": "U}{\\\\\\"T', '{"zone": "U}{\\\\\\"T', ""),
        ('{"zone": "UTC"} or so}\n</tool_call> Yes.', '{"zone": "UTC"}', "or so} Yes."),
        ('{"zone": UTC}}\n</tool_call> Yes.', '{"zone": UTC}', "} Yes."),
    ):
        for size in (1000, 5, 1):
            found = read(form, begun + written, size)
            assert [(call.name, call.arguments) for call in found.calls] == [("get-time", arguments)]
            assert "".join(found.content.split()) == "".join(f"Look. {behind}".split())


def test_reasoning_that_the_template_has_begun(special: dict[str, list[str]]):
    tokenizer = words("hermes", special, "<tool_call> <think> </think>")
    form = answer_form(tokenizer, "", "<|im_start|>assistant\n<think>\n", [])
    assert read(form, "Well.\n</think>\n\nYes.", 3) == Piece("Well.", "Yes.")
    assert read(answer_form(tokenizer, "", "<|im_start|>assistant\n", []), "Yes.", 3) == Piece("", "Yes.")


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "harmony"])
@pytest.mark.parametrize("text", ["Yes.", "\nYes.", " \n", "<to", '\n\n{"a": 1}', "\n<think>So.</think>Yes."])
def test_the_end_of_the_prompt_is_no_part_of_the_answer(special: dict[str, list[str]], name: str, text: str):
    """White space may begin a call, so the parser holds it back: that of the prompt is not told with the answer."""
    form, bare = (answer_form(words(name, special), "", start, TOOLS) for start in ("<|im_start|>assistant\n", ""))
    for size in (len(text), 1):
        assert read(form, text, size) == read(bare, text, size)


def test_calls_are_text_where_there_are_no_tools(special: dict[str, list[str]]):
    text = '<tool_call>\n{"name": "get-time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert read(answer_form(words("hermes", special), "", "", []), text, 3) == Piece("", text)
    one = answer_form(words("hermes", special), "", "", TOOLS, parallel=False)
    assert len(read(one, f"{text}\n{text}", 3).calls) == 1


def test_a_checkpoint_that_says_how_it_writes_is_believed():
    """The form of Gemma's calls, which no family here has: transformers' own language for it."""
    built = tiny.tokenizer()
    built.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    form = answer_form(HubTokenizer(built), "<|user|>x<|end|><|assistant|>", "", TOOLS)
    found = read(form, 'I look. <call:get_weather>{"place": "Paris"}</call>', 4)
    assert (found.content, [call.name for call in found.calls]) == ("I look.", ["get_weather"])


def test_thinking_may_come_before_a_call_that_is_required(special: dict[str, list[str]]):
    tokenizer = words("hermes", special, "<tool_call> <think> </think>")
    opened = calls_constraint(tokenizer, TOOLS, "<think>\n", parallel=False)
    assert opened is not None
    call = '<tool_call>\n{"name": "get-time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert allowed(tokenizer, opened, f"Well.\n</think>\n\n{call}")
    either = calls_constraint(tokenizer, TOOLS, "", parallel=False)
    assert allowed(tokenizer, either, call)
    assert allowed(tokenizer, either, f"<think>Well.</think>{call}")
    assert not allowed(tokenizer, either, "Well.")


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "glm"])
def test_a_free_answer_is_bound_where_it_begins_a_call(special: dict[str, list[str]], name: str):
    tokenizer = words(name, special)
    text = next(example for family, example, _ in EXAMPLES if family == name and "<tool_call>" in example)
    free = calls_constraint(tokenizer, TOOLS, "", parallel=True, free=True)
    for right in ("Hello!", text, f"{text} Done.", "a <tool"):
        assert allowed(tokenizer, free, right)
    assert not allowed(tokenizer, free, text.replace("get_weather", "get_wealth"))
    assert not allowed(tokenizer, free, text.replace("3", "x"))
    assert calls_constraint(words("kimi", special), TOOLS, "", parallel=True, free=True) is None


def allowed(tokenizer: Any, constraint: Constraint | None, text: str) -> bool:
    """Whether an answer of a form may begin with a text."""
    assert constraint is not None
    grammars = Grammars(tokenizer._tokenizer, len(tokenizer._tokenizer), (257,), 1)
    tokens, none = np.array(tokenizer.encode(text), dtype=np.int32), np.empty(0, dtype=np.int32)
    row = SampleRow(SamplingParams(), 0, none, none, constraint=constraint)
    return grammars.allowed(row, tokens) == len(tokens)
