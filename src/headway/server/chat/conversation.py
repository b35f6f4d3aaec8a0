"""A conversation as a chat template gets it: plain messages, tools in a stable form, and the template's switches.

Tools are the head of every agent's prompt, and clients write the keys of one JSON object in one order today and in
another tomorrow. So a tool and the keywords of its schema are written in one order; what only the API reads (`strict`,
`cache_control`) is left out. Names of parameters keep their order: models fill them
in as they come, and who wrote the schema may have meant it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.engine.tokenizer import TextTokenizer
from headway.errors import RequestError
from headway.server.chat.messages import Message, Tool, ToolCall
from headway.server.protocol import ChatRequest

__all__ = ["Conversation", "conversation_of", "plain_message", "plain_tool"]

# Options of transformers' function itself. The template above all: it is a program, and clients do not choose programs.
_TAKEN_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_ORDER = (
    *("type", "title", "description", "enum", "const", "default", "items", "properties", "required"),
    *("additionalProperties", "anyOf", "oneOf", "allOf"),
)
"""Keywords of a JSON schema in their order; others follow by name."""
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""Keys whose values are objects of schemas by name."""
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keys whose values are data and no schemas."""


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given.

    Attributes:
        messages: The messages.
        options: Its other variables.
        tools: The tools; empty for none.
        answer: Whether its text ends where the model's answer starts.
        continued: Whether its text ends inside the last message, which the model goes on with.
    """

    messages: Sequence[dict[str, Any]]
    options: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()
    answer: bool = True
    continued: bool = False

    def render(self, tokenizer: TextTokenizer) -> str:
        """Its text.

        Raises:
            Exception: The template refuses it.
        """
        options = dict(self.options)
        if self.tools:
            options["tools"] = list(self.tools)
        if self.continued:
            options["continue_final_message"] = True
        return tokenizer.render(self.messages, answer=self.answer, options=options)

    def part(self, tokenizer: TextTokenizer, messages: Sequence[dict[str, Any]]) -> str | None:
        """The text of a part of it, or None: some templates refuse one that ends in the middle."""
        try:
            return replace(self, messages=messages, answer=False, continued=False).render(tokenizer)
        except Exception:
            return None


def conversation_of(request: ChatRequest, tokenizer: TextTokenizer) -> Conversation:
    """The conversation of a request.

    Raises:
        RequestError: Fields that contradict each other, or variables that clients may not set.
    """
    given, continued = request.messages, request.continue_final_message
    if continued and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on with the last message and add_generation_prompt begins a new one; send one",
            "continue_final_message",
            "invalid_value",
        )
    names = {call.id: call.function.name for message in given for call in message.tool_calls or ()}
    messages = [plain_message(message, message.parts(), names) for message in given]
    tools = [plain_tool(tool) for tool in request.tools or ()]
    answer = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return Conversation(messages, _options(request, tokenizer), tools, answer, continued)


def _options(request: ChatRequest, tokenizer: TextTokenizer) -> Mapping[str, Any]:
    """The variables of the template that the client sets."""
    options = dict(request.chat_template_kwargs or {})
    taken = sorted(_TAKEN_OPTIONS & options.keys())
    if taken:
        raise RequestError(f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs")
    effort = request.reasoning_effort
    if effort is not None and tokenizer.template_knows("reasoning_effort"):
        options.setdefault("reasoning_effort", effort)
    if effort in ("none", "minimal") and tokenizer.template_knows("enable_thinking"):
        options.setdefault("enable_thinking", False)
    return options


def plain_message(
    message: Message, parts: Sequence[str], names: Mapping[str | None, str] | None = None
) -> dict[str, Any]:
    """A message as templates expect it.

    Args:
        message: The message.
        parts: Its texts, or some of them.
        names: The function that each call names, for messages that answer one without its name.
    """
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": "\n".join(parts)}
    name = message.name
    if message.role == "tool":
        name = name or (names or {}).get(message.tool_call_id)
        plain |= {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    reasoning = message.reasoning_content or message.reasoning
    plain |= {"reasoning_content": reasoning} if reasoning else {}
    plain |= {"tool_calls": [_plain_call(call) for call in message.tool_calls]} if message.tool_calls else {}
    return plain if name is None else plain | {"name": name}


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object: templates write that in the form in which their model was trained."""
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # one that was cut stays what the model wrote
            read = json.loads(arguments)
            json.dumps(read, ensure_ascii=False).encode()  # nor can half of a surrogate pair be written as it is
            arguments = read
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id} | plain


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it, its keys in one order."""
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    written = {"name": function.name, "description": function.description or "", "parameters": _ordered(parameters)}
    return {"type": "function", "function": written}


def _ordered(schema: Any) -> Any:
    """A schema with its keywords in one order."""
    if isinstance(schema, list):
        return [_ordered(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    rank = {key: place for place, key in enumerate(_ORDER)}
    ordered = {}
    for key in sorted(schema, key=lambda key: (rank.get(key, len(_ORDER)), key)):
        value = schema[key]
        if key in _NAMED and isinstance(value, dict):
            ordered[key] = {name: _ordered(one) for name, one in value.items()}
        else:
            ordered[key] = value if key in _DATA else _ordered(value)
    return ordered
