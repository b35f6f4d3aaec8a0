"""How models write reasoning and calls, in transformers' language for it (a *response template*).

A checkpoint may bring a response template of its own, which then says all. For others its chat template shows which
family it is of: it writes earlier calls in the very form in which the model was trained to make them. Each family below
is the published form of its makers; `tests/server/chat/test_families.py` has an example of each, with its source.

Rejected: guessing by the name of the model, which operators choose, and a parser of our own for each form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.engine.tokenizer import TextTokenizer

__all__ = ["FAMILIES", "Family", "family_of"]

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAME = r"(?P<name>[\w.-]+)"
_VERBATIM = {"content": "text", "content_args": {"strip": False}}
_CONTENT = dict(_VERBATIM)
_THINK = {"open": "<think>", "close": "</think>", **_VERBATIM}


@dataclass(frozen=True)
class Family:
    """A form of answers.

    Attributes:
        name: Its name.
        marks: What the chat templates of such models contain, all of it.
        calls: The field `tool_calls` of the response template.
        fields: Its other fields; None for text with `<think>`.
        anchored: Whether what the chat template writes in front of an answer may be part of it, such as `<think>`.
        short_ids: Ids of calls have nine letters and digits, and no others are taken back.
    """

    name: str
    marks: tuple[str, ...]
    calls: Mapping[str, Any]
    fields: Mapping[str, Any] | None = None
    anchored: bool = True
    short_ids: bool = False

    def response_template(self) -> dict[str, Any]:
        """It all, in transformers' language."""
        fields = {"reasoning_content": _THINK, "content": _CONTENT} if self.fields is None else self.fields
        calls = {"tool_calls": dict(self.calls)} if self.calls else {}
        return {"start_anchor": "\x00", "fields": {**fields, **calls}}


FAMILIES = (
    Family(
        "harmony",
        ("<|channel|>", "<|message|>"),
        {
            "open_pattern": (
                rf"<\|channel\|>commentary\s+to=functions\.{_NAME}[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
                rf"|\s*to=functions\.{_NAME}\s*<\|channel\|>commentary[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
            ),
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        {
            "reasoning_content": {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "\n",
                **_VERBATIM,
            },
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>[^<]*)?<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
                **_VERBATIM,
            },
        },
    ),
    Family(
        "kimi",
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        {
            "open_pattern": (
                r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
                rf"(?P<id>(?:functions\.)?{_NAME}:\d+)\s*<\|tool_call_argument_begin\|>"
            ),
            "close": "<|tool_call_end|>",
            "repeats": True,
            "content": "json",
            "transform": {**_CALL, "id": "{id}"},
        },
        {
            "reasoning_content": _THINK,
            "content": _CONTENT,
            "behind_calls": {"open": "<|tool_calls_section_end|>", "content": "text"},
        },
    ),
    Family(
        "qwen3-coder",
        ("<function=", "<parameter="),
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _CALL,
        },
    ),
    Family(
        "glm",
        ("<arg_key>", "<arg_value>"),
        {
            "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            },
            "transform": _CALL,
        },
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "open_pattern": rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        {"reasoning_content": {"open": "[THINK]", "close": "[/THINK]", **_VERBATIM}, "content": _CONTENT},
        short_ids=True,
    ),
    Family("mistral-v3", ("[TOOL_CALLS]",), {"open": "[TOOL_CALLS]", "content": "json"}, short_ids=True),
    Family(
        "hermes",
        ("<tool_call>",),
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    ),
    Family(
        "llama",
        ("<|start_header_id|>", "parameters"),
        {"open_pattern": r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"(?:name|type|function)")', "content": "text"},
        {"content": _CONTENT},
        anchored=False,
    ),
)
"""By how much their marks say: the first whose marks are all there is meant."""

_THINKING = Family("thinking", ("</think>",), {})


def family_of(tokenizer: TextTokenizer) -> Family | None:
    """The family that a chat template is of; None for plain text."""
    found = next((one for one in FAMILIES if all(mark in tokenizer.template for mark in one.marks)), None)
    return found or (_THINKING if "</think>" in tokenizer.template else None)
