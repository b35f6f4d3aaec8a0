"""Calls that must be made, as grammars: in the form that the model was trained to write, and that is read back.

A grammar holds an answer to calls of the given tools, with arguments that fit their schemas, written as the chat
template writes them when they are sent back: the next prompt then begins with the very tokens of this answer. Thinking
comes before, where the model thinks. Properties that a schema does not name are not invented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.engine.tokenizer import TextTokenizer
from headway.runtime.forward.grammars import JSON_SPACE
from headway.runtime.interface import Constraint
from headway.server.chat.families import family_of

__all__ = ["arguments_constraint", "binds_free_calls", "calls_constraint"]

_MOST_CALLS = 8
"""Calls in one answer: a small model that may go on does so for long."""
_WRITTEN = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as templates write it."""

_TRIGGER = "<tool_call>"
"""Where calls begin, in families whose answers may be bound from there on."""

Literal = Callable[[str], str]


@dataclass(frozen=True)
class _Form:
    """How a family writes calls, as texts around them; `%s` stands for the function.

    Attributes:
        call: Text in front of a call's arguments.
        end: Text behind them.
        first: Text in front of all calls.
        between: Text between two.
        last: Text behind all.
        tags: Texts around the name and the value of one argument, where arguments are no JSON object.
        most: Calls that there may be.
    """

    call: str
    end: str
    first: str = ""
    between: str = ""
    last: str = ""
    tags: tuple[str, str, str] | None = None
    most: int = _MOST_CALLS


_ID, _NUMBER = "\x01", "\x02"
"""Stand for an id of nine letters and digits, and for a digit."""
_PATTERNS = {_ID: "/[a-zA-Z0-9]{9}/", _NUMBER: "/[0-9]/"}
_FORMS = {
    "hermes": _Form('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", between="\n"),
    "llama": _Form('{"name": "%s", "parameters": ', "}", between="; "),
    "mistral": _Form("[TOOL_CALLS]%s[ARGS]", ""),
    "mistral-v3": _Form(
        '{"name": "%s", "arguments": ', f', "id": "{_ID}"}}', first="[TOOL_CALLS][", between=", ", last="]"
    ),
    "kimi": _Form(
        f"<|tool_call_begin|>functions.%s:{_NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>",
        last="<|tool_calls_section_end|>",
    ),
    "harmony": _Form("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", "", most=1),
    "qwen3-coder": _Form(
        "<tool_call>\n<function=%s>\n",
        "</function>\n</tool_call>",
        between="\n",
        tags=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "glm": _Form(
        "<tool_call>%s\n", "</tool_call>", between="\n", tags=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    ),
}
_THOUGHTS = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
    "mistral": ("[THINK]", "[/THINK]", ""),
}
"""What stands around thinking, and behind it."""


def calls_constraint(
    tokenizer: TextTokenizer,
    tools: Sequence[Mapping[str, Any]],
    opening: str,
    *,
    parallel: bool,
    otherwise: Constraint | None = None,
    free: bool = False,
) -> Constraint | None:
    """The form of an answer that calls some of `tools`; None where it is not known how the model writes calls.

    Args:
        tokenizer: The model's tokenizer.
        tools: The tools, as templates get them.
        opening: What the chat template writes in front of the answer.
        parallel: Whether there may be several calls.
        otherwise: A JSON schema that the answer may fit instead.
        free: Whether the answer may say anything, and has a form only from where a call begins. Not for all families.
    """
    family = family_of(tokenizer)
    if family is None or family.name not in _FORMS:
        return None
    form, special = _FORMS[family.name], tokenizer.special_tokens

    def literal(text: str) -> str:
        return _literal(text, special)

    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        rules += _call_rules(i, tool["function"], form, literal, cut=len(_TRIGGER) if free else 0)
    if free:
        if not binds_free_calls(tokenizer):
            return None
        return _grammar(
            [f"start: (lead call){{0,{form.most if parallel else 1}}} ANY", _lazy("lead", _TRIGGER), *rules]
        )
    most = form.most if parallel else 1
    more = f" ({literal(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    rules.append(f"calls: {literal(form.first)} call{more} {literal(form.last)}")
    ending = "calls"
    if otherwise is not None:
        rules.append(f"otherwise: %json {_spaced(otherwise.text)}")
        ending = "(calls | otherwise)"
    start, close, behind = _THOUGHTS.get(family.name, ("<think>", "</think>", ""))
    if start in tokenizer.template:
        inside = opening.rstrip().endswith(start)
        thought = f"thought {literal(behind)} SPACE"
        ending = f"{thought} {ending}" if inside else f"({literal(start)} {thought})? {ending}"
        rules.append(f"thought: ANY {literal(close)}" if close in special else _lazy("thought", close))
        rules.append(r"SPACE: /[ \n]{0,2}/")
    return _grammar(["start: " + ending, *rules])


def arguments_constraint(parameters: Mapping[str, Any]) -> Constraint:
    """The form of the arguments of one function, given the schema of its parameters."""
    return Constraint("json", json.dumps({**_closed(parameters), "x-guidance": _WRITTEN}))


def binds_free_calls(tokenizer: TextTokenizer) -> bool:
    """Whether an answer that may say anything can be bound where it begins a call."""
    family = family_of(tokenizer)
    form = None if family is None else _FORMS.get(family.name)
    return form is not None and form.call.startswith(_TRIGGER) and _TRIGGER not in tokenizer.special_tokens


def _grammar(rules: Sequence[str]) -> Constraint:
    return Constraint("grammar", "\n".join(["%llguidance {}", *rules, r"ANY: /(.|\n)*/", ""]))


def _call_rules(i: int, function: Mapping[str, Any], form: _Form, literal: Literal, cut: int) -> list[str]:
    """The rules of one function's calls."""
    schema = _closed(function["parameters"])
    before, end = literal((form.call % function["name"])[cut:]), literal(form.end)
    if form.tags is None:
        written = json.dumps({**schema, "x-guidance": _WRITTEN}, ensure_ascii=False)
        return [f"call_{i}: {before} args_{i} {end}", f"args_{i}: %json {written}"]
    opened, between, closed = form.tags
    rules, arguments = [], []
    for j, (name, of_value) in enumerate(_properties(schema).items()):
        value = f"value_{i}_{j}"
        argument = f"{literal(opened + name + between)} {value}"
        arguments.append(argument if name in (schema.get("required") or ()) else f"({argument})?")
        rules.append(_value_rule(value, of_value, closed, literal, schema))
    return [f"call_{i}: {before} {' '.join(arguments)} {end}", *rules]


def _value_rule(value: str, schema: Any, closed: str, literal: Literal, whole: Mapping[str, Any]) -> str:
    """The rule of one argument between tags: texts stand there as they are, all else as JSON."""
    kinds = schema if isinstance(schema, dict) else {}
    if kinds.get("type") == "string" and isinstance(kinds.get("enum"), list):
        return f"{value}: ({' | '.join(literal(str(one)) for one in kinds['enum'])}) {literal(closed)}"
    if kinds.get("type") == "string" or not kinds:
        most = kinds.get("maxLength")
        return _lazy(value, closed, rf"/(.|\n){{0,{most}}}/" if isinstance(most, int) else "ANY")
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    written = json.dumps({**shared, **kinds, "x-guidance": _WRITTEN}, ensure_ascii=False)
    return f"{value}: json_{value} {literal(closed)}\njson_{value}: %json {written}"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments, which are an object, that allows those it names, where it does not say otherwise."""
    required, named = schema.get("required"), _properties(schema)
    wanted = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    closed = "properties" in schema and all(name in named for name in wanted)
    return {"type": "object", **({"additionalProperties": False} if closed else {}), **schema}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _spaced(schema: str) -> str:
    """A schema with as much space as it has where there are no tools."""
    return json.dumps({"x-guidance": {"whitespace_pattern": JSON_SPACE}, **json.loads(schema)})


def _lazy(name: str, close: str, text: str = "ANY") -> str:
    """A rule for any text up to and with `close`."""
    return f"{name}[lazy]: {text} {json.dumps(close)}"


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A text as a grammar has it: special tokens by their numbers, patterns for what stands for one."""
    names = [re.escape(name) for name in sorted(special, key=len, reverse=True)]
    parts = re.split(f"({'|'.join([*names, *_PATTERNS])})", text)
    written = (
        f"<[{special[part]}]>" if part in special else _PATTERNS.get(part) or json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
    return " ".join(written)
